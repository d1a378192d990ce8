"""Small numbers for a configuration, chosen by the names of its fields.

Widths are divided by one factor, so that sums and ratios among them are kept, heads by another; layers, images and
vocabularies are capped. Where a class does not accept the result, further steps of a ladder follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

VOCAB = 64

TOKEN = re.compile(r"(token_(id|index)\w*|_token|token_ids|(pad|bos|eos|sep|cls|mask|blank|start|end)_(id|idx))$")
VOCABULARY = re.compile(r"vocab|codebook_size|num_codes|n_codes|num_embeddings$|num_tokens$")
LAYERS = re.compile(
    r"(num_\w*layers|n_layers?|\w*_layers|num_\w*blocks|depth|num_\w*stages_layers|layers|num_hidden_groups|n_blocks)$"
)
NOT_LAYERS = re.compile(r"feature|dropout|drop|skip|first_k|dense|indices|projector|conv_layers|feat_extract")
HEADS = re.compile(r"heads|n_head|num_key_value|head_num|num_attention_groups")
HEAD_SIZE = re.compile(
    r"head_dim|d_kv|head_size|dim_head|kv_channels|key_length|rope_dim|nope|d_head|mrope_section|rotary_dim"
)
EXPERTS = re.compile(
    r"^(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts|ffn_num_experts)$"
)
TOP = re.compile(
    r"experts_per_tok|^top_?k$|moe_top_?k|moe_k|num_selected_experts|topk_group|^n_group$|n_shared_experts|"
    r"num_zero_experts"
)
POSITIONS = re.compile(
    r"max_position|n_positions|max_source|max_target|max_seq|n_ctx|max_2d|block_size|seq_length$|max_length$"
)
IMAGE = re.compile(
    r"^(image_size|img_size|input_size|crop_size|resolution|image_resolution|pretrain_image_size|max_img_size)$"
)
PATCH = re.compile(r"^(patch_size|vision_patch_size)$")
WIDTH = re.compile(
    r"size|dim|width|channels|d_model|d_ff|d_inner|embd|hidden|inner|intermediate|rank|ffn|planes|filters|projection|"
    r"features|num_pos_feats|channel_list"
)
NOT_WIDTH = re.compile(
    r"kernel|stride|window|patch|group|pool|chunk|batch|type_vocab|rate|scale|^num_channels$|^(in|out)_channels$|"
    r"in_chans|merge|temporal|step|token|spatial|drop|conv_(dim|bias)_|hidden_act|max_|min_|num_dims|eps|downsample|"
    r"upsample|shuffle|ratio|state_size|mel|beams|queries|image|input_dim|num_input|buckets|distance|n_fft|hop|frame|"
    r"keypoint|sample|audio_channels|segment|pixel|_axis|normalize"
)
STAGES = re.compile(r"depths?|num_layers|layers|blocks|repeats")


@dataclass(frozen=True)
class Step:
    """One degree of shrinking: sizes of heads by `head_size`, images to `image` with patches of at most `patch`."""

    head_size: int
    layers: int = 2
    image: int = 32
    patch: int = 8
    heads: int | None = None


LADDER = (
    Step(8), Step(4), Step(8, image=64, patch=16), Step(4, image=64, patch=16), Step(2), Step(4, layers=4),
    Step(8, heads=1), Step(4, heads=1), Step(4, heads=1, image=64, patch=32),
    Step(2, heads=1, image=64, patch=32, layers=4), Step(1, heads=2, image=64, patch=32, layers=4),
    Step(1, heads=1, image=224, patch=32),
)  # fmt: skip

# Numbers that are capped at every step.
CAPS = {
    "n_groups": 1,
    "mamba_n_groups": 1,
    "spec_size": 64,
    "num_kv_shared_layers": 0,
    "encoder_in_channels": 8,
    "mm_tokens_per_image": 4,
    "upsample_initial_channel": 64,
    "num_queries": 5,
    "num_filters": 8,
    "upsampling_groups": 8,
}
# Text models whose positions have time, height and width.
MROPE = re.compile(
    r"qwen2_vl|qwen2_5_vl|qwen2_5_omni|qwen3_vl|qwen3_omni|qwen3_5|glm4v|glm_ocr|ernie4_5_vl|paddleocr|glm_image|keye"
)
# Replacement of timm's backbones.
RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip


def shrink(values: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Return a configuration with small numbers."""
    tokens: dict[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    by = step.heads or _common_heads(values)
    return _shrink_dict(dict(values), step, by, tokens)


def _shrink_dict(values: dict[str, Any], step: Step, by: int, tokens: dict[str, int]) -> dict[str, Any]:
    layers = {
        value for key, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 4 and _is_layers(key)
    }  # fmt: skip
    kept = {count: _kept_layers(values, count, step.layers) for count in layers}
    if values.get("model_type") == "timm_backbone":
        return deepcopy(RESNET)
    if values.get("model_type") == "timm_wrapper" and values.get("architecture") != "test_resnet":
        values = {**values, "architecture": "test_vit", "model_args": None, "pretrained_cfg": None}
    shrunk = {}
    for key, value in values.items():
        if isinstance(value, list) and len(value) in kept and not isinstance(value[0], dict):
            value = [value[index] for index in kept[len(value)]]
        if key in ("out_indices", "out_features", "stage_names", "_out_indices", "_out_features") and layers:
            continue
        if key == "per_layer_config":  # of layers that were removed
            continue
        if _is_layers(key) and isinstance(value, int) and value in kept:
            shrunk[key] = len(kept[value])
        else:
            shrunk[key] = _shrink_value(key, value, step, by, tokens)
    _fill_heads(shrunk)
    _fit_positions(shrunk)
    _fit_towers(shrunk)
    return shrunk


def _fill_heads(values: dict[str, Any]) -> None:
    """Write out values that a configuration would derive from numbers that have changed."""
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        if "head_dim" in values and values["head_dim"] is None:
            values["head_dim"] = width // heads
        if "num_key_value_heads" in values and values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = heads


def _fit_positions(values: dict[str, Any]) -> None:
    """Adapt positions: those in two dimensions rotate quarters of a head, those in three have sections."""
    for wide, many in (
        ("embed_dim", "num_heads"),
        ("hidden_size", "num_heads"),
        ("hidden_size", "num_attention_heads"),
    ):
        if "patch_size" in values and all(type(values.get(key)) is int for key in (wide, many)):
            size = values[wide] // values[many]
            if size % 4 or values[wide] % values[many]:
                values[wide] = values[many] * max(8, 4 * round(size / 4))
            break
    rope, heads, width = (values.get(key) for key in ("rope_parameters", "num_attention_heads", "hidden_size"))
    if isinstance(rope, dict) and type(heads) is type(width) is int and MROPE.search(str(values.get("model_type"))):
        half = int((values.get("head_dim") or width // heads) * rope.get("partial_rotary_factor", 1.0)) // 2
        values["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


def _fit_towers(values: dict[str, Any]) -> None:
    """Set the output width of a vision tower to the width that the text model takes."""
    text, vision = values.get("text_config"), values.get("vision_config")
    if isinstance(text, dict) and isinstance(vision, dict) and text.get("hidden_size"):
        key = "hidden_size" if str(vision.get("model_type")).startswith("qwen2_vl") else "out_hidden_size"
        if key in vision:
            vision[key] = text["hidden_size"]


def _kept_layers(values: Mapping[str, Any], count: int, wanted: int) -> list[int]:
    """Choose layers so that every kind is present."""
    kept: list[int] = []
    for value in values.values():
        if isinstance(value, list) and len(value) == count and isinstance(value[0], str):
            kept += [value.index(kind) for kind in dict.fromkeys(value)]
    kept = sorted(set(kept))[:4]
    rest = [index for index in range(count) if index not in kept]
    return sorted([*kept, *rest[: max(0, wanted - len(kept))]])


def _shrink_value(key: str, value: Any, step: Step, by: int, tokens: dict[str, int]) -> Any:
    if isinstance(value, Mapping):
        return _shrink_dict(dict(value), step, by, tokens)
    if isinstance(value, list):
        if TOKEN.search(key) and all(type(item) is int for item in value):
            return [tokens.setdefault(key, len(tokens))] if value else value
        return [_shrink_value(key, item, step, by, tokens) for item in value]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return value
    if TOKEN.search(key) and not VOCABULARY.search(key):
        return tokens.setdefault(key, len(tokens))
    return _shrink_number(key, value, step, by)


def _shrink_number(key: str, value: int, step: Step, by: int) -> int:
    if VOCABULARY.search(key):
        return min(value, VOCAB)
    if key in CAPS:
        return min(value, CAPS[key])
    if key == "window_size":  # in tokens, or in pixels
        return min(value, 2 if value <= 32 else 4 * step.patch)
    if _is_layers(key) or (STAGES.fullmatch(key) and value < 100):
        return min(value, step.layers)
    if EXPERTS.search(key):
        return min(value, 4)
    if TOP.search(key):
        return min(value, 1 if "group" in key else 2)
    if IMAGE.search(key):
        return min(value, step.image)
    if PATCH.search(key):
        return min(value, step.patch)
    if POSITIONS.search(key):
        return min(value, 128)
    if HEAD_SIZE.search(key):
        return value // step.head_size if value % step.head_size == 0 else value
    if HEADS.search(key):
        return value // by if value % by == 0 else value
    if WIDTH.search(key) and not NOT_WIDTH.search(key) and value >= 16:
        factor = by * step.head_size
        exact = value % factor == 0 and value // factor % 4 == 0
        return value // factor if exact else max(8, 8 * round(value / factor / 8))
    return value


def _is_layers(key: str) -> bool:
    return bool(LAYERS.search(key)) and not NOT_LAYERS.search(key) and key not in CAPS


def _common_heads(values: Any) -> int:
    """Return the largest common divisor of all numbers of heads that leaves at least two queries."""
    found = [number for key, number in _numbers(values) if HEADS.search(key) and number > 0]
    common = math.gcd(*found) if found else 1
    most = max(found, default=1)
    divisors = [divisor for divisor in range(1, common + 1) if common % divisor == 0 and most // divisor >= 2]
    return max(divisors, default=1)


def _numbers(values: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, name)
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value, key)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield key, values
