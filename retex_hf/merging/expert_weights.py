"""A base and its experts in memory, for methods that need them all at once: task vectors, heads and runnable models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..execution.expert_cache import copy_with
from ..execution.vocabulary_rows import with_own_rows

Weights = dict[str, Tensor]


@dataclass
class ExpertWeights:
    """All weights, in float32.

    `base` holds the tensors that are merged (the body); `vectors` (T, ...) the stacked task vectors `W_t - W_0` of
    each; `heads` the tensors that each task keeps, `rows` the rows of tokens that the base lacks (see
    `RetexConfig.vocabulary`). `model` is a model of the experts' class; its own values are not used.
    """

    model: nn.Module
    base: Weights
    vectors: Weights
    heads: dict[str, Weights]
    labels: dict[str, dict[str, Any]]
    rows: dict[str, Weights] = field(default_factory=dict)
    vocabulary: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        return list(self.heads)

    def body(self, coefficients: Tensor) -> Weights:
        """Return `W_0 + sum_t c_t (W_t - W_0)` for coefficients (T,), with their gradients."""
        return {name: base + torch.tensordot(coefficients, self.vectors[name], 1) for name, base in self.base.items()}

    def expert_body(self, task: str) -> Weights:
        """Return the body of one expert."""
        index = self.tasks.index(task)
        return {name: base + self.vectors[name][index] for name, base in self.base.items()}

    def module(self, body: Mapping[str, Tensor], task: str) -> nn.Module:
        """Return a runnable model of this body under the head of a task. It uses the tensors themselves, with their
        gradients."""
        tensors = {**body, **self.heads[task]}
        if task in self.rows:
            tensors |= with_own_rows(tensors, self.rows[task], self.vocabulary[task]["size"])
        return copy_with(self.model, tensors).eval()

    def body_bytes(self) -> int:
        """Return the bytes of one expert's body in the dtypes in which the model stores its tensors."""
        return sum(base.numel() * self.element_size(name) for name, base in self.base.items())

    def element_size(self, name: str) -> int:
        """Return the bytes per element of a tensor as the model stores it."""
        return self.model.state_dict()[name].element_size()

    def numbers(self) -> int:
        """Return how many numbers one expert's body holds."""
        return sum(base.numel() for base in self.base.values())


@dataclass(frozen=True)
class WeightTensors:
    """Experts in memory, in the form that merge methods read (`retex_hf.merging.TaskTensors`)."""

    weights: ExpertWeights

    @property
    def tasks(self) -> list[str]:
        return self.weights.tasks

    @property
    def names(self) -> list[str]:
        return list(self.weights.base)

    def read_base(self, name: str) -> Tensor:
        return self.weights.base[name]

    def read_expert(self, task: str, name: str) -> Tensor:
        return self.weights.base[name] + self.weights.vectors[name][self.tasks.index(task)]
