"""The shape rules: how the difference of one parameter is factored. No other module decides this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

VECTOR, MATRIX, WHOLE = "vector", "matrix", "whole"
KINDS = (VECTOR, MATRIX, WHOLE)
GENERATED_FIRST, SHARED_FIRST = "generated_first", "shared_first"
ORDERS = (GENERATED_FIRST, SHARED_FIRST)

Sides = tuple[int, int, int]
"""A parameter as a stack of matrices: how many, their rows and their columns."""


@dataclass(frozen=True)
class Layout:
    """The storage layout of one parameter's offset.

    - `vector`: a generated vector times a shared scalar (0-D and 1-D parameters);
    - `matrix`: a generated `(a, r)` factor times a shared `(r, b)` factor, in batches where `batch > 1`. In the order
      `shared_first` it is a shared `(a, r)` factor times a generated `(r, b)` one. With `inner_rank` r_g (ReTeX-E) the
      generated factor is itself a product of a generated `(a, r_g)` and a shared `(r_g, r)` factor;
    - `whole`: the offset itself, generated, where factors would cost as much or `rank="full"` asks for it.
    """

    shape: tuple[int, ...]
    kind: str
    batch: int = 1
    rows: int = 0
    columns: int = 0
    rank: int = 0
    order: str = GENERATED_FIRST
    inner_rank: int | None = None

    @property
    def matrix_rows(self) -> int:
        """Return how many rows each matrix of the parameter has."""
        return self.rows

    @property
    def is_factored(self) -> bool:
        """Return whether offsets are products of two matrices."""
        return self.kind == MATRIX

    @property
    def generated_shape(self) -> tuple[int, ...]:
        """Return the shape of the factor that differs between tasks: `G_t`, or ReTeX-E's `A_t`."""
        if self.kind != MATRIX:
            return (prod(self.shape),)
        rank = self.inner_rank or self.rank
        return (self.batch, self.rows, rank) if self.order == GENERATED_FIRST else (self.batch, rank, self.columns)

    @property
    def shared_shape(self) -> tuple[int, ...] | None:
        """Return the shape of `S`, the factor that all tasks share; None where there is none."""
        if self.kind != MATRIX:
            return () if self.kind == VECTOR else None
        first = self.order == GENERATED_FIRST
        return (self.batch, self.rank, self.columns) if first else (self.batch, self.rows, self.rank)

    @property
    def inner_shape(self) -> tuple[int, ...] | None:
        """Return the shape of ReTeX-E's shared factor `B`; None without `inner_rank`."""
        if self.kind != MATRIX or self.inner_rank is None:
            return None
        first = self.order == GENERATED_FIRST
        return (self.batch, self.inner_rank, self.rank) if first else (self.batch, self.rank, self.inner_rank)

    @property
    def stacked_shape(self) -> tuple[int, int, int]:
        """Return the shape of the parameter as a batch of matrices (only for `matrix`)."""
        return (self.batch, self.rows, self.columns)

    @property
    def solved_rank(self) -> int:
        """Return the rank that offsets can reach: that of `A_t B S` is at most the number of columns of `A_t`."""
        return self.inner_rank or self.rank

    def offset(self, generated: Tensor, shared: Tensor | None, inner: Tensor | None = None) -> Tensor:
        """Return `G_t S`, in the parameter's own shape."""
        if self.kind != MATRIX:
            return (generated if shared is None else generated * shared).view(self.shape)
        left, right = self._factors(generated, shared, inner)
        return (left @ right).view(self.shape)

    def added(
        self,
        base: Tensor,
        generated: Tensor,
        shared: Tensor | None,
        inner: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `base + G_t S` in one pass, without materialising the offset; write it into `out` if given."""
        if self.kind != MATRIX:
            generated = generated.view(self.shape)
            if shared is None:
                return torch.add(base, generated, out=out)
            return torch.addcmul(base, generated, shared, out=out)
        left, right = self._factors(generated, shared, inner)
        out = None if out is None else out.view(self.stacked_shape)
        return torch.baddbmm(base.reshape(self.stacked_shape), left, right, out=out).view(self.shape)

    def _factors(self, generated: Tensor, shared: Tensor | None, inner: Tensor | None) -> tuple[Tensor, Tensor]:
        assert shared is not None  # every matrix has one
        generated = generated.view(self.generated_shape)
        if self.order == GENERATED_FIRST:
            return (generated if inner is None else generated @ inner), shared
        return shared, (generated if inner is None else inner @ generated)

    def stored_numbers(self, num_tasks: int) -> int:
        """Return how many numbers the factors of all tasks take."""
        shared = [prod(shape) for shape in (self.shared_shape, self.inner_shape) if shape is not None]
        return num_tasks * prod(self.generated_shape) + sum(shared)

    def whole(self) -> Layout:
        """Return the layout of the same parameter stored whole."""
        return Layout(self.shape, WHOLE)


def effective_rank(rank: int, rows: int, columns: int) -> int:
    """Apply the paper's rule: return the requested rank where it is below both sides, else half the smaller side."""
    smaller = min(rows, columns)
    return rank if rank < smaller else smaller // 2


def plan_layout(
    shape: tuple[int, ...],
    rank: int | str,
    num_tasks: int,
    convolution: bool = False,
    *,
    order: str = GENERATED_FIRST,
    inner_rank: int | None = None,
) -> Layout:
    """Choose the layout of a parameter from its shape.

    Axes of size 1 are ignored. Convolution weights are matrices with one row per output channel; other tensors of three
    or more axes (stacked experts of an MoE layer) are batches of matrices.

    >>> plan_layout((768, 3, 16, 16), rank=256, num_tasks=8).generated_shape
    (1, 768, 256)
    """
    shape = tuple(shape)
    seen = (shape[0], prod(shape[1:])) if convolution or len(shape) == 4 else shape
    axes = [size for size in seen if size != 1]
    if len(axes) < 2:
        return Layout(shape, VECTOR)
    if rank == "full":
        return Layout(shape, WHOLE)
    assert not isinstance(rank, str)  # "full" is the only name of a rank
    layout = Layout(shape, MATRIX, prod(axes[:-2]), axes[-2], axes[-1], order=order)
    return at_rank(layout, rank, num_tasks, inner_rank)


def at_rank(layout: Layout, rank: int, num_tasks: int, inner_rank: int | None = None) -> Layout:
    """Return the layout of a matrix at a requested rank: by the rank rule, or whole where that costs no more
    numbers."""
    if layout.kind != MATRIX:
        return layout
    effective = effective_rank(rank, layout.rows, layout.columns)
    inner = None if inner_rank is None else min(inner_rank, effective)
    layout = replace(layout, rank=effective, inner_rank=inner)
    whole = layout.whole()
    return whole if whole.stored_numbers(num_tasks) <= layout.stored_numbers(num_tasks) else layout


def matrix_sides(shape: tuple[int, ...], convolution: bool) -> Sides | None:
    """Return a parameter as a stack of matrices, as `plan_layout` sees it; None for vectors.

    >>> matrix_sides((768, 3, 16, 16), convolution=True), matrix_sides((8, 64, 32), False), matrix_sides((1, 9), False)
    ((1, 768, 768), (8, 64, 32), None)
    """
    seen = (shape[0], prod(shape[1:])) if convolution or len(shape) == 4 else shape
    axes = [size for size in seen if size != 1]
    return None if len(axes) < 2 else (prod(axes[:-2]), axes[-2], axes[-1])
