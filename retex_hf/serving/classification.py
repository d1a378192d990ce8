"""Answers by a model that classifies texts or images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..workflows.predictor import Answer, Predictor
from .metrics import Metrics
from .options import ServeOptions
from .raw_inputs import RawInputs
from .rows import AUTO, MERGED, Decision, Done, Row


@dataclass(frozen=True)
class Label:
    """A label and its score, and the scores of all classes in their order (None where there are none)."""

    label: str
    score: float | None
    scores: tuple[float, ...] | None


class Classification:
    """Labels inputs, each by its own expert, in batches of any tasks."""

    def __init__(self, predictor: Predictor, options: ServeOptions, metrics: Metrics) -> None:
        self.predictor, self.metrics = predictor, metrics
        self.inputs = RawInputs(predictor, "classify")

    def rows(self, values: list[Any], model: str) -> list[Row]:
        """Return the rows of a request's inputs."""
        return self.inputs.rows(values, model)

    @torch.no_grad()
    def run(self, rows: list[Row]) -> None:
        """Answer rows of one key."""
        values, model = [row.value for row in rows], rows[0].model
        if model == MERGED:
            # Heads belong to tasks: the merged body answers under the head of the nearest one.
            routed = self.predictor.identified(values)
            answers = self.predictor.merged(values, [answer.task for answer in routed])
        else:
            answers = self.predictor.predict(values, None if model == AUTO else [row.model for row in rows])
            routed = answers
        for row, answer, found in zip(rows, answers, routed, strict=True):
            decision = decision_of(found)
            self.metrics.answered(row, decision, 0)
            assert answer.answer is not None  # of every kind of model that is served here
            row.send(Done(decision, Label(answer.answer, answer.score, answer.scores)))


def decision_of(answer: Answer) -> Decision:
    """Return how the input of an answer was routed."""
    task, likely, far = answer.task, answer.probabilities, answer.residuals
    return Decision(
        task, None if likely is None else likely[task], None if far is None else far[task], bool(answer.far)
    )
