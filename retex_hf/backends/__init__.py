"""The supported model libraries, each a module with the same functions; and plain modules of no library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import is_open_clip
from ..checkpoints.folder_files import FolderFiles
from ..errors import ConfigError, InputError
from . import diffusers_models, hf_transformers, openclip, plain_modules, sentence_modules, timm_models
from .protocol import Backend

__all__ = ["Backend", "sentence_modules"]

# The order matters: the last accepts any module.
LIBRARIES: dict[str, Backend] = {
    hf_transformers.NAME: hf_transformers,
    openclip.NAME: openclip,
    timm_models.NAME: timm_models,
    diffusers_models.NAME: diffusers_models,
    plain_modules.NAME: plain_modules,
}
# Libraries whose models do not keep their configuration.
DESCRIBED: tuple[Backend, ...] = (openclip, timm_models)


def library_of(model: nn.Module) -> Backend:
    """Return the library that a model comes from."""
    return next(library for library in LIBRARIES.values() if library.owns(model))


def library_of_folder(folder: Path) -> Backend:
    """Return the library that wrote the configuration in a folder."""
    if is_open_clip(folder):
        return openclip
    config = FolderFiles(folder).json(hf_transformers.CONFIG)
    if timm_models.is_folder_of(config):
        return timm_models
    if diffusers_models.is_folder_of(config):
        return diffusers_models
    return hf_transformers


def kind_of_model(model: nn.Module) -> str:
    """Return the name that experts must share: the class, or for timm, where one class makes many, the architecture."""
    return timm_models.architecture_of(model) if timm_models.owns(model) else type(model).__name__


def parse_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None = None) -> torch.dtype | None:
    """Return the dtype to load a model with; None keeps the stored one. `torch_dtype` is an alias of `dtype`."""
    given: dict[str, torch.dtype | None] = {}  # None: "auto"
    for name, value in (("dtype", dtype), ("torch_dtype", torch_dtype)):
        if value is None:
            continue
        is_auto = isinstance(value, str) and value == "auto"
        found = getattr(torch, value, None) if isinstance(value, str) else value
        # Floats of 8 bits or fewer are storage formats with separate scales; torch does not compute in them.
        is_float = isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1
        if not is_auto and not is_float:
            raise ConfigError(
                f'{name} must be a floating-point dtype that torch computes in, such as "float16", or "auto", '
                f"not {value!r}."
            )
        given[name] = None if is_auto else found
    if len(set(given.values())) > 1:
        raise ConfigError(f"dtype={dtype!r} and torch_dtype={torch_dtype!r} are two names for one setting.")
    return next(iter(given.values()), None)


def as_inputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return a batch as keyword arguments of a model's forward; a bare tensor is its main input."""
    if isinstance(batch, Tensor):
        return {library_of(model).main_inputs(model)[0]: batch}
    if not isinstance(batch, Mapping):
        raise InputError(f"A batch must be a dict of keyword arguments or a tensor, not a {type(batch).__name__}.")
    return dict(batch)
