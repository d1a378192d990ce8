"""The causal suites: experts learn answers, whole or as adapters, from which ReTeX builds one model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from decoders import make_decoder
from peft import PeftModel
from signed import make_tokenizer
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import causal
import causal_lora
from common import Task

from retex_hf import RetexConfig, RetexModel


@pytest.fixture
def base(tmp_path) -> Path:
    torch.manual_seed(0)
    make_decoder().save_pretrained(tmp_path / "base")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(3)
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def task_of(tokenizer, name: str) -> Task:
    places = tokenizer.get_vocab()  # in any order
    words = [word for word in sorted(places, key=places.__getitem__) if not word.startswith("[")][:4]
    labels = [row % 2 for row in range(64)]
    inputs = [words[label] for label in labels]
    return Task(name, words[2:], inputs, labels, inputs[:8], labels[:8])


@pytest.mark.parametrize("suite", [causal, causal_lora])
def test_an_expert_learns_answers_and_is_recovered(suite, base, tmp_path, monkeypatch):
    monkeypatch.setitem(causal.TASKS, "words", (1.0, 30))
    monkeypatch.setattr(suite, "LEARNING_RATE", 2e-3)
    task = task_of(make_tokenizer(), "words")
    suite.fine_tune_expert(base, task, tmp_path / "expert")
    assert (tmp_path / "expert" / "adapter_config.json").exists() == (suite is causal_lora)
    before = AutoModelForCausalLM.from_pretrained(base)
    if suite is causal_lora:
        expert = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "expert")
    else:
        expert = AutoModelForCausalLM.from_pretrained(tmp_path / "expert")
        assert torch.equal(expert.get_parameter(causal.EMBEDDINGS), before.get_parameter(causal.EMBEDDINGS))
    collate, readout = suite.make_collate(base), suite.make_readout(base)
    batch, rows = collate(task.test_inputs), ["words"] * 8
    right = [task.label_names[label] for label in task.test_labels]
    with torch.no_grad():
        found = [readout.answers(readout.call(model, batch), rows) for model in (before, expert)]
    assert found[0] != right and found[1] == right
    experts = {"words": tmp_path / "expert", "others": base}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    told = readout.call(model, batch, task=rows)
    assert readout.answers(told, rows) == right
