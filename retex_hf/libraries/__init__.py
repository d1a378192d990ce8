"""The two libraries whose models we wrap, behind the same handful of functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError, InputError
from . import hf_transformers, openclip

LIBRARIES = {library.NAME: library for library in (hf_transformers, openclip)}


def library_of(model: nn.Module) -> ModuleType:
    """The library that a model comes from."""
    for library in LIBRARIES.values():
        if library.owns(model):
            return library
    raise CheckpointError(f"{type(model).__name__} is neither a transformers nor an OpenCLIP model.")


def as_inputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A batch as keyword arguments of a model's forward; a bare tensor is its main input."""
    if isinstance(batch, Tensor):
        return {library_of(model).row_inputs(model)[0]: batch}
    if not isinstance(batch, Mapping):
        raise InputError(f"A batch must be a dict of keyword arguments or a tensor, not a {type(batch).__name__}.")
    return dict(batch)
