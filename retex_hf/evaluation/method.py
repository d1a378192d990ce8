"""The interface of methods under evaluation: anything that answers mixed batches, with or without the task."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..data.readout import Answer, Readout
from ..data.task_data import TaskData

Shared = TypeVar("Shared")
Collate = Callable[[Sequence[Any]], dict[str, Tensor]]
"""Turns a list of raw inputs (texts, images) into the keyword arguments of a model's forward."""


@dataclass(frozen=True)
class Prediction:
    """Answers to the rows of a batch, and the task that each row was taken for (None where a method does not say)."""

    answers: Sequence[Answer]
    tasks: list[str] | None


@dataclass(frozen=True)
class Material:
    """The data that methods may see before the test: models, training data and labelled validation data, no test data.

    Args:
        base: The pre-trained model, as `RetexModel.from_experts` takes it.
        experts: `{task: expert}`, likewise.
        train: Training data of each task. Each method's documentation says whether it uses labels.
        validation: Data held out from training, for methods that select hyperparameters or epochs.
        collate: Makes batches of raw inputs.
        readout: How models answer.
        seed: Seed of all random draws.
    """

    base: Any
    experts: Mapping[str, Any]
    train: Mapping[str, TaskData]
    validation: Mapping[str, TaskData]
    collate: Collate
    readout: Readout
    seed: int = 0
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    """Costly objects that several methods share (experts in memory, the identifier), made once."""

    @property
    def tasks(self) -> list[str]:
        return list(self.experts)

    def once(self, key: str, make: Callable[[], Shared]) -> Shared:
        """Return an object shared between methods, making it on first use."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def sample(self, task: str, count: int) -> list[Any]:
        """Draw training inputs of a task at random, without labels; the same ones for every method."""
        inputs = self.train[task].inputs
        chosen = random.Random(self.seed).sample(range(len(inputs)), min(count, len(inputs)))
        return [inputs[index] for index in chosen]

    def references(self, task: str, count: int, batch_size: int = 64) -> list[dict[str, Tensor]]:
        """Return the inputs that `sample` draws, in batches."""
        inputs = self.sample(task, count)
        return [self.collate(inputs[start : start + batch_size]) for start in range(0, len(inputs), batch_size)]


class Method(ABC):
    """A system that serves many tasks: `fit` makes it from experts, `predict` answers.

    Three modes are kept apart:

    - task known: `predict(inputs, tasks=...)`. The true tasks are given. The method uses their heads, and their experts
      where it keeps something per task; a method with a router of its own still mixes by that router.
    - task unknown: `predict(inputs)`. The method must also choose the head.
    - oracle routing: `predict(inputs, tasks=..., oracle=True)`. The true tasks replace the router's decision.
    """

    name: str
    modes: tuple[str, ...] = ("known", "unknown")
    """Which of the first two modes a method has: without a router, it cannot run with the task unknown."""
    routes = False
    """Whether there is a router, so that oracle routing applies."""

    @abstractmethod
    def fit(self, material: Material) -> None:
        """Prepare everything that is needed before the first input."""

    @abstractmethod
    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        """Answer every row of a mixed batch."""

    @abstractmethod
    def storage_bytes(self) -> int:
        """Return the bytes needed to serve all tasks, except heads: one model's body, task parts, routers."""

    def packed_bytes(self) -> int:
        """Return the part of `storage_bytes` that takes less than 32 bits per number: masks, rounded factors."""
        return 0

    def state(self) -> dict[str, Any]:
        """Return the results of `fit` (coefficients, validation scores) as plain values for the report, if any."""
        return {}


def grouped(tasks: Sequence[str]) -> dict[str, Tensor]:
    """Return the row numbers of each task, in order of first appearance.

    >>> from retex_hf.evaluation.method import grouped
    >>> {task: rows.tolist() for task, rows in grouped(["a", "b", "a"]).items()}
    {'a': [0, 2], 'b': [1]}
    """
    rows: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        rows.setdefault(task, []).append(row)
    return {task: torch.tensor(members) for task, members in rows.items()}


def take_rows(inputs: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return some rows of a batch."""
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}


def without_padding(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of texts without the columns on the right that are padding in all rows."""
    mask = inputs.get("attention_mask")
    if "input_ids" not in inputs or not isinstance(mask, Tensor) or not mask.any():
        return dict(inputs)
    used = int(mask.any(0).nonzero().max()) + 1
    return {
        name: value[:, :used] if isinstance(value, Tensor) and value.shape == mask.shape else value
        for name, value in inputs.items()
    }
