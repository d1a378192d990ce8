"""Bodies of their own for every row: the mixture, the grouping, what is remembered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import assert_rows_close, body_tensors, logits_of, raw, rows
from helpers import TASKS
from materials import make_material, mixed_batch

from retex_hf.baselines.dynamic import Dynamic, Mixtures, row_keys
from retex_hf.baselines.weights import expert_weights
from retex_hf.errors import TaskError
from retex_hf.evaluation.method import without_padding

COEFFICIENTS = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.1, 0.1, 0.8]])


class ByLength(Dynamic):
    """Mixes experts by something that is easily seen: the sum of a row's inputs."""

    name = "by length"
    routed = 0

    def prepare(self, material):
        weights = self.weights
        corners = {name: base + weights.vectors[name] for name, base in weights.base.items()}
        return Mixtures(weights, corners, {})

    def route(self, inputs):
        self.routed += 1
        key = "input_ids" if "input_ids" in inputs else "pixel_values"
        sums = inputs[key].flatten(1).double().sum(1)
        return torch.stack([(sums * factor).sin() for factor in (1, 2, 3)], 1).softmax(-1).float()

    def storage_bytes(self):
        return 0


@pytest.mark.parametrize("kind", ["bert", "vit", "resnet"])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_every_row_runs_on_its_own_mixture_under_its_own_head(kind, at_once):
    material = raw(make_material(kind))
    weights = expert_weights(material)
    corners = {name: base + weights.vectors[name] for name, base in weights.base.items()}
    mixtures = Mixtures(weights, corners, {})
    mixtures._at_once = min(at_once, mixtures._at_once)
    inputs, _ = mixed_batch(material)
    coefficients, heads = COEFFICIENTS.repeat(3, 1), ["red", "green", "blue", "blue", "red", "green"] + ["red"] * 3
    with torch.inference_mode():  # as evaluation calls it
        found = mixtures.answers(material.readout, inputs, coefficients, heads)
    _, experts = body_tensors(material)
    assert set(experts) == set(weights.base)
    expected = []
    for row, shares, head in zip(rows(inputs), coefficients.double().numpy(), heads, strict=True):
        body = {name: sum(c * t for c, t in zip(shares, of, strict=True)) for name, of in experts.items()}
        expected.append(logits_of(material, head, body, row))
    assert_rows_close(found, expected)


def test_fixed_tensors_stay_and_experts_are_not_written_to():
    material = raw(make_material("bert"))
    weights = expert_weights(material)
    kept = {name: vectors.clone() for name, vectors in weights.vectors.items()}
    mixed = [name for name in weights.base if "layer.1" in name]
    corners = {name: weights.base[name] + weights.vectors[name] for name in mixed}
    mixtures = Mixtures(weights, corners, {name: t for name, t in weights.base.items() if name not in mixed})
    inputs, _ = mixed_batch(material)
    found = mixtures.answers(material.readout, inputs, COEFFICIENTS.repeat(3, 1), ["green"] * 9)
    base, experts = body_tensors(material)
    expected = []
    for row, shares in zip(rows(inputs), COEFFICIENTS.repeat(3, 1).double().numpy(), strict=True):
        own = {name: sum(c * t for c, t in zip(shares, experts[name], strict=True)) for name in mixed}
        expected.append(logits_of(material, "green", {**base, **own}, row))
    assert_rows_close(found, expected)
    assert all(torch.equal(kept[name], weights.vectors[name]) for name in kept)


@pytest.mark.parametrize("kind", ["bert", "clip", "t5", "gpt2"])
def test_a_mixed_batch_is_one_row_at_a_time(kind):
    material = make_material(kind)
    method = ByLength()
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    together = method.predict(inputs, tasks)
    alone = [method.predict(row, [task]) for row, task in zip(rows(inputs), tasks, strict=True)]
    assert together.answers == [prediction.answers[0] for prediction in alone]
    unknown = method.predict(inputs)
    assert unknown.tasks == [TASKS[index] for index in method.route(inputs).argmax(-1)]


@pytest.mark.parametrize("kind", ["bert", "vit", "clip", "t5", "gpt2"])
def test_the_corner_of_the_true_task_is_its_expert(kind):
    material = make_material(kind)
    method = ByLength()
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    right = [material.validation[task].answers[row] for row, task in enumerate(tasks)]
    assert method.predict(inputs, tasks, oracle=True).answers == right
    with pytest.raises(TaskError, match="by length needs the task of every row for oracle routing"):
        method.predict(inputs, oracle=True)
    assert method.predict(inputs, tasks).answers != right


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_method_that_remembers_answers_alike_and_computes_once(kind, monkeypatch):
    material = make_material(kind)
    method, forgetful = ByLength(remember=True), ByLength()
    method.fit(material)
    forgetful.fit(material)
    ran = []
    mixtures_answers = method.mixtures.answers
    monkeypatch.setattr(
        method.mixtures, "answers", lambda r, i, c, heads: ran.append(len(heads)) or mixtures_answers(r, i, c, heads)
    )
    inputs, tasks = mixed_batch(material)
    order = [4, 2, 7, 0, 1, 8, 3, 6, 5]
    shuffled = {name: value[order] for name, value in inputs.items()}
    unknown, known = method.predict(inputs), method.predict(shuffled, [tasks[row] for row in order])
    assert unknown == forgetful.predict(inputs)
    assert known == forgetful.predict(shuffled, [tasks[row] for row in order])
    assert method.routed == 1
    wrong = sum(chosen != task for chosen, task in zip(unknown.tasks, tasks, strict=True))
    # Under another head a class must be asked for again; a text is the same.
    assert ran == ([9, wrong] if kind == "bert" else [9])
    assert method.predict(inputs, tasks, oracle=True) == forgetful.predict(inputs, tasks, oracle=True)


def test_rounded_coefficients_still_sum_to_one():
    shares = torch.tensor([[0.3333, 0.3333, 0.3334], [0.9996, 0.0004, 0.0]])
    assert torch.equal(ByLength().coefficients(shares), shares)
    rounded = ByLength(decimals=2).coefficients(shares)
    np.testing.assert_allclose(rounded.numpy(), [[1 / 3] * 3, [1, 0, 0]], rtol=1e-6)


def test_rows_are_known_again_whatever_their_padding():
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    assert without_padding(batch)["input_ids"].tolist() == [[5, 6], [7, 8]]
    keys = row_keys(batch)
    assert keys == row_keys(without_padding(batch))
    assert len(set(keys)) == 2
    masked = {**batch, "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])}
    assert row_keys(masked)[0] == keys[0]
    assert row_keys(masked)[1] != keys[1]
