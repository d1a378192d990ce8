"""Conversion of texts and images to batches, with the tokenizer or processor stored next to a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, cast

import numpy as np
import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel

from ..backends import Backend, hf_transformers, library_of, openclip
from ..backends.containment import contained
from ..backends.untrusted_processor import CheckedProcessor
from ..backends.untrusted_tokenizer import vetted_side_files
from ..checkpoints.folder_files import private_copy
from ..checkpoints.tokenizer_files import is_task_tokenizer
from ..errors import ArtifactError, InputError, WriteError, brief, first_line
from ..utils.paths import as_path
from .reading import read_config_files, read_side_files

TEXT, IMAGE = "text", "image"
# Files in which transformers looks for an image processor's settings, in this order; timm's are in the model's own.
PROCESSORS = ("processor_config.json", "preprocessor_config.json")


class Preprocessor:
    """Converts raw inputs to batches: keyword arguments of the model's `forward`.

    Args:
        kind: `"text"` (strings, or pairs of strings) or `"image"` (PIL images, or arrays of bytes).
        collate: Turns a list of such inputs into a batch.
        tokenizer: Decodes generated token ids, where the model reads texts.
        encode_texts: For dual encoders of images and texts: turns class prompts into a batch for the text encoder.

    Threads may share it. `lock` is held while it converts; hold it to use its tokenizer beside that.
    """

    def __init__(
        self,
        kind: str,
        collate: Callable[[list[Any]], dict[str, Tensor]],
        tokenizer: Any = None,
        encode_texts: Callable[[list[str]], dict[str, Tensor]] | None = None,
    ) -> None:
        self.kind, self.tokenizer, self.encode_texts = kind, tokenizer, encode_texts
        self._collate, self.lock = collate, RLock()

    def __call__(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        inputs = [Image.fromarray(value) if isinstance(value, np.ndarray) else value for value in inputs]
        for index, value in enumerate(inputs):
            if not (_is_text(value) if self.kind == TEXT else isinstance(value, Image.Image)):
                expected = "a text or a pair of texts" if self.kind == TEXT else "an image"
                raise InputError(f"Input {index + 1} is a {type(value).__name__}, but this model takes {expected}.")
        with self.lock:  # a tokenizer is set to pad and to truncate before it runs
            return self._collate(inputs)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )


def load_preprocessor(
    folder: str | Path, model: nn.Module, *, max_length: int | None = None, tokens: int | None = None
) -> Preprocessor:
    """Load the preprocessor of a model from the files of a folder.

    Args:
        folder: Folder with tokenizer or processor files; those of an artifact must be as recorded.
        model: The wrapped model; it determines whether inputs are texts or images.
        max_length: Truncate texts to this many tokens; default: the limit of the tokenizer and the model.
        tokens: Vocabulary size of the task whose tokenizer this is; default: that of the model.
    """
    library = library_of(model)
    if library not in (hf_transformers, openclip):
        raise InputError(
            f"{type(model).__name__} needs tensors as inputs; raw inputs are preprocessed for models of "
            "transformers and OpenCLIP only."
        )
    files = _SideFiles.read(as_path(folder), library)
    if not isinstance(model, PreTrainedModel):
        return _open_clip_preprocessor(files, model)
    if model.main_input_name == "pixel_values" or library.is_dual_encoder(model):
        process = files.image_processor("L" if getattr(model.config, "num_channels", 3) == 1 else "RGB")
        encode = None
        if library.is_dual_encoder(model):
            tokenizer = files.load(AutoTokenizer, "tokenizer")

            def encode(texts: list[str]) -> dict[str, Tensor]:
                return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

        return Preprocessor(IMAGE, process, encode_texts=encode)
    if model.main_input_name != "input_ids":
        raise ArtifactError(
            f"{type(model).__name__} takes {model.main_input_name!r}; only texts and images are preprocessed here."
        )
    known = tokens or len(cast(Tensor, model.get_input_embeddings().weight))
    return _text_preprocessor(files, model, max_length, known)


def _text_preprocessor(files: _SideFiles, model: PreTrainedModel, max_length: int | None, known: int) -> Preprocessor:
    tokenizer, folder = files.load(AutoTokenizer, "tokenizer"), files.folder
    generates_in_place = model.can_generate() and not model.config.is_encoder_decoder
    if generates_in_place:
        tokenizer.padding_side = "left"  # generated tokens must follow the text, not the padding
    if tokenizer.pad_token is None:
        # Padding is masked, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ArtifactError(f"The tokenizer in {folder} has neither a padding token nor one that ends a text.")
    positions = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(tokenizer.model_max_length, (int, float)) or tokenizer.model_max_length < 1:
        raise ArtifactError(
            f"The tokenizer in {folder} truncates texts after {brief(tokenizer.model_max_length)} tokens: expected a "
            "number above 0 as its model_max_length."
        )
    # A tokenizer without a limit gives a huge number.
    longest = int(min(tokenizer.model_max_length, positions or tokenizer.model_max_length))
    if max_length is None:
        max_length = longest
    elif max_length < 1 or (positions and max_length > longest):
        most = f" of at most {longest}, which is what the model takes" if positions else ""
        raise InputError(f"max_length must be a positive number{most}, not {max_length}.")
    cut = {"truncation": True, "max_length": max_length} if max_length < 1_000_000 else {}

    def collate(texts: list[Any]) -> dict[str, Tensor]:
        pairs = [text if isinstance(text, (tuple, list)) else (text, None) for text in texts]
        kinds = {second is None for _, second in pairs}
        if len(kinds) > 1:  # tokenizers do not take a mix of texts and pairs in one call
            rows = [tokenizer(first, second, **cut) for first, second in pairs]
            return _check_tokens(dict(tokenizer.pad(rows, return_tensors="pt")), known, folder)
        columns = [list(column) for column in zip(*pairs, strict=True)]
        batch = tokenizer(*(columns[:1] if True in kinds else columns), padding=True, return_tensors="pt", **cut)
        return _check_tokens(dict(batch), known, folder)

    return Preprocessor(TEXT, collate, tokenizer)


def _check_tokens(batch: dict[str, Tensor], known: int, folder: Path) -> dict[str, Tensor]:
    """Refuse tokens without an embedding, for which torch would only report an index out of range."""
    tokens = batch["input_ids"]
    if tokens.shape[-1] == 0:
        raise InputError("The tokenizer gives no tokens for these texts: expected non-empty texts.")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < known:
        raise ArtifactError(
            f"The tokenizer in {folder} gives the token {int(tokens.max())}, but the model has {known}: it is the "
            "tokenizer of another model."
        )
    return batch


def _open_clip_preprocessor(files: _SideFiles, model: nn.Module) -> Preprocessor:
    path = files.folder / openclip.CONFIG
    # Where OpenCLIP itself keeps them.
    settings = cast(dict[str, Any], model.get_submodule("visual").preprocess_cfg)
    try:
        transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)
    except Exception as error:  # OpenCLIP uses assertions without messages
        raise ArtifactError(
            f"{path} has a preprocess_cfg that OpenCLIP does not read ({first_line(error)}): expected its own words "
            f"and numbers, not {brief(settings)}."
        ) from error

    def process(images: list[Image.Image]) -> dict[str, Tensor]:
        return {"image": torch.stack([transform(image.convert("RGB")) for image in images])}

    def encode(texts: list[str]) -> dict[str, Tensor]:
        return {"text": files.open_clip_tokenizer()(texts)}

    return Preprocessor(IMAGE, CheckedProcessor(path, settings, process), encode_texts=encode)


@dataclass(frozen=True)
class _SideFiles:
    """The tokenizer and processor files of a folder, and its model's configuration, vetted and in memory."""

    folder: Path
    content: dict[str, bytes | dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, library: Backend) -> _SideFiles:
        home = folder.parent if is_task_tokenizer(folder.name) else folder
        files: dict[str, bytes | dict[str, Any]] = {**vetted_side_files(home, read_side_files(home))}
        if home != folder:  # a task's own tokenizer in an artifact
            inside = f"{folder.name}/"
            files = {name.removeprefix(inside): data for name, data in files.items() if name.startswith(inside)}
        beside = read_config_files(home, library.CONFIG)
        if beside.has(library.CONFIG):
            files[library.CONFIG] = library.vetted_config(home, beside)
        return cls(folder, files)

    def load(self, auto_class: type[AutoTokenizer] | type[AutoImageProcessor], what: str) -> Any:
        """Load a tokenizer or processor of transformers from a private copy, so that it can read nothing else."""
        try:
            with contained(self.folder), private_copy(self.content) as copy:
                loaded = auto_class.from_pretrained(copy, trust_remote_code=False)
        except WriteError:
            raise
        except Exception as error:  # transformers may raise anything on missing or untrusted files
            raise ArtifactError(
                f"{self.folder} holds no {what} that loads ({first_line(error)}); save the {what} of the base there."
            ) from error
        _rename(vars(loaded), str(copy), str(self.folder))
        return loaded

    def image_processor(self, mode: str) -> CheckedProcessor:
        """Load an image processor of transformers in the same way; it receives images of this mode."""
        processor = self.load(AutoImageProcessor, "image processor")
        name = next((name for name in PROCESSORS if name in self.content), hf_transformers.CONFIG)

        def process(images: list[Image.Image]) -> dict[str, Tensor]:
            return dict(processor([image.convert(mode) for image in images], return_tensors="pt"))

        return CheckedProcessor(self.folder / name, processor.to_dict(), process)

    def open_clip_tokenizer(self) -> Any:
        """Load OpenCLIP's text tokenizer in the same way."""
        try:
            with contained(self.folder), private_copy(self.content) as copy:
                return open_clip.get_tokenizer(f"local-dir:{copy}")
        except WriteError:
            raise
        except Exception as error:  # OpenCLIP passes on any exception of its tokenizers
            raise ArtifactError(f"{self.folder}: the text tokenizer does not load: {first_line(error)}") from error


def _rename(attributes: dict[str, Any], old: str, new: str) -> None:
    """Replace a temporary path by a permanent one in an object that remembers its files (to save them again)."""
    for key, value in attributes.items():
        if isinstance(value, str) and value.startswith(old):
            attributes[key] = new + value.removeprefix(old)
        elif isinstance(value, dict):
            _rename(value, old, new)
