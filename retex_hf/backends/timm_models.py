"""Loading, saving, classifiers and labels of timm models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from transformers import initialization as init

from ..checkpoints.folder_files import FolderFiles
from ..checkpoints.sources import Source
from ..errors import CheckpointError, RetexError, first_line
from .config_limits import check_weights, limited_model
from .containment import contained
from .input_forms import InputForm, Signal
from .named_tensors import align as align
from .named_tensors import check_names, fill, save_tensors
from .named_tensors import file_form as file_form
from .named_tensors import index_metadata as index_metadata
from .named_tensors import saved_names as saved_names
from .not_supported import own_token_ids as own_token_ids
from .not_supported import resize_vocabulary as resize_vocabulary
from .not_supported import set_vocabulary as set_vocabulary
from .plain_modules import cast as cast
from .plain_modules import feature_call as feature_call
from .plain_modules import feature_root as feature_root
from .plain_modules import is_dual_encoder as is_dual_encoder
from .plain_modules import is_text_parameter as is_text_parameter
from .plain_modules import main_inputs as main_inputs
from .plain_modules import row_inputs as row_inputs
from .plain_modules import vocabulary_names as vocabulary_names
from .same_computation import check_alike, structure_difference
from .untrusted_config import TIMM_DATA, vet_timm_config

NAME = "timm"
CONFIG = "config.json"
WEIGHTS_STEM, SHARDED = "model", False  # timm reads one weight file only
NAMES_FIELDS = False
# Attribute that holds the model's `config.json` as a dict, which timm does not keep.
CONFIG_ATTRIBUTE = "timm_config"

if TYPE_CHECKING:

    class TimmModel(nn.Module):
        """The common interface of the models of timm, which have no class of their own."""

        pretrained_cfg: Mapping[str, Any]
        num_classes: int
        num_features: int

        def get_classifier(self) -> nn.Module | tuple[nn.Module, ...] | list[nn.Module]: ...


def owns(model: nn.Module) -> TypeGuard[TimmModel]:
    """Return whether `timm.create_model` makes such a model; custom classes built on timm do not count."""
    place = type(model).__module__
    return (
        place.startswith("timm.models.") and not place.startswith("timm.models._") and hasattr(model, "pretrained_cfg")
    )


def is_folder_of(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is one that timm writes, not that of transformers' wrapper around timm."""
    return isinstance(config.get("architecture"), str) and not ({"architectures", "model_type"} & config.keys())


def architecture(folder: Path) -> str:
    """Return the architecture that a folder's configuration asks for."""
    return str(vetted_config(folder)["architecture"])


def architecture_of(model: TimmModel) -> str:
    """Return timm's name for a model's architecture."""
    config = getattr(model, CONFIG_ATTRIBUTE, None)
    return str(config["architecture"] if config else model.pretrained_cfg.get("architecture"))


def vetted_config(folder: Path, files: FolderFiles | None = None) -> dict[str, Any]:
    """Return a folder's configuration, vetted: nothing in it runs code or is fetched."""
    return vet_timm_config((files or FolderFiles(folder)).json(CONFIG), folder / CONFIG)


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
    """Load a folder's weights (`source`) into the model it describes. timm receives tensors, never file names."""
    if options:
        raise CheckpointError(f"a timm model takes no {sorted(options)[0]!r}, an option of transformers.")
    config = vetted_config(folder, files)
    model = _create(folder / CONFIG, config)
    check_names(model, source, CONFIG)
    return fill(model, source, copy=copy, dtype=dtype).eval()


def load_on_meta(folder: Path, source: Source | None = None, *, files: FolderFiles | None = None) -> nn.Module:
    """Create the model of `load` without values: names, shapes, ties and configuration."""
    with _on_meta():
        return _create(folder / CONFIG, vetted_config(folder, files)).eval()


@contextmanager
def _on_meta() -> Iterator[None]:
    with torch.device("meta"), init.meta_device_safe_creation_ops():
        yield


def _create(path: Path, config: Mapping[str, Any]) -> nn.Module:
    import timm  # imported late, because it is slow to import and rarely needed

    note = {key: value for key, value in config.get("pretrained_cfg", {}).items() if key in TIMM_DATA}
    note |= {"architecture": config["architecture"], "num_classes": config["num_classes"]}
    try:
        with contained(path):
            model = timm.create_model(
                config["architecture"],
                pretrained=False,
                pretrained_cfg=note,
                **{"num_classes": config["num_classes"], **config.get("model_args", {})},
            )
    except RetexError:
        raise
    except Exception as error:  # an untrusted file may make timm raise anything; keep the cause
        raise CheckpointError(f"{path} does not describe a model of timm: {first_line(error)}") from error
    setattr(model, CONFIG_ATTRIBUTE, dict(config))
    return model


def limited(folder: Path, source: Source, *, files: FolderFiles | None = None) -> AbstractContextManager[None]:
    """Within this context, create a folder's model only if its weights (`source`) could fill it."""
    path, config = folder / CONFIG, vetted_config(folder, files)
    # These keys describe images and labels; nothing is allocated from them.
    sizes = {key: value for key, value in config.items() if key not in ("pretrained_cfg", "label_names")}
    return limited_model(path, sizes, source)


def plan(folder: Path, source: Source, *, files: FolderFiles | None = None) -> nn.Module:
    """Create a folder's model on the meta device, and check its weights (`source`) against its configuration."""
    with limited(folder, source, files=files):
        model = load_on_meta(folder, files=files)
    check_names(model, source, CONFIG)
    check_weights(folder / CONFIG, model, source, {name: info for name, (info, _) in align(model, source)[0].items()})
    return model


def describe(
    model: TimmModel,
    model_config: str | dict[str, Any] | None,
    folder: Path | None = None,
    sibling: nn.Module | None = None,
) -> None:
    """Make sure a model carries its configuration, which timm itself does not keep, and that the configuration
    describes this model.

    Args:
        model: The model.
        model_config: The arguments of `timm.create_model`: `{"architecture": ..., "model_args": {...}}`, or the
            architecture's name. Default: the architecture that the model itself names, without arguments.
        folder: Unused; other libraries need it.
        sibling: Unused; other libraries need it.
    """
    if hasattr(model, CONFIG_ATTRIBUTE):
        return
    given = {"architecture": model_config} if isinstance(model_config, str) else dict(model_config or {})
    note = dict(model.pretrained_cfg)
    values = {
        "architecture": given.pop("architecture", note.get("architecture")),
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "model_args": given.pop("model_args", {}),
        "pretrained_cfg": {key: value for key, value in note.items() if key in TIMM_DATA and value is not None},
    }
    if given:
        raise CheckpointError(f"model_config has {sorted(given)[0]!r}: expected 'architecture' and 'model_args'.")
    pool = getattr(model, "global_pool", None)
    values |= {"global_pool": pool} if isinstance(pool, str) and pool else {}
    path = Path("model_config")
    config = vet_timm_config(json.loads(json.dumps(values)), path)
    with _on_meta():
        made = _create(path, config)
    if (difference := _difference(model, made)) is not None:
        raise CheckpointError(
            f"timm.create_model({config['architecture']!r}, num_classes={model.num_classes}) does not make this model "
            f"({difference}): pass model_config={{'architecture': ..., 'model_args': {{...}}}} to from_experts, with "
            "the arguments that it was made with."
        )
    setattr(model, CONFIG_ATTRIBUTE, config)


def _difference(model: nn.Module, made: nn.Module) -> str | None:
    """Say where two models are made in another way; None where they are not."""
    if (difference := structure_difference(model, made)) is not None:
        return difference
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    for name, tensor in model.state_dict().items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            return f"tensor {name!r} has shape {tuple(tensor.shape)}"
    return f"tensor {next(iter(shapes))!r} is missing" if shapes else None


def check_configuration(model: nn.Module, source: Source, *, is_base: bool = False) -> None:
    """Refuse a checkpoint whose model computes otherwise than this one: another activation, another epsilon."""
    check_alike(model, source, _described, is_base=is_base)


def _described(folder: Path, source: Source) -> nn.Module:
    with limited(folder, source):
        return load_on_meta(folder)


def save(model: nn.Module, folder: Path, max_shard_size: str | int) -> None:
    """Write the two files that `timm.create_model("local-dir:...", pretrained=True)` reads. It reads a single weight
    file, so `max_shard_size` does not apply."""
    save_config(model, folder)
    save_tensors(model, folder, WEIGHTS_STEM, 1 << 62)


def save_config(model: nn.Module, folder: Path) -> None:
    """Write all that `save` writes, except the weights."""
    text = json.dumps(getattr(model, CONFIG_ATTRIBUTE), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def head_names(model: TimmModel, names: list[str]) -> set[str]:
    """Return the parameters of the classifier, or of both where there are two."""
    found = model.get_classifier() if num_labels(model) else ()
    heads = set(found) if isinstance(found, (tuple, list)) else {found}
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module in heads)
    return {name for name in names if name.startswith(prefixes)} if prefixes else set()


def labels_of(source: Source) -> dict[str, Any]:
    """Return the label names in a checkpoint's configuration."""
    if source.folder is None:
        return {}
    names = vetted_config(source.folder).get("label_names")
    named = names.items() if isinstance(names, Mapping) else enumerate(names or ())
    return {"id2label": {str(key): str(value) for key, value in named}} if names else {}


def num_labels(model: TimmModel) -> int | None:
    return model.num_classes or None


def set_labels(model: TimmModel, labels: dict[str, Any]) -> None:
    """Give a model the label names of a task."""
    names = list(labels["id2label"].values())
    config = deepcopy(getattr(model, CONFIG_ATTRIBUTE)) | {"num_classes": len(names), "label_names": names}
    setattr(model, CONFIG_ATTRIBUTE, config)
    model.num_classes = len(names)


def input_form(model: nn.Module) -> InputForm:
    """Return the form of images that the model was made for."""
    settings: Any = model.pretrained_cfg
    return Signal(main_inputs(model)[0], tuple(settings["input_size"]), smooth=2)
