"""The loss of a mixed batch is the mean over all its labels, each row on its own expert."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from families import FAMILIES, LLM, TEXT, VOCAB, images, tokens
from helpers import MIXED, TASKS, build_from, build_retex, make_experts, rows_of
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

ROWS = len(MIXED)


def mixed_logits(experts, inputs: dict[str, Tensor], field: str = "logits") -> Tensor:
    """The logits that each row's expert gives on the whole batch."""
    outputs = {task: experts[task](**inputs)[field] for task in TASKS}
    return torch.stack([outputs[task][row] for row, task in enumerate(MIXED)])


def some_ignored(labels: Tensor) -> Tensor:
    """Ignore a different number of labels in every row."""
    ignored = torch.arange(labels.shape[1]) >= torch.arange(1, len(labels) + 1).unsqueeze(1)
    return labels.masked_fill(ignored, -100)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def bart_decoder():
    config = FAMILIES["bart"].make().config
    return tf.BartForCausalLM(config)


LANGUAGE_MODELS = {
    "gpt2": (FAMILIES["gpt2"].make, tokens, next_token_loss),
    "llama": (FAMILIES["llama-tied"].make, tokens, next_token_loss),
    "mamba": (FAMILIES["mamba"].make, tokens, next_token_loss),
    "mixtral": (FAMILIES["mixtral"].make, tokens, next_token_loss),
    "bart decoder": (bart_decoder, tokens, token_loss),
    "t5": (FAMILIES["t5"].make, tokens, token_loss),
    "bart": (FAMILIES["bart"].make, tokens, token_loss),
    "masked": (FAMILIES["roberta"].make, tokens, token_loss),
    "tokens": (lambda: tf.BertForTokenClassification(tf.BertConfig(**TEXT, num_labels=VOCAB)), tokens, token_loss),
    "llama tokens": (
        lambda: tf.LlamaForTokenClassification(tf.LlamaConfig(**LLM, num_labels=VOCAB)),
        tokens,
        token_loss,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_label_counts_once_and_ignored_ones_do_not(name):
    make, make_inputs, loss = LANGUAGE_MODELS[name]
    base = make().eval()
    model, experts = build_from(base, make_experts(base, scale=1.0))
    inputs = make_inputs(ROWS)
    labels = some_ignored(torch.randint(3, VOCAB, (ROWS, 8)))
    expected = loss(mixed_logits(experts, inputs | {"labels": labels}), labels)
    actual = model(**inputs, labels=labels, task=MIXED).loss
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    by_rows = torch.stack([experts[t](**inputs, labels=labels).loss * MIXED.count(t) / ROWS for t in TASKS]).sum()
    assert (actual - by_rows).abs() > 1e-3  # the mean over rows would be something else


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_the_loss_is_the_weighted_mean_of_the_experts_own(name):
    make, make_inputs, loss = LANGUAGE_MODELS[name]
    base = make().eval()
    model, experts = build_from(base, make_experts(base, scale=1.0))
    inputs, labels = make_inputs(ROWS), some_ignored(torch.randint(3, VOCAB, (ROWS, 8)))
    total = count = 0
    for task in TASKS:
        rows = rows_of(task)
        own = {key: value[rows] for key, value in (inputs | {"labels": labels}).items()}
        number = int((own["labels"][:, 1:] if loss is next_token_loss else own["labels"]).ne(-100).sum())
        if number:
            total += experts[task](**own).loss * number
        count += number
    torch.testing.assert_close(model(**inputs, labels=labels, task=MIXED).loss, total / count, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_group_whose_labels_are_all_ignored_does_not_spoil_the_loss():
    model, experts = build_retex("gpt2")
    inputs = tokens(ROWS)
    labels = torch.randint(3, VOCAB, (ROWS, 8))
    labels[rows_of("red")] = -100
    expected = next_token_loss(mixed_logits(experts, inputs), labels)
    torch.testing.assert_close(model(**inputs, labels=labels, task=MIXED).loss, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_given_number_of_items_divides_the_sum():
    model, experts = build_retex("gpt2")
    inputs = tokens(ROWS)
    labels = some_ignored(torch.randint(3, VOCAB, (ROWS, 8)))
    logits = mixed_logits(experts, inputs)
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / 100
    actual = model(**inputs, labels=labels, num_items_in_batch=torch.tensor(100), task=MIXED).loss
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cut_off", [[], [0], rows_of("blue")], ids=["all inside", "one cut off", "a group cut off"])
def test_answers_to_questions(cut_off):
    base = tf.BertForQuestionAnswering(tf.BertConfig(**TEXT)).eval()
    model, experts = build_from(base, make_experts(base, scale=1.0))
    inputs = tokens(ROWS)
    starts, ends = torch.randint(0, 4, (ROWS,)), torch.randint(4, 8, (ROWS,))
    starts[cut_off], ends[cut_off] = 8, 9  # beyond the eight tokens: not counted
    output = model(**inputs, start_positions=starts, end_positions=ends, task=MIXED)
    logits = [mixed_logits(experts, inputs, field) for field in ("start_logits", "end_logits")]
    kept = [row for row in range(ROWS) if row not in cut_off]
    expected = (cross_entropy(logits[0][kept], starts[kept]) + cross_entropy(logits[1][kept], ends[kept])) / 2
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.start_logits, logits[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_classes_of_images():
    base = tf.ViTForImageClassification(FAMILIES["vit"].make().config).eval()
    model, experts = build_from(base, make_experts(base, scale=1.0))
    inputs, labels = images(ROWS), torch.randint(0, 2, (ROWS,))
    expected = cross_entropy(mixed_logits(experts, inputs), labels)
    torch.testing.assert_close(model(**inputs, labels=labels, task=MIXED).loss, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_regression_counts_rows():
    base = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=1)).eval()
    model, experts = build_from(base, make_experts(base, scale=1.0))
    inputs, labels = tokens(ROWS), torch.randn(ROWS)
    expected = mse_loss(mixed_logits(experts, inputs).squeeze(), labels)
    torch.testing.assert_close(model(**inputs, labels=labels, task=MIXED).loss, expected, rtol=1e-4, atol=1e-5)
