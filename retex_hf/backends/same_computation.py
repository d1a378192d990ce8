"""Compare how two models compute, module by module.

Experts may differ in their tensors only: activations, epsilons and other settings are shared, so they must be equal.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss

from ..checkpoints.adapters import AdapterSource
from ..checkpoints.sources import Source
from ..errors import CheckpointError, brief
from .module_attributes import attribute_differences, hook_difference, is_setting

logger = logging.getLogger(__name__)

# Settings in `extra_repr` that no output in evaluation depends on.
OF_TRAINING = re.compile(r"(?:^|, )(?:momentum|inplace|padding_idx|sparse|dropout|scale_grad_by_freq)=[^,]*")
EPSILONS = ("eps", "epsilon", "variance_epsilon")


def check_alike(
    model: nn.Module, source: Source, make: Callable[[Path, Source], nn.Module] | None = None, *, is_base: bool = False
) -> None:
    """Refuse a checkpoint whose modules compute something else than those of `model`.

    Attributes of a user's own classes that differ cause a warning only.

    Args:
        model: The model that all experts run in.
        source: The checkpoint.
        make: Creates the model that a folder describes.
        is_base: The checkpoint is the base, whose heads may be other modules than the experts'.
    """
    # An adapter's folder contains no model to compare.
    complete = not isinstance(source, AdapterSource) or source.own_base
    other = source.model if complete else None
    if other is None and make is not None and source.folder is not None and complete:
        other = make(source.folder, source)
    if other is None:
        return
    experts = "the experts" if is_base else "the other experts"
    difference = (
        structure_difference(other, model, heads=not is_base)
        or _hook_difference(other, model)
        or _buffer_difference(other, model)
    )
    if difference is not None:
        raise CheckpointError(f"{source.label}: {difference} as in {experts}: experts must compute alike.")
    notes = [difference for difference, refused in _attribute_differences(other, model) if not refused]
    if notes:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        logger.warning("%s: %s as in %s%s: all experts get the latter.", source.label, notes[0], experts, more)


def structure_difference(one: nn.Module, other: nn.Module, *, heads: bool = True) -> str | None:
    """Describe the first module whose class or settings differ between `one` and `other`; return None if all agree.

    Without `heads`, modules with tensors may have different classes.
    """
    ours, theirs = dict(_computing(one)), dict(_computing(other))
    for name in (name for name in ours if name in theirs):
        kinds = [class_name(model[name]).removesuffix("Fp32") for model in (ours, theirs)]
        if kinds[0] != kinds[1]:
            if heads or not any(_has_tensors(model[name]) for model in (ours, theirs)):
                return f"module {name!r} is a {kinds[0]}, not a {kinds[1]}"
            continue
        if _shapes(ours[name]) != _shapes(theirs[name]):
            continue  # a head or a vocabulary of another size, which shows in its settings too
        settings = [_settings(model[name]) for model in (ours, theirs)]
        if settings[0] != settings[1]:
            return f"module {name!r} is a {type(ours[name]).__name__}({settings[0]}), not ({settings[1]})"
    refused = (difference for difference, refused in _attribute_differences(one, other) if refused)
    if (difference := next(refused, None)) is not None or not heads:
        return difference
    if (lone := _lone_module(one, other)) is not None:
        return f"module {lone[0]!r} is {lone[1]}, not {lone[2]}"
    if (lone := _lone_module(other, one)) is not None:
        return f"module {lone[0]!r} is {lone[2]}, not {lone[1]}"
    return None


def _pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield pairs of modules with the same name and class in two models, including the models themselves."""
    theirs = dict(other.named_modules(remove_duplicate=False))
    for name, module in one.named_modules():
        if name in theirs and class_name(module) == class_name(theirs[name]):
            yield name, module, theirs[name]


def _attribute_differences(one: nn.Module, other: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield a description of each attribute that differs, and whether it is certainly a setting."""
    for name, ours, theirs in _pairs(one, other):
        if _is_inert(ours) or _shapes(ours) != _shapes(theirs):
            continue
        for attribute, *values in attribute_differences(ours, theirs):
            where = f"{attribute!r} of {_place(name, ours)}"
            difference = f"{where} is {brief(values[0])}, not {brief(values[1])}"
            yield difference, is_setting(ours, attribute, values)


def _hook_difference(one: nn.Module, other: nn.Module) -> str | None:
    for name, ours, theirs in _pairs(one, other):
        if (difference := hook_difference(ours, theirs)) is not None:
            return f"{_place(name, ours)} {difference}"
    return None


def _place(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"module {name!r} (a {kind})" if name else f"the model (a {kind})"


def _lone_module(one: nn.Module, other: nn.Module) -> tuple[str, str, str] | None:
    """Find a module of `one` without tensors (an activation) that is missing in `other` or does nothing there.

    Return its name, its class, and what `other` has instead. Modules with tensors are compared by the tensors' names.
    """
    theirs = dict(other.named_modules(remove_duplicate=False))
    for name, module in _computing(one):
        parent, _, last = name.rpartition(".")
        above = theirs.get(parent)
        if above is None or class_name(above) != class_name(one.get_submodule(parent)):
            continue
        if _has_tensors(module) or next(module.children(), None) is not None or _is_container(module):
            continue
        found = theirs.get(name, vars(above).get(last))
        if isinstance(found, nn.Module) and not _is_inert(found):
            continue
        if getattr(found, "__name__", "").lower() != type(module).__name__.lower():  # F.gelu is as good as nn.GELU
            there = f"a {class_name(found)}" if isinstance(found, nn.Module) else brief(found)
            return name, f"a {class_name(module)}", "missing" if found is None else there
    return None


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def _has_tensors(module: nn.Module) -> bool:
    return any(_own_tensors(part) for part in module.modules())


def class_name(module: nn.Module) -> str:
    """Return the full name of a module's class; names, because a notebook may define the same class twice."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _computing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of a model by name, without those that do nothing in evaluation."""
    for name, module in model.named_modules():
        if name and not _is_inert(module):
            yield name, module


def _is_inert(module: nn.Module) -> bool:
    """Return whether no output in evaluation depends on a module: dropout, losses, metrics, identities."""
    kind = type(module)
    inert = isinstance(module, (_DropoutNd, _Loss, nn.Identity)) or "drop" in kind.__name__.lower()
    return inert or kind.__module__.startswith(("timm.loss.", "torchmetrics."))


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in _own_tensors(module)]


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _settings(module: nn.Module) -> str:
    """Return a module's `extra_repr` and its epsilon.

    Skip the `extra_repr` of classes outside of torch that have tensors: it may show values of these.
    """
    shown = ""
    if type(module).__module__.startswith("torch.") or not _own_tensors(module):
        shown = OF_TRAINING.sub("", module.extra_repr()).removeprefix(", ")
    found = [f"{name}={vars(module)[name]}" for name in EPSILONS if isinstance(vars(module).get(name), float)]
    return ", ".join([shown, *found] if shown else found)


def _buffer_difference(one: nn.Module, other: nn.Module) -> str | None:
    """Describe the first non-persistent buffer that differs, or return None.

    Buffers of different shapes are skipped: they are caches, which grow with the inputs.
    """
    kept, theirs = one.state_dict().keys(), dict(other.named_buffers())
    for name, buffer in one.named_buffers():
        match = theirs.get(name)
        if name in kept or match is None or match.shape != buffer.shape or match.is_meta or buffer.is_meta:
            continue
        if not _equal(buffer.detach().cpu(), match.detach().cpu()):
            return f"buffer {name!r}, which is not part of the state dict, does not hold the same numbers"
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of the coarser of their dtypes."""
    if not (one.is_floating_point() and other.is_floating_point()):
        return torch.equal(one, other)
    coarse = max(torch.finfo(tensor.dtype).eps for tensor in (one, other))
    return torch.allclose(one.double(), other.double(), rtol=2 * coarse, atol=0, equal_nan=True)
