"""A base and its experts in memory, for methods that need them all at once: task vectors, heads, and models of them."""

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

    `base` are the tensors that are merged (the body); `vectors` (T, ...) the stacked task vectors `W_t - W_0` of each;
    `heads` what each task keeps for itself, `rows` those of tokens that the base lacks (see `RetexConfig.vocabulary`).
    `model` is a model of the experts' class; its own tensors do not matter.
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
        """`W_0 + sum_t c_t (W_t - W_0)` for coefficients (T,), with their gradients."""
        return {name: base + torch.tensordot(coefficients, self.vectors[name], 1) for name, base in self.base.items()}

    def expert_body(self, task: str) -> Weights:
        """The body of one expert."""
        index = self.tasks.index(task)
        return {name: base + self.vectors[name][index] for name, base in self.base.items()}

    def module(self, body: Mapping[str, Tensor], task: str) -> nn.Module:
        """A runnable model: this body under the head of a task. Tensors are used as they are, gradients and all."""
        tensors = {**body, **self.heads[task]}
        if task in self.rows:
            tensors |= with_own_rows(tensors, self.rows[task], self.vocabulary[task]["size"])
        return copy_with(self.model, tensors).eval()

    def body_bytes(self) -> int:
        """Bytes of one expert's body, as wide as the model stores its tensors."""
        return sum(base.numel() * self.element_size(name) for name, base in self.base.items())

    def element_size(self, name: str) -> int:
        """Bytes of one number of a tensor, as the model stores it."""
        return self.model.state_dict()[name].element_size()

    def numbers(self) -> int:
        """How many numbers one expert's body holds."""
        return sum(base.numel() for base in self.base.values())
