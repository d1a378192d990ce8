"""What a checkpoint's configuration may not ask for: to run code, or to fetch something from elsewhere.

Configurations come with checkpoints of strangers. What the person at the keyboard passes as an option is another
matter: it goes to the library as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ..errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
# Options of transformers that run code of strangers.
OF_CODE = ("trust_remote_code", "custom_generate", "allow_all_kernels")
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
# Those that are in transformers and torch themselves; for others it may fetch kernels.
BUILT_IN = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
# Keys under which configurations name a model of timm, which would also look on the Hub.
OF_TIMM = ("architecture", "backbone", "timm_model_name")
# What OpenCLIP's own configurations tell its tokenizers; it hands anything else to transformers, as an option.
TOKENIZER_OPTIONS = {"clean", "strip_sep_token", "language"}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of `from_pretrained` that would run code which comes with a checkpoint."""
    for name in OF_CODE:
        if options.get(name):
            raise CheckpointError(f"{name} is not supported: code that comes with a checkpoint is never run.")


def check_transformers_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose files would have transformers run code, fetch kernels, or change the weights."""
    path = folder / "config.json"
    if (folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(f"{folder} holds a model and an adapter ({ADAPTER_CONFIG}), which would change it.")
    if config.get("quantization_config") is not None:
        raise CheckpointError(f"{path} has a quantization_config: expected plain weights. Quantise when loading.")
    for key, value in _entries(config):
        if key.lstrip("_") in IMPLEMENTATIONS:
            names = value.values() if isinstance(value, Mapping) else [value]
            if other := [name for name in names if name not in BUILT_IN]:
                raise CheckpointError(
                    f"{path} asks for {key}={other[0]!r}, which may be fetched from elsewhere: take it out, and pass "
                    f"{key.lstrip('_')} when loading, if you want it."
                )
    _check_timm(config, path)


def check_open_clip_config(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration that would have OpenCLIP, or the tokenizers behind it, run code or fetch models."""
    text = _part(_part(config, "model_cfg", path), "text_cfg", path)
    _check_timm(config, path)
    foreign = sorted(set(_part(text, "tokenizer_kwargs", path)) - TOKENIZER_OPTIONS)
    if foreign:
        raise CheckpointError(
            f"{path} has the tokenizer option {foreign[0]!r}, which is none of {sorted(TOKENIZER_OPTIONS)}."
        )


def text_tower(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What to make an OpenCLIP model with whose text tower is one of transformers': its configuration from the local
    Hub cache, and no weights. Empty for other models.

    OpenCLIP names such a tower by its Hub id, and would fetch it. Who trusts that id fetches its configuration first.
    """
    text = _part(_part(config, "model_cfg", path), "text_cfg", path)
    name = text.get("hf_model_name")
    if not name:
        return {}
    try:
        found = try_to_load_from_cache(str(name), "config.json")
    except HFValidationError:
        raise CheckpointError(f"{path} names the text tower {name!r}, which is not a Hub id.") from None
    if not isinstance(found, str):
        raise CheckpointError(
            f"{path} names the text tower {name!r}, which is not in the local cache: if you trust it, "
            f"run `hf download {name} config.json` first."
        )
    return {"text_cfg": {**text, "hf_model_name": str(Path(found).parent), "hf_model_pretrained": False}}


def _check_timm(config: Mapping[str, Any], path: Path) -> None:
    for key, value in _entries(config):
        if key in OF_TIMM and isinstance(value, str) and (":" in value or "/" in value):
            raise CheckpointError(
                f"{path} asks for {key}={value!r}, which would be fetched: expected a name of timm's."
            )


def _part(values: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    part = values.get(key) or {}
    if not isinstance(part, Mapping):
        raise CheckpointError(f"{path}: {key} must hold keys and values, not a {type(part).__name__}.")
    return part


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of a configuration, with those of the configurations in it."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield key, value
            yield from _entries(value)
    elif isinstance(values, list):
        for value in values:
            yield from _entries(value)
