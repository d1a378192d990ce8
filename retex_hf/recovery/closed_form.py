"""The exact minimiser of `sum_t ||G_t S - D_t||^2`, one parameter at a time.

The `G_t` are free matrices (one generator column per task), so by Eckart-Young the optimum is the truncated SVD of the
stacked differences: `S` holds the top right singular vectors and `G_t = D_t S^T`. Only a Gram matrix is needed; float64
keeps its small eigenvalues, which a float32 Gram matrix would drown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import MATRIX, Layout


@dataclass(frozen=True)
class Solution:
    """Factors of one parameter: `generated` (T, numbers of `G_t`), `shared` or None, and what they leave out.

    `energy` is `sum_t ||D_t||^2`, `residual` the part of it that the factors cannot represent.
    """

    layout: Layout
    generated: Tensor
    shared: Tensor | None
    energy: float
    residual: float


def solve(differences: list[Tensor], layout: Layout) -> Solution:
    """Factor the differences `D_t` of one parameter (one tensor per task, in the parameter's shape)."""
    energy = sum(difference.double().square().sum().item() for difference in differences)
    if layout.kind != MATRIX:
        shared = None if layout.shared_shape is None else torch.ones(())
        generated = torch.stack([difference.reshape(-1).float() for difference in differences])
        return Solution(layout, generated, shared, energy, 0.0)

    generated = torch.empty(len(differences), *layout.generated_shape)
    shared = torch.empty(layout.shared_shape)
    stacks = [difference.reshape(layout.stacked_shape) for difference in differences]
    residual = 0.0
    for index in range(layout.batch):
        factors, shared[index], left = solve_matrices([stack[index] for stack in stacks], layout.rank)
        residual += left
        for task, factor in enumerate(factors):
            generated[task, index] = factor
    return Solution(layout, generated.flatten(1), shared, energy, residual)


def solve_matrices(differences: list[Tensor], rank: int) -> tuple[list[Tensor], Tensor, float]:
    """Top-`rank` factors `G_t (a, r)`, `S (r, b)` of a list of (a, b) matrices, and the discarded energy."""
    rows, columns = differences[0].shape
    if len(differences) * rows < columns:
        stacked = torch.cat([difference.double() for difference in differences])
        values, vectors = _top_eigenpairs(stacked @ stacked.T, rank)
        shared = vectors[:, :rank].T @ stacked
        # Directions without energy have no right singular vector to normalise; zero rows are the exact answer there.
        norms = shared.norm(dim=1, keepdim=True)
        shared = torch.where(norms > 1e-7 * norms.max(), shared / norms, 0.0)
    else:
        gram = torch.zeros(columns, columns, dtype=torch.float64)
        for difference in differences:
            difference = difference.double()
            gram.addmm_(difference.T, difference)
        values, vectors = _top_eigenpairs(gram, rank)
        shared = vectors[:, :rank].T
    factors = [(difference.double() @ shared.T).float() for difference in differences]
    return factors, shared.float(), values[rank:].clamp(min=0).sum().item()


def _top_eigenpairs(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0), vectors.flip(1)[:, :rank]
