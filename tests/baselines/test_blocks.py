"""MLPs, attention blocks, norms and embeddings of many architectures."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from families import FAMILIES

from retex_hf.baselines.blocks import find_attention, find_mlps, lookup_table, norms_and_embeddings, require_mlps
from retex_hf.errors import ConfigError

BERT = ["encoder.layer.{}.intermediate.dense", "encoder.layer.{}.output.dense"]
FIRST_MLPS = {
    "bert": [tuple(name.format(layer) for name in BERT) for layer in (0, 1)],
    "roberta": [tuple(f"roberta.{name.format(layer)}" for name in BERT) for layer in (0, 1)],
    "clip": [(f"text_model.encoder.layers.{n}.mlp.fc1", f"text_model.encoder.layers.{n}.mlp.fc2") for n in (0, 1)],
    "t5": [
        (f"encoder.block.{n}.layer.1.DenseReluDense.wi", f"encoder.block.{n}.layer.1.DenseReluDense.wo")
        for n in (0, 1)
    ],
    "bart": [(f"model.encoder.layers.{n}.fc1", f"model.encoder.layers.{n}.fc2") for n in (0, 1)],
    "gpt2": [(f"transformer.h.{n}.mlp.c_fc", f"transformer.h.{n}.mlp.c_proj") for n in (0, 1)],
    "llama-tied": [
        tuple(f"model.layers.{n}.mlp.{part}_proj" for part in ("gate", "up", "down")) for n in (0, 1)
    ],
    "swin": [
        tuple(f"encoder.layers.0.blocks.{n}.mlp.{part}" for part in ("fc1", "fc2")) for n in (0, 1)
    ],
    "open_clip-vit": [
        tuple(f"visual.transformer.resblocks.{n}.mlp.{part}" for part in ("c_fc", "c_proj")) for n in (0, 1)
    ],
}  # fmt: skip
NUMBERS = {
    # MLPs and attention blocks; T5 and BART have cross-attention in their decoders, CLIP has two towers.
    "bert": (2, 2), "roberta": (2, 2), "deberta-v2": (2, 2), "vit": (2, 2), "clip": (4, 4), "siglip": (5, 5),
    "t5": (4, 6), "bart": (4, 6), "whisper": (4, 6), "gpt2": (2, 2), "llama-tied": (2, 2), "swin": (4, 4),
    "open_clip-vit": (4, 4), "convnext": (5, 0), "resnet": (0, 0),
}  # fmt: skip


@pytest.mark.parametrize("family", FIRST_MLPS)
def test_mlps_are_found_by_shape(family):
    model = FAMILIES[family].make()
    assert find_mlps(model, model.state_dict())[:2] == FIRST_MLPS[family]


@pytest.mark.parametrize("family", NUMBERS)
def test_as_many_blocks_as_the_architecture_has(family):
    model = FAMILIES[family].make()
    body = model.state_dict()
    mlps = find_mlps(model, body)
    attention = find_attention(model, body, mlps)
    assert (len(mlps), len(attention)) == NUMBERS[family]
    assert not any(layer.startswith(f"{block}.") for block in attention for mlp in mlps for layer in mlp)


def test_blocks_by_name():
    model = FAMILIES["bert"].make()
    body = model.state_dict()
    patterns = ["*.intermediate.dense", "encoder.layer.*.output.dense"]
    assert find_mlps(model, body, patterns) == FIRST_MLPS["bert"]
    assert find_attention(model, body, [], ["*.attention.self"]) == [
        "encoder.layer.0.attention.self", "encoder.layer.1.attention.self",
    ]  # fmt: skip
    assert find_attention(model, body, [], []) == []


def test_what_is_not_in_the_body_is_not_looked_at():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    assert find_mlps(model, model.state_dict()) == [("0", "1")]
    assert find_mlps(model, ["0.weight"]) == []


def test_a_model_without_mlps_is_told_so():
    model = FAMILIES["resnet"].make()
    with pytest.raises(ConfigError, match="no neighbouring linear layers of ResNetModel expand and contract"):
        require_mlps(model, model.state_dict(), "WEMoE", None)
    with pytest.raises(ConfigError, match=r"are called \['\*.fc1', '\*.fc2'\]"):
        require_mlps(model, model.state_dict(), "WEMoE", ["*.fc1", "*.fc2"])


def test_norms_and_embeddings():
    names = norms_and_embeddings(model := FAMILIES["bert"].make(), list(model.state_dict()))
    tables = ["word", "position", "token_type"]
    assert [name for name in names if name.startswith("embeddings")] == [
        *(f"embeddings.{table}_embeddings.weight" for table in tables),
        "embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias",
    ]  # fmt: skip
    rest = [name for name in names if not name.startswith("embeddings")]
    assert len(rest) == 8 and all("LayerNorm" in name for name in rest)
    model = FAMILIES["vit"].make()
    found = norms_and_embeddings(model, list(model.state_dict()))
    assert {"embeddings.cls_token", "embeddings.position_embeddings", "layernorm.weight"} <= set(found)
    assert not any("dense" in name or "projection" in name for name in found)


def test_a_table_that_is_only_looked_up_in():
    bert = FAMILIES["bert"].make()
    assert lookup_table(bert, bert.state_dict()) == "embeddings.word_embeddings.weight"
    assert lookup_table(bert, []) is None
    for family in ("t5", "gpt2", "llama-tied", "vit", "resnet", "open_clip-vit"):
        model = FAMILIES[family].make()
        assert lookup_table(model, model.state_dict()) is None, family
    untied = FAMILIES["llama-untied"].make()
    assert lookup_table(untied, untied.state_dict()) == "model.embed_tokens.weight"
    config = tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    model = tf.GPT2Model(config)
    assert lookup_table(model, model.state_dict()) == "wte.weight"
