"""The tensors that recovery is fitted to: the experts' and the merged ones, read one parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

NORM_CHUNK = 1 << 16


class ExpertTensors(Protocol):
    """The source of the experts' tensors (memory-mapped files, as a rule)."""

    @property
    def tasks(self) -> list[str]: ...

    def read_expert(self, task: str, name: str) -> Tensor: ...


@dataclass
class Targets:
    """The experts and the merged model.

    `names` are the parameters to recover: those in which some expert differs from the merge. `energies` are the squared
    norms of every task's difference in every parameter.
    """

    experts: ExpertTensors
    merged: Mapping[str, Tensor]
    names: list[str]
    energies: Mapping[str, list[float]]
    # Several parameters may be solved at once, but a source may compute a tensor with libraries that are not made for
    # threads (an adapter's with peft).
    _reading: Lock = field(default_factory=Lock, repr=False)

    @property
    def num_tasks(self) -> int:
        return len(self.experts.tasks)

    def expert(self, task: int, name: str) -> Tensor:
        """Return one expert's tensor, in float32 or better, on the device that computes."""
        with self._reading:
            tensor = self.experts.read_expert(self.experts.tasks[task], name)
        return _wide(tensor)

    def merged_beside(self, expert: Tensor, name: str) -> Tensor:
        """Return the merged tensor, in float32 or better, on the device of an expert's: it is stored where results are
        written."""
        return _wide(self.merged[name].to(expert.device))

    def all_experts(self, name: str) -> list[Tensor]:
        return [self.expert(task, name) for task in range(self.num_tasks)]

    def difference(self, task: int, name: str) -> Tensor:
        """Return `D_t = W_t - W_merged` of one task."""
        expert = self.expert(task, name)
        return expert - self.merged_beside(expert, name)

    def differences(self, name: str) -> list[Tensor]:
        """Return `D_t = W_t - W_merged` of every task."""
        experts = self.all_experts(name)
        merged = self.merged_beside(experts[0], name)
        return [expert - merged for expert in experts]

    def mixed_difference(self, name: str, weights: Tensor) -> Tensor:
        """Return `sum_t w_t D_t`; read only the experts with a nonzero weight."""
        tasks = weights.nonzero().flatten().tolist()
        if len(tasks) == 1 and weights[tasks[0]] == 1:
            return self.difference(tasks[0], name)
        return sum((weights[task] * self.difference(task, name) for task in tasks), start=torch.zeros(()))


def squared_norm(tensor: Tensor) -> float:
    """Return the squared norm of a tensor in float64, by parts, to avoid a float64 copy of the whole."""
    return sum(torch.dot(part, part).item() for part in map(Tensor.double, tensor.reshape(-1).split(NORM_CHUNK)))


def difference_energy(expert: Tensor, merged: Tensor) -> float:
    """Return the energy of `W_t - W_merged`, by parts; 0 for an expert that is the merged one in its dtype."""
    if torch.equal(expert.to(merged.dtype), merged):
        return 0.0
    parts = zip(*(tensor.reshape(-1).split(NORM_CHUNK) for tensor in (expert, merged)), strict=True)
    return sum(squared_norm(ours.double() - theirs.double()) for ours, theirs in parts)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
