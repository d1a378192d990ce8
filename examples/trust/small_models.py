"""Small random models of any class of transformers, made from its own default configuration.

`OVERRIDES` holds values that no rule of `shrinking.py` finds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from trust.shrinking import LADDER, VOCAB, shrink

PARAMETERS = 700_000
AT_MOST = 10_000_000
# Lower ids are special tokens; texts are drawn from the rest.
FIRST_WORD = 24

SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "feature_size": ...,
}

PINPOINTS = {"image_grid_pinpoints": [[32, 32], [64, 32]]}
VQ = {
    "base_channels": 32,
    "embed_dim": 32,
    "latent_channels": 32,
    "num_res_blocks": 1,
    "channel_multiplier": [1, 1],
    "resolution": 32,
}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SMALL_NET = {"width_coefficient": 0.25, "depth_coefficient": 0.1}
CLAP_AUDIO = {
    "num_mel_bins": 16, "window_size": 4, "spec_size": 64, "patch_size": 2, "patch_stride": [2, 2], "hidden_size": 32,
    "depths": [2, 2], "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 16, "num_hidden_layers": 2,
}  # fmt: skip
# By configuration class: values for paths of the configuration, after shrinking; `...` leaves one to the class.
OVERRIDES: dict[str, dict[str, Any]] = {
    "AlignConfig": {f"vision_config.{key}": value for key, value in SMALL_NET.items()}
    | {"vision_config.hidden_dim": 80, "projection_dim": 80},
    "AyaVisionConfig": {"vision_config.hidden_size": 16, "vision_config.num_attention_heads": 2},
    "Blip2Config": {"image_token_index": 5},
    "InstructBlipConfig": {"image_token_index": 5},
    "InstructBlipVideoConfig": {"video_token_index": 5, "image_token_index": 5},
    "JanusConfig": {f"vq_config.{key}": value for key, value in VQ.items()},
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}},
    "VipLlavaConfig": {"vision_feature_layers": [-1, -2]},
    "AutoformerConfig": SERIES | {"label_length": 2, "moving_average": 3},
    "BambaConfig": {"attn_layer_indices": [1], "layer_types": ..., "layers_block_type": ...},
    "BrosConfig": dict.fromkeys(("dim_bbox_sinusoid_emb_2d", "dim_bbox_sinusoid_emb_1d", "dim_bbox_projection"), ...),
    "ChameleonConfig": {
        "vocabulary_map": {"<image>": 4} | {f"IMGIMG{a}Z": 30 + i for i, a in enumerate("ABCDEFGH")},
        "vq_config.num_embeddings": 8,
    }
    | {f"vq_config.{key}": value for key, value in VQ.items()},
    "ClapConfig": {f"audio_config.{key}": value for key, value in CLAP_AUDIO.items()},
    "ClapAudioConfig": CLAP_AUDIO,
    "CodeGenConfig": {"n_head": 4, "n_embd": 32, "rotary_dim": 4},
    "DeepseekV2Config": MOE,
    "Dots1Config": MOE | {"n_shared_experts": 1},
    "EfficientNetConfig": SMALL_NET,
    "Emu3Config": {
        "vocabulary_map": {"<image>": 4, "<|extra_200|>": 5} | {f"<|visual token {i:06d}|>": 30 + i for i in range(8)},
        "vq_config.codebook_size": 8,
    }
    | {f"vq_config.{key}": value for key, value in VQ.items()},
    "EsmConfig": {"vocab_size": VOCAB, "pad_token_id": 0, "mask_token_id": 3},
    "FalconConfig": {"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 32},
    "GptOssConfig": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"], "layers_block_type": ...},
    "InformerConfig": SERIES,
    "JambaConfig": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "layers_block_type": ...,
        "layer_types": ...,
    },
    "LayoutLMv3Config": {"hidden_size": 48, "coordinate_size": 8, "shape_size": 8, "num_attention_heads": 2},
    "LiltConfig": {"hidden_size": 48, "num_attention_heads": 3},
    "LlavaNextConfig": PINPOINTS,
    "LlavaNextVideoConfig": PINPOINTS,
    "LlavaOnevisionConfig": PINPOINTS,
    "SegGptConfig": {"image_size": [64, 32]},
    "TimeSeriesTransformerConfig": SERIES,
}

# Composed of small configurations (`default_config`).
COMPOSED = frozenset(
    {"EncoderDecoderConfig", "VisionEncoderDecoderConfig", "SpeechEncoderDecoderConfig", "VisionTextDualEncoderConfig"}
)  # fmt: skip
# Mappings whose classes differ most come first, in case a run is cut short.
FIRST = [
    "MODEL_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING", "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_RETRIEVAL_MAPPING",
]  # fmt: skip


def class_mappings() -> dict[str, type[PreTrainedModel]]:
    """Return all model classes that an auto class knows, by name; the plain models come first."""
    names = [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING")]
    names.sort(key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    found: dict[str, type[PreTrainedModel]] = {}
    for name in names:
        mapping = getattr(modeling_auto, name)
        for kind, model in mapping._model_mapping.items():
            for model_name in (model,) if isinstance(model, str) else model:
                try:
                    cls = mapping._load_attr_from_module(kind, model_name)
                except (ImportError, ValueError, AttributeError):
                    continue  # listed in a mapping, but not defined
                if isinstance(cls, type) and type(cls).__name__ != "DummyObject":
                    found.setdefault(cls.__name__, cls)
    return found


def default_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the default configuration of a class; composite ones get small parts."""
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = transformers.BertConfig(**small, vocab_size=VOCAB)
    decoder = transformers.BertConfig(**small, vocab_size=VOCAB, is_decoder=True, add_cross_attention=True)
    image = transformers.ViTConfig(**small, image_size=32, patch_size=8)
    sound = transformers.Wav2Vec2Config(**small, conv_dim=[8, 8], conv_kernel=[10, 3], conv_stride=[5, 2])
    match config_class.__name__:
        case "EncoderDecoderConfig":
            return config_class.from_encoder_decoder_configs(encoder, decoder)
        case "VisionEncoderDecoderConfig":
            return config_class.from_encoder_decoder_configs(image, decoder)
        case "SpeechEncoderDecoderConfig":
            return config_class.from_encoder_decoder_configs(sound, decoder)
        case "VisionTextDualEncoderConfig":
            return config_class.from_vision_text_configs(image, encoder)
        case "TimmWrapperConfig":
            return config_class(architecture="test_resnet", pretrained_cfg={"num_classes": 10})
    return config_class()


def small_models(cls: type[PreTrainedModel]) -> Iterator[PreTrainedModel]:
    """Yield models of a class, one per accepted step of the ladder; raise the last error if there is none."""
    values = json.loads(json.dumps(default_config(cls.config_class).to_dict(), default=str))
    last: Exception | None = None
    made, spare = 0, []
    for step in LADDER:
        try:
            small = values if cls.config_class.__name__ in COMPOSED else shrink(values, step)
            shrunk = _override(deepcopy(small), OVERRIDES.get(cls.config_class.__name__, {}))
            config = cls.config_class.from_dict(deepcopy(shrunk))
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in cls(deepcopy(config)).parameters())
            if size > PARAMETERS:
                spare.append((size, config))
                continue
            model = cls(config).eval()
        except Exception as error:  # inconsistent numbers raise any kind of error
            last = error
            continue
        made += 1
        yield model
    for size, config in sorted(spare, key=lambda pair: pair[0]):
        if size <= AT_MOST:
            made += 1
            yield cls(config).eval()
    if spare and not made:
        raise ValueError(f"it has {min(size for size, _ in spare):,} parameters")
    if not made and last is not None:
        raise last


@torch.no_grad()
def randomise(model: nn.Module, seed: int, scale: float) -> nn.Module:
    """Add noise to every parameter in place, large enough that every layer affects the output."""
    draw = torch.Generator().manual_seed(seed)
    computed = getattr(model, "_keys_to_ignore_on_save", None) or ()  # recomputed whenever the model is loaded
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or "inv_freq" in name or name in computed:
            continue
        size = math.prod(parameter.shape[1:]) ** -0.5 if parameter.ndim > 1 and parameter.numel() else 0.15
        noise = torch.randn(parameter.shape, generator=draw) * scale * size
        moved = parameter.float().nan_to_num(0).clamp(-10, 10) + noise
        parameter.copy_(moved)
    return model


def _override(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for path, value in overrides.items():
        *place, key = path.split(".")
        inner = values
        for name in place:
            inner = inner[name]
        if value is ...:
            inner.pop(key, None)
        else:
            inner[key] = value
    return values
