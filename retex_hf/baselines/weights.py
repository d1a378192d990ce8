"""The experts in memory, shared by all methods."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..build.plan import load_expert_weights
from ..evaluation.method import Material
from ..merging.expert_weights import ExpertWeights


def expert_weights(material: Material) -> ExpertWeights:
    """Return the base and all experts, read once for all methods. Treat them as read-only."""
    return material.once("weights", lambda: load_expert_weights(material.base, material.experts))


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
