"""Modules of no known library: any `nn.Module`, which the caller creates with a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.folder_files import FolderFiles
from ..checkpoints.inventory import Inventory
from ..checkpoints.sources import Source, check_module
from ..errors import CheckpointError, ConfigError
from .named_tensors import align as align
from .named_tensors import check_names, fill, no_heads, no_labels, save_tensors
from .named_tensors import file_form as file_form
from .named_tensors import index_metadata as index_metadata
from .named_tensors import saved_names as saved_names
from .not_supported import architecture as architecture
from .not_supported import describe as describe
from .not_supported import load_on_meta as load_on_meta
from .not_supported import own_token_ids as own_token_ids
from .not_supported import resize_vocabulary as resize_vocabulary
from .not_supported import set_labels as set_labels
from .not_supported import set_vocabulary as set_vocabulary
from .not_supported import vetted_config as vetted_config
from .same_computation import check_alike

NAME = "torch"
# Such a model has no file that describes it.
CONFIG = "model_config.json"
WEIGHTS_STEM, SHARDED = "model", True
NAMES_FIELDS = False
HOW_TO_MAKE = "from_pretrained(..., make_model=lambda: YourModule(...)), a function that makes one, with any weights"

head_names, labels_of = no_heads, no_labels


class Skeleton(nn.Module):
    """The tensors of a module whose class is not at hand, on the meta device: for comparison, not to run."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        for name, info in source.infos.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                child = module._modules.get(part)
                if child is None:
                    child = module._modules[part] = nn.Module()
                module = child
            if last in module._modules:
                raise CheckpointError(f"{source.label}: {name!r} is the name of a tensor and of a module.")
            module._buffers[last] = torch.empty(info.shape, dtype=info.dtype, device="meta")


def owns(model: nn.Module) -> bool:
    return True


def plan(folder: Path, source: Source, *, files: FolderFiles | None = None) -> nn.Module:
    """Return a stand-in with the tensors of the weights; only `load` learns the class."""
    return Skeleton(source)


def load(
    folder: Path,
    source: Source,
    *,
    files: FolderFiles | None = None,
    copy: bool = True,
    make_model: Callable[[], nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Load a folder's weights (`source`) into the module that the caller's function creates."""
    if options:
        raise CheckpointError(f"a module of your own takes no option {sorted(options)[0]!r}.")
    if make_model is None:
        raise CheckpointError(f"it was built from modules of a custom class: load it with {HOW_TO_MAKE}.")
    if not callable(make_model) or isinstance(make_model, nn.Module):
        raise ConfigError(f"make_model must be a function that makes a module, not a {type(make_model).__name__}.")
    model = make_model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"make_model must make an nn.Module, not a {type(model).__name__}.")
    check_module(model, f"the {type(model).__name__} of make_model")
    check_names(model, source, f"the {type(model).__name__} of make_model")
    return fill(model, source, copy=copy, dtype=dtype).eval()


@contextmanager
def limited(folder: Path, source: Source) -> Iterator[None]:
    """Limit nothing: only the caller creates the model of such a folder."""
    yield


def save(model: nn.Module, folder: Path, max_shard_size: str | int) -> None:
    """Write the weights. There is no configuration, because the class is the author's own."""
    save_tensors(model, folder, WEIGHTS_STEM, max_shard_size)


def save_config(model: nn.Module, folder: Path) -> None:
    """Write nothing: apart from the weights, such a model has no files."""


def num_labels(model: nn.Module) -> int | None:
    return None


def is_dual_encoder(model: nn.Module) -> bool:
    return False


def is_text_parameter(name: str) -> bool:
    return False


def feature_root(model: nn.Module) -> nn.Module:
    return model


def vocabulary_names(model: nn.Module, inventory: Inventory) -> list[str]:
    """Return none: nothing tells which tensors have a row per token."""
    return []


def check_configuration(model: nn.Module, source: Source, *, is_base: bool = False) -> None:
    """Refuse a module that computes otherwise than this one, as far as its parts show it; of bare tensors, nothing
    does."""
    check_alike(model, source, is_base=is_base)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model in place."""
    model.to(dtype)


def feature_call(model: nn.Module) -> tuple[str, str]:
    """Return the submodule that computes features, and its method."""
    return "", "forward"


def main_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return the name of the first argument of `forward`."""
    return row_inputs(model)[:1]


def row_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return the named arguments of `forward` in order: the first that is a tensor has the rows."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind not in kinds)


def input_form(model: nn.Module) -> None:
    """Return nothing: no configuration says what the input looks like."""
