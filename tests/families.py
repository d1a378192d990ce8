"""Small random models of every architecture family, and inputs for them. No network, no files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from open_clip.coca_model import CoCa
from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn

ROWS = 6
VOCAB = 40


@dataclass(frozen=True)
class Family:
    """How to make a model of a family and a batch for it; `model_config` is what an OpenCLIP module does not carry."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    model_config: dict[str, Any] | None = None


def tokens(rows: int) -> dict[str, Tensor]:
    """Token ids with right padding of different lengths."""
    ids = torch.randint(3, VOCAB, (rows, 8))
    mask = (torch.arange(8) < torch.randint(4, 9, (rows, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def seq2seq(rows: int) -> dict[str, Tensor]:
    return tokens(rows) | {"decoder_input_ids": torch.randint(3, VOCAB, (rows, 5))}


def images(rows: int, size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, size, size)}


def clip_inputs(rows: int) -> dict[str, Tensor]:
    """Four class prompts for any number of images."""
    ids = torch.randint(3, VOCAB - 1, (4, 8))
    ids[:, -1] = VOCAB - 1
    return images(rows) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def open_clip_inputs(rows: int) -> dict[str, Tensor]:
    return {"image": torch.randn(rows, 3, 32, 32), "text": torch.randint(1, VOCAB, (4, 8))}


def coca_inputs(rows: int) -> dict[str, Tensor]:
    return {"image": torch.randn(rows, 3, 32, 32), "text": torch.randint(1, VOCAB, (rows, 8))}


TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
LLM = TEXT | {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {k: v for k, v in TEXT.items() if k not in ("vocab_size", "max_position_embeddings")} | {
    "image_size": 32,
    "patch_size": 8,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPEN_CLIP_TEXT = {"context_length": 8, "vocab_size": VOCAB, "width": 16, "heads": 2, "layers": 2}
OPEN_CLIP_VIT = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "patch_size": 8, "head_width": 8},
    "text_cfg": OPEN_CLIP_TEXT,
}
OPEN_CLIP_RESNET = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
    "text_cfg": OPEN_CLIP_TEXT,
}
COCA = {
    "embed_dim": 16,
    "multimodal_cfg": {"width": 16, "context_length": 8, "heads": 2, "layers": 2},
    "vision_cfg": {
        "image_size": 32, "layers": 2, "width": 16, "patch_size": 8, "head_width": 8,
        "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True,
    },
    "text_cfg": OPEN_CLIP_TEXT | {"embed_cls": True, "output_tokens": True},
    "custom_text": True,
}  # fmt: skip


def _whisper_inputs(rows: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(rows, 8, 32),
        "decoder_input_ids": torch.randint(3, VOCAB, (rows, 5)),
    }


def _without_extras(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "custom_text"}


def _initialised(model: nn.Module) -> nn.Module:
    # OpenCLIP leaves a parameter of CoCa's decoder uninitialised.
    nn.init.normal_(model.text_decoder.text_projection, std=0.1)
    return model


FAMILIES: dict[str, Family] = {
    "bert": Family(lambda: tf.BertModel(tf.BertConfig(**TEXT)), tokens),
    "bert-classifier": Family(lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3)), tokens),
    "roberta": Family(lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**TEXT | SPECIAL)), tokens),
    "deberta-v2": Family(
        lambda: tf.DebertaV2Model(
            tf.DebertaV2Config(
                **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4, share_att_key=False
            )
        ),
        tokens,
    ),
    "vit": Family(lambda: tf.ViTModel(tf.ViTConfig(**VISION)), images),
    "clip": Family(
        lambda: tf.CLIPModel(
            tf.CLIPConfig(
                text_config=TEXT | SPECIAL | {"eos_token_id": VOCAB - 1}, vision_config=VISION, projection_dim=12
            )
        ),
        clip_inputs,
    ),
    "siglip": Family(
        lambda: tf.SiglipModel(tf.SiglipConfig(text_config=TEXT | SPECIAL, vision_config=VISION)), clip_inputs
    ),
    "swin": Family(
        lambda: tf.SwinModel(
            tf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
        ),
        images,
    ),
    "convnext": Family(
        lambda: tf.ConvNextModel(tf.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1])), images
    ),
    "resnet": Family(
        lambda: tf.ResNetModel(
            tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")
        ),
        images,
    ),
    "t5": Family(
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
        ),
        seq2seq,
    ),
    "bart": Family(
        lambda: tf.BartForConditionalGeneration(
            tf.BartConfig(
                vocab_size=VOCAB,
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=24,
                decoder_ffn_dim=24,
                max_position_embeddings=32,
                decoder_start_token_id=2,
                forced_eos_token_id=None,
                **SPECIAL,
            )
        ),
        seq2seq,
    ),
    "whisper": Family(
        lambda: tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(
                vocab_size=VOCAB,
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=24,
                decoder_ffn_dim=24,
                num_mel_bins=8,
                max_source_positions=16,
                max_target_positions=16,
                decoder_start_token_id=1,
                suppress_tokens=None,
                begin_suppress_tokens=None,
                **SPECIAL,
            )
        ),
        _whisper_inputs,
    ),
    "gpt2": Family(
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, **SPECIAL)
        ),
        tokens,
    ),
    "llama-tied": Family(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLM, tie_word_embeddings=True)), tokens),
    "llama-untied": Family(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLM, tie_word_embeddings=False)), tokens),
    "mixtral": Family(
        lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**LLM, num_local_experts=4, num_experts_per_tok=2)), tokens
    ),
    "mamba": Family(
        lambda: tf.MambaForCausalLM(
            tf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4, **SPECIAL)
        ),
        tokens,
    ),
    "open_clip-vit": Family(lambda: CLIP(**OPEN_CLIP_VIT), open_clip_inputs, OPEN_CLIP_VIT),
    "open_clip-resnet": Family(lambda: CLIP(**OPEN_CLIP_RESNET), open_clip_inputs, OPEN_CLIP_RESNET),
    "open_clip-custom-text": Family(
        lambda: CustomTextCLIP(**OPEN_CLIP_VIT), open_clip_inputs, OPEN_CLIP_VIT | {"custom_text": True}
    ),
    "open_clip-coca": Family(lambda: _initialised(CoCa(**_without_extras(COCA))), coca_inputs, COCA),
}
