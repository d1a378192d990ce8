"""SCE: select by variance, calculate weights from squares, erase minority signs (FuseChat, arXiv 2408.07990)."""

from __future__ import annotations

import torch
from torch import Tensor

from .options import check_density
from .registry import Merger, TaskTensors, register_merge
from .threshold import CHUNK, magnitude_thresholds


@register_merge("sce", prepare=True)
def sce(tensors: TaskTensors, *, density: float = 0.1) -> Merger:
    """Select the entries that differ most between experts, and weigh experts by their selected entries; per tensor.

    Select: the share `density` of entries in which task vectors have the largest variance over the experts (all entries
    that tie are selected). Calculate: an expert's weight is its share of the squares of all selected entries. Erase:
    drop the entries against the sign of the selected entries' sum. Sum the rest by those weights.
    """
    check_density(density)
    return lambda _, base, experts: _merge(base.float(), experts, density)


def _merge(base: Tensor, experts: list[Tensor], density: float) -> Tensor:
    vectors = torch.stack([(expert.float() - base).flatten() for expert in experts])
    variance = torch.cat([_variance(part) for part in vectors.split(CHUNK, dim=1)])
    vectors *= variance >= _limit(variance, density)
    squares = torch.stack([vector.double().square().sum() for vector in vectors])
    if not squares.sum() > 0:
        return base.clone()
    weights = (squares / squares.sum()).tolist()
    elected = vectors.sum(0).sign_()
    merged = base.flatten().clone()
    for vector, weight in zip(vectors, weights, strict=True):
        merged.add_(vector.mul_(vector * elected > 0), alpha=weight)
    return merged.view(base.shape)


def _variance(vectors: Tensor) -> Tensor:
    """Return the variance over the experts, computed from differences to one of them: exactly zero where experts are
    equal."""
    differences = vectors - vectors[0]
    return (differences - differences.mean(0)).square_().mean(0)


def _limit(variance: Tensor, density: float) -> float:
    zero = variance.new_zeros(1).expand(variance.numel())
    return magnitude_thresholds(lambda _: [(0, variance, zero)], 1, variance.numel(), density)[0]
