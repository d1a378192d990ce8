"""Evaluation of a finished model on test data, beside its merged model and, where available, its experts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..baselines.retex import Retex
from ..baselines.static import Individual
from ..data.readout import Readout
from ..data.task_data import TaskData
from ..errors import EvaluationError, TaskError
from ..evaluation.method import Material, Method, Prediction
from ..evaluation.report import Report
from ..evaluation.run import evaluate
from ..model.retex_model import RetexModel
from .predictor import Predictor


class MergedModel(Method):
    """The merged model of a finished [`RetexModel`], under the heads of the given tasks.

    Args:
        model: The model.
        readout: How it answers.
    """

    name, modes = "merged", ("known",)

    def __init__(self, model: RetexModel, readout: Readout) -> None:
        self.model, self.readout = model, readout

    def fit(self, material: Material) -> None:
        """Do nothing: the model is finished."""

    @torch.no_grad()
    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        if tasks is None:
            raise TaskError(f"{self.name} has no router: name the task of every row.")
        options = {"task": list(tasks)} if self.readout.chooses_head else {}
        with self.model.disable_adapter():
            output = self.readout.call(self.model, inputs, **options)
        return Prediction(self.readout.answers(output, list(tasks)), list(tasks))

    def storage_bytes(self) -> int:
        return Retex(model=self.model).body_bytes()


def evaluate_model(
    predictor: Predictor,
    tests: Sequence[TaskData],
    *,
    experts: Mapping[str, Any] | None = None,
    base: Any = None,
    seed: int = 0,
    batch_size: int = 64,
    progress: bool = True,
) -> Report:
    """Evaluate a finished model on one shuffled stream of all tests.

    Args:
        predictor: The model, and how it answers.
        tests: Labelled data of all tasks of the model.
        experts: The experts it was built from, to evaluate beside it; figures are then also given relative to theirs.
            Experts are held in host memory and run on the CPU.
        base: The experts' base model.
        seed: Seed of the order of the stream.
        batch_size: Rows per call.
        progress: Show progress bars.
    """
    readout = predictor.readout
    if readout is None:
        raise EvaluationError("The model gives features only, so it has no answers to evaluate.")
    missing = [task for task in predictor.model.tasks if task not in {test.name for test in tests}]
    if missing:
        raise EvaluationError(f"There is no test data for task {missing[0]!r}.")
    material = Material(base, dict(experts or {}), {}, {}, predictor.batch, readout)
    methods: list[Method] = [MergedModel(predictor.model, readout), Retex(model=predictor.model)]
    if experts:
        methods.insert(0, Individual())
    evaluations = []
    for method in methods:
        method.fit(material)
        modes = _modes(method, predictor)
        batch = predictor.preprocessor if isinstance(method, Individual) else predictor.batch
        evaluations.append(
            evaluate(method, tests, batch, modes=modes, seed=seed, batch_size=batch_size, progress=progress)
        )
    body = None if experts else methods[0].storage_bytes()
    return Report(evaluations, individual="individual" if experts else None, body_bytes=body)


def _modes(method: Method, predictor: Predictor) -> Sequence[str]:
    """Return the modes to run; a model without signatures cannot be asked with the task unknown."""
    model = predictor.model
    routed = model.parts().identified_by is not None
    return ("known", "unknown", "oracle") if routed or not method.routes else ("known",)


def sample_rows(data: TaskData, count: int, seed: int = 0) -> TaskData:
    """Draw at most `count` rows of a task at random."""
    if count < 1:
        raise EvaluationError(f"The number of rows to draw must be positive, not {count}.")
    chosen = sorted(random.Random(seed).sample(range(len(data)), min(count, len(data))))
    return TaskData(data.name, [data.inputs[i] for i in chosen], [data.answers[i] for i in chosen], data.label_names)
