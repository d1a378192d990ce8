"""Loading, saving, tensor names and feature extraction of OpenCLIP models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.coca_model import CoCa
from open_clip.model import CLIP, CustomTextCLIP
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoints.folder_files import FolderFiles, private_copy
from ..checkpoints.inventory import Inventory
from ..checkpoints.sources import Source, TensorInfo
from ..errors import CheckpointError, RetexError, first_line, shorten
from .config_limits import check_weights, limited_model
from .containment import contained
from .input_forms import IMAGE_SIZE, InputForm, Signal
from .not_supported import own_token_ids as own_token_ids
from .not_supported import resize_vocabulary as resize_vocabulary
from .not_supported import set_labels as set_labels
from .not_supported import set_vocabulary as set_vocabulary
from .same_computation import check_alike, structure_difference
from .untrusted_config import text_tower, vet_open_clip_config

NAME = "open_clip"
CONFIG, WEIGHTS_FILE = "open_clip_config.json", "open_clip_model.safetensors"
WEIGHTS_STEM, SHARDED = Path(WEIGHTS_FILE).stem, False
NAMES_FIELDS = False
# Beginnings of OpenCLIP's warnings about a model without weights.
WITHOUT_WEIGHTS = ("No pretrained weights loaded", "Local config loaded, but no CLIP weights found")
# Attribute that holds the model's `open_clip_config.json` as a dict, which OpenCLIP does not keep.
CONFIG_ATTRIBUTE = "open_clip_config"

OpenClipModel = CLIP | CustomTextCLIP | CoCa


def owns(model: nn.Module) -> bool:
    return isinstance(model, OpenClipModel)


def architecture(folder: Path) -> str:
    """Return the library's name: an OpenCLIP folder does not name a class."""
    return NAME


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
    """Load a folder's weights (`source`) into the model it describes, and keep its configuration.

    OpenCLIP receives tensors, never file names. Loading is always strict, and always copies.
    """
    if options:
        raise CheckpointError(f"an OpenCLIP model takes no {sorted(options)[0]!r}, an option of transformers.")
    config = vetted_config(folder, files)
    model = _create(folder, config)
    aligned, unexpected = align(model, source)
    if unexpected:
        raise CheckpointError(f"{source.label} holds {shorten(unexpected)}, which {CONFIG} does not ask for.")
    try:
        model.load_state_dict({name: read() for name, (_, read) in aligned.items()})
    except RuntimeError as error:
        # torch's first line only says that something does not fit; the second says what.
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise CheckpointError(f"{folder} does not load as an OpenCLIP model: {reason}") from error
    setattr(model, CONFIG_ATTRIBUTE, config)
    return model if dtype is None else model.to(dtype)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model in place."""
    model.to(dtype)


def load_on_meta(folder: Path, source: Source | None = None, *, files: FolderFiles | None = None) -> nn.Module:
    """Create the model of `load` without values: names, shapes, ties and configuration."""
    config = vetted_config(folder, files)
    with torch.device("meta"):
        model = _create(folder, config, device="meta")
    setattr(model, CONFIG_ATTRIBUTE, config)
    return model


def _create(folder: Path, config: dict[str, Any], **options: Any) -> nn.Module:
    """Create a model from a folder's configuration; fetch nothing."""
    path = folder / CONFIG
    options |= {"load_weights": False, "pretrained_text": False, **text_tower(config, path)}
    try:
        with contained(path), private_copy({CONFIG: config}) as copy, _no_warning_of_missing_weights():
            return open_clip.create_model(f"local-dir:{copy}", **options).eval()
    except RetexError:
        raise
    except Exception as error:  # an untrusted file may make OpenCLIP raise anything; keep the cause
        raise CheckpointError(f"{path} does not describe an OpenCLIP model: {first_line(error)}") from error


def limited(folder: Path, source: Source, *, files: FolderFiles | None = None) -> AbstractContextManager[None]:
    """Within this context, create a folder's model only if its weights (`source`) could fill it."""
    return limited_model(folder / CONFIG, vetted_config(folder, files), source)


def plan(folder: Path, source: Source, *, files: FolderFiles | None = None) -> nn.Module:
    """Create a folder's model on the meta device, and check its weights (`source`) against its configuration."""
    path = folder / CONFIG
    with limited(folder, source, files=files):
        model = load_on_meta(folder, files=files)
    unexpected = sorted(source.infos.keys() - model.state_dict().keys())
    if unexpected:
        raise CheckpointError(f"{source.label} holds {shorten(unexpected)}, which {CONFIG} does not ask for.")
    check_weights(path, model, source, source.infos)
    return model


@contextmanager
def _no_warning_of_missing_weights() -> Iterator[None]:
    """Silence OpenCLIP's warning, on the root logger, about a model without weights: here that is intended."""
    root = logging.getLogger()

    def others(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(WITHOUT_WEIGHTS)

    root.addFilter(others)
    try:
        yield
    finally:
        root.removeFilter(others)


def describe(
    model: nn.Module,
    model_config: str | dict[str, Any] | None,
    folder: Path | None,
    sibling: nn.Module | None,
) -> None:
    """Make sure a model carries its configuration, which OpenCLIP itself does not keep.

    Take it from `model_config` (an architecture name or its dict), else from the model itself (if `load` created it),
    else from `folder` or a `sibling` of the same architecture.
    """
    if model_config is None:
        if hasattr(model, CONFIG_ATTRIBUTE):
            return
        if folder is not None and (folder / CONFIG).is_file():
            _attach(model, vetted_config(folder), folder)
        elif hasattr(sibling, CONFIG_ATTRIBUTE):
            _attach(model, getattr(sibling, CONFIG_ATTRIBUTE), Path("the base's configuration"))
        else:
            raise CheckpointError(
                "An OpenCLIP module does not know its own configuration: "
                'pass model_config="ViT-B-32" (its architecture name, or the dict) to from_experts.'
            )
        return
    config = open_clip.get_model_config(model_config) if isinstance(model_config, str) else deepcopy(model_config)
    if config is None:
        raise CheckpointError(f"OpenCLIP has no architecture named {model_config!r}.")
    preprocess = dict(getattr(model.visual, "preprocess_cfg", {}))
    for key, attribute in (("mean", "image_mean"), ("std", "image_std")):
        if getattr(model.visual, attribute, None) is not None:
            preprocess.setdefault(key, list(getattr(model.visual, attribute)))
    _attach(model, {"model_cfg": config, "preprocess_cfg": preprocess}, Path("model_config"))


def _attach(model: nn.Module, config: dict[str, Any], path: Path) -> None:
    """Attach a configuration to a model, after checking that it describes this model."""
    with torch.device("meta"):
        made = _create(path, config, device="meta")
    difference = structure_difference(model, made)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    for name, tensor in model.state_dict().items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            difference = difference or f"tensor {name!r} has shape {tuple(tensor.shape)}"
    if shapes and difference is None:
        difference = f"tensor {next(iter(shapes))!r} is missing"
    if difference is not None:
        raise CheckpointError(
            f"{path} does not make this model ({difference}): pass model_config=, the architecture name or the dict "
            "that it was made with, to from_experts."
        )
    setattr(model, CONFIG_ATTRIBUTE, config)


def vetted_config(folder: Path, files: FolderFiles | None = None) -> dict[str, Any]:
    """Return a folder's configuration, vetted: nothing in it runs code or is fetched."""
    return vet_open_clip_config((files or FolderFiles(folder)).json(CONFIG), folder / CONFIG)


def save(model: nn.Module, folder: Path, max_shard_size: str | int) -> None:
    """Write the two files that `open_clip.create_model("local-dir:...")` reads. It reads a single weight file, so
    `max_shard_size` does not apply."""
    save_config(model, folder)
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def save_config(model: nn.Module, folder: Path) -> None:
    """Write all that `save` writes, except the weights."""
    text = json.dumps(getattr(model, CONFIG_ATTRIBUTE), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def saved_names(model: nn.Module) -> list[str]:
    """Return the names of the tensors that `save` writes, as the model has them."""
    return list(model.state_dict())


def file_form(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as they are: OpenCLIP's files use the model's own names."""
    return tensors


def index_metadata(model: nn.Module) -> dict[str, Any]:
    """Return no index metadata: OpenCLIP reads a single weight file, without an index."""
    return {}


def head_names(model: nn.Module, names: list[str]) -> set[str]:
    """Return no head parameters: OpenCLIP models classify by text."""
    return set()


def align(model: nn.Module, source: Source) -> tuple[dict[str, tuple[TensorInfo, Callable[[], Tensor]]], list[str]]:
    """Map a source's tensors to the model's names, without the `module.` prefix of training checkpoints."""
    known = model.state_dict()
    aligned: dict[str, tuple[TensorInfo, Callable[[], Tensor]]] = {}
    unexpected = []
    for key, info in source.infos.items():
        name = key.removeprefix("module.")
        if name in known:
            aligned[name] = (info, partial(source.read, key))
        elif not name.endswith("embeddings.position_ids"):  # a constant that older text towers saved
            unexpected.append(key)
    return aligned, unexpected


def labels_of(source: Source) -> dict[str, Any]:
    return {}


def num_labels(model: nn.Module) -> int | None:
    return None


def check_configuration(model: nn.Module, source: Source, *, is_base: bool = False) -> None:
    """Refuse a checkpoint whose model computes otherwise than this one: with QuickGELU, say."""
    check_alike(model, source, _described, is_base=is_base)


def _described(folder: Path, source: Source) -> nn.Module:
    with limited(folder, source):
        return load_on_meta(folder)


def vocabulary_names(model: nn.Module, inventory: Inventory) -> list[str]:
    """Return none: OpenCLIP's towers share one tokenizer, which experts do not extend."""
    return []


def is_dual_encoder(model: nn.Module) -> bool:
    """Return whether images and texts are encoded apart; CoCa's captions depend on their images."""
    return not isinstance(model, CoCa)


def is_text_parameter(name: str) -> bool:
    """Return whether a parameter of a dual encoder belongs to its text side, which OpenCLIP does not always name."""
    return not name.startswith(("visual.", "logit_"))


def feature_root(model: OpenClipModel) -> nn.Module:
    return model.visual


def feature_call(model: nn.Module) -> tuple[str, str]:
    """Return the submodule that computes features, and its method."""
    return "visual", "forward"


def main_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the image input in `forward` and in `generate`."""
    return ("image", "images")


def row_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return the names of inputs that tell how many rows a batch has; the first match wins."""
    return (*main_inputs(model), "text")


def input_form(model: OpenClipModel) -> InputForm:
    """Return the form of the images."""
    size = getattr(model.visual, "image_size", None) or IMAGE_SIZE
    return Signal("image", (3, *((size, size) if isinstance(size, int) else size)), smooth=2)
