"""Base of most methods: every row runs on the body, and under the head, of one task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.readout import Answer
from ..errors import TaskError
from ..evaluation.method import Material, Method, Prediction, grouped, take_rows, without_padding
from ..execution import ExpertCache
from ..merging.expert_weights import Weights
from .identifier import Identifier, shared_identifier
from .weights import expert_weights

CACHE_BYTES = 2 * 1024**3


class TaskBodies(Method):
    """One body per task, made on first use; a batch runs group by group. Does not identify tasks."""

    modes: tuple[str, ...] = ("known",)

    def fit(self, material: Material) -> None:
        self.readout = material.readout
        self.weights = expert_weights(material)
        self._cache = ExpertCache(CACHE_BYTES)

    @abstractmethod
    def body(self, task: str) -> Weights:
        """Return the body that rows of a task run on."""

    def module(self, task: str) -> nn.Module:
        """Return the body of a task under the task's head, ready to run."""
        size = 4 * self.weights.numbers()
        return self._cache.get(task, lambda: self.weights.module(self.body(task), task), lambda: size)

    @torch.no_grad()
    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        chosen = self.choose(inputs) if tasks is None else list(tasks)
        answers: dict[int, Answer] = {}
        for task, rows in grouped(chosen).items():
            output = self.readout.call(self.module(task), without_padding(take_rows(inputs, rows)))
            answers.update(zip(rows.tolist(), self.readout.answers(output, [task] * len(rows)), strict=True))
        return Prediction([answers[row] for row in range(len(chosen))], chosen)

    def choose(self, inputs: Mapping[str, Tensor]) -> list[str]:
        """Choose the task of every row, where it is not given."""
        raise TaskError(f"{self.name} has no router: name the task of every row.")


class Identified(TaskBodies):
    """Mixin that adds our identifier to a method that must be given the task.

    Args:
        args: Positional arguments of that method; `options` are its keyword arguments.
        identifier: Identifier to use; default: the one that all methods share.
    """

    modes = ("known", "unknown")
    routes = True
    held: tuple[str, ...] = ("pretrained",)
    """Sources of features that the method stores anyway; see `Identifier.storage_bytes`."""

    def __init__(self, *args: Any, identifier: Identifier | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given = identifier

    def fit(self, material: Material) -> None:
        super().fit(material)
        self.identifier = shared_identifier(material, self._given)

    def choose(self, inputs: Mapping[str, Tensor]) -> list[str]:
        return self.identifier.tasks_of(inputs)

    def storage_bytes(self) -> int:
        own = super().storage_bytes()  # type: ignore[safe-super]  # a mixin: that of the method beside it
        return own + self.identifier.storage_bytes(self.held)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "feature_layer": self.identifier.signatures.feature_layer}
