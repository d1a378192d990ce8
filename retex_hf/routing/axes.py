"""Identification of the axis that holds the features of one position: (rows, L, d), (rows, C, L), (rows, H, W, C).

The number of features of a layer equals some side of its parameters. Where other axes have that length too, a
perturbation decides: entry j of the parameter that acts last (a bias, or a row of a weight) changes feature j of every
position, and no other. Perturbations instead of gradients, because autograd does not run in a process that was forked
from one where it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

ROUNDING = 1e-5


def axes_by_size(shape: torch.Size, others: Iterable[int], layer: nn.Module) -> list[int]:
    """Return the axes of a layer's output, among `others` (all but that of the rows), that may hold its features."""
    axes = list(others)
    sides = {size for parameter in layer.parameters() for size in parameter.shape}
    return axes if len(axes) == 1 else [axis for axis in axes if shape[axis] in sides]


def axis_by_change(
    hidden_of: Callable[[Mapping[str, Tensor]], Tensor], parameters: Mapping[str, Tensor], axes: list[int]
) -> int | None:
    """Return the one of several axes that the parameters of a layer run along; None where it cannot be determined.

    Args:
        hidden_of: Function that computes the layer's output with some of its parameters replaced.
        parameters: Parameters of the layer, in the order in which they act.
        axes: The candidates.
    """
    hidden = hidden_of({})
    strongest = {axis: _strongest(hidden, axis) for axis in axes}
    # The last conclusive one: earlier ones may act along another axis (a mixer's act along positions).
    for name, tensor in reversed(list(parameters.items())):
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_floating_point() or tensor.is_meta:
            continue
        along = [
            axis
            for axis, index in strongest.items()
            if any(
                _moves_only(hidden, hidden_of({name: _changed(tensor, side, index)}), axis, index)
                for side, length in enumerate(tensor.shape)
                if length == hidden.shape[axis]
            )
        ]
        if len(along) == 1:
            return along[0]
    return None


def _strongest(hidden: Tensor, axis: int) -> int:
    """Return the index along an axis where a layer's output is largest, because an activation has not cut it off."""
    return int(hidden.detach().float().abs().movedim(axis, 0).flatten(1).sum(1).argmax())


def _changed(parameter: Tensor, side: int, index: int) -> Tensor:
    """Copy a parameter with one index of a side changed in a random direction: a constant one may cancel out."""
    changed = parameter.detach().clone()
    part = changed.select(side, index)
    scale = float(parameter.detach().abs().max()) or 1.0
    direction = torch.randn(part.shape, generator=torch.Generator().manual_seed(index)).to(part)
    part.add_(direction, alpha=0.1 * scale)
    return changed


def _moves_only(before: Tensor, after: Tensor, axis: int, index: int) -> bool:
    """Return whether two outputs differ at one index along an axis, and nowhere else beyond rounding."""
    moved = (after.detach().float() - before.detach().float()).abs().movedim(axis, 0).flatten(1).amax(1)
    others = moved.clone()
    others[index] = 0
    return bool(moved[index] > 0) and bool(others.amax() <= ROUNDING * moved[index])
