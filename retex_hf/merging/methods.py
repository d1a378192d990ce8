"""The merge methods that need nothing but weights: average, task arithmetic, TIES. Float32, or better."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError
from .options import check_density, check_number
from .registry import Merger, TaskTensors, register_merge
from .threshold import CHUNK, magnitude_thresholds, trimming_bounds, vector_thresholds


@register_merge("average")
def average(base: Tensor, experts: list[Tensor]) -> Tensor:
    """The mean of the experts."""
    # In float64, so that the mean of equal tensors (a frozen tower) is that tensor to the bit and costs no recovery.
    return (sum(expert.double() for expert in experts) / len(experts)).float()


@register_merge("task_arithmetic")
def task_arithmetic(base: Tensor, experts: list[Tensor], *, scale: float = 0.3) -> Tensor:
    """The base plus `scale` times the sum of the task vectors `W_t - W_0`."""
    check_number("scale", scale)
    base = base.float()
    return base + scale * sum(expert.float() - base for expert in experts)


@register_merge("ties", prepare=True)
def ties(tensors: TaskTensors, *, density: float = 0.2, scale: float = 1.0, trim: str = "vector") -> Merger:
    """TIES: trim each task vector to its largest entries, elect a sign, average the entries that agree with it.

    `trim="vector"` keeps the top `density` of a whole task vector (the TIES paper), `"tensor"` of each tensor.
    """
    check_number("scale", scale)
    check_density(density)
    if trim not in ("vector", "tensor"):
        raise ConfigError(f'RetexConfig.merge: trim must be "vector" or "tensor", not {trim!r}.')

    thresholds = vector_thresholds(tensors, density) if trim == "vector" else None

    def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        limits = thresholds or magnitude_thresholds(
            lambda wanted: ((number, experts[number], base) for number in wanted), len(experts), base.numel(), density
        )
        return _merge_trimmed(base, experts, limits, scale)

    return merge


def _merge_trimmed(base: Tensor, experts: list[Tensor], limits: list[float], scale: float) -> Tensor:
    """`base + scale * mean` of the entries that reach their task's limit and agree with the elected sign.

    A chunk of all task vectors fits the processor's cache; every step is a float32 operation on it, in place.
    """
    merged = torch.empty(base.numel())
    flat_base, flat_experts = base.reshape(-1), [expert.reshape(-1) for expert in experts]
    bounds = trimming_bounds(limits)
    for start in range(0, len(merged), CHUNK):
        part = slice(start, start + CHUNK)
        origin = flat_base[part].float()
        vectors = [expert[part].float() - origin for expert in flat_experts]
        trimmed = [torch.nn.functional.hardshrink(vector, bound) for vector, bound in zip(vectors, bounds, strict=True)]
        torch.add(origin, _disjoint_mean(trimmed), alpha=scale, out=merged[part])
    return merged.view(base.shape)


def _disjoint_mean(vectors: list[Tensor]) -> Tensor:
    """The mean over the entries of the sign that outweighs the other. Uses the vectors up."""
    elected = torch.sign(sum(vectors))
    total, count = torch.zeros_like(elected), torch.zeros_like(elected)
    for vector in vectors:
        agreeing = vector.mul_(elected).relu_()
        total += agreeing
        count += agreeing.sign_()
    return total.mul_(elected).div_(count.clamp_(min=1))
