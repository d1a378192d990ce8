"""The leading eigenpairs of a Gram matrix: computed in float32 where a bound certifies them, else in float64.

Half the precision takes half the time and memory at almost no cost: the energy that a slightly wrong subspace misses is
of second order in the error. But the absolute error of a float32 eigenvalue scales with the largest one, so where
little is discarded (near-exact recovery, differences of low rank) float32 may choose wrong directions. Each float32
result is therefore checked against a lower bound on the optimum from its own eigenvalues, and dropped if it may be
worse than that by more than `TOLERANCE`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Limit on the discarded energy relative to the lower bound on the least possible: at most 1 + TOLERANCE.
TOLERANCE = 1e-3
# Below this side float64 takes milliseconds.
SMALLEST_FLOAT32_SIDE = 256


def top_eigenpairs(matrix: Tensor, rank: int, kept: int | None = None) -> tuple[Tensor, Tensor, float]:
    """Return the `rank` largest eigenvalues (descending) of a positive semi-definite float64 matrix, and their vectors.

    Vectors are orthonormal columns. The third result is the energy outside the first `kept` of them (default: all), by
    which the result is judged; it is the exact energy that these vectors leave out, not an estimate.
    """
    kept = rank if kept is None else kept
    if len(matrix) >= SMALLEST_FLOAT32_SIDE and kept < len(matrix):  # of nothing discarded, no bound certifies
        found = _in_float32(matrix, rank, kept)
        if found is not None:
            return found
    values, vectors = _eigh(matrix)
    values = values.flip(0).clamp(min=0)
    return values[:rank], vectors.flip(1)[:, :rank], values[kept:].sum().item()


def eigenvalues(matrix: Tensor) -> Tensor:
    """Return all eigenvalues of a positive semi-definite matrix, descending.

    >>> import torch
    >>> eigenvalues(torch.diag(torch.tensor([1.0, 3.0, 2.0])))
    tensor([3., 2., 1.])
    """
    scale = _scale(matrix)
    try:
        values = torch.linalg.eigvalsh(matrix / scale).flip(0)
    except torch.linalg.LinAlgError:
        values = torch.linalg.svdvals(matrix / scale)
    return values.clamp(min=0) * scale


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (ascending) and eigenvectors of a positive semi-definite matrix."""
    scale = _scale(matrix)
    try:
        values, vectors = torch.linalg.eigh(matrix / scale)
    except torch.linalg.LinAlgError:
        vectors, values, _ = torch.linalg.svd(matrix / scale)
        values, vectors = values.flip(0), vectors.flip(1)
    return values * scale, vectors


def _scale(matrix: Tensor) -> float:
    """Return a power of two of the size of a matrix; dividing by it rounds nothing.

    LAPACK may fail to converge where almost all entries are zero and the others small. Where it fails all the same, the
    singular value decomposition is taken.
    """
    largest = matrix.diagonal().amax().item() if len(matrix) else 0.0
    return 2.0 ** math.floor(math.log2(largest)) if 0 < largest < math.inf else 1.0


def _in_float32(matrix: Tensor, rank: int, kept: int) -> tuple[Tensor, Tensor, float] | None:
    """Return eigenpairs from a float32 decomposition; None where they cannot be certified."""
    scale = matrix.diagonal().max()  # normalise: float32 has a narrow range, and squares of differences a wide one
    if not scale > 0:
        return None
    estimates, vectors = _eigh((matrix / scale).float())
    estimates = estimates.flip(0).double() * scale
    values, vectors = _rayleigh_ritz(matrix, vectors.flip(1)[:, :rank].double())
    total = matrix.diagonal().sum()
    discarded = total - values[:kept].sum()
    if discarded <= (1 + TOLERANCE) * _least_discarded(estimates, kept, total, torch.linalg.matrix_norm(matrix)):
        return values, vectors, discarded.item()
    return None


def _rayleigh_ritz(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best orthonormal eigenvectors within the span of a nearly orthonormal basis, with their exact
    energies."""
    triangle = torch.linalg.cholesky(basis.T @ basis)
    basis = torch.linalg.solve_triangular(triangle.T, basis, upper=True, left=False)
    values, rotation = torch.linalg.eigh(basis.T @ (matrix @ basis))
    return values.flip(0), basis @ rotation.flip(1)


def _least_discarded(estimates: Tensor, kept: int, total: Tensor, norm: Tensor) -> Tensor:
    """Return a lower bound on the energy that any `kept` directions leave out, from all float32 eigenvalues
    (descending).

    The optimum is the sum of the eigenvalues that are not kept, which is also the trace minus those that are; the
    smaller of the two is used, so that an eigenvalue missed or counted twice cannot pass. The estimates are the exact
    eigenvalues of `matrix + E`. Rounding to float32 and a backward stable decomposition give `||E||_F <= sqrt(n) u
    ||matrix||_F` (a few times the observed value), so sums of eigenvalues move by at most `sqrt(n) ||E||_F`
    (Hoffman-Wielandt).
    """
    unit_roundoff = torch.finfo(torch.float32).eps / 2
    slack = len(estimates) * unit_roundoff * norm
    return torch.minimum(estimates[kept:].sum(), total - estimates[:kept].sum()) - slack
