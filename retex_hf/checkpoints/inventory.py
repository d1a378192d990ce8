"""The tensors of a model: floating-point tensors (parameters and buffers), ties, integer tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Inventory:
    """The tensors of a model, under one name each.

    `shapes` has the floating-point tensors in order; `aliases` maps each of their names to all names that share the
    tensor (itself included); `integers` are copied, never merged; `convolutions` are weights of convolution modules.
    """

    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, tuple[str, ...]]
    integers: tuple[str, ...]
    convolutions: frozenset[str]


def take_inventory(model: nn.Module) -> Inventory:
    """List the tensors of a model; tied tensors appear once, under the name that the model ties the others to."""
    groups: dict[int, list[str]] = {}
    constants = computed_names(model)
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in constants}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    # transformers' attribute is {tied name: name it is tied to}.
    leaders = set(getattr(model, "all_tied_weights_keys", {}).values())
    shapes, aliases, integers = {}, {}, []
    for names in groups.values():
        leader = next((name for name in names if name in leaders), names[0])
        tensor = tensors[leader]
        if not tensor.is_floating_point():
            integers.append(leader)
        elif tensor.numel() > 0:
            shapes[leader] = tuple(tensor.shape)
            aliases[leader] = tuple(names)
    return Inventory(shapes, aliases, tuple(integers), frozenset(_convolutions(model, shapes)))


def computed_names(model: nn.Module) -> frozenset[str]:
    """Return the parameters that a transformers class computes and does not save, such as MarianMT's positions."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _convolutions(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> set[str]:
    # By prefix, because weight normalisation moves the weight into a submodule of the convolution.
    prefixes = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.modules.conv._ConvNd)
    )
    return {name for name, shape in shapes.items() if len(shape) > 2 and name.startswith(prefixes)}
