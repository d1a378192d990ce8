"""Merges of sparsified task vectors: DARE, DELLA and Model Breadcrumbs.

Each comes in two forms: the sparse vectors are summed as in task arithmetic, or a sign is elected per entry and the
entries that agree with it are averaged, as in TIES. DARE and DELLA drop entries at random and divide the rest by the
probability of being kept, so that the expectation of a sparse vector is the task vector.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import inf

import torch
from torch import Tensor

from ..errors import ConfigError
from .draws import Draws
from .methods import disjoint_mean, weighted_sum
from .options import LARGEST_SEED, Weights, check_density, check_integer, check_number, shares, summands
from .registry import Merger, TaskTensors, register_merge
from .threshold import CHUNK, magnitude_thresholds

# `sparsify(name, base, experts)` returns the sparse task vectors of one tensor, which the caller may overwrite.
Sparsify = Callable[[str, Tensor, list[Tensor]], list[Tensor]]


@register_merge("dare_linear", prepare=True)
def dare_linear(
    tensors: TaskTensors,
    *,
    density: float = 0.5,
    scale: float | None = None,
    weights: Weights = None,
    seed: int = 0,
) -> Merger:
    """Keep each entry with probability `density`, divided by it, then apply task arithmetic (DARE, arXiv
    2311.03099)."""
    return _added(tensors, _dare(tensors, density, seed), scale, weights)


@register_merge("dare_ties", prepare=True)
def dare_ties(
    tensors: TaskTensors, *, density: float = 0.5, scale: float = 1.0, weights: Weights = None, seed: int = 0
) -> Merger:
    """Apply TIES with DARE in place of its trim: drop at random, elect a sign, average the entries that agree with
    it."""
    return _elected(tensors, _dare(tensors, density, seed), scale, weights)


@register_merge("della", prepare=True)
def della(
    tensors: TaskTensors,
    *,
    density: float = 0.5,
    epsilon: float = 0.2,
    scale: float = 1.0,
    weights: Weights = None,
    seed: int = 0,
) -> Merger:
    """Drop small entries more often than large ones, elect a sign, average what agrees (DELLA, arXiv 2406.11617).

    Within a row of a matrix (an output of the layer) the probability of being kept rises with the rank of an entry's
    magnitude, in equal steps from `density - epsilon / 2` to `density + epsilon / 2`.
    """
    return _elected(tensors, _della(tensors, density, epsilon, seed), scale, weights)


@register_merge("della_linear", prepare=True)
def della_linear(
    tensors: TaskTensors,
    *,
    density: float = 0.5,
    epsilon: float = 0.2,
    scale: float | None = None,
    weights: Weights = None,
    seed: int = 0,
) -> Merger:
    """Drop entries as `della` does, then apply task arithmetic."""
    return _added(tensors, _della(tensors, density, epsilon, seed), scale, weights)


@register_merge("breadcrumbs", prepare=True)
def breadcrumbs(
    tensors: TaskTensors,
    *,
    density: float = 0.15,
    gamma: float = 0.01,
    scale: float | None = None,
    weights: Weights = None,
) -> Merger:
    """Mask the largest and the small entries, then apply task arithmetic (Model Breadcrumbs, arXiv 2312.06795).

    In each tensor of each task vector the share `gamma` of largest magnitude is masked, the next `density` is kept, and
    the small rest is masked. Entries that tie are treated alike.
    """
    return _added(tensors, _breadcrumbs(density, gamma), scale, weights)


@register_merge("breadcrumbs_ties", prepare=True)
def breadcrumbs_ties(
    tensors: TaskTensors,
    *,
    density: float = 0.15,
    gamma: float = 0.01,
    scale: float = 1.0,
    weights: Weights = None,
) -> Merger:
    """Apply TIES with the masks of `breadcrumbs` in place of its trim."""
    return _elected(tensors, _breadcrumbs(density, gamma), scale, weights)


def _added(tensors: TaskTensors, sparsify: Sparsify, scale: float | None, weights: Weights) -> Merger:
    """Return the merger `W_0 + scale * sum_t w_t v_t`."""
    factors, scale = summands(weights, scale, tensors.tasks)

    def merge(name: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        return base.float() + scale * weighted_sum(sparsify(name, base, experts), factors)

    return merge


def _elected(tensors: TaskTensors, sparsify: Sparsify, scale: float, weights: Weights) -> Merger:
    """Return the merger `W_0 + scale * mean` of the entries that agree with the elected sign."""
    check_number("scale", scale)
    factors = shares(weights, tensors.tasks)

    def merge(name: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        return base.float() + scale * disjoint_mean(sparsify(name, base, experts), factors)

    return merge


def _dare(tensors: TaskTensors, density: float, seed: int) -> Sparsify:
    check_density(density)
    check_integer("seed", seed, 0, LARGEST_SEED)

    def sparsify(name: str, base: Tensor, experts: list[Tensor]) -> list[Tensor]:
        vectors = _vectors(base, experts)
        for task, vector in zip(tensors.tasks, vectors, strict=True):
            draws = Draws(seed, task, name)
            for part in vector.view(-1).split(CHUNK):
                _drop(part, torch.full(part.shape, density, dtype=torch.float64), draws)
        return vectors

    return sparsify


def _della(tensors: TaskTensors, density: float, epsilon: float, seed: int) -> Sparsify:
    check_density(density)
    check_number("epsilon", epsilon)
    check_integer("seed", seed, 0, LARGEST_SEED)
    if epsilon < 0 or density - epsilon / 2 <= 0 or density + epsilon / 2 > 1:
        raise ConfigError(
            "RetexConfig.merge: epsilon must leave density - epsilon / 2 above 0 and density + epsilon / 2 at most 1, "
            f"but density is {density!r} and epsilon is {epsilon!r}."
        )

    def sparsify(name: str, base: Tensor, experts: list[Tensor]) -> list[Tensor]:
        vectors = _vectors(base, experts)
        for task, vector in zip(tensors.tasks, vectors, strict=True):
            draws = Draws(seed, task, name)
            rows = vector.flatten(1) if vector.ndim > 1 else vector.view(1, -1)
            for part in rows.split(max(1, CHUNK // max(1, rows.shape[1]))):
                _drop(part, ranked_probabilities(part, density, epsilon), draws)
        return vectors

    return sparsify


def ranked_probabilities(rows: Tensor, density: float, epsilon: float) -> Tensor:
    """Return probabilities of being kept that rise with the rank of a magnitude within its row; their mean is
    `density`.

    Where magnitudes tie, the later entry has the higher rank.
    """
    width = rows.shape[1]
    steps = torch.linspace(density - epsilon / 2, density + epsilon / 2, width, dtype=torch.float64)
    if width == 1:
        steps = torch.full((1,), density, dtype=torch.float64)
    order = rows.abs().argsort(dim=1, stable=True)
    return torch.empty(rows.shape, dtype=torch.float64).scatter_(1, order, steps.expand(rows.shape))


def _drop(part: Tensor, kept: Tensor, draws: Draws) -> None:
    """Set entries to zero with probability `1 - kept` and divide the others by `kept`; in place."""
    part.mul_(torch.where(draws.take(part.shape) < kept, 1 / kept, 0.0))


def _breadcrumbs(density: float, gamma: float) -> Sparsify:
    check_density(density)
    check_number("gamma", gamma)
    if gamma < 0 or density + gamma > 1:
        raise ConfigError(
            "RetexConfig.merge: gamma must be at least 0 and leave room for density (their sum is at most 1), "
            f"but density is {density!r} and gamma is {gamma!r}."
        )

    def sparsify(_: str, base: Tensor, experts: list[Tensor]) -> list[Tensor]:
        size = base.numel()
        masked = round(gamma * size)
        kept = min(max(1, round(density * size)), size - masked)

        def limits(largest: int) -> list[float]:
            def read(wanted: Collection[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
                return ((number, experts[number], base) for number in wanted)

            return magnitude_thresholds(read, len(experts), size, largest / max(1, size))

        lowest = limits(masked + kept)
        highest = limits(masked) if masked else [inf] * len(experts)
        vectors = _vectors(base, experts)
        for vector, low, high in zip(vectors, lowest, highest, strict=True):
            magnitudes = vector.abs()
            vector.masked_fill_((magnitudes < low) | (magnitudes >= high), 0)
        return vectors

    return sparsify


def _vectors(base: Tensor, experts: list[Tensor]) -> list[Tensor]:
    base = base.float()
    return [(expert.float() - base).contiguous() for expert in experts]
