"""The two libraries whose models we wrap, behind the same handful of functions."""

from __future__ import annotations

from types import ModuleType

from torch import nn

from ..errors import CheckpointError
from . import hf_transformers, openclip

LIBRARIES = {library.NAME: library for library in (hf_transformers, openclip)}


def library_of(model: nn.Module) -> ModuleType:
    """The library that a model comes from."""
    for library in LIBRARIES.values():
        if library.owns(model):
            return library
    raise CheckpointError(f"{type(model).__name__} is neither a transformers nor an OpenCLIP model.")
