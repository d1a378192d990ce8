"""Checks of data and of methods' answers, which refuse faults in one sentence before any figure is computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from operator import index
from typing import Any

from ..data.task_data import TaskData
from ..errors import EvaluationError, shorten
from .method import Prediction

MISSING_LABEL = -1
"""The value that `datasets` stores where the labels of a test set are withheld."""


def check_tasks(tasks: Sequence[TaskData], num_labels: Mapping[str, int] | None = None) -> None:
    """Refuse tasks that cannot be evaluated on.

    Args:
        tasks: Data to evaluate on.
        num_labels: The width of each task's head; default: the number of `label_names`.
    """
    if not tasks:
        raise EvaluationError("There are no tasks to evaluate on.")
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvaluationError(f"Task {twice[0]!r} is given twice; every task needs its own name.")
    for task in tasks:
        named = None if task.label_names is None else len(task.label_names)
        _check_task(task, (num_labels or {}).get(task.name, named))


def _check_task(task: TaskData, width: int | None) -> None:
    if len(task.inputs) != len(task.answers):
        raise EvaluationError(
            f"Task {task.name!r} has {len(task.inputs)} inputs but {len(task.answers)} answers; expected one each."
        )
    if not len(task.inputs):
        raise EvaluationError(f"Task {task.name!r} has no rows to evaluate on.")
    texts = [isinstance(answer, str) for answer in task.answers]
    for row, answer in enumerate(task.answers):
        if is_missing(answer):
            raise EvaluationError(
                f"Row {row} of task {task.name!r} has no label ({answer}); evaluation needs the answer of every row."
            )
        if texts[row] != texts[0]:
            raise EvaluationError(f"Task {task.name!r} mixes texts and class numbers in its answers (row {row}).")
        if not texts[row]:
            _check_class(task.name, row, answer, width)


def _check_class(task: str, row: int, answer: Any, width: int | None) -> None:
    try:
        label = index(answer)
    except TypeError:
        raise EvaluationError(f"Row {row} of task {task!r} has label {answer!r}, which is not an integer.") from None
    if label < 0:
        raise EvaluationError(f"Row {row} of task {task!r} has label {label}, which is below 0.")
    if width is not None and label >= width:
        raise EvaluationError(
            f"Row {row} of task {task!r} has label {label}, which is outside the head's {width} classes "
            f"(0 to {width - 1})."
        )


def is_missing(answer: Any) -> bool:
    """Return whether a label is missing: None, not a number, or -1."""
    if answer is None:
        return True
    if isinstance(answer, str):
        return False
    return math.isnan(answer) or answer == MISSING_LABEL


def check_answers(prediction: Prediction, method: str, batch: Sequence[str]) -> None:
    """Refuse a number of answers other than that of a batch's rows; `batch` holds the task of each row."""
    if len(prediction.answers) != len(batch):
        raise EvaluationError(f"{method} gave {len(prediction.answers)} answers to {_batch(batch)}.")


def check_chosen_tasks(
    prediction: Prediction, method: str, batch: Sequence[str], tasks: Collection[str], must_say: bool
) -> None:
    """Refuse tasks that a method cannot have chosen.

    Args:
        prediction: The method's answers.
        method: Name of the method.
        batch: The task that each row belongs to.
        tasks: The tasks to choose from.
        must_say: Whether an answer is meaningless without its task.
    """
    if prediction.tasks is None:
        if must_say:
            raise EvaluationError(f"{method} did not give the task of each row in {_batch(batch)}.")
        return
    if len(prediction.tasks) != len(batch):
        raise EvaluationError(f"{method} named {len(prediction.tasks)} tasks for {_batch(batch)}.")
    for found, true in zip(prediction.tasks, batch, strict=True):
        if found not in tasks:
            raise EvaluationError(
                f"{method} assigned a row of task {true!r} to {found!r}, which is not among the tasks {sorted(tasks)}."
            )


def _batch(batch: Sequence[str]) -> str:
    return f"a batch of {len(batch)} rows of {shorten(dict.fromkeys(batch))}"
