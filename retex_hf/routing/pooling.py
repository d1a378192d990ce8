"""Pooling of a layer's output, in any layout, to one vector per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..rows import Along, AlongItems, Reading


@dataclass(frozen=True)
class Layout:
    """The position of the rows in a layer's output, and the axis that holds the features of one position."""

    rows: Along | AlongItems
    features: int


def pool_rows(hidden: Tensor, layout: Layout, reading: Reading, rows: int, mask: Tensor | None, pooling: str) -> Tensor:
    """Pool a layer's output in any layout to one vector per row (rows, d); `mask` (rows, positions) selects the
    positions, where the layer has that many."""
    if isinstance(layout.rows, AlongItems):
        owner = layout.rows.owner(reading).to(hidden.device)
        items = pool(positions_of(hidden, layout, None), None, pooling)
        counts = torch.bincount(owner, minlength=rows)
        if not counts.all():
            raise InputError(
                f"Row {int((counts == 0).nonzero()[0])} has none of {layout.rows.name!r}, which tasks are identified "
                "by: name the task with task=."
            )
        return items.new_zeros(rows, items.shape[1]).index_add(0, owner, items) / counts.unsqueeze(1)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != rows:
        return pool(positions_of(hidden, layout, None), None, pooling)
    positions = positions_of(hidden, layout, mask.shape[1])
    masked = positions.ndim == 3 and positions.shape[:2] == mask.shape
    return pool(positions, mask if masked else None, pooling)


def positions_of(hidden: Tensor, layout: Layout, length: int | None) -> Tensor:
    """Return a layer's output as (rows, positions, d), or (rows, d).

    Outputs with more axes are averaged over the others; `length` identifies the axis of positions that stays. Maps
    (rows, C, H, W) have none, and are averaged whole.
    """
    axis, per_row = (layout.rows.axis, layout.rows.per_row) if isinstance(layout.rows, Along) else (0, 1)
    moved = hidden.movedim((axis, layout.features), (0, -1))
    if per_row > 1:
        moved = moved.unflatten(0, (-1, per_row))
    if moved.ndim <= 3:
        return moved
    between = range(1, moved.ndim - 1)
    long = [axis for axis in between if moved.shape[axis] == length]
    return moved.mean([axis for axis in between if len(long) != 1 or axis != long[0]])


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Pool unmasked positions (rows, L, d) to one vector per row by `pooling`."""
    if hidden.ndim == 2:
        return hidden
    if mask is None:
        return {"mean": hidden.mean(1), "first": hidden[:, 0], "last": hidden[:, -1]}[pooling]
    mask = mask.to(hidden.device).bool()
    if pooling == "mean":
        return hidden.masked_fill(~mask.unsqueeze(-1), 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    if pooling == "first":
        index = positions.masked_fill(~mask, mask.shape[1] - 1).amin(1)
    else:
        index = positions.masked_fill(~mask, 0).amax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), index]
