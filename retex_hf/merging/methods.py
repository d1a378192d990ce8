"""The merge methods that need nothing but weights: average, task arithmetic, TIES. Float32, or better."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .registry import Merger, TaskTensors, register_merge


@register_merge("average")
def average(base: Tensor, experts: list[Tensor]) -> Tensor:
    """The mean of the experts."""
    # In float64, so that the mean of equal tensors (a frozen tower) is that tensor to the bit and costs no recovery.
    return (sum(expert.double() for expert in experts) / len(experts)).float()


@register_merge("task_arithmetic")
def task_arithmetic(base: Tensor, experts: list[Tensor], *, scale: float = 0.3) -> Tensor:
    """The base plus `scale` times the sum of the task vectors `W_t - W_0`."""
    _check_number("scale", scale)
    base = base.float()
    return base + scale * sum(expert.float() - base for expert in experts)


@register_merge("ties", prepare=True)
def ties(tensors: TaskTensors, *, density: float = 0.2, scale: float = 1.0, trim: str = "vector") -> Merger:
    """TIES: trim each task vector to its largest entries, elect a sign, average the entries that agree with it.

    `trim="vector"` keeps the top `density` of a whole task vector (the TIES paper), `"tensor"` of each tensor.
    """
    _check_number("scale", scale)
    _check_number("density", density)
    if not 0 < density <= 1:
        raise ConfigError(f"RetexConfig.merge: density must be in (0, 1], not {density!r}.")
    if trim not in ("vector", "tensor"):
        raise ConfigError(f'RetexConfig.merge: trim must be "vector" or "tensor", not {trim!r}.')

    def task_vector(task: str) -> Iterable[Tensor]:
        return (tensors.read_expert(task, n).float() - tensors.read_base(n).float() for n in tensors.names)

    thresholds = None
    if trim == "vector":
        thresholds = [magnitude_threshold(lambda t=task: task_vector(t), density) for task in tensors.tasks]

    def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        base = base.float()
        vectors = [expert.float() - base for expert in experts]
        limits = thresholds or [magnitude_threshold(lambda v=vector: [v], density) for vector in vectors]
        trimmed = [torch.where(v.abs() >= limit, v, 0.0) for v, limit in zip(vectors, limits, strict=True)]
        return base + scale * _disjoint_mean(trimmed)

    return merge


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"RetexConfig.merge: {name} must be a number, not {value!r}.")


def _disjoint_mean(vectors: list[Tensor]) -> Tensor:
    elected = torch.sign(sum(vectors))
    agreeing = [torch.where(torch.sign(vector) == elected, vector, 0.0) for vector in vectors]
    count = sum((vector != 0).to(elected.dtype) for vector in agreeing)
    return sum(agreeing) / count.clamp(min=1)


def magnitude_threshold(read: Callable[[], Iterable[Tensor]], density: float) -> float:
    """The magnitude that the top `density` of all entries reach, in two passes of constant memory.

    The bits of a non-negative float32 sort like the float itself: the first pass counts the upper half of the bits, the
    second the lower half within the one bin that holds the answer. `read()` yields the tensors anew for each pass.
    """

    def counts(select: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros(1 << 16, dtype=torch.int64)
        for tensor in read():
            bits = tensor.float().abs().contiguous().view(torch.int32).flatten()
            total += torch.bincount(select(bits), minlength=1 << 16)
        return total

    upper = counts(lambda bits: bits >> 16)
    total = upper.sum().item()
    if total == 0:
        return 0.0
    wanted = max(1, round(density * total))
    high, above = _bin_reaching(upper, wanted)
    low, _ = _bin_reaching(counts(lambda bits: bits[bits >> 16 == high] & 0xFFFF), wanted - above)
    return torch.tensor(high << 16 | low, dtype=torch.int32).view(torch.float32).item()


def _bin_reaching(counts: Tensor, wanted: int) -> tuple[int, int]:
    """The highest bin such that it and all above hold at least `wanted`; and how many are above it."""
    from_top = counts.flip(0).cumsum(0)
    position = int(torch.searchsorted(from_top, wanted))
    return len(counts) - 1 - position, int(from_top[position] - counts.flip(0)[position])
