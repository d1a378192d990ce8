"""Alignment of a shared trunk: what to add to the hidden state at its end, once the task of a row is known.

The merged trunk gives the expert's next layer other hidden states than the expert's own trunk would. Over the positions
of reference inputs, a ridge regression of low rank predicts the difference from the merged hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..rows import Along, Reading
from ..utils.records import is_record, rebuilt, record_fields
from .feature_space import top_directions
from .pooling import Layout

RANK = 64
# Names of the tensors, as they are stored.
TENSORS = ("trunk_down", "trunk_up", "trunk_shift")
# Weight of the ridge, relative to the mean variance of a feature.
RIDGE = 0.1


@dataclass(frozen=True)
class Alignment:
    """The correction of each task: `down` and `up` (T, r, d) and `shift` (T, d) add `up.T @ (down @ h) + shift` to a
    hidden state `h` (d,).

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
    def fit(cls, pairs: Sequence[tuple[Tensor, Tensor]], rank: int = RANK) -> Alignment:
        """Fit the correction of each task to its pairs of hidden states (N, d): merged, and the expert's."""
        fitted = [fit_correction(merged, expert, rank) for merged, expert in pairs]
        return cls(*(torch.stack(parts) for parts in zip(*fitted, strict=True)))

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
            part = hidden[rows].to(found.dtype)
            share = weights[rows, task].view(-1, *[1] * (hidden.ndim - 1))
            found[rows] += share * ((part @ down[task].T) @ up[task] + shift[task])
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


def fit_correction(merged: Tensor, expert: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor, Tensor]:
    """Return `down` and `up` (rank, d) and `shift` (d,), which take merged hidden states (N, d) to the expert's.

    Minimises `|X B - Y|^2 + ridge |B|^2` over centred states `X` and differences `Y`, and keeps the directions in which
    the fitted values are largest: the best of this rank for the fitted values (reduced-rank regression).
    """
    states, differences = merged.double(), (expert - merged).double()
    mean, shift = states.mean(0), differences.mean(0)
    states, differences = states - mean, differences - shift
    count, width = states.shape
    ridge = RIDGE * states.square().sum() / width + torch.finfo(torch.float32).tiny
    if count < width:  # the same solution, from the smaller of the two matrices
        gram = states @ states.T + ridge * torch.eye(count, dtype=states.dtype, device=states.device)
        mapping = states.T @ torch.linalg.solve(gram, differences)
    else:
        gram = states.T @ states + ridge * torch.eye(width, dtype=states.dtype, device=states.device)
        mapping = torch.linalg.solve(gram, states.T @ differences)
    fitted = states @ mapping
    _, up = top_directions(fitted.T @ fitted, rank)
    up = torch.nn.functional.pad(up.to(mapping), (0, 0, 0, rank - len(up)))  # of fewer features than the rank
    down = (mapping @ up.T).T
    shift = shift - up.T @ (down @ mean)
    return down.float().contiguous(), up.float().contiguous(), shift.float()


def align_entries(output: Any, layout: Layout, alignment: Alignment, weights: Tensor) -> Any:
    """Return a layer's output, aligned by weights (entries, T) of its entries."""
    axes = (layout.rows.axis if isinstance(layout.rows, Along) else 0, layout.features)

    def align(hidden: Tensor) -> Tensor:
        return alignment(hidden.movedim(axes, (0, -1)), weights).movedim((0, -1), axes)

    return with_first_tensor(output, align)


def owners(layout: Layout, reading: Reading, rows: int) -> Tensor:
    """Return the row that each entry of a layer's output belongs to."""
    if isinstance(layout.rows, Along):
        return torch.arange(rows).repeat_interleave(layout.rows.per_row)
    return layout.rows.owner(reading)


def positions(
    hidden: Tensor, layout: Layout, reading: Reading, mask: Tensor | None, rows: int
) -> tuple[Tensor, Tensor]:
    """Return the hidden states (N, d) at all unmasked positions of a layer's output, and the row of each."""
    axes = (layout.rows.axis if isinstance(layout.rows, Along) else 0, layout.features)
    found = hidden.movedim(axes, (0, -1))
    found = found.reshape(len(found), -1, found.shape[-1])
    owner = owners(layout, reading, rows).unsqueeze(1).expand(found.shape[:2])
    if isinstance(mask, Tensor) and mask.shape == found.shape[:2]:
        kept = mask.bool()
        return found[kept.to(found.device)], owner[kept.to(owner.device)]
    return found.flatten(0, 1), owner.flatten()


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
