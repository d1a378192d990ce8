"""transformers' `Trainer` with a `RetexModel`: evaluates, predicts and trains as direct calls say it should."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import transformers as tf
from datasets import Dataset
from families import VOCAB, tokens
from helpers import MIXED, TASKS, build_retex
from materials_of_pipelines import LABELS, TEXTS, make_tokenizer, text_classifier
from torch.nn.functional import cross_entropy
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from retex_hf import RetexError, RetexModel

QUIET = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
IDS = [TASKS.index(task) for task in MIXED]
ANSWERS = [index % len(LABELS[task]) for index, task in enumerate(MIXED)]


@pytest.fixture(scope="module")
def classifier():
    return text_classifier()


def labelled(**columns) -> Dataset:
    """Six texts, the labels of their tasks, and a column that no model knows."""
    encoded = make_tokenizer()(TEXTS, padding="max_length", max_length=6)
    return Dataset.from_dict({**encoded, "labels": ANSWERS, "remark": TEXTS, **columns})


def inputs_of(data: Dataset) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(data[name]) for name in ("input_ids", "attention_mask")}


def accuracy(prediction: tf.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_the_signature_is_that_of_the_wrapped_model_and_the_task(classifier):
    model, experts = classifier
    shown = inspect.signature(model.forward).parameters
    wrapped = inspect.signature(experts["red"].forward).parameters
    assert [name for name in shown if name not in ("task", "adapter_names")] == list(wrapped)
    assert shown["task"].default is None
    assert "labels" in inspect.signature(RetexModel.forward).parameters  # of the class, where Trainer looks for labels


@torch.no_grad()
@pytest.mark.parametrize("known", [True, False], ids=["task column", "identified"])
@pytest.mark.parametrize("size", [2, 4])
def test_evaluation(classifier, tmp_path, known, size):
    """Of several heads, logits are as wide as the widest; the loss is the mean over rows, each under its own head."""
    model, experts = classifier
    data = labelled(task=IDS) if known else labelled()
    trainer = Trainer(
        model,
        TrainingArguments(tmp_path, per_device_eval_batch_size=size, eval_accumulation_steps=1, **QUIET),
        compute_metrics=accuracy,
    )
    assert trainer.label_names == ["labels"]
    tasks = MIXED if known else model.identify(**inputs_of(data)).tasks
    rows = [
        experts[task](**{name: value[row : row + 1] for name, value in inputs_of(data).items()}).logits[0]
        for row, task in enumerate(tasks)
    ]
    answers = [answer % len(row) for answer, row in zip(ANSWERS, rows, strict=True)]
    data = data.remove_columns("labels").add_column("labels", answers)
    result = trainer.predict(data)
    assert result.predictions.shape == (6, 4)
    for row, expected in enumerate(rows):
        np.testing.assert_allclose(result.predictions[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)
        assert np.all(result.predictions[row, len(expected) :] == -np.inf)
    losses = [cross_entropy(row, torch.tensor(answer)) for row, answer in zip(rows, answers, strict=True)]
    assert result.metrics["test_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
    right = [int(row.argmax()) == answer for row, answer in zip(rows, answers, strict=True)]
    assert trainer.evaluate(data)["eval_accuracy"] == pytest.approx(sum(right) / 6)
    assert "eval_loss" not in trainer.evaluate(data.remove_columns("labels"))


@torch.no_grad()
@pytest.mark.parametrize("execution", ["grouped", "mixed"])
@pytest.mark.parametrize("name", ["llama-tied", "t5"])
def test_losses_of_language_models(tmp_path, name, execution):
    """transformers hands the number of labels to the model; Llama divides by it, T5 takes and ignores it."""
    model, _ = build_retex(name, scale=1.0)
    model.execution = execution
    inputs, labels = tokens(6), torch.randint(3, VOCAB, (6, 8))
    data = Dataset.from_dict({**{k: v.tolist() for k, v in inputs.items()}, "labels": labels.tolist(), "task": IDS})
    trainer = Trainer(model, TrainingArguments(tmp_path, per_device_eval_batch_size=6, **QUIET))
    direct = model(**inputs, labels=labels, task=MIXED)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(float(direct.loss), rel=1e-4)


def test_generated_answers(tmp_path):
    model, experts = build_retex("t5", scale=1.0)
    inputs, labels = tokens(6), torch.randint(3, VOCAB, (6, 5))
    data = Dataset.from_dict({**{k: v.tolist() for k, v in inputs.items()}, "labels": labels.tolist(), "task": IDS})
    options = Seq2SeqTrainingArguments(tmp_path, per_device_eval_batch_size=4, predict_with_generate=True, **QUIET)
    result = Seq2SeqTrainer(model, options).predict(data, max_length=7)
    for row, task in enumerate(MIXED):
        own = {name: value[row : row + 1] for name, value in inputs.items()}
        expected = experts[task].generate(**own, max_length=7)[0].tolist()
        assert result.predictions[row, : len(expected)].tolist() == expected
        assert not result.predictions[row, len(expected) :].any()
    assert result.metrics["test_loss"] > 0


def test_checkpoints_of_tied_models(tmp_path):
    """A state dict is what `Trainer` keeps of a model that is not of transformers' own classes."""
    model, _ = build_retex("t5", scale=1.0)
    inputs = tokens(6)
    names = ("input_ids", "attention_mask")
    data = Dataset.from_dict(
        {
            **{name: inputs[name].tolist() for name in names},
            "labels": torch.randint(3, VOCAB, (6, 5)).tolist(),
            "task": IDS,
        }
    )
    options = TrainingArguments(tmp_path, num_train_epochs=1, learning_rate=1e-2, **QUIET | {"save_strategy": "epoch"})
    Trainer(model, options, train_dataset=data).train()
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert model.get_base_model().lm_head.weight is model.get_base_model().shared.weight
    with torch.no_grad():
        model.recovery.task_embedding.add_(1.0)
    Trainer(model, options, train_dataset=data).train(resume_from_checkpoint=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name]), name


def test_training_reaches_the_recovery_and_nothing_else(classifier, tmp_path):
    classifier[0].save_pretrained(tmp_path / "artifact")
    model = RetexModel.from_pretrained(tmp_path / "artifact", is_trainable=True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    options = TrainingArguments(
        tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2, num_train_epochs=8, learning_rate=1e-2,
        **QUIET,
    )  # fmt: skip
    data = labelled(task=IDS)
    trainer = Trainer(model, options, train_dataset=data, eval_dataset=data)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < start / 2
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed and all(name.startswith("recovery.") for name in changed)
    model.save_pretrained(tmp_path / "trained")
    loaded = Trainer(RetexModel.from_pretrained(tmp_path / "trained"), options)
    assert loaded.evaluate(data)["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-4)
    with pytest.raises(RetexError, match=r"No parameter of this model can be trained: .*is_trainable=True"):
        Trainer(RetexModel.from_pretrained(tmp_path / "trained"), options, train_dataset=data).train()
