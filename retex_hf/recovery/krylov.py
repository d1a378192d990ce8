"""The leading right singular vectors of large stacks of matrices, from a few products with blocks of vectors.

A Gram matrix `G = X^T X` of b columns costs b^2 times the rows of X, and its eigenvectors b^3, whatever the rank. A
product of G with a block of vectors costs the numbers of X times the width of the block, and a Krylov space of a few
such products holds the leading directions almost exactly. How exactly is not assumed, but bounded (`certificate`): the
energy that the directions leave out is at most `1 + TOLERANCE` times the least possible. Where that cannot be shown,
nothing is returned, and the caller takes the exact way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from .certificate import LanczosTest, largest_sum
from .targets import squared_norm

# Limit on the discarded energy relative to the lower bound on the least possible: at most 1 + TOLERANCE.
TOLERANCE = 1e-2
# Vectors of a block beyond the rank.
OVERSAMPLING = 16
# Blocks of the Krylov space: before the first certificate, and at most.
FIRST_BLOCKS, MOST_BLOCKS = 4, 8
# Steps of the test of the rest between two certificates, and at most.
STEPS, MOST_STEPS = 4, 24
# How often a block must fit into the smaller side for this to be faster than a Gram matrix: measured at ranks of 16 to
# 256 and sides of 512 to 4096. Spectra without any decay take up to three times as long as others, about as long as a
# Gram matrix at this limit.
SIDES_PER_BLOCK = 20
# Rows that are cast to another dtype at a time.
SLAB_ROWS = 4096


@dataclass(frozen=True)
class Leading:
    """The leading right singular vectors of a stack.

    `rows` (rank, b) are orthonormal, in float64; `factors` are the products (a, rank) of every matrix with them.
    `energy` is that of the stack, `discarded` the part outside the kept vectors, and `least` a lower bound on the part
    outside any as many vectors.
    """

    rows: Tensor
    factors: list[Tensor]
    energy: float
    discarded: float
    least: float


def pays(rows: int, columns: int, rank: int) -> bool:
    """Return whether a Krylov space is faster than a Gram matrix, for a stack of so many rows in all.

    >>> pays(8192, 5632, 64), pays(4096, 1024, 64)
    (True, False)
    """
    return min(rows, columns) >= SIDES_PER_BLOCK * (rank + OVERSAMPLING)


def leading_vectors(
    matrices: Sequence[Tensor], rank: int, kept: int | None = None, tolerance: float = TOLERANCE, seed: int = 0
) -> Leading | None:
    """Return the `rank` leading right singular vectors of stacked matrices (a, b); None if they cannot be certified.

    What is left out may be as small as the rounding errors of float64, about 1e-11 of the energy; then nothing is
    certified (`least` is 0), and no other way would do better.

    They are judged by the energy outside the first `kept` of them (default: all). The result depends on the arguments
    alone.

    >>> import torch
    >>> found = leading_vectors([torch.diag(1 / torch.arange(1.0, 201))], 2)
    >>> found.factors[0].norm(dim=0)
    tensor([1.0000, 0.5000])
    >>> 1 <= found.discarded / found.least <= 1 + TOLERANCE
    True
    """
    energy = sum(squared_norm(matrix) for matrix in matrices)
    if energy == 0:
        rows = torch.eye(rank, matrices[0].shape[1], dtype=torch.float64, device=matrices[0].device)
        return Leading(rows, [matrix.new_zeros(len(matrix), rank) for matrix in matrices], 0.0, 0.0, 0.0)
    for dtype in (torch.float32, torch.float64):
        search = _Search(_Stack(matrices, energy, dtype), rank, kept or rank, tolerance, seed)
        found = search.run()
        if found is not None or not search.rounding_shows:
            return found
    return None


class _Stack:
    """Products in a dtype with stacked matrices, which are divided by the root of their energy."""

    def __init__(self, matrices: Sequence[Tensor], energy: float, dtype: torch.dtype) -> None:
        self.matrices, self.energy, self.dtype = matrices, energy, dtype
        self.columns = matrices[0].shape[1]
        self.side = min(self.columns, sum(len(matrix) for matrix in matrices))
        self.numbers = sum(matrix.numel() for matrix in matrices)
        self.unit_roundoff = torch.finfo(dtype).eps / 2
        self._scale = energy**-0.5

    def multiply(self, block: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return `X block`, by matrix, and `X^T X block`."""
        products, image = [], self._zeros(block.shape[1])
        for matrix in self.matrices:
            parts = []
            for slab in self._slabs(matrix):
                parts.append((slab @ block).mul_(self._scale))
                image.addmm_(parts[-1].T, slab)
            products.append(torch.cat(parts))
        return products, image.mul_(self._scale).T

    def image(self, block: Tensor) -> Tensor:
        """Return `X^T X block`."""
        return self.multiply(block)[1]

    def sketch(self, width: int, generator: torch.Generator) -> Tensor:
        """Return `X^T` times random vectors."""
        image = self._zeros(width)
        for matrix in self.matrices:
            for slab in self._slabs(matrix):
                image.addmm_(torch.randn(len(slab), width, generator=generator).to(slab).T, slab)
        return image.mul_(self._scale).T

    def _slabs(self, matrix: Tensor) -> Iterator[Tensor]:
        if matrix.dtype == self.dtype:
            return iter([matrix])
        return (part.to(self.dtype) for part in matrix.split(SLAB_ROWS))

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(width, self.columns, dtype=self.dtype, device=self.matrices[0].device)


class _Search:
    """A Krylov space that grows until what it misses is certified.

    `rounding_shows` says whether the dtype is too coarse for what is left out.
    """

    def __init__(self, stack: _Stack, rank: int, kept: int, tolerance: float, seed: int) -> None:
        self.stack, self.rank, self.kept, self.tolerance = stack, rank, kept, tolerance
        self.width = rank + OVERSAMPLING
        self.generator = torch.Generator().manual_seed(seed)
        self.blocks: list[Tensor] = []
        self.images: list[Tensor] = []
        self.products: list[list[Tensor]] = []
        self.rounding_shows = False

    def run(self) -> Leading | None:
        """Return the vectors, or None if they cannot be certified."""
        rho = inf  # the rest only shrinks, so an earlier bound stays one
        while len(self.blocks) < MOST_BLOCKS and (len(self.blocks) + 1) * self.width <= self.stack.side:
            self._extend()
            if len(self.blocks) < FIRST_BLOCKS:
                continue
            ritz = _Ritz.of(self.blocks, self.images, self.kept, self.stack)
            if ritz is None:
                return None
            self.rounding_shows = ritz.slack > self.tolerance / 4 * ritz.discarded
            if self.rounding_shows and self.stack.dtype != torch.float64:
                return None
            rho = min(rho, ritz.outside)
            least = self._certified(ritz, rho)
            if least is None:
                rho = min(rho, self._tested(ritz))
                least = self._certified(ritz, rho)
            if least is not None:
                return self._leading(ritz, least)
        return None

    def _extend(self) -> None:
        """Add a block to the space."""
        block = self.images[-1] if self.images else self.stack.sketch(self.width, self.generator)
        for _ in range(3):  # what a pass leaves of a block within the space is noise, which may lie in the space again
            for other in self.blocks:
                block = block - other @ (other.T @ block)
            block = torch.linalg.qr(block).Q
        products, image = self.stack.multiply(block)
        self.blocks.append(block)
        self.products.append(products)
        self.images.append(image)

    def _certified(self, ritz: _Ritz, rho: float) -> float | None:
        """Return the least energy that any directions leave out, if it is near enough to what these leave out."""
        if self.rounding_shows:  # in float64: nothing else is left
            return 0.0
        least = ritz.least(rho)
        return least if ritz.discarded <= (1 + self.tolerance) * least else None

    def _tested(self, ritz: _Ritz) -> float:
        """Return a bound on the rest: one that certifies, or the best one if none would."""
        test = LanczosTest(self.stack.image, ritz.basis.to(self.stack.dtype), self.generator)
        rho = ritz.outside
        while test.steps < MOST_STEPS:
            test.step(STEPS)
            rho = ritz.rounded_up(test.bound(ritz.outside))
            if self._certified(ritz, rho) is not None or self._certified(ritz, test.found()) is None:
                break
        return rho

    def _leading(self, ritz: _Ritz, least: float) -> Leading:
        rotation = ritz.rotation[:, : self.rank]
        rows = (torch.cat(self.blocks, 1).double() @ rotation).T
        energy, scale = self.stack.energy, self.stack.energy**0.5
        factors = [
            torch.cat(parts, 1) @ (scale * rotation).to(self.stack.dtype) for parts in zip(*self.products, strict=True)
        ]
        return Leading(rows, factors, energy, max(ritz.discarded, 0.0) * energy, max(least, 0.0) * energy)


@dataclass(frozen=True)
class _Ritz:
    """What a space tells of the eigenvalues of a Gram matrix of trace 1.

    `basis` is orthonormal, in float64, and `rotation` leads from the blocks of the space to the Ritz vectors. Rounding
    of the products moves `A` by about `sqrt(m) u |A|_F` in the Frobenius norm, and a sum of k eigenvalues by `sqrt(k)`
    times that; the sum of N squares in float64 is off by about `sqrt(N)` roundings. Together they are the `slack`. The
    roots of the eigenvalues of the rest move by about `sqrt(b) u |X|`, the `shift`. All are a few times what is
    observed.
    """

    basis: Tensor
    rotation: Tensor
    values: Tensor
    coupling: Tensor
    kept: int
    slack: float
    shift: float

    @classmethod
    def of(cls, blocks: list[Tensor], images: list[Tensor], kept: int, stack: _Stack) -> _Ritz | None:
        """Compute the Ritz values of a space and its coupling to the rest; None if its blocks are not independent, as
        in a stack of very low rank."""
        basis, image = torch.cat(blocks, 1).double(), torch.cat(images, 1).double()
        # The blocks are orthonormal to the precision of their dtype; go on to that of float64.
        lower, failed = torch.linalg.cholesky_ex(basis.T @ basis)
        if failed:
            return None
        triangle = lower.T
        basis = torch.linalg.solve_triangular(triangle, basis, upper=True, left=False)
        image = torch.linalg.solve_triangular(triangle, image, upper=True, left=False)
        inner = basis.T @ image
        values, rotation = torch.linalg.eigh((inner + inner.T) / 2)
        values, rotation = values.flip(0), rotation.flip(1)
        outside = (image - basis @ inner) @ rotation
        of_products = sqrt(kept * len(values)) * stack.unit_roundoff * values.norm().item()
        return cls(
            basis,
            torch.linalg.solve_triangular(triangle, rotation, upper=True),
            values.cpu(),
            (outside.T @ outside).cpu(),
            kept,
            slack=of_products + sqrt(stack.numbers) * torch.finfo(torch.float64).eps,
            shift=sqrt(stack.columns * values[0].item()) * stack.unit_roundoff,
        )

    @property
    def outside(self) -> float:
        """Return the energy outside the space, which is a bound on any eigenvalue there."""
        return max(1 - self.values.sum().item(), 0.0) + self.slack

    @property
    def discarded(self) -> float:
        """Return the energy outside the kept vectors."""
        return 1 - self.values[: self.kept].sum().item()

    def rounded_up(self, rho: float) -> float:
        """Return a computed bound on the rest with room for rounding."""
        return (sqrt(rho) + self.shift) ** 2

    def least(self, rho: float) -> float:
        """Return a lower bound on the energy outside any as many vectors."""
        return 1 - largest_sum(self.values, self.coupling, rho, self.kept) - self.slack
