"""Cost model of a call in one pass and group by group, for `execution="auto"`.

Costs are in multiplications. A matrix product takes its arithmetic or the time to read its operands, whichever is
longer, plus a fixed overhead. Only ratios matter, so two constants describe a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...recovery import RecoveryModule
from ...recovery.components import COMPONENTS
from ...recovery.layout import VECTOR

# Multiplications in the time it takes to read one float32 number from memory; this dominates where few rows meet large
# matrices (decoding). Calibrated with examples/benchmarks/execution.py.
PER_NUMBER = 16.0
# Multiplications in the time it takes to start one operation, and operations per matrix in a model.
PER_OPERATION = 4e5
OPERATIONS_PER_MATRIX = 8
# Multiplications in the time it takes to unpack one number of factors that are stored at a few bits: 17 to 23 ns on a
# core that multiplies 35 numbers per ns.
PER_CODE = 600.0


@dataclass(frozen=True)
class Product:
    """One recovered matrix in a pass: its sizes, and the number of vectors per row that it is applied to.

    `packed` tells whether its factors are stored at a few bits, and unpacked for each call.
    """

    rows: int
    columns: int
    rank: int
    positions: float
    name: str
    packed: bool = False

    def unpacking(self, tasks: float) -> float:
        """Return the cost of unpacking the factors of so many tasks."""
        return PER_CODE * tasks * self.rank * (self.rows + self.columns) if self.packed else 0.0


@dataclass(frozen=True)
class Work:
    """The matrix products of one row of a call whose largest input has `input_size` numbers per row."""

    products: list[Product]
    input_size: int

    @classmethod
    def of_log(cls, log: list[tuple[str, int, int]], recovery: RecoveryModule, input_size: int) -> Work:
        products = []
        for name, _, numbers in log:
            if name not in recovery:
                continue
            layout = recovery[name].layout
            shape = torch.Size(layout.shape)
            if len(shape) < 2 or layout.kind == VECTOR:
                continue
            rows, columns = shape[0], shape.numel() // shape[0]
            rank = layout.solved_rank if layout.is_factored else min(rows, columns)
            packed = layout.kind == COMPONENTS
            products.append(Product(rows, columns, rank, max(1.0, numbers / columns), name, packed))
        return cls(products, input_size)


@dataclass(frozen=True)
class Call:
    """The size of one call.

    It holds the rows per group, the number of experts to recover first, the input per row and, for `generate`, the
    number of steps and beams and the prefix of parameters that run only once (the encoder's).
    """

    groups: list[int]
    missing: float
    input_size: int
    steps: int = 0
    beams: int = 1
    once: str | None = None


def _product(vectors: float, rows: int, columns: int) -> float:
    numbers = rows * columns + vectors * (rows + columns)
    return max(vectors * rows * columns, PER_NUMBER * numbers) + PER_OPERATION


def _passes(product: Product, work: Work, call: Call) -> list[tuple[float, int]]:
    """Return (vectors per row, number of times) for each kind of pass over a matrix."""
    whole = product.positions * call.input_size / work.input_size
    if not call.steps:
        return [(whole, 1)]
    if call.once is not None and not product.name.startswith(call.once):
        return [(float(call.beams), call.steps)]
    return [(whole, 1)] if call.once is not None else [(whole, 1), (float(call.beams), call.steps)]


def grouped_cost(work: Work, call: Call) -> float:
    """Return the cost of running every group on its own expert, recovering the missing experts first."""
    total = 0.0
    for product in work.products:
        making = product.rank * product.rows * product.columns + 3 * PER_NUMBER * product.rows * product.columns
        total += call.missing * making + product.unpacking(call.missing)
        for vectors, times in _passes(product, work, call):
            for rows in call.groups:
                body = _product(rows * vectors, product.rows, product.columns)
                total += times * (body + OPERATIONS_PER_MATRIX * PER_OPERATION)
    return total


def mixed_cost(work: Work, call: Call) -> float:
    """Return the cost of running the whole batch on the merged matrices, plus each group's factors."""
    total = 0.0
    for product in work.products:
        total += product.unpacking(len(call.groups))
        for vectors, times in _passes(product, work, call):
            rows = sum(call.groups)
            body = _product(rows * vectors, product.rows, product.columns) + OPERATIONS_PER_MATRIX * PER_OPERATION
            shared = _product(rows * vectors, product.rank, product.columns)
            own = sum(_product(group * vectors, product.rows, product.rank) for group in call.groups)
            total += times * (body + shared + own)
    return total
