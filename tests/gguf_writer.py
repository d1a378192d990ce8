"""Small language models, and GGUF files of them as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from families import LLM
from torch import nn

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def make(kind: str = "llama", **options: Any) -> nn.Module:
    options = {**LLM, **SIZES, "tie_word_embeddings": False, **options}
    if kind == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**options))
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**options))


def write(model: nn.Module, path: Path, kind: str = "llama", quantisation: str = "Q8_0") -> Path:
    """A file as llama.cpp's converter writes it: rows of queries and keys in pairs, matrices quantised."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    writer, config = gguf.GGUFWriter(path, kind), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(10000.0)
    names = {f"{mine}.{end}": f"{theirs}.{end}" for theirs, mine in OTHERS.items() for end in ("weight", "bias")}
    names |= {
        f"model.layers.{layer}.{mine}.{end}": f"blk.{layer}.{theirs}.{end}"
        for layer in range(config.num_hidden_layers)
        for theirs, mine in BLOCKS.items()
        for end in ("weight", "bias")
    }
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        for part, count in heads.items():
            if part in names[name] and kind == "llama":
                array = array.reshape(count, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if array.ndim > 1 and quantisation != "F32":
            stored = gguf.GGMLQuantizationType[quantisation]
            writer.add_tensor(names[name], gguf.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(names[name], np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
