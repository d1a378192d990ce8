"""Architectures of OpenCLIP and timm, each made so small that three experts of it are merged in a second.

Layers, widths and images shrink; the components of an architecture stay. The small forms of timm's architectures are
registered under names of their own, so that they are found by name like the others.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import timm
from timm.models import model_entrypoint, register_model
from timm.models.vitamin import VitCfg, VitConvCfg

# The arguments that make a family small, by prefix of the name; the first match is taken.
VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
RESNET = {"channels": (16, 16, 32, 32)}
SMALL_TIMM: dict[str, dict[str, Any]] = {
    "vit_base_mci": {"depth": 1, "img_size": 64},  # its stem requires one width
    "vit_relpos": VIT | {"img_size": 32},
    "vit_": VIT | {"img_size": 64},
    "deit": VIT | {"img_size": 32},
    "beit": VIT | {"img_size": 32},
    "eva": VIT | {"img_size": 64},
    "flexivit": VIT | {"img_size": 32},
    "cait": VIT | {"img_size": 32, "depth_token_only": 1},
    "xcit": VIT | {"img_size": 32},
    "mixer": {"img_size": 32},
    "gmlp": {"img_size": 32},
    "resmlp": {"img_size": 32},
    "resnet10t": RESNET,
    "resnet26d": RESNET,
    "seresnet": RESNET,
    "skresnet": RESNET,
    "resnest": RESNET,
    "res2net": RESNET | {"layers": (1, 1, 1, 1)},
    "swin": {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (1, 2)},
    "convnext": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "fastvit": {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 64)},
    "pvt": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 1, 2, 2)},
    "mambaout": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "davit": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 1, 2, 2)},
    "vitamin": {"img_size": 64},
}  # fmt: skip
# For architectures that take images of any size.
SMALL_IMAGE = 64
# Configurations of the text towers that OpenCLIP takes from transformers, by their Hub ids.
SMALL_TOWERS: dict[str, dict[str, Any]] = {
    "roberta": {"model_type": "roberta", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 90},
    "mt5": {"model_type": "mt5", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
            "vocab_size": 100},
    "nllb": {"model_type": "m2m_100", "d_model": 32, "encoder_layers": 2, "decoder_layers": 1,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
             "vocab_size": 100, "max_position_embeddings": 90},
}  # fmt: skip
VOCABULARY, CONTEXT = 100, 8


def timm_arguments(name: str) -> dict[str, Any]:
    """Return the arguments that make an architecture of timm small."""
    found = dict(next((values for start, values in SMALL_TIMM.items() if name.startswith(start)), {}))
    if name.startswith("vitamin"):
        conv = VitConvCfg(norm_layer="layernorm2d", norm_eps=1e-6)
        stem = VitCfg(embed_dim=(8, 16, 32), depths=(1, 1, 1), stem_width=8, conv_cfg=conv, head_type="1d")
        found |= VIT | {"embed_cfg": stem}
    return found


def timm_image_size(name: str) -> int:
    """Return the side of the images that a small architecture takes."""
    known = timm.get_pretrained_cfg(name)
    return timm_arguments(name).get("img_size", known.input_size[-1] if known.fixed_input_size else SMALL_IMAGE)


@cache
def small_timm(name: str) -> str:
    """Register an architecture of timm in its small form, and return its name."""
    original, arguments = model_entrypoint(name), timm_arguments(name)

    def made(pretrained: bool = False, **kwargs: Any):
        return original(pretrained=pretrained, **{**arguments, **kwargs})

    made.__name__, made.__module__ = f"small_{name}", __name__
    sys.modules[__name__].__dict__.setdefault("__all__", []).append(made.__name__)
    register_model(made)
    assert timm.is_model(made.__name__)
    return made.__name__


def small_open_clip(name: str, towers: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the small configuration of an OpenCLIP architecture: as written to a file, and as passed to OpenCLIP.

    `towers` is a Hub cache, into which the configurations of text towers are written.
    """
    config = deepcopy(open_clip.get_model_config(name))
    config["embed_dim"] = 128 if "multimodal_cfg" in config else 32  # captions attend to images: their width
    _shrink_images(config["vision_cfg"])
    text = config["text_cfg"]
    _shrink_texts(text, config["embed_dim"])
    if "multimodal_cfg" in config:
        _shrink_texts(config["multimodal_cfg"], config["embed_dim"])
    made = deepcopy(config)
    if text.get("hf_model_name"):
        made["text_cfg"] |= {"hf_model_name": str(_tower(text["hf_model_name"], towers)), "hf_model_pretrained": False}
    return config, made


def _shrink_images(vision: dict[str, Any]) -> None:
    if vision.get("timm_model_name"):
        vision["image_size"] = timm_image_size(vision["timm_model_name"])
        vision |= {"timm_model_name": small_timm(vision["timm_model_name"]), "timm_model_pretrained": False}
    elif isinstance(vision.get("layers"), list):
        vision |= {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64, "head_width": 64}
    else:
        head = vision.get("head_width", 64)
        vision |= {"layers": 2, "width": 2 * head, "image_size": 2 * vision["patch_size"]}
        if vision.get("attentional_pool"):
            vision |= {"attn_pooler_queries": 4, "attn_pooler_heads": 2}


def _shrink_texts(text: dict[str, Any], embed_dim: int) -> None:
    text |= {"context_length": CONTEXT, "vocab_size": VOCABULARY}
    if "width" in text:
        text |= {"width": embed_dim, "heads": 2, "layers": 2}


def _tower(name: str, cache_folder: Path) -> Path:
    """Write the configuration of a text tower as if it had been downloaded, and return its folder."""
    repository = cache_folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text("0" * 40)
    values = dict(next(values for kind, values in SMALL_TOWERS.items() if kind in name))
    if "xlm" in name:
        values["model_type"] = "xlm-roberta"
    (snapshot / "config.json").write_text(json.dumps(values))
    return snapshot
