"""Merge methods that need only weights: average, task arithmetic, TIES. They compute in float32 or better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .expert_weights import WeightTensors
from .options import Weights, check_density, check_number, shares, summands
from .registry import Merger, TaskTensors, register_merge
from .scales import MEAN_SCALES, SCALES, scale_of
from .threshold import chunk_size, magnitude_thresholds, trimming_bounds, vector_thresholds

if TYPE_CHECKING:
    from .calibration import Calibration


@register_merge("average", prepare=True)
def average(tensors: TaskTensors, *, weights: Weights = None) -> Merger:
    """Average the experts; with `weights`, take their weighted mean (only the ratios of weights count)."""
    factors = shares(weights, tensors.tasks)

    def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        # In float64, the mean of equal tensors (a frozen tower) is that tensor bit for bit and needs no recovery.
        weighted = (factor * expert.double() for factor, expert in zip(factors, experts, strict=True))
        total = sum(weighted, torch.zeros_like(experts[0], dtype=torch.float64))
        return (total / sum(factors)).float()

    return merge


def choose_sum_scale(calibration: Calibration, *, weights: Weights = None) -> dict[str, Any]:
    """Choose the scale of task arithmetic by accuracy on labelled batches; the smallest among equals."""
    merger = task_arithmetic(WeightTensors(calibration.weights), scale=1, weights=weights)
    return {"scale": scale_of(calibration, merger, SCALES)}


@register_merge("task_arithmetic", prepare=True, calibrate=choose_sum_scale)
def task_arithmetic(tensors: TaskTensors, *, scale: float | str | None = None, weights: Weights = None) -> Merger:
    """Add to the base `scale` times the sum of the task vectors `W_t - W_0`, each times its weight.

    `scale` defaults to 0.3, or to 1 where `weights` are given; `"auto"` chooses it by accuracy on labelled
    `calibration` batches.
    """
    factors, factor = summands(weights, scale, tensors.tasks)

    def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        base = base.float()
        return base + factor * weighted_sum([expert.float() - base for expert in experts], factors)

    return merge


def choose_ties_scale(
    calibration: Calibration, *, density: float = 0.2, trim: str = "vector", weights: Weights = None
) -> dict[str, Any]:
    """Choose the scale of TIES by accuracy on labelled batches; the smallest among equals."""
    merger = ties(WeightTensors(calibration.weights), density=density, trim=trim, weights=weights)
    return {"scale": scale_of(calibration, merger, MEAN_SCALES)}


@register_merge("ties", prepare=True, calibrate=choose_ties_scale)
def ties(
    tensors: TaskTensors,
    *,
    density: float = 0.2,
    scale: float | str = 1.0,
    trim: str = "vector",
    weights: Weights = None,
) -> Merger:
    """Trim each task vector to its largest entries, elect a sign per entry, average the entries that agree with it
    (TIES).

    `trim="vector"` keeps the top `density` of a whole task vector (the TIES paper), `"tensor"` of each tensor. With
    `weights`, entries vote and are averaged by the weight of their task. `scale="auto"` chooses it by accuracy on
    labelled `calibration` batches.
    """
    factor = check_number("scale", scale)
    check_density(density)
    factors = shares(weights, tensors.tasks)
    if trim not in ("vector", "tensor"):
        raise ConfigError(f'RetexConfig.merge: trim must be "vector" or "tensor", not {trim!r}.')

    thresholds = vector_thresholds(tensors, density) if trim == "vector" else None

    def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        limits = thresholds or magnitude_thresholds(
            lambda wanted: ((number, experts[number], base) for number in wanted), len(experts), base.numel(), density
        )
        return _merge_trimmed(base, experts, limits, factors, factor)

    return merge


def _merge_trimmed(
    base: Tensor, experts: list[Tensor], limits: list[float], weights: list[float], scale: float
) -> Tensor:
    """Return `base + scale * mean` of the entries that reach their task's limit and agree with the elected sign.

    A chunk of all task vectors fits the processor's cache; every step is a float32 operation on it, in place.
    """
    merged = torch.empty(base.numel(), device=base.device)
    flat_base, flat_experts = base.reshape(-1), [expert.reshape(-1) for expert in experts]
    bounds = trimming_bounds(limits)
    step = chunk_size(base)
    for start in range(0, len(merged), step):
        part = slice(start, start + step)
        origin = flat_base[part].float()
        vectors = [expert[part].float() - origin for expert in flat_experts]
        trimmed = [torch.nn.functional.hardshrink(vector, bound) for vector, bound in zip(vectors, bounds, strict=True)]
        torch.add(origin, disjoint_mean(trimmed, weights), alpha=scale, out=merged[part])
    return merged.view(base.shape)


def weighted_sum(vectors: list[Tensor], weights: list[float]) -> Tensor:
    """Sum vectors, each times its weight."""
    total = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        total.add_(vector, alpha=weight)
    return total


def disjoint_mean(vectors: list[Tensor], weights: list[float]) -> Tensor:
    """Average, by weight, the entries that agree with the elected sign. Overwrites the vectors."""
    elected = weighted_sum(vectors, weights).sign_()
    total, count = torch.zeros_like(elected), torch.zeros_like(elected)
    for vector, weight in zip(vectors, weights, strict=True):
        agreeing = vector.mul_(elected).relu_()
        total.add_(agreeing, alpha=weight)
        count.add_(agreeing.sign_(), alpha=weight)
    return total.mul_(elected).div_(count.masked_fill_(count == 0, 1))
