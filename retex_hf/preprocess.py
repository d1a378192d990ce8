"""From texts and images to batches, with the tokenizer or processor that lies beside a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer

from .config import CONFIG_NAME
from .errors import ArtifactError, InputError, first_line
from .libraries import library_of, openclip
from .loading import check_side_files
from .paths import as_path

TEXT, IMAGE = "text", "image"


class Preprocessor:
    """Makes batches of raw inputs: keyword arguments of the model's `forward`.

    Args:
        kind: `"text"` (strings, or pairs of strings) or `"image"` (PIL images, or arrays of bytes).
        collate: Turns a list of such inputs into a batch.
        tokenizer: What turns generated token ids into text again, where the model reads texts.
        encode_texts: For dual encoders of images and texts: what turns class prompts into a batch of the text side.
    """

    def __init__(
        self,
        kind: str,
        collate: Callable[[list[Any]], dict[str, Tensor]],
        tokenizer: Any = None,
        encode_texts: Callable[[list[str]], dict[str, Tensor]] | None = None,
    ) -> None:
        self.kind, self.tokenizer, self.encode_texts = kind, tokenizer, encode_texts
        self._collate = collate

    def __call__(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        inputs = [Image.fromarray(value) if isinstance(value, np.ndarray) else value for value in inputs]
        for index, value in enumerate(inputs):
            if not (_is_text(value) if self.kind == TEXT else isinstance(value, Image.Image)):
                expected = "a text or a pair of texts" if self.kind == TEXT else "an image"
                raise InputError(f"Input {index + 1} is a {type(value).__name__}, but this model takes {expected}.")
        return self._collate(inputs)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )


def load_preprocessor(folder: str | Path, model: nn.Module, *, max_length: int | None = None) -> Preprocessor:
    """The preprocessor of a model, from the files of a folder.

    Args:
        folder: Where tokenizer or processor files lie, such as an artifact; of that, they must be those it records.
        model: The wrapped model; it decides between texts and images.
        max_length: Texts are cut after so many tokens; default: what the tokenizer and the model can take.
    """
    folder = as_path(folder)
    if (folder / CONFIG_NAME).exists():
        check_side_files(folder)
    if library_of(model) is openclip:
        return _open_clip_preprocessor(folder, model)
    if model.main_input_name == "pixel_values" or library_of(model).is_dual_encoder(model):
        processor = _load(AutoImageProcessor, "image processor", folder)
        encode = None
        if library_of(model).is_dual_encoder(model):
            tokenizer = _load(AutoTokenizer, "tokenizer", folder)

            def encode(texts: list[str]) -> dict[str, Tensor]:
                return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

        mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
        return Preprocessor(
            IMAGE,
            lambda images: dict(processor([image.convert(mode) for image in images], return_tensors="pt")),
            encode_texts=encode,
        )
    if model.main_input_name != "input_ids":
        raise ArtifactError(
            f"{type(model).__name__} takes {model.main_input_name!r}; batches are made here of texts and images only."
        )
    return _text_preprocessor(folder, model, max_length)


def _text_preprocessor(folder: Path, model: nn.Module, max_length: int | None) -> Preprocessor:
    tokenizer = _load(AutoTokenizer, "tokenizer", folder)
    generates_in_place = model.can_generate() and not model.config.is_encoder_decoder
    if generates_in_place:
        tokenizer.padding_side = "left"  # what is generated must follow the text, not the padding
    if tokenizer.pad_token is None:
        # What is padded is masked, so any token will do; this is the usual one.
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ArtifactError(f"The tokenizer in {folder} has neither a padding token nor one that ends a text.")
    positions = getattr(model.config, "max_position_embeddings", None)
    # A tokenizer that knows no limit says so by a huge number.
    longest = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
    if max_length is None:
        max_length = longest
    elif max_length < 1 or (positions and max_length > longest):
        most = f" of at most {longest}, which is what the model takes" if positions else ""
        raise InputError(f"max_length must be a positive number{most}, not {max_length}.")
    cut = {"truncation": True, "max_length": max_length} if max_length < 1_000_000 else {}

    def collate(texts: list[Any]) -> dict[str, Tensor]:
        pairs = [text if isinstance(text, (tuple, list)) else (text, None) for text in texts]
        kinds = {second is None for _, second in pairs}
        if len(kinds) > 1:  # texts of one task and pairs of another, which tokenizers take one by one only
            rows = [tokenizer(first, second, **cut) for first, second in pairs]
            return dict(tokenizer.pad(rows, return_tensors="pt"))
        columns = [list(column) for column in zip(*pairs, strict=True)]
        return dict(tokenizer(*(columns[:1] if True in kinds else columns), padding=True, return_tensors="pt", **cut))

    return Preprocessor(TEXT, collate, tokenizer)


def _open_clip_preprocessor(folder: Path, model: nn.Module) -> Preprocessor:
    transform = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)

    def encode(texts: list[str]) -> dict[str, Tensor]:
        openclip.read_config(folder)  # which may not ask the tokenizer to run code
        try:
            tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
        except Exception as error:  # OpenCLIP raises whatever its tokenizers do
            raise ArtifactError(f"{folder}: the text tokenizer does not load: {first_line(error)}") from error
        return {"text": tokenizer(texts)}

    return Preprocessor(
        IMAGE,
        lambda images: {"image": torch.stack([transform(image.convert("RGB")) for image in images])},
        encode_texts=encode,
    )


def _load(auto_class: type, what: str, folder: Path) -> Any:
    try:
        # Left open, transformers would ask the person at the keyboard whether to run code that lies in the folder.
        return auto_class.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a missing or foreign file makes transformers raise
        raise ArtifactError(
            f"{folder} holds no {what} that loads ({first_line(error)}); save the {what} of the base there."
        ) from error
