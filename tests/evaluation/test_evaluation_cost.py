"""Costs, with a clock that the methods themselves turn and with memory that they really take."""

from __future__ import annotations

import json

import pytest
import torch
from toys import Toy, toy_collate, toy_tasks
from transformers import BertConfig, BertForSequenceClassification

from retex_hf import RetexError
from retex_hf.data.readout import Classifier
from retex_hf.evaluation import cost
from retex_hf.evaluation.cost import StaticModel, held_bytes, measure_cost

MB = 10**6


class Clock:
    """Time passes only when somebody says so."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def perf_counter(self):
        return self.now


class Busy(Toy):
    """Takes some seconds and megabytes for every batch."""

    def __init__(self, name, clock, seconds, megabytes=0, held=0):
        super().__init__(name, storage=0)
        self.clock, self.seconds, self.megabytes = clock, seconds, megabytes
        self.weights = torch.zeros(held * MB // 4)

    def predict(self, inputs, tasks=None, *, oracle=False):
        self.clock.order.append(self.name)
        # A machine under growing load: everything takes longer and longer.
        self.clock.now += self.seconds * (1 + self.clock.now / 10) * (2 if tasks is None else 1)
        if self.megabytes:
            taken = torch.ones(self.megabytes * MB // 4)
            for _ in range(10):
                taken.add_(1)
        return super().predict(inputs, tasks, oracle=oracle)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cost, "time", clock)
    return clock


def test_latency_is_relative_to_a_static_model_that_takes_turns(clock):
    static, method = Busy("static", clock, 0.010), Busy("method", clock, 0.030)
    table = measure_cost([method], toy_tasks(), toy_collate, static, batch_size=4, batches=3, repeats=2, progress=False)
    assert [(of.method, of.mode) for of in table.costs] == [
        ("static", "known"),
        ("method", "known"),
        ("method", "unknown"),
    ]
    ratios = [of.latency_ratio for of in table.costs]
    assert ratios == pytest.approx([1, 3, 6], rel=1e-2)
    assert table.costs[1].milliseconds == pytest.approx(30, rel=0.2)
    # In turns: 3 batches to warm up and 2 repeats of them; then 3 alone for memory. The static model was first.
    measured = clock.order[21:]
    assert measured[:18] == ["static", "method"] * 9 and measured[18:21] == ["method"] * 3


def test_memory_counts_what_is_held_and_what_is_added(clock):
    static = Busy("static", clock, 1.0, megabytes=40, held=40)
    method = Busy("method", clock, 1.0, megabytes=160, held=80)
    options = {"batch_size": 4, "batches": 1, "repeats": 1, "modes": ["known"], "progress": False}
    first, second = measure_cost([method], toy_tasks(), toy_collate, static, **options).costs
    assert (first.held_bytes, second.held_bytes) == (40 * MB, 80 * MB)
    assert first.added_bytes == pytest.approx(40 * MB, rel=0.25) and first.memory_ratio == 1
    assert second.added_bytes == pytest.approx(160 * MB, rel=0.25)
    assert second.memory_ratio == pytest.approx(240 / 80, rel=0.25)


def test_tables_and_files(clock, tmp_path):
    table = measure_cost(
        [Busy("method", clock, 0.02)],
        toy_tasks(),
        toy_collate,
        Busy("static", clock, 0.01),
        batch_size=4,
        progress=False,
    )
    assert "| method | task unknown |" in table.markdown() and "method  task unknown" in str(table)
    paths = table.save(tmp_path)
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(table.as_dict()))
    assert paths["md"].read_text() == table.markdown()


def test_a_static_model_runs_once_per_batch():
    config = BertConfig(
        vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    model = BertForSequenceClassification(config).eval()
    static = StaticModel(model, Classifier())
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 4]])}
    found = static.predict(inputs, ["red", "blue"])
    assert found.answers == model(**inputs).logits.argmax(-1).tolist() and found.tasks == ["red", "blue"]
    expected = {
        id(tensor): tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()]
    }
    assert static.storage_bytes() == held_bytes(static) == sum(expected.values())
    with pytest.raises(RetexError, match="static has no router: name the task of every row"):
        static.predict(inputs)


def test_what_cannot_be_measured_is_refused(clock, monkeypatch, tmp_path):
    toy = Busy("toy", clock, 1.0)
    with pytest.raises(RetexError, match="fewer rows than one batch of 64"):
        measure_cost([toy], toy_tasks(), toy_collate, toy, progress=False)
    with pytest.raises(RetexError, match="at least one batch and one repeat, not 1 and 0"):
        measure_cost([toy], toy_tasks(), toy_collate, toy, batches=1, repeats=0, progress=False)
    monkeypatch.setattr(cost, "STATUS", tmp_path / "none")
    with pytest.raises(RetexError, match="which only Linux has"):
        measure_cost([toy], toy_tasks(), toy_collate, toy, batch_size=4, progress=False)
