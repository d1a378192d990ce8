"""Merging of an adapter into one module through peft's own layers: a plain module with the base's values is wrapped by
peft, given the module's adapter tensors, merged, and unwrapped again. No other module is held."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any, cast

import torch
from peft import PeftModel, PeftType, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.boft import layer as boft_layer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import CheckpointError, brief, first_line

MODULE = "module"
PREFIX = f"base_model.model.{MODULE}."
SHARED_PREFIX = "base_model."
# Limit of the size of a tensor that depends only on an adapter's configuration (random projections, logits): 1 GiB in
# float32.
MOST_NUMBERS = 2**28
# Integer tensors: indices of rows and columns of a weight, or indices into the flattened weight.
POSITIONS, PLACES = "shira_indices", "supertuning_indices"


def merge_module(
    kind: str,
    settings: Mapping[str, Any],
    owner: nn.Module,
    parameters: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return a module's parameters with an adapter merged into them, in float32.

    Args:
        kind: Type of the adapter.
        settings: Settings for this module, checked by `TunerSettings`.
        owner: Module of the adapted class and shapes; its own values are not used.
        parameters: Values of the base.
        parts: Tensors of the adapter for this module, by their names after the module's; shared ones by their own.

    Raises:
        CheckpointError: The tensors are not those that peft makes for these settings. The caller adds the names of the
            adapter and the module.
    """
    _check_indices(parts, parameters["weight"])
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in parts.items()}
    with aside(), torch.no_grad():
        wrapped = _wrap(kind, settings, _with_parameters(owner, parameters))
        _load(wrapped, kind, floats)
        try:
            merged = getattr(wrapped.merge_and_unload(), MODULE)
        except Exception as error:  # untrusted values can make peft raise anything
            raise CheckpointError(f"does not merge into it: {first_line(error).rstrip('.')}") from error
    found = {name: tensor.detach() for name, tensor in merged.named_parameters(recurse=False)}
    for name in found.keys() - parameters.keys():
        if found.pop(name).any():
            raise CheckpointError(f"gives it a {name}, which it does not have in the base")
    return found


def derive_projections(kind: str, settings: Mapping[str, Any], rows: int, columns: int) -> dict[str, Tensor]:
    """Recompute the random projections that an adapter did not save, from its seed, for modules of at most this many
    rows and columns."""
    rank = settings.get("r") or PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]().to_dict()["r"]
    bases = ceil(min(rows, columns) / rank) if kind == "RANDLORA" else 1
    if rank * bases * max(rows, columns) > MOST_NUMBERS:
        raise CheckpointError(f"asks for random projections of {brief(rank)} times {max(rows, columns)} numbers")
    largest = nn.Linear(columns, rows, bias=False, device="meta")
    largest.weight = nn.Parameter(torch.zeros(1, 1).expand(rows, columns), requires_grad=False)  # takes no memory
    with aside():
        tuner = _wrap(kind, settings, largest).base_model
    return {name: getattr(tuner, name)["default"] for name in PROJECTIONS[kind]}


PROJECTIONS = {
    "PVERA": ("pvera_A", "pvera_B"), "RANDLORA": ("randlora_A", "randlora_B"), "VERA": ("vera_A", "vera_B"),
}  # fmt: skip


def slice_projections(kind: str, projections: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
    """Return the part of the shared projections that a module of this many rows and columns uses."""
    first, second = (projections[name] for name in PROJECTIONS[kind])
    if kind == "RANDLORA":
        small, large = min(rows, columns), max(rows, columns)
        parts = first[:, :, :small], second[:large, : ceil(small / max(1, first.shape[0]))]
    else:
        parts = first[:, :columns], second[:rows]
    return dict(zip(PROJECTIONS[kind], parts, strict=True))


@contextmanager
def aside() -> Iterator[None]:
    """Within this context, use peft's layers without side effects.

    Restore the random state, silence peft's warnings of unsuitable options (the tensors are checked against the options
    elsewhere), and keep BOFT from compiling its CUDA extension.
    """
    extension = boft_layer._FBD_CUDA
    boft_layer._FBD_CUDA = False  # type: ignore[assignment]  # peft's module says None, its initial value
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        boft_layer._FBD_CUDA = extension


class _Holder(nn.Module):
    """A model that consists of one module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _with_parameters(owner: nn.Module, parameters: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module with other parameters."""
    module = owner.__class__.__new__(owner.__class__)
    module.__dict__ = dict(owner.__dict__)
    # Copies, because peft writes to them.
    own = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in parameters.items()}
    module._parameters = {
        name: nn.Parameter(own[name], requires_grad=False) if name in own else None for name in owner._parameters
    }
    return module.eval()


def _wrap(kind: str, settings: Mapping[str, Any], module: nn.Module) -> PeftModel:
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    known = {field.name for field in dataclasses.fields(config_class)}
    values = {**settings, "target_modules": [MODULE], "inference_mode": True}
    if "fan_in_fan_out" in known:
        values["fan_in_fan_out"] = isinstance(module, Conv1D)
    if "save_projection" in known:
        values["save_projection"] = True
    if kind == "ADALORA":
        values |= {"target_r": values["init_r"], "total_step": 1}
    try:
        return get_peft_model(_Holder(module), config_class(**values)).eval()
    except Exception as error:  # an untrusted configuration can make peft raise anything
        raise CheckpointError(f"does not fit it: {first_line(error).rstrip('.')}") from error


def _load(model: PeftModel, kind: str, parts: Mapping[str, Tensor]) -> None:
    """Load the adapter's tensors into the wrapped module; refuse tensors that peft would not have saved."""
    shared = {
        name for name in parts if name.startswith(tuple(PROJECTIONS.get(kind, ("vblora_vector_bank", "tinylora_v."))))
    }
    given = {(SHARED_PREFIX if name in shared else PREFIX) + name: tensor for name, tensor in parts.items()}
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    # RandLoRA's projections are saved again with each module; only the shared ones count.
    expected = {
        name: tensor
        for name, tensor in expected.items()
        if not (name.startswith(PREFIX) and name.removeprefix(PREFIX) in PROJECTIONS.get(kind, ()))
    }
    for name in expected.keys() - given.keys():
        raise CheckpointError(f"lacks {_shown(name)} of it")
    for name, tensor in given.items():
        if name not in expected:
            raise CheckpointError(f"has a {_shown(name)} for it, which peft does not make for these settings")
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"has a {_shown(name)} of shape {tuple(tensor.shape)} for it, but its configuration asks for "
                f"{tuple(expected[name].shape)}"
            )
    try:
        result = cast("nn.modules.module._IncompatibleKeys", set_peft_model_state_dict(model, given))
    except Exception as error:  # untrusted tensors can make peft raise anything
        raise CheckpointError(f"does not load into it: {first_line(error).rstrip('.')}") from error
    if result.unexpected_keys:
        raise CheckpointError(f"has a {_shown(result.unexpected_keys[0])} for it, which peft leaves out")


def _shown(name: str) -> str:
    return brief(name.removeprefix(PREFIX).removeprefix(SHARED_PREFIX))


def _check_indices(parts: Mapping[str, Tensor], weight: Tensor) -> None:
    """Refuse indices outside of the weight, which not every torch operation checks."""
    limits = {POSITIONS: list(weight.shape), PLACES: [weight.numel()]}
    for name in limits.keys() & parts.keys():
        rows = parts[name].long() if len(limits[name]) > 1 else parts[name].long().flatten()[None]
        if rows.ndim != 2 or len(rows) != len(limits[name]):
            raise CheckpointError(f"has {brief(name)} of shape {tuple(parts[name].shape)} for it")
        for row, most in zip(rows, limits[name], strict=True):
            if row.numel() and not (row.min().item() >= 0 and row.max().item() < most):
                raise CheckpointError(f"has {brief(name)} that point outside of its weight")


def default_targets(kind: str) -> Mapping[str, list[str]]:
    """Return the modules that peft adapts if a configuration names none, by model type."""
    return getattr(PEFT_TYPE_TO_TUNER_MAPPING[PeftType(kind)], "target_module_mapping", None) or {}
