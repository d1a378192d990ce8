"""Products of each segment's rows with matrices, the segment's own or one for all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .call import MixedCall

# Up to this many vectors per segment, one batched product is faster than separate products.
FEW_VECTORS = 64
# Padding segments to the longest must not more than double their size.
MOST_PADDING = 2.0


class OwnFactors:
    """The matrices (n, m) of all segments of a call, for inputs on their left.

    Long segments are multiplied one by one, short ones (the steps of `generate`) as a batch of matrices. Batching is
    free if the factors are adjacent in memory in segment order; otherwise they are stacked on their second use.
    """

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices
        self._batch = _as_batch(matrices)
        self._uses = 0

    def add(self, call: MixedCall, result: Tensor, x: Tensor) -> None:
        """Add `x A_t` to `result` in place; both have the segments' vectors along their leading axis."""
        per_row = len(x) // call.rows
        batch = self._batch_for(call, per_row)
        if batch is None or result.requires_grad:
            for part, matrix in zip(call.slices(per_row), self.matrices, strict=True):
                result[part].addmm_(x[part], matrix)
            return
        sizes = call.sizes(per_row)
        if min(sizes) == max(sizes):
            shape = (len(sizes), sizes[0], -1)
            result.view(shape).baddbmm_(x.view(shape), batch)
            return
        slots, entries = call.padding(per_row, x.device)
        padded = x.index_select(0, entries).view(len(sizes), max(sizes), -1)
        result += torch.bmm(padded, batch).flatten(0, 1).index_select(0, slots)

    def applied(self, call: MixedCall, x: Tensor) -> Tensor:
        """Return `x A_t`."""
        if x.requires_grad:
            parts = zip(call.slices(len(x) // call.rows), self.matrices, strict=True)
            return torch.cat([x[part] @ matrix for part, matrix in parts])
        result = x.new_zeros(len(x), self.matrices[0].shape[1])
        self.add(call, result, x)
        return result

    def _batch_for(self, call: MixedCall, per_row: int) -> Tensor | None:
        sizes = call.sizes(per_row)
        longest = max(sizes)
        if len(sizes) == 1 or longest > FEW_VECTORS or len(sizes) * longest > MOST_PADDING * sum(sizes):
            return None
        self._uses += 1
        if self._batch is None and self._uses > 1:
            self._batch = torch.stack(self.matrices)
        return self._batch


@dataclass(frozen=True)
class Chain:
    """Factors, each a segment's own or one for all, that rows are multiplied by one after the other."""

    factors: list[OwnFactors | Tensor]

    def add(self, call: MixedCall, result: Tensor, x: Tensor) -> None:
        """Add the product of `x` with all factors to `result` in place, as `OwnFactors.add`."""
        *before, last = self.factors
        for factor in before:
            x = factor.applied(call, x) if isinstance(factor, OwnFactors) else x @ factor
        if isinstance(last, OwnFactors):
            last.add(call, result, x)
        else:
            result.addmm_(x, last)


def _as_batch(matrices: list[Tensor]) -> Tensor | None:
    """Return equally spaced matrices in one storage as a (batch, n, m) view, or None if they are not."""
    first = matrices[0]
    if len(matrices) == 1:
        return first.unsqueeze(0)
    size = first.element_size()
    distances = {(b.data_ptr() - a.data_ptr()) // size for a, b in pairwise(matrices)}
    same = all(m.stride() == first.stride() and m.shape == first.shape for m in matrices)
    one_storage = len({matrix.untyped_storage().data_ptr() for matrix in matrices}) == 1
    if not same or not one_storage or len(distances) != 1 or min(distances) <= 0:
        return None
    return first.as_strided((len(matrices), *first.shape), (distances.pop(), *first.stride()))
