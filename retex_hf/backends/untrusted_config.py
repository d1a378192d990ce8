"""Vet the configuration of an untrusted checkpoint: pass on only what describes a model's shape.

Libraries resolve configuration values as files, Hub ids, classes and code, at any depth, and more of them with every
release. So values are judged by what they are, not by a list of bad keys:

- numbers, booleans and null pass (`config_limits` checks their size);
- a string passes if it is a plain word, and its key does not say that it names a file, an address or a repository;
- other strings are refused where the configuration's class reads the key, and left out where it does not: such keys
  hold notes that no code needs;
- references to custom code are left out, so that every loader, at any depth, takes the library's own class or fails.

Options that the user passes are trusted and go to the library unchanged.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig

from ..errors import CheckpointError, brief

# Options of transformers that run code which comes with a checkpoint.
OF_CODE = ("trust_remote_code", "custom_generate", "allow_all_kernels")
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
# Implementations within transformers and torch; for others transformers may fetch kernels.
BUILT_IN = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
# Left out at any depth: references to custom code, and notes of a model's origin.
LEFT_OUT = {"auto_map", "_name_or_path", "name_or_path", "_commit_hash"}
# The device of a processor: for the user to choose.
PLACES = {"device"}
# Free text for people and tokenizers, which no library resolves.
FREE_TEXT = {
    "id2label", "label2id", "label_names", "architectures", "transformers_version", "task_specific_params", "prefix",
    "finetuning_task", "vocab_list", "vocabulary_map", "languages", "langs", "lang2id", "id2lang", "lang_to_id",
    "task_to_id", "doc_sep", "title_sep", "stop_strings",
}  # fmt: skip
# Keys that name an architecture of timm, which timm may also look up on the Hub.
OF_TIMM = ("architecture", "backbone", "timm_model_name")
# timm's note on the origin of its weights, and the keys of it that its data transforms read.
TIMM_NOTE = "pretrained_cfg"
TIMM_DATA = {
    "input_size", "fixed_input_size", "min_input_size", "interpolation", "crop_pct", "crop_mode", "test_input_size",
    "test_crop_pct", "test_crop_mode", "mean", "std", "num_classes", "label_offset", "label_names",
    "label_descriptions", "pool_size", "first_conv", "classifier", "tag",
}  # fmt: skip
# Other keys that timm's own configurations use to describe a model.
OF_TIMM_MODELS = {"architecture", "num_classes", "num_features", "global_pool", "label_names", "label_descriptions"}
# Arguments of timm's factory that load, fetch or wrap something, and do not describe a model's shape.
NOT_OF_SHAPE = re.compile(r"pretrained.*|checkpoint_path|cache_dir|feature.*|scriptable|exportable|no_jit|num_classes")
# Words in a key which indicate that its value names something to be opened, fetched or imported.
NAMING = {
    "path", "paths", "file", "files", "filename", "url", "urls", "uri", "dir", "directory", "folder", "checkpoint",
    "repo", "repository", "hub", "revision", "dataset", "weights", "pretrained", "module", "script", "code", "load",
}  # fmt: skip
# Letters, digits and a few signs. A dot only before a part with a digit in it ("torch.float16", "v1.5"), because
# otherwise it may be a file name.
PLAIN = re.compile(r"[A-Za-z0-9_+ -]*(?:\.[A-Za-z_+ -]*[0-9][A-Za-z0-9_+ -]*)*")
LONGEST_WORD = 200
# Tokenizer options in OpenCLIP's own configurations; it passes any other to transformers.
TOKENIZER_OPTIONS = {"clean", "strip_sep_token", "language"}
FINDS_FILES = "configuration_files"
# Arguments of tokenizers that take a file name, or are passed on unchecked.
FILES_OF_TOKENIZERS = {"vocab", "merges", "init_inputs", "sp_model_kwargs", "fast_tokenizer_files"}
TOKENS = {
    "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "model_specific_special_tokens",
    "language_codes",
}  # fmt: skip
TEMPLATES = {"chat_template", "chat_templates"}
# Counts among the settings of `generate`: their smallest sensible value, and limits beyond any real use.
COUNTS = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "max_new_tokens"), 1),
    **dict.fromkeys(
        ("max_length", "min_length", "min_new_tokens", "top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        0,
    ),
}
MOST = {"num_beams": 1_000, "num_beam_groups": 1_000, "num_return_sequences": 1_000}
MOST_OF_ANYTHING = 10_000_000
NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "length_penalty", "diversity_penalty", "guidance_scale", "max_time", "penalty_alpha",
)  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of `from_pretrained` that would run code which comes with a checkpoint."""
    for name in OF_CODE:
        if options.get(name):
            raise CheckpointError(f"{name} is not supported: code that comes with a checkpoint is never run.")


def vet_transformers_config(
    values: Mapping[str, Any], path: Path, config_class: type[PreTrainedConfig] | None
) -> dict[str, Any]:
    """Return the part of a `config.json` that transformers may read, by the rules of this module.

    `config_class` is the class that will read it. If it is None, every key counts as read.
    """
    if values.get("quantization_config") is not None:
        raise CheckpointError(f"{path} has a quantization_config: expected plain weights. Quantise when loading.")
    if FINDS_FILES in values:
        raise CheckpointError(f"{path} names other configuration files under {FINDS_FILES!r}: expected none.")
    return _vetted(values, path, config_class)


def vet_generation_config(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the part of a `generation_config.json` that transformers may read; numbers must be numbers."""
    for key in values.keys() & COUNTS.keys():
        value, least, most = values[key], COUNTS[key], MOST.get(key, MOST_OF_ANYTHING)
        is_count = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if value is not None and not is_count:
            raise CheckpointError(f"{path} has {key}={brief(value)}: expected a number from {least} to {most}.")
    for key in values.keys() & set(NUMBERS):
        value = values[key]
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise CheckpointError(f"{path} has {key}={brief(value)}: expected a number.")
    return vet_transformers_config(values, path, None)


def vet_open_clip_config(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the part of an `open_clip_config.json` that OpenCLIP may read."""
    model = part(values, "model_cfg", path)
    text = part(model, "text_cfg", path)
    _check_norms(model, path)
    foreign = sorted(set(part(text, "tokenizer_kwargs", path)) - TOKENIZER_OPTIONS)
    if foreign:
        raise CheckpointError(
            f"{path} has the tokenizer option {foreign[0]!r}, which is not one of {sorted(TOKENIZER_OPTIONS)}."
        )
    # `text_tower` resolves the names of a text tower and of its tokenizer.
    towers = {key: text[key] for key in ("hf_model_name", "hf_tokenizer_name") if key in text}
    vetted = _vetted({**values, "model_cfg": _without(values, towers)}, path, None)
    if towers:
        vetted["model_cfg"]["text_cfg"] |= towers
    return vetted


def vet_timm_config(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the part of a timm model's `config.json` that timm may read: the architecture, the arguments that create
    it, and what describes its images and labels."""
    note = part(values, TIMM_NOTE, path) if TIMM_NOTE in values else values
    kept = {key: value for key, value in values.items() if key in OF_TIMM_MODELS}
    arguments = dict(part(values, "model_args", path))
    # timm 1.0.31 and later write it there, too.
    repeated = arguments.pop("num_classes", None)
    if wrong := sorted(key for key in arguments if NOT_OF_SHAPE.fullmatch(key)):
        raise CheckpointError(f"{path} has {wrong[0]!r} in model_args, which does not determine a model's shape.")
    kept.setdefault("num_classes", note.get("num_classes", 1000) if repeated is None else repeated)
    classes = kept["num_classes"]
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 0:
        raise CheckpointError(f"{path} has num_classes={brief(classes)}: expected a number of classes.")
    if repeated is not None and repeated != classes:
        raise CheckpointError(f"{path} has num_classes={classes}, but {brief(repeated)} in model_args.")
    descriptions = kept.pop("label_descriptions", None)  # free text for every label
    vetted = _vetted({**kept, "model_args": arguments, TIMM_NOTE: note}, path, None)
    if not isinstance(vetted.get("architecture"), str):
        raise CheckpointError(f"{path} names no architecture of timm.")
    return vetted if descriptions is None else {**vetted, "label_descriptions": descriptions}


def vet_diffusers_config(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the part of a diffusers model's `config.json` that diffusers may read: plain words and numbers."""
    if values.get("quantization_config") is not None:
        raise CheckpointError(f"{path} has a quantization_config: expected plain weights. Quantise when loading.")
    return _vetted(values, path, None)


def _check_norms(model: Mapping[str, Any], path: Path) -> None:
    """Refuse strings among the settings of normalisation, on which torch would fail during the forward pass."""
    for section in model:
        if not isinstance(model[section], Mapping):
            continue
        for key, value in part(model[section], "norm_kwargs", path).items():
            if not isinstance(value, (int, float)):
                raise CheckpointError(f"{path} has {key}={brief(value)} in norm_kwargs: expected a number.")


def _without(values: Mapping[str, Any], left_out: Mapping[str, Any]) -> Any:
    if not left_out:
        return values.get("model_cfg")
    model = values["model_cfg"]
    text = {key: value for key, value in model["text_cfg"].items() if key not in left_out}
    return {**model, "text_cfg": text}


def text_tower(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the options for creating an OpenCLIP model with a text tower of transformers: its configuration from the
    local Hub cache, and no weights. Empty for other models.

    OpenCLIP names such a tower by its Hub id and would fetch it. A user who trusts that id fetches its configuration
    first.
    """
    text = part(part(config, "model_cfg", path), "text_cfg", path)
    name = text.get("hf_model_name")
    if not name:
        return {}
    try:
        found = try_to_load_from_cache(str(name), "config.json")
    except HFValidationError:
        raise CheckpointError(f"{path} names the text tower {brief(name)}, which is not a Hub id.") from None
    if not isinstance(found, str):
        raise CheckpointError(
            f"{path} names the text tower {name!r}, which is not in the local cache: if you trust it, "
            f"run `hf download {name} config.json` first."
        )
    return {"text_cfg": {**text, "hf_model_name": str(Path(found).parent), "hf_model_pretrained": False}}


def vet_side_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a tokenizer's or processor's configuration that transformers may read.

    Tokens and templates are free text; other strings must be plain words. Old versions noted the paths of their own
    files there, so values that name a file are left out, not refused; files are found by their fixed names.
    """
    kept = {}
    for key, value in values.items():
        if key in LEFT_OUT or key in FILES_OF_TOKENIZERS or key in PLACES:
            continue
        if is_token(key) or key in TEMPLATES:
            kept[key] = value
        elif isinstance(value, Mapping):
            kept[key] = vet_side_config(value)
        elif all(_is_plain(key, entry) for entry in (value if isinstance(value, list) else [value])):
            kept[key] = value
    return kept


def vet_special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens of a `special_tokens_map.json`, and no other argument of a tokenizer."""
    return {key: value for key, value in values.items() if is_token(key)}


def is_token(key: str) -> bool:
    """Return whether a key of a tokenizer's configuration holds tokens."""
    return key.endswith("_token") or key in TOKENS


def _is_plain(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return vet_side_config(value) == value
    if not isinstance(value, str):
        return not isinstance(value, list) or all(_is_plain(key, entry) for entry in value)
    return not _names_something(key) and len(value) <= LONGEST_WORD and PLAIN.fullmatch(value) is not None


def _vetted(values: Mapping[str, Any], path: Path, config_class: type[PreTrainedConfig] | None) -> dict[str, Any]:
    read = _keys_read_by(config_class)
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key in LEFT_OUT:
            continue
        if key.lstrip("_") in IMPLEMENTATIONS:
            _check_implementation(key, value, path)
        if key in FREE_TEXT:
            kept[key] = value
        elif key == TIMM_NOTE and isinstance(value, Mapping):
            kept[key] = {name: entry for name, entry in value.items() if name in TIMM_DATA}
        elif isinstance(value, Mapping):
            kept[key] = _vetted(value, path, _nested_class(config_class, key, value))
        elif isinstance(value, list):
            kept[key] = _vetted_list(key, value, path, config_class)
        elif not isinstance(value, str) or _is_allowed(key, value, path, config_class):
            kept[key] = value
        elif read is None or key in read:
            raise CheckpointError(
                f"{path} has {key}={brief(value)}, which may name a file, an address or a repository: expected a plain "
                "word, or none."
            )
    return kept


def _vetted_list(key: str, values: list[Any], path: Path, config_class: type[PreTrainedConfig] | None) -> list[Any]:
    read = _keys_read_by(config_class)
    kept: list[Any] = []
    for value in values:
        if isinstance(value, Mapping):
            kept.append(_vetted(value, path, None))
        elif isinstance(value, list):
            kept.append(_vetted_list(key, value, path, config_class))
        elif not isinstance(value, str) or _is_allowed(key, value, path, config_class):
            kept.append(value)
        elif read is None or key in read:
            raise CheckpointError(f"{path} lists {brief(value)} under {key!r}: expected plain words.")
        else:
            return []  # a note: drop it as a whole, because a part of it could mislead
    return kept


def _is_allowed(key: str, value: str, path: Path, config_class: type[PreTrainedConfig] | None) -> bool:
    if key in OF_TIMM:
        return _check_timm_name(key, value, path)
    if value == _default(config_class, key):
        return True
    return not _names_something(key) and len(value) <= LONGEST_WORD and PLAIN.fullmatch(value) is not None


def _names_something(key: str) -> bool:
    return not NAMING.isdisjoint(re.split(r"[_\W]+", key.lower()))


def _check_timm_name(key: str, value: str, path: Path) -> bool:
    import timm  # imported late, because it is slow to import and rarely needed

    if len(value) > LONGEST_WORD or ":" in value or "/" in value or not timm.is_model(value):
        raise CheckpointError(f"{path} asks for {key}={brief(value)}, which is not one of timm's own architectures.")
    return True


def _check_implementation(key: str, value: Any, path: Path) -> None:
    names = value.values() if isinstance(value, Mapping) else [value]
    if other := [name for name in names if name not in BUILT_IN]:
        raise CheckpointError(
            f"{path} asks for {key}={brief(other[0])}, which may be fetched from elsewhere: remove it, and pass "
            f"{key.lstrip('_')} when loading, if you want it."
        )


def _keys_read_by(config_class: type[PreTrainedConfig] | None) -> set[str] | None:
    """Return the keys that a configuration class declares; None where the class is not known."""
    if config_class is None:
        return None
    names = {field.name for field in dataclasses.fields(config_class)}
    return names | config_class.attribute_map.keys() | set(OF_TIMM)


def _default(config_class: type[PreTrainedConfig] | None, key: str) -> Any:
    fields = () if config_class is None else dataclasses.fields(config_class)
    return next((field.default for field in fields if field.name == key), None)


def _nested_class(
    config_class: type[PreTrainedConfig] | None, key: str, values: Mapping[str, Any]
) -> type[PreTrainedConfig] | None:
    """Return the class that reads a nested configuration; None where it is not known."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = values.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    found = getattr(config_class, "sub_configs", {}).get(key)
    return found if isinstance(found, type) and issubclass(found, PreTrainedConfig) else None


def part(values: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """Return a section of a configuration; empty where there is none."""
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: {key} must hold keys and values, not a {type(found).__name__}.")
    return found
