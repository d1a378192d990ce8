"""Loading, saving and tensor names of diffusers models. The library itself is optional."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import initialization as init

from ..checkpoints.folder_files import FolderFiles
from ..checkpoints.sources import Source
from ..errors import CheckpointError, RetexError, brief, first_line
from .config_limits import check_weights, limited_model
from .containment import contained
from .named_tensors import align as align
from .named_tensors import check_names, fill, no_heads, no_labels, save_tensors
from .named_tensors import file_form as file_form
from .named_tensors import index_metadata as index_metadata
from .named_tensors import saved_names as saved_names
from .not_supported import describe as describe
from .not_supported import own_token_ids as own_token_ids
from .not_supported import resize_vocabulary as resize_vocabulary
from .not_supported import set_labels as set_labels
from .not_supported import set_vocabulary as set_vocabulary
from .plain_modules import cast as cast
from .plain_modules import feature_call as feature_call
from .plain_modules import feature_root as feature_root
from .plain_modules import input_form as input_form
from .plain_modules import is_dual_encoder as is_dual_encoder
from .plain_modules import is_text_parameter as is_text_parameter
from .plain_modules import main_inputs as main_inputs
from .plain_modules import row_inputs as row_inputs
from .plain_modules import vocabulary_names as vocabulary_names
from .same_computation import check_alike
from .untrusted_config import vet_diffusers_config

NAME = "diffusers"
CONFIG = "config.json"
WEIGHTS_STEM, SHARDED = "diffusion_pytorch_model", True
# Whether `forward` returns named fields, and a tuple of them with `return_dict=False`.
NAMES_FIELDS = True
CLASS = "_class_name"

if TYPE_CHECKING:

    class DiffusersModel(nn.Module):
        """The common interface of the models of diffusers: the methods of its `ConfigMixin`, which is no module."""

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> DiffusersModel: ...

        def save_config(self, save_directory: Path) -> None: ...


head_names, labels_of = no_heads, no_labels


def owns(model: nn.Module) -> bool:
    """Return whether a model's class is part of diffusers; custom classes cannot be found again by name."""
    module = sys.modules.get("diffusers.models.modeling_utils")  # such a model implies that it is imported
    return (
        module is not None and isinstance(model, module.ModelMixin) and type(model).__module__.startswith("diffusers.")
    )


def is_folder_of(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is one that diffusers writes for a model."""
    return CLASS in config and not ({"architectures", "model_type"} & config.keys())


def architecture(folder: Path) -> str:
    """Return the class name that a folder's `config.json` asks for."""
    return str(vetted_config(folder)[CLASS])


def vetted_config(folder: Path, files: FolderFiles | None = None) -> dict[str, Any]:
    """Return a folder's configuration, vetted: nothing in it runs code or is fetched."""
    return vet_diffusers_config((files or FolderFiles(folder)).json(CONFIG), folder / CONFIG)


def _model_class(name: Any, path: Path) -> type[DiffusersModel]:
    try:
        import diffusers.models
        from diffusers.models.modeling_utils import ModelMixin
    except ImportError:
        raise CheckpointError(
            f"{path} asks for a model of diffusers, which is not installed: pip install diffusers."
        ) from None
    # `getattr` alone would import any module of diffusers by name.
    public = isinstance(name, str) and name.isidentifier() and name[0].isupper() and name in dir(diffusers.models)
    found = getattr(diffusers.models, name, None) if public else None
    is_model = isinstance(found, type) and issubclass(found, ModelMixin) and hasattr(found, "from_config")
    if found is None or not is_model:
        raise CheckpointError(f"{path} asks for {brief(name)}, which is not a model class of diffusers.")
    return found


def load(
    folder: Path,
    source: Source,
    *,
    files: FolderFiles | None = None,
    copy: bool = True,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Load a folder's weights (`source`) into the model it describes. diffusers receives tensors, never file names."""
    if options:
        raise CheckpointError(f"a diffusers model takes no {sorted(options)[0]!r}, an option of transformers.")
    model = _create(folder / CONFIG, vetted_config(folder, files))
    check_names(model, source, CONFIG)
    return fill(model, source, copy=copy, dtype=dtype).eval()


def load_on_meta(folder: Path, source: Source | None = None, *, files: FolderFiles | None = None) -> nn.Module:
    """Create the model of `load` without values: names, shapes, ties and configuration."""
    with torch.device("meta"), init.meta_device_safe_creation_ops():
        return _create(folder / CONFIG, vetted_config(folder, files)).eval()


def _create(path: Path, config: Mapping[str, Any]) -> nn.Module:
    cls = _model_class(config[CLASS], path)
    try:
        with contained(path):
            return cls.from_config(dict(config))
    except RetexError:
        raise
    except Exception as error:  # an untrusted file may make diffusers raise anything; keep the cause
        raise CheckpointError(f"{path} does not describe a {cls.__name__}: {first_line(error)}") from error


def limited(folder: Path, source: Source, *, files: FolderFiles | None = None) -> AbstractContextManager[None]:
    """Within this context, create a folder's model only if its weights (`source`) could fill it."""
    return limited_model(folder / CONFIG, vetted_config(folder, files), source)


def plan(folder: Path, source: Source, *, files: FolderFiles | None = None) -> nn.Module:
    """Create a folder's model on the meta device, and check its weights (`source`) against its configuration."""
    with limited(folder, source, files=files):
        model = load_on_meta(folder, files=files)
    check_names(model, source, CONFIG)
    check_weights(folder / CONFIG, model, source, {name: info for name, (info, _) in align(model, source)[0].items()})
    return model


def check_configuration(model: nn.Module, source: Source, *, is_base: bool = False) -> None:
    """Refuse a checkpoint whose model computes otherwise than this one: another activation, another epsilon."""
    check_alike(model, source, _described, is_base=is_base)


def _described(folder: Path, source: Source) -> nn.Module:
    with limited(folder, source):
        return load_on_meta(folder)


def save(model: DiffusersModel, folder: Path, max_shard_size: str | int) -> None:
    """Write the files that the model's own `from_pretrained` reads."""
    save_config(model, folder)
    save_tensors(model, folder, WEIGHTS_STEM, max_shard_size)


def save_config(model: DiffusersModel, folder: Path) -> None:
    """Write all that `save` writes, except the weights."""
    model.save_config(folder)


def num_labels(model: nn.Module) -> int | None:
    return None
