"""The two libraries whose models we wrap, behind the same handful of functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError, InputError
from . import hf_transformers, openclip

LIBRARIES = {library.NAME: library for library in (hf_transformers, openclip)}


def library_of(model: nn.Module) -> ModuleType:
    """The library that a model comes from."""
    for library in LIBRARIES.values():
        if library.owns(model):
            return library
    raise CheckpointError(f"{type(model).__name__} is neither a transformers nor an OpenCLIP model.")


def parse_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None = None) -> torch.dtype | None:
    """The dtype to load a model with; None leaves it as it is stored. `torch_dtype` is another name of the same."""
    given = {}
    for name, value in (("dtype", dtype), ("torch_dtype", torch_dtype)):
        if value is None:
            continue
        found = getattr(torch, value, None) if isinstance(value, str) and value != "auto" else value
        if found != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
            raise ConfigError(f'{name} must be a floating-point dtype such as "float16", or "auto", not {value!r}.')
        given[name] = found
    if len(set(given.values())) > 1:
        raise ConfigError(f"dtype={dtype!r} and torch_dtype={torch_dtype!r} are two names of one setting.")
    found = next(iter(given.values()), None)
    return None if found == "auto" else found


def as_inputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A batch as keyword arguments of a model's forward; a bare tensor is its main input."""
    if isinstance(batch, Tensor):
        return {library_of(model).row_inputs(model)[0]: batch}
    if not isinstance(batch, Mapping):
        raise InputError(f"A batch must be a dict of keyword arguments or a tensor, not a {type(batch).__name__}.")
    return dict(batch)
