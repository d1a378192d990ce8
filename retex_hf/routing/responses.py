"""The strength with which tasks' updates of a layer respond to what enters it.

An update `D` is a sum of products of gradients and of the inputs that it was trained on, so its rows lie where these
inputs did. Two corrections make that visible. The mean input of no task is subtracted, and directions in which all
inputs vary are divided by their deviation on inputs of no task: `D W` with `W = (C + c I)^(-1/2)`. And singular values
are nearly levelled, `f(D W)`, because the few largest ones mostly hold what all tasks have in common, and the optimiser
scales the others anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..recovery import ComponentGenerator, Generator
from ..recovery.layout import GENERATED_FIRST
from .feature_space import top_directions

SMALLEST = torch.finfo(torch.float32).tiny
ROUNDING = torch.finfo(torch.float32).eps
# Added to all variances, as a share of their mean.
SHRINKAGE = 1.0
# Singular values are raised to this power; those below this share of the largest are rounding errors of storage.
POWER, NEGLIGIBLE = 0.2, 1e-3


@dataclass(frozen=True)
class Neutral:
    """What enters a layer on inputs of no task: its `mean` (d,), and the `directions` (k, d) in which it varies, each
    with the share of it that whitening takes away, `taken` (k,)."""

    mean: Tensor
    directions: Tensor
    taken: Tensor

    @classmethod
    def fit(cls, pooled: Tensor) -> Neutral:
        """Fit the mean and the covariance `C` of inputs (N, d).

        Up to a factor, `(C + c I)^(-1/2)` keeps `sqrt(c / (e + c))` of a principal direction of variance `e`, and all
        that is orthogonal to these.
        """
        mean = pooled.mean(0)
        count = min(len(pooled) - 1, pooled.shape[1])
        values, directions = top_directions(pooled - mean, count)
        variances = values.square() / max(len(pooled) - 1, 1)
        floor = SHRINKAGE * variances.sum() / pooled.shape[1]
        taken = torch.where(variances > 0, 1 - (floor / (variances + floor)).sqrt(), 0.0)
        return cls(mean, directions.to(mean), taken.to(mean))

    def whiten(self, rows: Tensor) -> Tensor:
        """Return `rows @ (C + c I)^(-1/2)`, up to a factor.

        >>> import torch
        >>> neutral = Neutral(torch.zeros(2), torch.tensor([[1.0, 0.0]]), torch.tensor([0.75]))
        >>> neutral.whiten(torch.tensor([[4.0, 1.0]])).tolist()
        [[1.0, 1.0]]
        """
        return rows - (rows @ self.directions.T * self.taken) @ self.directions


class Responses:
    """The strength with which each task's update of one layer responds to what enters the layer.

    Where the factor applied to the input is shared, the input is projected once on an orthonormal basis of what it lets
    through, and every task has a Gram matrix `grams` (T, r, r); otherwise every task has a projection.
    """

    def __init__(
        self, module: nn.Module, generator: Generator, embeddings: Tensor, neutral: Neutral | None = None
    ) -> None:
        self.module = module
        transposed = isinstance(module, Conv1D)
        whiten = (lambda rows: rows) if neutral is None else neutral.whiten
        self.mean = None if neutral is None else neutral.mean
        self.grams: Tensor | None = None
        self.projections: list[Tensor] = []
        factors = [_acting(generator, embedding, transposed) for embedding in embeddings]
        norms = torch.stack([_product(left, right).square().sum() for left, right in factors])
        # Every task must change the layer by more than rounding; otherwise its response is not defined.
        self.usable = bool((norms > ROUNDING * norms.max()).all())
        if not self.usable:
            return
        if (
            not isinstance(generator, ComponentGenerator)
            and generator.factor("shared") is not None
            and (generator.layout.order == GENERATED_FIRST) != transposed
        ):
            basis, triangle = torch.linalg.qr(whiten(factors[0][1]).T)
            levelled = [level(_product(left, triangle.T)) for left, _ in factors]
            self.projections = [basis.T.contiguous()]
            self.grams = torch.stack([matrix.T @ matrix for matrix in levelled])
        else:
            self.projections = [level(_product(left, whiten(right))) for left, right in factors]

    def __call__(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return `log( |f(D_t W) (h - mean)|^2 / |f(D_t W)|_F^2 )` of every row and task, averaged over (unmasked)
        tokens inside the log."""
        energies = [self._energy(self._project(hidden, matrix), mask) for matrix in self.projections]
        energy = energies[0] if self.grams is not None else torch.stack(energies, 1)
        return energy.clamp(min=SMALLEST).log()

    def _project(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """Apply a matrix in place of the layer's weight to centred inputs: (rows, tokens or positions, rows of the
        matrix)."""
        bias = None if self.mean is None else -(matrix @ self.mean)
        if isinstance(self.module, nn.Conv2d):
            layer = self.module
            kernel = matrix.reshape(-1, *layer.weight.shape[1:])
            return F.conv2d(hidden, kernel, bias, layer.stride, layer.padding, layer.dilation).flatten(2).mT
        return F.linear(hidden, matrix, bias).reshape(len(hidden), -1, len(matrix))

    def _energy(self, projected: Tensor, mask: Tensor | None) -> Tensor:
        count: Tensor | int = projected.shape[1]
        if mask is not None:
            projected = projected * mask.unsqueeze(-1)
            count = mask.sum(1, keepdim=True).clamp(min=1)
        if self.grams is None:
            return (projected.square().sum((1, 2)).unsqueeze(1) / count).squeeze(1)
        # One r-by-r moment per row serves all tasks.
        moments = projected.mT @ projected
        return moments.flatten(1) @ self.grams.flatten(1).T / count


def level(matrix: Tensor) -> Tensor:
    """Return a matrix of Frobenius norm 1 with the same right singular vectors, and singular values raised to `POWER`.
    The left ones change, which changes no norm of a product.

    >>> import torch
    >>> found = level(torch.diag(torch.tensor([32.0, 1.0])))
    >>> print(round(float(found[0].norm() / found[1].norm()), 3))  # 32 ** 0.2
    2.0
    """
    _, values, right = torch.linalg.svd(matrix, full_matrices=False)
    raised = torch.where(values > NEGLIGIBLE * values[0], values, 0.0) ** POWER
    return (raised / raised.norm()).unsqueeze(1) * right


def mean_input(module: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean (rows, d) of what a layer's weight is applied to: tokens (unmasked ones), or the patches under a
    convolution."""
    if isinstance(module, nn.Conv2d):
        return _mean_patch(module, hidden)
    tokens = hidden.reshape(len(hidden), -1, hidden.shape[-1])
    if mask is None:
        return tokens.mean(1)
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1)


def _mean_patch(module: nn.Conv2d, hidden: Tensor) -> Tensor:
    """Return the mean patch (rows, channels x height x width) without making the patches, which may be large."""
    # What the module itself pads by, where padding is "same" too.
    padded = F.pad(hidden, module._reversed_padding_repeated_twice)
    sizes: list[tuple[Sequence[int], int]] = []
    for axis in (0, 1):
        kernel, stride, dilation = module.kernel_size[axis], module.stride[axis], module.dilation[axis]
        starts = [place * dilation for place in range(kernel)]
        places = (padded.shape[2 + axis] - dilation * (kernel - 1) - 1) // stride + 1
        sizes.append((starts, (places - 1) * stride + 1))
    (tops, height), (lefts, width) = sizes
    down, right = module.stride
    means = [
        padded[:, :, top : top + height : down, left : left + width : right].mean((2, 3))
        for top in tops
        for left in lefts
    ]
    return torch.stack(means, 2).flatten(1)


def _acting(generator: Generator, embedding: Tensor, transposed: bool) -> tuple[Tensor | None, Tensor]:
    """Return factors `left @ right` of the matrix that a task's update applies to inputs, the left one made small
    (|left x| stays); None where there is none."""
    layout = generator.layout
    if not layout.is_factored:
        offset = generator(embedding).reshape(layout.shape[0], -1)
        return None, offset.T if transposed else offset
    left, right = (factor[0] for factor in generator.factors(embedding))
    left, right = (right.T, left.T) if transposed else (left, right)
    # |left x| = |T x| with the triangle T of left = Q T.
    return torch.linalg.qr(left, mode="r").R, right


def _product(left: Tensor | None, right: Tensor) -> Tensor:
    return right if left is None else left @ right
