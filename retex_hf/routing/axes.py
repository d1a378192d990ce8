"""Which axis of a layer's output holds the features of one position: (rows, L, d), (rows, C, L), (rows, H, W, C)?

The features of a layer are as many as some side of its parameters. Where other axes are that long too, a change tells:
entry j of the parameter that acts last (a bias, or a row of a weight) moves feature j of every position, and no other.
Changes and not gradients, because autograd does not run in a process that was forked from one where it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

ROUNDING = 1e-5


def axes_by_size(shape: torch.Size, others: Iterable[int], layer: nn.Module) -> list[int]:
    """The axes of a layer's output, among `others` than that of the rows, that may hold its features."""
    axes = list(others)
    sides = {size for parameter in layer.parameters() for size in parameter.shape}
    return axes if len(axes) == 1 else [axis for axis in axes if shape[axis] in sides]


def axis_by_change(
    hidden_of: Callable[[Mapping[str, Tensor]], Tensor], parameters: Mapping[str, Tensor], axes: list[int]
) -> int | None:
    """Find the one of several axes that the parameters of a layer run along; None where nothing tells.

    Args:
        hidden_of: Computes the layer's output from some of its parameters, the others being as they are.
        parameters: Those of the layer, in the order in which they act.
        axes: The candidates.
    """
    hidden = hidden_of({})
    strongest = {axis: _strongest(hidden, axis) for axis in axes}
    # The last one that tells: earlier ones may act along another axis (a mixer's act along positions).
    for name, tensor in reversed(parameters.items()):
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
    """The index along an axis where a layer's output is largest: it is not one that an activation has cut off."""
    return int(hidden.detach().float().abs().movedim(axis, 0).flatten(1).sum(1).argmax())


def _changed(parameter: Tensor, side: int, index: int) -> Tensor:
    """Copy a parameter with one index of a side moved, in a random direction: a constant one may cancel out."""
    changed = parameter.detach().clone()
    part = changed.select(side, index)
    scale = float(parameter.detach().abs().max()) or 1.0
    direction = torch.randn(part.shape, generator=torch.Generator().manual_seed(index)).to(part)
    part.add_(direction, alpha=0.1 * scale)
    return changed


def _moves_only(before: Tensor, after: Tensor, axis: int, index: int) -> bool:
    """Whether two outputs differ at one index along an axis, and nowhere else beyond rounding."""
    moved = (after.detach().float() - before.detach().float()).abs().movedim(axis, 0).flatten(1).amax(1)
    others = moved.clone()
    others[index] = 0
    return bool(moved[index] > 0) and bool(others.amax() <= ROUNDING * moved[index])
