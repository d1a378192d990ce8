"""Which axis of a layer's output holds the features of one position: (rows, L, d), (rows, C, L), (rows, H, W, C)?

The features of a layer are as many as some side of its parameters. Where other axes are that long too, gradients tell:
feature j depends on no entry but j of the parameter that acts last (a bias, or the rows of a weight), whereas every
position depends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn


def axes_by_size(shape: torch.Size, others: Iterable[int], layer: nn.Module) -> list[int]:
    """The axes of a layer's output, among `others` than that of the rows, that may hold its features."""
    axes = list(others)
    sides = {size for parameter in layer.parameters() for size in parameter.shape}
    return axes if len(axes) == 1 else [axis for axis in axes if shape[axis] in sides]


def axis_by_gradient(
    hidden_of: Callable[[Mapping[str, Tensor]], Tensor], parameters: Mapping[str, Tensor], axes: list[int]
) -> int | None:
    """The one of several axes that the parameters of a layer run along, or None.

    Args:
        hidden_of: Computes the layer's output from its parameters.
        parameters: Those of the layer, in the order in which they act.
        axes: The candidates.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaves = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in parameters.items()
            if type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point() and not tensor.is_meta
        }
        hidden = hidden_of(leaves)
        if not hidden.requires_grad:
            return None
        slices = {axis: _strongest(hidden, axis) for axis in axes}
        gradients = {
            axis: torch.autograd.grad(
                hidden.select(axis, index).float().sum(), list(leaves.values()), retain_graph=True, allow_unused=True
            )
            for axis, index in slices.items()
        }
    # The last one that tells: earlier ones may act along another axis (a mixer's act along positions).
    for number in reversed(range(len(leaves))):
        along = [
            axis
            for axis in axes
            if gradients[axis][number] is not None
            and _only_at(gradients[axis][number], hidden.shape[axis], slices[axis])
        ]
        if len(along) == 1:
            return along[0]
    return None


def _strongest(hidden: Tensor, axis: int) -> int:
    """The index along an axis where a layer's output is largest: it is not one that an activation has cut off."""
    return int(hidden.detach().float().abs().movedim(axis, 0).flatten(1).sum(1).argmax())


def _only_at(gradient: Tensor, size: int, index: int) -> bool:
    """Whether a gradient is zero outside one index of some side of the parameter that is so long."""
    for side, length in enumerate(gradient.shape):
        if length == size:
            reached = gradient.abs().movedim(side, 0).flatten(1).sum(1) if gradient.ndim > 1 else gradient.abs()
            if reached[index] > 0 and int((reached > 0).sum()) == 1:
                return True
    return False
