"""Compare how two models compute, module by module: the numbers in which experts differ are in their tensors, and
activations, epsilons and the like are not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..checkpoints.adapters import AdapterSource
from ..checkpoints.sources import Source
from ..errors import CheckpointError

# What `extra_repr` says that no output in evaluation depends on.
OF_TRAINING = re.compile(r"(?:^|, )(?:momentum|inplace|padding_idx|sparse|dropout|scale_grad_by_freq)=[^,]*")
EPSILONS = ("eps", "epsilon", "variance_epsilon")


def check_alike(model: nn.Module, source: Source, make: Callable[[Path, Source], nn.Module] | None = None) -> None:
    """Refuse a checkpoint whose model computes otherwise than `model`, as far as modules show it. `make` makes the
    model that a folder describes."""
    # Beside an adapter's files lies no model.
    complete = not isinstance(source, AdapterSource) or source.own_base
    other = source.model if complete else None
    if other is None and make is not None and source.folder is not None and complete:
        other = make(source.folder, source)
    if other is None:
        return
    difference = structure_difference(other, model) or _buffer_difference(other, model)
    if difference is not None:
        raise CheckpointError(f"{source.label}: {difference} as in the other experts: experts must compute alike.")


def structure_difference(one: nn.Module, other: nn.Module) -> str | None:
    """Say which module of `one` is of another class or of other settings than in `other`; None where none is."""
    ours, theirs = dict(_computing(one)), dict(_computing(other))
    for name in ours.keys() & theirs.keys():
        kinds = [class_name(model[name]).removesuffix("Fp32") for model in (ours, theirs)]
        if kinds[0] != kinds[1]:
            return f"module {name!r} is a {kinds[0]}, not a {kinds[1]}"
        if _shapes(ours[name]) != _shapes(theirs[name]):
            continue  # a head or a vocabulary of another size, of which its settings speak too
        settings = [_settings(model[name]) for model in (ours, theirs)]
        if settings[0] != settings[1]:
            return f"module {name!r} is a {type(ours[name]).__name__}({settings[0]}), not ({settings[1]})"
    return None


def class_name(module: nn.Module) -> str:
    """Return the full name of a module's class. Classes of one name are one, though a notebook made them twice."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _computing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model by name, without those that do nothing in evaluation."""
    for name, module in model.named_modules():
        inert = isinstance(module, (_DropoutNd, nn.Identity)) or "drop" in type(module).__name__.lower()
        if name and not inert:
            yield name, module


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in _own_tensors(module)]


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _settings(module: nn.Module) -> str:
    """What a module says of itself, and its epsilon. Classes outside of torch may say what their tensors hold."""
    said = ""
    if type(module).__module__.startswith("torch.") or not _own_tensors(module):
        said = OF_TRAINING.sub("", module.extra_repr()).removeprefix(", ")
    found = [f"{name}={vars(module)[name]}" for name in EPSILONS if isinstance(vars(module).get(name), float)]
    return ", ".join([said, *found] if said else found)


def _buffer_difference(one: nn.Module, other: nn.Module) -> str | None:
    """Say which buffer that no checkpoint has differs. Of other shapes are caches, which grow with what they see."""
    kept, theirs = one.state_dict().keys(), dict(other.named_buffers())
    for name, buffer in one.named_buffers():
        match = theirs.get(name)
        if name in kept or match is None or match.shape != buffer.shape or match.is_meta or buffer.is_meta:
            continue
        if not _equal(buffer.detach().cpu(), match.detach().cpu()):
            return f"buffer {name!r}, which is not part of the state dict, does not hold the same numbers"
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, up to the rounding of the coarser of their dtypes."""
    if not (one.is_floating_point() and other.is_floating_point()):
        return torch.equal(one, other)
    coarse = max(torch.finfo(tensor.dtype).eps for tensor in (one, other))
    return torch.allclose(one.double(), other.double(), rtol=2 * coarse, atol=0, equal_nan=True)
