"""Scoring of rows: which ones a model answers correctly, and of which it identifies the task.

Tasks run one at a time, with inputs of similar length together, so that little of a batch is padding. The result is an
`Evaluation`, which `experiment.pack` turns into a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import Study, run_cells
from torch import Tensor
from tqdm.auto import tqdm

from retex_hf import RetexModel
from retex_hf.baselines.weights import expert_weights
from retex_hf.data.readout import Answer, Readout
from retex_hf.evaluation import Collate, TaskData
from retex_hf.evaluation.metrics import normalised
from retex_hf.evaluation.run import Evaluation, TaskScore, is_right

Batch = dict[str, Tensor]


def batches(inputs: Sequence[Any], collate: Collate, size: int) -> Iterator[tuple[list[int], Batch]]:
    """Yield batches of inputs of similar length, with their row numbers."""
    order = sorted(range(len(inputs)), key=lambda row: len(inputs[row]) if hasattr(inputs[row], "__len__") else 0)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield rows, collate([inputs[row] for row in rows])


def gather(call: Callable[[Batch], Tensor], inputs: Sequence[Any], collate: Collate, size: int) -> Tensor:
    """Apply a function of batches to all inputs; return one row of a tensor per input, in their order."""
    numbers: list[int] = []
    parts = []
    for rows, batch in batches(inputs, collate, size):
        numbers += rows
        parts.append(call(batch))
    return torch.cat(parts)[torch.tensor(numbers).argsort()]


@torch.inference_mode()
def right_rows(answer: Callable[[Batch], Sequence[Answer]], data: TaskData, collate: Collate, size: int) -> np.ndarray:
    """Return whether the answer to each row of a task is right."""
    right = np.zeros(len(data), dtype=bool)
    for rows, inputs in batches(data.inputs, collate, size):
        for row, found in zip(rows, answer(inputs), strict=True):
            right[row] = is_right(found, data.answers[row])
    return right


def answers_as(readout: Readout, model: Any, head: str, **options: Any) -> Callable[[Batch], list[Answer]]:
    """Return a function that answers under the head of one task; `options` (such as `task=`) go with the inputs."""

    def answer(inputs: Batch) -> list[Answer]:
        rows = len(next(iter(inputs.values())))
        return readout.answers(readout.call(model, inputs, **options), [head] * rows)

    return answer


@torch.inference_mode()
def identified_rows(model: RetexModel, data: TaskData, collate: Collate, size: int) -> np.ndarray:
    """Return whether a model identifies the task of each row."""
    task = model.tasks.index(data.name)
    return (gather(lambda inputs: model.identify(**inputs).task_ids, data.inputs, collate, size) == task).numpy()


def individual(study: Study) -> Evaluation:
    """Evaluate the experts, each on its own task; their storage is `T` bodies."""
    weights, readout = expert_weights(study.material), study.material.readout
    scores = {}
    for test in study.tests:
        expert = weights.module(weights.expert_body(test.name), test.name)
        right = right_rows(answers_as(readout, expert, test.name), test, *_how(study))
        scores[test.name] = TaskScore(right)
    return Evaluation("individual", {"known": scores}, len(study.tasks) * weights.body_bytes())


def recovered(model: RetexModel, study: Study) -> dict[str, TaskScore]:
    """Evaluate a finished ReTeX on every task, with the task known."""
    readout = study.material.readout
    return {
        test.name: TaskScore(
            right_rows(answers_as(readout, model, test.name, task=test.name), test, *_how(study))
        )
        for test in study.tests
    }  # fmt: skip


def routed(model: RetexModel, study: Study, known: Mapping[str, TaskScore]) -> dict[str, TaskScore]:
    """Evaluate a finished ReTeX on every task, with the task unknown; `known` holds its scores with the task known.

    A class is right only under the right head, where the answer equals that with the task known. A text may be right
    under any task, so texts are generated again.
    """
    readout, scores = study.material.readout, {}
    for test in study.tests:
        identified = identified_rows(model, test, *_how(study))
        if readout.chooses_head:
            right = identified & known[test.name].correct
        else:
            right = right_rows(answers_as(readout, model, test.name), test, *_how(study))
        scores[test.name] = TaskScore(right, identified)
    return scores


def fit_signatures(model: RetexModel, study: Study) -> None:
    """Fit signatures on the study's own reference inputs."""
    count = model.retex_config.num_reference
    references = {task: study.material.references(task, count) for task in study.tasks}
    model.fit_signatures(references, progress=False)


def recovery_bytes(model: RetexModel) -> int:
    """Return the bytes of the recovery module as it is stored."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.recovery.state_dict().values())


def accuracy(evaluation: Evaluation, mode: str) -> float:
    """Return the mean accuracy over tasks."""
    return float(np.mean([score.accuracy for score in evaluation.scores[mode].values()]))


def identification(evaluation: Evaluation) -> float:
    """Return the mean over tasks of the share of rows identified as their own task."""
    return float(np.mean([score.identified.mean() for score in evaluation.scores["unknown"].values()]))


def normalised_accuracy(evaluation: Evaluation, mode: str, experts: Evaluation) -> float:
    """Return the mean over tasks of the accuracy relative to the individual expert's."""
    scores = evaluation.scores[mode]
    single = experts.scores["known"]
    return float(normalised([scores[task].accuracy for task in scores], [single[task].accuracy for task in scores]))


def run_each(
    work: Path, kind: str, cells: Mapping[str, tuple[Any, Callable[[], Any]]], identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of `{label: (ingredients, function)}`, stored as cells by their ingredients.

    Labels may change, and tables may share a cell: it is computed once.
    """
    values = {}
    bar = tqdm(cells.items(), desc=kind, unit="cell")
    for label, (built, compute) in bar:
        bar.set_postfix_str(label)
        done = run_cells(work / "cells", {kind: compute}, {**identity, "built": built}, progress=False)
        values[label] = done[kind]
    return values


def _how(study: Study) -> tuple[Collate, int]:
    return study.material.collate, study.recipe.batch_size
