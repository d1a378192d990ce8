"""Upper bounds on the eigenvalues of a positive semi-definite matrix of which only products with few vectors are known.

Let the columns of Q be orthonormal, `A = Q^T G Q`, `C = (I - Q Q^T) G Q` what couples Q to the rest, and rho at least
the largest eigenvalue of the rest, `B = (I - Q Q^T) G (I - Q Q^T)`.

The sum of the k largest eigenvalues of G is the least value of `k mu + tr(Z)` over all mu and all `Z >= 0` with
`Z >= G - mu I`. For mu > rho the positive part of `A - mu I + C^T C / (mu - rho)`, on the span of Q, is such a Z, by
the Schur complement of `Z - G + mu I`. Hence

    sum of the k largest eigenvalues  <=  k mu + tr(A - mu I + C^T C / (mu - rho))_+        for every mu > rho.

That is of second order in the coupling, as the error of the Ritz values is.

rho comes from Lanczos steps from p vectors that are Gaussian in the rest. Let `pi_j` be the orthonormal polynomials of
the steps from w, that is `pi_j(B) w` = |w| times the j-th Lanczos vector, and v a unit eigenvector of B of eigenvalue
lambda. The Lanczos vectors are orthonormal, hence `<v, w>^2 sum_j pi_j(lambda)^2 <= |w|^2`. The sum of the p squares
`<v, w>^2` has a chi-squared distribution. So where `sum_w |w|^2 / sum_j pi_j(lambda)^2` is less than the quantile of a
small probability, lambda is not the largest eigenvalue, except with that probability.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, lgamma, log

import torch
from torch import Tensor

# Vectors that test the rest: more cost almost nothing, because reading the matrices takes most of the time.
TEST_VECTORS = 16
# Probability that the bound on the rest does not hold.
FAILURE = 1e-9
# Values of lambda that are examined, and evaluations of the bound on the sum of eigenvalues.
GRID, EVALUATIONS = 512, 10
GOLDEN = (5**0.5 - 1) / 2


def largest_sum(ritz: Tensor, coupling: Tensor, rho: float, count: int) -> float:
    """Return an upper bound on the sum of the `count` largest eigenvalues.

    Args:
        ritz: Eigenvalues of A, descending; on the CPU, in float64.
        coupling: `C^T C` in the coordinates of A's eigenvectors.
        rho: Upper bound on the eigenvalues of the rest.
        count: Number of eigenvalues.

    >>> import torch
    >>> ritz = torch.tensor([5.0, 3.0, 1.0], dtype=torch.float64)
    >>> largest_sum(ritz, torch.zeros(3, 3, dtype=torch.float64), rho=0.5, count=2)
    8.0
    """
    last = ritz[count - 1].item()
    scale = max(rho, last)
    if not scale > 0:
        return 0.0

    def bound(logarithm: float) -> float:
        distance = exp(logarithm)
        mu = rho + distance
        return count * mu + _positive_part(torch.diag(ritz - mu) + coupling / distance)

    found = _least(bound, log(1e-3 * scale), log(4 * scale))
    # Without coupling the last of the largest eigenvalues is the best mu.
    return min(found, bound(log(last - rho))) if last > rho else found


def _positive_part(matrix: Tensor) -> float:
    """Return an upper bound on the sum of the positive eigenvalues, where the second half of the diagonal is small.

    If the second half is negative definite, its Schur complement bounds the sum as above; a quarter of the cost.
    """
    half = (len(matrix) + 1) // 2
    triangle, failed = torch.linalg.cholesky_ex(-matrix[half:, half:])
    if failed:
        return inf
    root = torch.linalg.solve_triangular(triangle, matrix[half:, :half], upper=False)
    return torch.linalg.eigvalsh(matrix[:half, :half] + root.T @ root).clamp(min=0).sum().item()


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the least value that a golden-section search finds; the bound is convex in mu."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(EVALUATIONS - 2):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return min(at_left, at_right)


class LanczosTest:
    """Lanczos steps from Gaussian vectors outside a basis, which bound the largest eigenvalue there.

    Args:
        multiply: Function that returns the product of G with a block of vectors.
        basis: Orthonormal columns, in the dtype of the products.
        generator: Source of the vectors.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor], basis: Tensor, generator: torch.Generator) -> None:
        self._multiply, self._basis = multiply, basis
        start = torch.randn(len(basis), TEST_VECTORS, generator=generator, dtype=torch.float64).to(basis)
        start = self._outside(self._outside(start))
        norms = start.norm(dim=0)
        self._energies = norms.double().square().cpu()
        self._vectors = [start / norms]
        self._diagonal: list[Tensor] = []
        self._beside: list[Tensor] = []

    @property
    def steps(self) -> int:
        """Return how many products were made."""
        return len(self._diagonal)

    def step(self, count: int) -> None:
        """Make some more steps."""
        for _ in range(count):
            vector = self._vectors[-1]
            product = self._outside(self._multiply(vector))
            self._diagonal.append((vector.double() * product.double()).sum(0).cpu())
            for _ in range(2):  # twice is enough for orthogonality to working precision
                for other in self._vectors:
                    product = product - other * (other * product).sum(0)
                product = self._outside(product)
            norms = product.norm(dim=0).clamp(min=torch.finfo(product.dtype).tiny)
            self._beside.append(norms.double().cpu())
            self._vectors.append(product / norms)

    def found(self) -> float:
        """Return the largest Ritz value, a lower bound."""
        steps = torch.diag_embed(torch.stack(self._diagonal, 1))
        beside = torch.stack(self._beside, 1)[:, :-1]
        steps = steps + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
        return torch.linalg.eigvalsh(steps)[:, -1].max().item()

    def bound(self, most: float) -> float:
        """Return an upper bound, which fails with probability `FAILURE`; `most` is one that is known."""
        found = self.found()
        if not 0 < found < most:
            return most
        values = torch.logspace(log(found), log(most), GRID, base=torch.e, dtype=torch.float64)
        possible = self._mass(values) >= chi_squared_quantile(TEST_VECTORS, FAILURE)
        # Beyond the largest Ritz value the mass falls: what is ruled out at one value is so up to the next.
        last = int(possible.nonzero()[-1]) if possible.any() else -1
        return most if last == GRID - 1 else values[last + 1].item()

    def _mass(self, values: Tensor) -> Tensor:
        """Return the most that the squares `<v, w>^2` can sum to, for eigenvectors v of each of these eigenvalues."""
        values = values.unsqueeze(1)
        before, current = torch.zeros_like(self._energies), torch.ones_like(self._energies).expand(len(values), -1)
        squares, coefficient = current.square(), torch.zeros_like(self._energies)
        for diagonal, beside in zip(self._diagonal, self._beside, strict=True):
            following = ((values - diagonal) * current - coefficient * before) / beside
            before, current, coefficient = current, following, beside
            squares = squares + current.square()
        return (self._energies / squares).sum(1)

    def _outside(self, block: Tensor) -> Tensor:
        return block - self._basis @ (self._basis.T @ block)


def chi_squared_quantile(degrees: int, probability: float) -> float:
    """Return a value below which a chi-squared variable falls with at most a small probability.

    The distribution function is at most `(x / 2)^(p/2) / Gamma(p/2 + 1)`.

    >>> round(chi_squared_quantile(2, 0.01), 6)
    0.02
    """
    half = degrees / 2
    return 2 * exp((log(probability) + lgamma(half + 1)) / half)
