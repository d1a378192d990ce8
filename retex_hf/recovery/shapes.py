"""The shape rules: how the difference of one parameter is factored. Nothing else in the library decides this."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

VECTOR, MATRIX, WHOLE = "vector", "matrix", "whole"
KINDS = (VECTOR, MATRIX, WHOLE)


@dataclass(frozen=True)
class Layout:
    """How the offset of one parameter is stored.

    - `vector`: a generated vector times a shared scalar (0-D and 1-D parameters);
    - `matrix`: a generated `(a, r)` factor times a shared `(r, b)` factor, in batches where `batch > 1`;
    - `whole`: the offset itself, generated, where factors would cost as much or `rank="full"` asks for it.
    """

    shape: tuple[int, ...]
    kind: str
    batch: int = 1
    rows: int = 0
    columns: int = 0
    rank: int = 0

    @property
    def generated_shape(self) -> tuple[int, ...]:
        """Shape of `G_t`, the factor that differs from task to task."""
        return (self.batch, self.rows, self.rank) if self.kind == MATRIX else (prod(self.shape),)

    @property
    def shared_shape(self) -> tuple[int, ...] | None:
        """Shape of `S`, the factor that all tasks share; None where there is none."""
        if self.kind == WHOLE:
            return None
        return (self.batch, self.rank, self.columns) if self.kind == MATRIX else ()

    @property
    def stacked_shape(self) -> tuple[int, int, int]:
        """The parameter seen as a batch of matrices (only for `matrix`)."""
        return (self.batch, self.rows, self.columns)

    def offset(self, generated: Tensor, shared: Tensor | None) -> Tensor:
        """`G_t S`, in the parameter's own shape."""
        if self.kind == MATRIX:
            return (generated.view(self.generated_shape) @ shared).view(self.shape)
        return (generated if shared is None else generated * shared).view(self.shape)

    def stored_numbers(self, num_tasks: int) -> int:
        """How many numbers the factors of all tasks take."""
        shared = 0 if self.shared_shape is None else prod(self.shared_shape)
        return num_tasks * prod(self.generated_shape) + shared


def effective_rank(rank: int, rows: int, columns: int) -> int:
    """The paper's rule: the asked rank where it is below both sides, else half the smaller side."""
    smaller = min(rows, columns)
    return rank if rank < smaller else smaller // 2


def plan_layout(shape: tuple[int, ...], rank: int | str, num_tasks: int, convolution: bool = False) -> Layout:
    """Choose the layout of a parameter from its shape.

    Axes of size 1 do not count. Convolution weights are matrices of one row per output channel; other tensors of three
    or more axes (stacked experts of an MoE layer) are batches of matrices.

    >>> plan_layout((768, 3, 16, 16), rank=256, num_tasks=8).generated_shape
    (1, 768, 256)
    """
    shape = tuple(shape)
    seen = (shape[0], prod(shape[1:])) if convolution or len(shape) == 4 else shape
    axes = [size for size in seen if size != 1]
    if len(axes) < 2:
        return Layout(shape, VECTOR)
    batch, rows, columns = prod(axes[:-2]), axes[-2], axes[-1]
    if rank == "full":
        return Layout(shape, WHOLE)
    layout = Layout(shape, MATRIX, batch, rows, columns, effective_rank(rank, rows, columns))
    whole = Layout(shape, WHOLE)
    return whole if whole.stored_numbers(num_tasks) <= layout.stored_numbers(num_tasks) else layout
