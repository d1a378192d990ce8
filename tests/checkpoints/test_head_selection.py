"""Which tensors each task keeps whole: heads by class, by absence from the base, by size, by the user's word."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from families import FAMILIES, LLM, SPECIAL, TEXT, VISION, VOCAB
from helpers import TASKS, assert_same, make_experts, perturb
from torch import nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.backends import library_of
from retex_hf.checkpoints import take_inventory

T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
BART = {
    "vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, **SPECIAL}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
CLASSIFIER = {"classifier.weight", "classifier.bias"}
DENSE = {f"{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")}

HEADS = {
    tf.BertForSequenceClassification: (tf.BertConfig(**TEXT), CLASSIFIER),
    tf.BertForTokenClassification: (tf.BertConfig(**TEXT), CLASSIFIER),
    tf.BertForMultipleChoice: (tf.BertConfig(**TEXT), CLASSIFIER),
    tf.BertForQuestionAnswering: (tf.BertConfig(**TEXT), {"qa_outputs.weight", "qa_outputs.bias"}),
    tf.BertForNextSentencePrediction: (
        tf.BertConfig(**TEXT),
        {"cls.seq_relationship.weight", "cls.seq_relationship.bias"},
    ),
    tf.RobertaForSequenceClassification: (tf.RobertaConfig(**TEXT | SPECIAL), {f"classifier.{name}" for name in DENSE}),
    tf.DebertaV2ForSequenceClassification: (
        tf.DebertaV2Config(**TEXT),
        CLASSIFIER | {"pooler.dense.weight", "pooler.dense.bias"},
    ),
    tf.DistilBertForSequenceClassification: (
        tf.DistilBertConfig(vocab_size=VOCAB, dim=16, n_layers=1, n_heads=2, hidden_dim=24),
        CLASSIFIER | {"pre_classifier.weight", "pre_classifier.bias"},
    ),
    tf.T5ForSequenceClassification: (tf.T5Config(**T5), {f"classification_head.{name}" for name in DENSE}),
    tf.T5ForQuestionAnswering: (tf.T5Config(**T5), {"qa_outputs.weight", "qa_outputs.bias"}),
    tf.BartForSequenceClassification: (tf.BartConfig(**BART), {f"classification_head.{name}" for name in DENSE}),
    tf.GPT2ForSequenceClassification: (tf.GPT2Config(**GPT2), {"score.weight"}),
    tf.LlamaForSequenceClassification: (tf.LlamaConfig(**LLM), {"score.weight"}),
    tf.ViTForImageClassification: (tf.ViTConfig(**VISION), CLASSIFIER),
    tf.CLIPForImageClassification: (tf.CLIPConfig(text_config=TEXT | SPECIAL, vision_config=VISION), CLASSIFIER),
    tf.ResNetForImageClassification: (tf.ResNetConfig(**RESNET), {"classifier.1.weight", "classifier.1.bias"}),
    tf.BertForMaskedLM: (tf.BertConfig(**TEXT), set()),
    tf.BertForPreTraining: (tf.BertConfig(**TEXT), set()),
    tf.GPT2LMHeadModel: (tf.GPT2Config(**GPT2), set()),
    tf.T5ForConditionalGeneration: (tf.T5Config(**T5), set()),
    tf.CLIPModel: (tf.CLIPConfig(text_config=TEXT | SPECIAL, vision_config=VISION), set()),
}


@pytest.mark.parametrize("cls", HEADS, ids=lambda cls: cls.__name__)
def test_head_of_a_class(cls):
    config, expected = HEADS[cls]
    model = cls(config)
    assert library_of(model).head_names(model, list(take_inventory(model).shapes)) == expected


def build(base, experts, **options) -> tuple[RetexModel, set[str]]:
    """A model with exact recovery, checked, and the names of its heads."""
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full", **options), progress=False)
    heads = model.heads
    names = set(heads["red"])
    for task, expert in experts.items():
        state = expert.state_dict()
        assert set(heads[task]) == names
        assert all(torch.equal(tensor, state[name]) for name, tensor in heads[task].items())
        assert_same(model.recover(task), dict(state), rtol=1e-6, atol=1e-6)
    assert not names & set(model.recovery)
    assert names | set(model.recovery) == set(take_inventory(experts["red"]).shapes)
    return model, names


def classifiers(base: nn.Module, widths=(2, 2, 2)) -> dict[str, nn.Module]:
    experts = {}
    for seed, (task, width) in enumerate(zip(TASKS, widths, strict=True), start=1):
        expert = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=width)).eval()
        expert.bert.load_state_dict(perturb(base, seed).state_dict())
        experts[task] = expert
    return experts


@pytest.fixture
def bert() -> tf.BertModel:
    return tf.BertModel(tf.BertConfig(**TEXT)).eval()


@pytest.mark.parametrize("widths", [(2, 2, 2), (2, 5, 3)])
def test_class_heads_are_kept_whole_whatever_their_shapes(bert, widths):
    assert build(bert, classifiers(bert, widths))[1] == CLASSIFIER


def test_class_heads_that_the_base_has_too_are_still_heads(bert):
    experts = classifiers(bert)
    base = tf.BertForSequenceClassification(tf.BertConfig(**TEXT)).eval()
    base.bert.load_state_dict(bert.state_dict())
    assert build(base, experts)[1] == CLASSIFIER


def test_what_the_base_lacks_is_a_head():
    """A masked language model has no pooler, and its own head is not the experts'."""
    base = tf.BertForMaskedLM(tf.BertConfig(**TEXT)).eval()
    experts = {}
    for seed, task in enumerate(TASKS, start=1):
        experts[task] = tf.BertForSequenceClassification(tf.BertConfig(**TEXT)).eval()
        experts[task].bert.load_state_dict(perturb(base.bert, seed).state_dict(), strict=False)
    assert build(base, experts)[1] == CLASSIFIER | {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}


@pytest.mark.parametrize("family", ["gpt2", "llama-untied"])
@pytest.mark.parametrize("grown", [["green"], TASKS])
def test_a_vocabulary_of_another_size_is_no_head(family, grown):
    base = FAMILIES[family].make().eval()
    experts = make_experts(base)
    for task in grown:
        experts[task].resize_token_embeddings(VOCAB + 2, mean_resizing=False)
    model, heads = build(base, experts)
    embeddings = {"gpt2": {"transformer.wte.weight"}, "llama-untied": {"model.embed_tokens.weight", "lm_head.weight"}}
    assert heads == set()
    assert embeddings[family] <= set(model.recovery)


@pytest.mark.parametrize("family", ["gpt2", "llama-untied", "t5", "clip", "open_clip-vit", "roberta"])
def test_language_model_heads_and_projections_are_recovered_like_the_rest(family):
    base = FAMILIES[family].make().eval()
    experts = make_experts(base)
    options = {"model_config": FAMILIES[family].model_config, "progress": False}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=3), **options)
    assert not any(model.heads.values())
    assert set(model.recovery) == set(take_inventory(base).shapes)


def test_heads_named_by_the_user(bert):
    experts = make_experts(bert)
    assert build(bert, experts, heads=["pooler"])[1] == {"pooler.dense.weight", "pooler.dense.bias"}
    assert build(bert, experts, heads=["*.1.output.dense.bias"])[1] == {"encoder.layer.1.output.dense.bias"}


def test_the_users_list_replaces_the_class_head():
    base = FAMILIES["bert-classifier"].make().eval()
    experts = make_experts(base)
    assert build(base, experts, heads=[])[1] == set()
    assert build(base, experts, heads=["bert.pooler"])[1] == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}


def test_tensors_that_must_be_heads_are_so_even_beside_the_users_list(bert):
    names = build(bert, classifiers(bert), heads=["bert.pooler"])[1]
    assert names == CLASSIFIER | {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
