"""Alignment of a shared trunk: what to add to the hidden state at its end, once the task of a row is known.

The merged trunk gives the expert's next layer other hidden states than the expert's own trunk would. Over the positions
of reference inputs, a ridge regression of low rank predicts the difference from the merged hidden state; in a map, from
those around the position too, because the layers of a trunk have mixed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..rows import Along
from ..utils.records import is_record, rebuilt, record_fields
from .feature_space import top_directions
from .pooling import Layout

# A correction costs `2 r d` multiplications per position, and `10 r d` where it reads the positions around.
RANK = 64
# Names of the tensors, as they are stored.
TENSORS = ("trunk_down", "trunk_up", "trunk_shift")
# Weights of the ridge, relative to the mean variance of a regressor: those that are tried.
RIDGES = (0.01, 0.1, 1.0)
# Positions that a map's correction reads are SIDE x SIDE, of maps with at most so many regressors.
SIDE, MOST_REGRESSORS = 3, 4096


@dataclass(frozen=True)
class Correction:
    """What one task adds to a hidden state `h` (d,): `up.T @ (down @ h) + shift`, of `down` and `up` (r, d) and `shift`
    (d,). A `down` (r, d, 3, 3) is a convolution of maps, continued beyond their edge by what is there."""

    down: Tensor
    up: Tensor
    shift: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return what is added to hidden states (n, ..., d)."""
        if self.down.ndim == 2:
            return (hidden @ self.down.T) @ self.up + self.shift
        return functional.conv2d(_continued(hidden), self.down).movedim(1, -1) @ self.up + self.shift


@dataclass(frozen=True)
class Alignment:
    """The corrections of all tasks: `down` and `up` (T, r, d) and `shift` (T, d), or `down` (T, r, d, 3, 3).

    >>> import torch
    >>> from retex_hf.routing.alignment import Alignment
    >>> alignment = Alignment(torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.tensor([[0.0, 5.0]]))
    >>> alignment(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([[1.0], [0.0]])).tolist()
    [[4.0, 10.0], [1.0, 2.0]]
    """

    down: Tensor
    up: Tensor
    shift: Tensor

    @classmethod
    def of(cls, corrections: Sequence[Correction]) -> Alignment:
        """Return the alignment of tasks with these corrections."""
        return cls(*(torch.stack([getattr(one, part) for one in corrections]) for part in ("down", "up", "shift")))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as they are stored."""
        return dict(zip(TENSORS, (self.down, self.up, self.shift), strict=True))

    def __call__(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Return hidden states (n, ..., d) with the corrections of the tasks added, by weights (n, T) of each row."""
        found = hidden.to(torch.promote_types(hidden.dtype, torch.float32), copy=True)
        down, up, shift = (part.to(found.device, found.dtype) for part in (self.down, self.up, self.shift))
        weights = weights.to(found.device, found.dtype)
        for task in weights.any(0).nonzero().flatten().tolist():
            rows = weights[:, task].nonzero().flatten()
            share = weights[rows, task].view(-1, *[1] * (hidden.ndim - 1))
            place = slice(None) if len(rows) == len(hidden) else rows  # of rows of one task, nothing is copied
            found[place] += share * Correction(down[task], up[task], shift[task])(hidden[place].to(found.dtype))
        return found.to(hidden.dtype)

    def to(self, device: torch.device) -> Alignment:
        return Alignment(*(part.to(device) for part in (self.down, self.up, self.shift)))

    def joined_by(self, other: Alignment) -> Alignment:
        """Return the corrections followed by those of other tasks."""
        own, others = ((each.down, each.up, each.shift) for each in (self, other))
        return Alignment(*(torch.cat([one, more]) for one, more in zip(own, others, strict=True)))

    def without(self, task: int) -> Alignment:
        """Return the corrections without those of one task."""
        kept = torch.arange(len(self.shift)) != task
        return Alignment(self.down[kept], self.up[kept], self.shift[kept])


@dataclass(frozen=True)
class Moments:
    """Sums over positions that a regression needs, in double precision: their number, of the regressors `x` (k,), of
    the differences `y` (d,), of `x x.T` and of `x y.T`. Those of other positions are added."""

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor

    @classmethod
    def of(cls, regressors: Tensor, differences: Tensor) -> Moments:
        """Return the moments of positions with regressors (N, k) and differences (N, d)."""
        x, y = regressors.double(), differences.double()
        return cls(len(x), x.sum(0), y.sum(0), x.T @ x, x.T @ y)

    def __add__(self, other: Moments) -> Moments:
        parts = ("count", "x", "y", "xx", "xy")
        return Moments(*(getattr(self, part) + getattr(other, part) for part in parts))

    def correction(self, ridge: float) -> Correction:
        """Return the correction that takes merged hidden states to the expert's.

        Minimises `|X B - Y|^2 + weight |B|^2` over centred regressors `X` and differences `Y`, and keeps the directions
        in which the fitted values are largest: the best of this rank for the fitted values (reduced-rank regression).
        """
        (width, features), count = self.xy.shape, max(self.count, 1)
        mean, shift = self.x / count, self.y / count
        gram, product = self.xx - count * torch.outer(mean, mean), self.xy - count * torch.outer(mean, shift)
        weight = ridge * gram.trace() / width + torch.finfo(torch.float32).tiny
        mapping = torch.linalg.solve(gram + weight * torch.eye(width).to(gram), product)
        _, directions = top_directions(mapping.T @ gram @ mapping, RANK)
        up = directions.to(mapping)
        down = (mapping @ up.T).T
        shift = shift - up.T @ (down @ mean)
        down = down if width == features else down.view(-1, features, SIDE, SIDE)
        return Correction(down.float().contiguous(), up.float().contiguous(), shift.float())

    def no_correction(self) -> Correction:
        """Return the correction, of the shapes of the others, that leaves merged hidden states as they are."""
        width, features = self.xy.shape
        rank = min(RANK, features)
        shape = (rank, features) if width == features else (rank, features, SIDE, SIDE)
        return Correction(torch.zeros(shape), torch.zeros(rank, features), torch.zeros(features))


def regressors(hidden: Tensor) -> Tensor:
    """Return what differences are predicted from, at each position of hidden states (n, ..., d): the hidden state, or
    of maps (n, H, W, d) that are not too wide the 3 x 3 hidden states around (n, H, W, 9 d)."""
    if hidden.ndim != 4 or SIDE * SIDE * hidden.shape[-1] > MOST_REGRESSORS:
        return hidden
    found = functional.unfold(_continued(hidden), SIDE)
    return found.unflatten(2, hidden.shape[1:3]).movedim(1, -1)


def _continued(maps: Tensor) -> Tensor:
    """Return maps (n, H, W, d) as (n, d, H + 2, W + 2): what is at the edge is beyond it, too."""
    return functional.pad(maps.movedim(-1, 1), (SIDE // 2,) * 4, mode="replicate")


def align_entries(output: Any, layout: Layout, alignment: Alignment, weights: Tensor) -> Any:
    """Return a layer's output, aligned by weights (entries, T) of its entries."""

    def align(hidden: Tensor) -> Tensor:
        return alignment(entries(hidden, layout), weights).movedim((0, -1), _axes(layout))

    return with_first_tensor(output, align)


def entries(hidden: Tensor, layout: Layout) -> Tensor:
    """Return a layer's output as (entries, ..., d)."""
    return hidden.movedim(_axes(layout), (0, -1))


def unmasked(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return hidden states (n, ..., d) at all unmasked positions: (N, d)."""
    found = hidden.reshape(len(hidden), -1, hidden.shape[-1])
    if isinstance(mask, Tensor) and mask.shape == found.shape[:2]:
        return found[mask.bool().to(found.device)]
    return found.flatten(0, 1)


def _axes(layout: Layout) -> tuple[int, int]:
    return (layout.rows.axis if isinstance(layout.rows, Along) else 0, layout.features)


def with_first_tensor(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output in which the first floating-point tensor is changed."""
    return _changed(output, change)[0]


def _changed(output: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    if isinstance(output, Tensor):
        return (change(output), True) if output.is_floating_point() else (output, False)
    if isinstance(output, Mapping) or is_record(output):
        fields: Mapping[Any, Any] = record_fields(output)
    elif isinstance(output, (list, tuple)):
        fields = dict(enumerate(output))
    else:
        return output, False
    done, found = False, dict(fields)
    for key, part in fields.items():
        found[key], done = _changed(part, change)
        if done:
            break
    if isinstance(output, (list, tuple)) and not is_record(output):
        return type(output)(found.values()), done
    return rebuilt(output, found), done
