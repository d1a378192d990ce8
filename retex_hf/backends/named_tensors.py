"""Models whose files hold their state dict under the model's own names; tied tensors once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from ..checkpoints.sources import Source, TensorInfo
from ..errors import CheckpointError, shorten

# Prefix that data-parallel training adds to the names.
PARALLEL = "module."


def saved_names(model: nn.Module) -> list[str]:
    """Return the names of the tensors that `save_tensors` writes: the first of each tied group."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
    return list(first.values())


def save_tensors(model: nn.Module, folder: Path, stem: str, max_shard_size: str | int) -> None:
    """Write a model's tensors as safetensors, in shards of at most `max_shard_size`."""
    tensors = model.state_dict()
    # Copy, because views of shared memory are refused.
    plain = {name: tensors[name].detach().cpu().contiguous().clone() for name in saved_names(model)}
    save_torch_state_dict(plain, folder, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=max_shard_size)


def file_form(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as they are: files use the model's own names."""
    return tensors


def index_metadata(model: nn.Module) -> dict[str, Any]:
    """Return no metadata for the index of sharded weights."""
    return {}


def align(model: nn.Module, source: Source) -> tuple[dict[str, tuple[TensorInfo, Callable[[], Tensor]]], list[str]]:
    """Map a source's tensors to the model's names, without the prefix of data-parallel training."""
    known = model.state_dict()
    aligned: dict[str, tuple[TensorInfo, Callable[[], Tensor]]] = {}
    unexpected = []
    for key, info in source.infos.items():
        name = key if key in known else key.removeprefix(PARALLEL)
        if name in known:
            aligned[name] = (info, partial(source.read, key))
        else:
            unexpected.append(key)
    return aligned, unexpected


def check_names(model: nn.Module, source: Source, asked_by: str) -> None:
    """Refuse weights with unexpected or missing tensors, or other shapes; `asked_by` names the origin of the model."""
    aligned, unexpected = align(model, source)
    if unexpected:
        raise CheckpointError(f"{source.label} holds {shorten(unexpected)}, which {asked_by} does not ask for.")
    tensors = model.state_dict(keep_vars=True)
    for name, (info, _) in aligned.items():
        if info.shape != tuple(tensors[name].shape):
            raise CheckpointError(
                f"{source.label}: tensor {name!r} has shape {info.shape}, but {asked_by} asks for "
                f"{tuple(tensors[name].shape)}."
            )
        if info.dtype.is_floating_point != tensors[name].is_floating_point():
            raise CheckpointError(f"{source.label}: tensor {name!r} has dtype {info.dtype}, not {tensors[name].dtype}.")
    there = {id(tensors[name]) for name in aligned}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in there and tensor.numel()]
    if missing:
        raise CheckpointError(
            f"{source.label} lacks {len(missing)} tensor(s) that {asked_by} asks for: {shorten(missing)}."
        )


def fill(model: nn.Module, source: Source, *, copy: bool, dtype: torch.dtype | None) -> nn.Module:
    """Give a model the tensors of a source, checked by `check_names`, in their stored dtypes.

    Args:
        model: The model, with tensors of its own or on the meta device.
        source: The weights.
        copy: Copy the tensors, so that writing to the model does not write to the source.
        dtype: Cast the model to this dtype instead.
    """
    stored = {info.dtype for info in source.infos.values() if info.dtype.is_floating_point}
    if len(stored) == 1:
        # Constants that are in no file follow the weights. For models that warn about this, every tensor is set below.
        nn.Module.to(model, next(iter(stored)))
    tensors = model.state_dict(keep_vars=True)
    for name, (_, read) in align(model, source)[0].items():
        value = read()
        tensors[name].data = value.clone() if copy else value
    return model if dtype is None else nn.Module.to(model, dtype)


def no_heads(model: nn.Module, names: list[str]) -> set[str]:
    """Return no head parameters: nothing in such a model tells which layers belong to the task."""
    return set()


def no_labels(source: Source) -> dict[str, Any]:
    """Return no labels: such a checkpoint names none."""
    return {}
