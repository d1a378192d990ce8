"""Merges by angles between tensors: Model Stock and the Karcher mean.

They depend on the tensors only through their inner products, so one pass computes a Gram matrix and another combines
the tensors with the resulting coefficients. Both passes run in float64, a chunk at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from .options import Weights, check_integer, check_number, shares
from .registry import Merger, TaskTensors, register_merge
from .threshold import CHUNK

# Accuracy of cosines of float64 vectors; angles near pi are accurate to its square root.
COSINE_ERROR = 1e-12
SHORTEST_MEAN = 1e-6


@register_merge("model_stock")
def model_stock(base: Tensor, experts: list[Tensor]) -> Tensor:
    """Interpolate between the base and the mean of the experts by the agreement of task vectors (Model Stock, arXiv
    2403.19522).

    Per tensor, `t = N cos / (1 + (N - 1) cos)` with the mean cosine between task vectors of different experts, and the
    result is `t W_mean + (1 - t) W_0`. A task vector of zeros counts as orthogonal to all others, and a mean cosine
    below zero as zero. One expert is returned unchanged.
    """
    count = len(experts)
    ratio = interpolation_ratio(gram_matrix(experts, base)) if count > 1 else 1.0
    return combined([base, *experts], torch.tensor([1 - ratio, *[ratio / count] * count], dtype=torch.float64))


def interpolation_ratio(gram: Tensor) -> float:
    """Return `N cos / (1 + (N - 1) cos)` with the mean cosine of the vectors whose Gram matrix is given."""
    count, lengths = len(gram), gram.diagonal().sqrt()
    scales = torch.where(lengths > 0, 1 / lengths, 0.0)
    cosines = (scales[:, None] * gram * scales).clamp(-1, 1)
    mean = (cosines.sum() - cosines.diagonal().sum()).item() / (count * (count - 1))
    mean = max(mean, 0.0)
    return count * mean / (1 + (count - 1) * mean)


@register_merge("karcher", prepare=True)
def karcher(
    tensors: TaskTensors, *, weights: Weights = None, max_iterations: int = 100, tolerance: float = 1e-6
) -> Merger:
    """Return the Riemannian (Karcher) mean of the experts' directions on the sphere, times the mean of their norms.

    Per tensor, flattened: the point of the sphere at which the weighted sum of logarithms (tangent vectors towards the
    experts) vanishes, found by following that sum until it is shorter than `tolerance` (in radians). Norms are averaged
    by the same weights. A tensor of zeros has no direction: it counts in the norm only. A tensor of one entry is
    averaged. Experts whose directions cancel, or one that is opposite to the mean, have no unique mean and are refused.
    """
    factors = torch.tensor(shares(weights, tensors.tasks), dtype=torch.float64)
    factors /= factors.sum()
    check_integer("max_iterations", max_iterations, 1, 10_000)
    check_number("tolerance", tolerance)
    if not 1e-7 <= tolerance <= 1:
        raise ConfigError(f"RetexConfig.merge: tolerance must be in [1e-7, 1], not {tolerance!r}.")

    def merge(name: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        if base.numel() == 1:
            return combined(experts, factors)
        gram = gram_matrix(experts)
        lengths = gram.diagonal().sqrt()
        norm = (factors * lengths).sum()
        pointing = ((lengths > 0) & (factors > 0)).nonzero().flatten()
        if len(pointing) == 0:
            return torch.zeros(base.shape)
        scales = lengths[pointing]
        directions = gram[pointing][:, pointing] / (scales[:, None] * scales)
        found = sphere_mean(directions, factors[pointing], max_iterations, tolerance)
        if isinstance(found, str):
            raise CheckpointError(f'Merge method "karcher": tensor {name!r} of the experts {found}.')
        return combined([experts[number] for number in pointing.tolist()], norm * found / scales)

    return merge


def sphere_mean(cosines: Tensor, weights: Tensor, max_iterations: int, tolerance: float) -> Tensor | str:
    """Return the coefficients of the Karcher mean of unit vectors that are given by their cosines.

    A point `m = sum_t c_t u_t` of the sphere moves along the mean of the logarithms `log_m(u_t) = angle_t /
    sin(angle_t) * (u_t - cos(angle_t) m)`. Where there is no mean, return the reason, as the end of a sentence.
    """
    weights = weights / weights.sum()
    mean = weights.clone()
    length = (mean @ cosines @ mean).clamp(min=0).sqrt()
    if length < SHORTEST_MEAN:
        return "points in directions that cancel, which have no mean"
    mean = mean / length
    for _ in range(max_iterations):
        toward = (cosines @ mean).clamp(-1, 1)
        if (toward < COSINE_ERROR - 1).any():
            return "has one that is opposite to the mean, to which there is no shortest path"
        angles = toward.acos()
        factors = weights * torch.where(angles > 0, angles / angles.sin().clamp(min=1e-300), 1.0)
        step = factors - (factors @ toward) * mean
        length = (step @ cosines @ step).clamp(min=0).sqrt()
        if length > 0:
            mean = length.cos() * mean + length.sin() / length * step
            mean = mean / (mean @ cosines @ mean).sqrt()
        if length <= tolerance:
            return mean
    return f"has no mean after {max_iterations} steps: raise max_iterations or tolerance"


def gram_matrix(tensors: list[Tensor], origin: Tensor | None = None) -> Tensor:
    """Return the inner products of tensors, or of their differences from an origin."""
    gram = torch.zeros(len(tensors), len(tensors), dtype=torch.float64)
    flat = [tensor.reshape(-1) for tensor in tensors]
    start_point = None if origin is None else origin.reshape(-1)
    for start in range(0, flat[0].numel(), CHUNK):
        part = slice(start, start + CHUNK)
        block = torch.stack([tensor[part].double() for tensor in flat])
        if start_point is not None:
            block -= start_point[part].double()
        gram += block @ block.T
    return gram


def combined(tensors: list[Tensor], coefficients: Tensor) -> Tensor:
    """Return `sum_i c_i W_i`, computed in float64 and returned in float32."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    result = torch.empty(flat[0].numel())
    for start in range(0, len(result), CHUNK):
        part = slice(start, start + CHUNK)
        result[part] = coefficients @ torch.stack([tensor[part].double() for tensor in flat])
    return result.view(tensors[0].shape)
