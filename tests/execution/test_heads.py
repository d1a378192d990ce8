"""Classifiers whose heads differ in width and meaning, in one batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
from families import TEXT, tokens
from helpers import MIXED, TASKS, build_retex, make_experts, rows_of
from torch.nn.functional import cross_entropy

from retex_hf import RetexConfig, RetexError, RetexModel

WIDTHS = {"red": 2, "green": 5, "blue": 3}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ROWS = len(MIXED)


def save_experts(folder, cls, widths, **settings):
    """Experts as people have them: folders fine-tuned from a headless base, each with a head of its own."""
    base = tf.BertModel(tf.BertConfig(**TEXT))
    base.save_pretrained(folder / "base")
    experts = {}
    for task, body in make_experts(base, scale=1.0).items():
        config = tf.BertConfig(
            **TEXT, id2label={i: f"{task}-{i}" for i in range(widths[task])}, **settings.get(task, {})
        )
        expert = cls(config).eval()
        expert.bert.load_state_dict(body.state_dict(), strict=False)
        torch.nn.init.normal_(expert.classifier.weight)
        expert.save_pretrained(folder / task)
        experts[task] = expert
    paths = {task: str(folder / task) for task in experts}
    return RetexModel.from_experts(str(folder / "base"), paths, RetexConfig(rank="full"), progress=False), experts


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("classifiers")
    return save_experts(folder, tf.BertForSequenceClassification, WIDTHS)


@torch.no_grad()
def test_logits_are_padded_to_the_widest_head(classifiers):
    model, experts = classifiers
    inputs = tokens(ROWS)
    output = model(**inputs, task=MIXED)
    assert output.logits.shape == (ROWS, 5)
    assert output.routing.num_labels == [WIDTHS[task] for task in MIXED]
    for task in TASKS:
        rows, width, expected = rows_of(task), WIDTHS[task], experts[task](**inputs).logits
        torch.testing.assert_close(output.logits[rows, :width], expected[rows], **CLOSE)
        assert (output.logits[rows, width:] == -float("inf")).all()
        assert torch.equal(output.logits[rows].argmax(-1), expected[rows].argmax(-1))
        torch.testing.assert_close(output.logits[rows].softmax(-1)[:, :width], expected[rows].softmax(-1), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("task", TASKS)
def test_one_named_task_has_its_own_width_and_one_task_per_row_the_widest(classifiers, task):
    model, experts = classifiers
    inputs = tokens(ROWS)
    named = model(**inputs, task=task)
    assert named.logits.shape == (ROWS, WIDTHS[task])
    assert named.routing.num_labels == [WIDTHS[task]] * ROWS
    torch.testing.assert_close(named.logits, experts[task](**inputs).logits, **CLOSE)
    per_row = model(**inputs, task=[task] * ROWS)
    assert per_row.logits.shape == (ROWS, 5)
    assert torch.equal(per_row.logits[:, : WIDTHS[task]], named.logits)


@torch.no_grad()
def test_the_loss_is_the_mean_over_all_rows(classifiers):
    model, experts = classifiers
    inputs = tokens(ROWS)
    labels = torch.tensor([4, 1, 2, 0, 1, 0])
    losses = {task: [] for task in TASKS}
    for task in TASKS:
        logits = experts[task](**inputs).logits[rows_of(task)]
        losses[task] = cross_entropy(logits, labels[rows_of(task)], reduction="none")
    expected = torch.cat(list(losses.values())).mean()
    torch.testing.assert_close(model(**inputs, labels=labels, task=MIXED).loss, expected, **CLOSE)
    weighted = sum(
        experts[task](**{k: v[rows_of(task)] for k, v in (inputs | {"labels": labels}).items()}).loss
        * MIXED.count(task)
        for task in TASKS
    )
    torch.testing.assert_close(expected, weighted / ROWS, **CLOSE)


@torch.no_grad()
def test_predict_names_task_label_and_score(classifiers):
    model, experts = classifiers
    inputs = tokens(ROWS)
    for row, (task, prediction) in enumerate(zip(MIXED, model.predict(**inputs, task=MIXED), strict=True)):
        scores = experts[task](**inputs).logits[row].softmax(-1)
        assert prediction["task"] == task
        assert prediction["label"] == f"{task}-{int(scores.argmax())}"
        assert prediction["score"] == pytest.approx(scores.max().item(), abs=1e-5)


@torch.no_grad()
def test_predict_follows_the_routing(classifiers):
    model, _ = classifiers
    inputs = tokens(3 * ROWS)
    model.retex_config = replace(model.retex_config, signature_rank=1)
    parts = {task: {k: v[i::3] for k, v in inputs.items()} for i, task in enumerate(TASKS)}
    model.fit_signatures({task: [part] for task, part in parts.items()}, progress=False)
    routing = model.identify(**inputs)
    assert [prediction["task"] for prediction in model.predict(**inputs)] == routing.tasks
    assert model.predict(**inputs) == model.predict(**inputs, task=routing.tasks)


def test_predict_is_refused_for_models_without_classes():
    model, _ = build_retex("bert")
    with pytest.raises(RetexError, match="predict needs one classification per row"):
        model.predict(**tokens(2), task="red")


@torch.no_grad()
def test_token_classifiers_are_padded_in_the_last_axis(tmp_path):
    model, experts = save_experts(tmp_path, tf.BertForTokenClassification, WIDTHS)
    inputs = tokens(ROWS)
    labels = torch.randint(0, 2, (ROWS, 8)).masked_fill(inputs["attention_mask"] == 0, -100)
    output = model(**inputs, labels=labels, task=MIXED)
    assert output.logits.shape == (ROWS, 8, 5)
    losses = []
    for task in TASKS:
        rows, width, expected = rows_of(task), WIDTHS[task], experts[task](**inputs).logits
        torch.testing.assert_close(output.logits[rows, :, :width], expected[rows], **CLOSE)
        assert (output.logits[rows, :, width:] == -float("inf")).all()
        losses.append(cross_entropy(expected[rows].flatten(0, 1), labels[rows].flatten(), reduction="none"))
    expected = torch.cat(losses).sum() / (labels != -100).sum()
    torch.testing.assert_close(output.loss, expected, **CLOSE)


@torch.no_grad()
def test_a_regression_head_beside_classifiers(tmp_path):
    settings = {"red": {"problem_type": "regression"}, "green": {"problem_type": "multi_label_classification"}}
    model, experts = save_experts(
        tmp_path, tf.BertForSequenceClassification, {"red": 1, "green": 4, "blue": 3}, **settings
    )
    inputs = tokens(ROWS)
    output = model(**inputs, task=MIXED)
    assert output.logits.shape == (ROWS, 4)
    assert output.routing.num_labels == [{"red": 1, "green": 4, "blue": 3}[task] for task in MIXED]
    predictions = model.predict(**inputs, task=MIXED)
    for row, task in enumerate(MIXED):
        logits = experts[task](**inputs).logits[row]
        score = {"red": logits[0], "green": logits.sigmoid().max(), "blue": logits.softmax(0).max()}[task]
        assert predictions[row]["label"] == f"{task}-{int(logits.argmax())}"
        assert predictions[row]["score"] == pytest.approx(score.item(), abs=1e-5)

    values = torch.randn(ROWS)
    named = model(**inputs, labels=values, task="red").loss
    torch.testing.assert_close(named, experts["red"](**inputs, labels=values).loss, **CLOSE)
    marks = torch.randint(0, 2, (ROWS, 4)).float()
    named = model(**inputs, labels=marks, task="green").loss
    torch.testing.assert_close(named, experts["green"](**inputs, labels=marks).loss, **CLOSE)


@torch.no_grad()
def test_the_merged_model_keeps_its_own_problem_type(tmp_path):
    model, _ = save_experts(tmp_path, tf.BertForSequenceClassification, {"red": 1, "green": 4, "blue": 3})
    inputs = tokens(ROWS)
    before = model.config.to_dict()
    model(**inputs, labels=torch.randn(ROWS), task="red")
    model(**inputs, labels=torch.zeros(ROWS, dtype=torch.long), task="green")
    assert model.config.to_dict() == before
