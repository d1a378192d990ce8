"""Small decoders and classifiers that vLLM knows, of three tasks that differ in the words they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from helpers import TASKS, perturb
from signed import WORDS, make_tokenizer, references, separate
from torch import nn

from retex_hf import RetexConfig, RetexModel

SIZES: dict[str, Any] = {
    "vocab_size": 4 + sum(map(len, WORDS.values())),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# What vLLM has no place for in an adapter.
UNSERVED = ["*norm*", "*.bias"]
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_decoder(kind: str = "llama", **options: Any) -> nn.Module:
    sizes = {**SIZES, **options}
    if kind == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    if kind == "qwen2":
        return tf.Qwen2ForCausalLM(tf.Qwen2Config(**sizes))
    if kind == "qwen3":
        return tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes, head_dim=16))
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**sizes))


def signed_decoder(kind: str = "llama", *, model_options: dict[str, Any] | None = None, **config: Any) -> RetexModel:
    """Return a model of three experts that tells their words apart; heads of 2, 3 and 4 classes for a classifier."""
    torch.manual_seed(0)
    tokenizer, own = make_tokenizer(), model_options or {}
    base = make_decoder(kind, **own)
    separate(base.get_input_embeddings(), tokenizer)  # type: ignore[operator]  # of transformers
    experts = {}
    for index, task in enumerate(TASKS):
        expert = perturb(base, index + 1)
        if kind == "classifier":
            sized = make_decoder(kind, **own, num_labels=index + 2)
            state = {name: tensor for name, tensor in expert.state_dict().items() if not name.startswith("score")}
            sized.load_state_dict(state, strict=False)
            expert = sized
        experts[task] = expert.eval()
    settings = {"rank": 8, **config}
    model = RetexModel.from_experts(base.eval(), experts, RetexConfig(**settings), progress=False)
    model.fit_signatures(references(tokenizer), progress=False)
    return model


def saved_decoder(folder: Path, kind: str = "llama", **options: Any) -> RetexModel:
    """Save such a model with its tokenizer, and return it as loaded."""
    model = signed_decoder(kind, **options)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    loaded = RetexModel.from_pretrained(folder, verify=False)  # tokenizer files are not recorded yet
    loaded.save_description(folder)
    return RetexModel.from_pretrained(folder)
