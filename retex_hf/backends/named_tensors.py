"""Models whose files hold the tensors of their state dict, under the model's own names; tied ones once."""

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

# What data-parallel training puts before the names.
PARALLEL = "module."


def saved_names(model: nn.Module) -> list[str]:
    """Names of the tensors that `save_tensors` writes: of those that are tied, the first."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
    return list(first.values())


def save_tensors(model: nn.Module, folder: Path, stem: str, max_shard_size: str | int) -> None:
    """Write a model's tensors as safetensors, in shards where they are larger than `max_shard_size`."""
    tensors = model.state_dict()
    # Copies, because views of one memory are refused.
    plain = {name: tensors[name].detach().cpu().contiguous().clone() for name in saved_names(model)}
    save_torch_state_dict(plain, folder, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=max_shard_size)


def file_form(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Files have the model's own names."""
    return tensors


def index_metadata(model: nn.Module) -> dict[str, Any]:
    """The index of sharded weights says nothing of the model."""
    return {}


def align(model: nn.Module, source: Source) -> tuple[dict[str, tuple[TensorInfo, Callable[[], Tensor]]], list[str]]:
    """Map a source's tensors to the model's names, from which data-parallel training may have moved them."""
    known = model.state_dict()
    aligned, unexpected = {}, []
    for key, info in source.infos.items():
        name = key if key in known else key.removeprefix(PARALLEL)
        if name in known:
            aligned[name] = (info, partial(source.read, key))
        else:
            unexpected.append(key)
    return aligned, unexpected


def check_names(model: nn.Module, source: Source, asked_by: str) -> None:
    """Refuse weights with tensors that a model lacks, without some that it has, or of other shapes; `asked_by` says
    what made the model."""
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
    """Give a model the tensors of a source, which `check_names` has compared, in the dtypes they are stored in.

    Args:
        model: Made with tensors of its own, or on the meta device.
        source: The weights.
        copy: Copy the tensors, so that writing to the model does not write to the source.
        dtype: Cast the model to this dtype instead.
    """
    stored = {info.dtype for info in source.infos.values() if info.dtype.is_floating_point}
    if len(stored) == 1:
        # Constants that are in no file follow the weights. Of models that warn of this, every tensor is set below.
        nn.Module.to(model, next(iter(stored)))
    tensors = model.state_dict(keep_vars=True)
    for name, (_, read) in align(model, source)[0].items():
        value = read()
        tensors[name].data = value.clone() if copy else value
    return model if dtype is None else nn.Module.to(model, dtype)


def no_heads(model: nn.Module, names: list[str]) -> set[str]:
    """Nothing in such a model says which of its layers belongs to the task."""
    return set()


def no_labels(source: Source) -> dict[str, Any]:
    """Such a checkpoint names no labels."""
    return {}
