"""What a model's main input looks like, as far as its configuration says: tokens, or a signal of some shape."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

TOKEN_ID = re.compile(r"_token_ids?$|_token_index$")
# Side of the images of models that take any size, and a second of sound.
IMAGE_SIZE, SECOND = 224, 16_000


@dataclass(frozen=True)
class Tokens:
    """Token ids below `size`, in sequences of at most `longest`; those `reserved` stand for something else (padding,
    the place of an image)."""

    name: str
    size: int
    longest: int | None = None
    reserved: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Signal:
    """Real numbers: images, video, spectrograms, waves. Neighbours along the last `smooth` axes of `shape` (of one row)
    resemble each other."""

    name: str
    shape: tuple[int, ...]
    smooth: int


InputForm = Tokens | Signal


def transformers_form(model: PreTrainedModel, name: str) -> InputForm | None:
    """Return the form of a main input of a model of transformers."""
    config: Any = model.config
    if name == "input_ids":
        try:
            weight = getattr(model.get_input_embeddings(), "weight", None)
        except (AttributeError, NotImplementedError):  # of several towers, or with a table of its own kind
            weight = None
        if not isinstance(weight, Tensor):
            return None
        named = _token_ids(config.to_dict())
        longest = getattr(config, "max_position_embeddings", None)
        longest = longest if isinstance(longest, int) and longest > 0 else None
        return Tokens(name, len(weight), longest, frozenset(named))
    if name == "pixel_values":
        config = getattr(config, "vision_config", config)
        frames = getattr(config, "num_frames", None)
        side = getattr(config, "image_size", None) or IMAGE_SIZE
        sides = (side, side) if isinstance(side, int) else tuple(side)
        shape = (getattr(config, "num_channels", None) or 3, *sides[-2:])
        return Signal(name, shape if frames is None else (frames, *shape), smooth=2)
    bins = getattr(config, "num_mel_bins", None)
    if name == "input_features" and bins is not None and hasattr(config, "max_source_positions"):
        return Signal(name, (bins, 2 * config.max_source_positions), smooth=2)
    if name == "input_values" and bins is not None:
        return Signal(name, (config.max_length, bins), smooth=2)
    if name == "input_values" and hasattr(config, "conv_stride"):
        return Signal(name, (SECOND,), smooth=1)
    return None


def _token_ids(values: Any) -> set[int]:
    """Return the ids of all tokens that a configuration names.

    >>> sorted(_token_ids({"pad_token_id": 0, "text_config": {"eos_token_id": [2, 3]}, "image_token_index": 9}))
    [0, 2, 3, 9]
    """
    found: set[int] = set()
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _token_ids(value)
        elif isinstance(name, str) and TOKEN_ID.search(name):
            found |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return found
