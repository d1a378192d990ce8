"""WEMoE: weights of MLPs mixed for every row, routers trained on entropy."""

from __future__ import annotations

import dataclasses
from copy import deepcopy

import numpy as np
import pytest
import torch
from explicit import body_tensors, logits_of, rows
from helpers import TASKS
from materials import make_material, mixed_batch

from retex_hf.baselines import wemoe
from retex_hf.baselines.heads import most_confident
from retex_hf.baselines.merges import validation_batches
from retex_hf.baselines.weights import expert_weights
from retex_hf.baselines.wemoe import WEMoE, mixed_linear, mlp_router
from retex_hf.data.readout import Classifier
from retex_hf.errors import ConfigError, TaskError

UNTRAINED = {"steps": 0, "progress": False}


def is_mlp(name: str) -> bool:
    return "intermediate" in name or (".output.dense" in name and "attention" not in name)


@pytest.mark.parametrize("shape", [(5, 6), (5, 1, 6), (5, 7, 6), (5, 2, 3, 6)])
@pytest.mark.parametrize("bytes_at_once", [1, 64 * 1024**2])
def test_a_mixed_layer_has_explicit_weights_for_every_row(shape, bytes_at_once, monkeypatch):
    monkeypatch.setattr(wemoe, "LAYER_BYTES", bytes_at_once)
    stack, bias = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    coefficients = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    found = mixed_linear(hidden, coefficients, stack, bias)
    expected = np.empty((*shape[:-1], 4))
    for row in range(5):
        shares = coefficients[row].detach().numpy()
        weight = sum(c * w for c, w in zip(shares, stack.numpy(), strict=True))
        offset = sum(c * b for c, b in zip(shares, bias.numpy(), strict=True))
        expected[row] = hidden[row].detach().numpy() @ weight.T + offset
    np.testing.assert_allclose(found.detach().numpy(), expected)
    assert torch.autograd.gradcheck(lambda h, c: mixed_linear(h, c, stack, bias), (hidden, coefficients))


def test_routers_start_at_the_scale():
    router = mlp_router(16, 3, 0.3)
    assert router[0].weight.shape == (16, 16)
    assert router[0].weight.std().item() == pytest.approx(0.01, rel=0.2)
    assert torch.equal(router[0].bias, torch.zeros(16))
    assert torch.equal(router[2].bias, torch.full((3,), 0.3))
    torch.nn.init.zeros_(router[2].weight)
    torch.testing.assert_close(router(torch.randn(2, 5, 16)), torch.full((2, 5, 3), 0.3))


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_untrained_it_is_task_arithmetic(kind):
    material = make_material(kind)
    method = WEMoE(scale=0.25, **UNTRAINED)
    method.fit(material)
    for expert in method.experts:
        torch.nn.init.zeros_(expert.router[2].weight)  # no noise
    base, experts = body_tensors(material)
    body = {name: tensor + 0.25 * sum(e - tensor for e in experts[name]) for name, tensor in base.items()}
    inputs, _ = mixed_batch(material)
    scores = method.shared.scores(material.readout, inputs, TASKS)
    for task in TASKS:
        expected = logits_of(material, task, body, inputs)
        torch.testing.assert_close(scores[task], expected, rtol=1e-3, atol=1e-3)


def test_every_row_has_the_weights_that_its_routers_say():
    material = make_material("bert")
    method = WEMoE(**UNTRAINED)
    method.fit(material)
    for expert in method.experts:
        for parameter in expert.router.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    base, experts = body_tensors(material)
    inputs, _ = mixed_batch(material)
    expected = []
    for row in rows(inputs):
        length = int(row["attention_mask"].sum())
        row = {name: value[:, :length] for name, value in row.items()}
        model = deepcopy(material.experts["green"])
        tensors = model.state_dict()
        for name, tensor in base.items():
            tensors[name].copy_(torch.tensor(tensor + 0.3 * sum(e - tensor for e in experts[name])))

        def set_weights(layer, args, number):
            """Before an MLP runs, give its layers the weights for this very row."""
            shares = method.experts[number].router(args[0])[0].mean(0).double().numpy()
            prefix = f"bert.encoder.layer.{number}."
            for name in (name for name in base if name.startswith(prefix) and is_mlp(name)):
                mixed = base[name] + sum(c * (e - base[name]) for c, e in zip(shares, experts[name], strict=True))
                tensors[name].copy_(torch.tensor(mixed))  # noqa: B023

        for number, layer in enumerate(model.bert.encoder.layer):
            layer.intermediate.register_forward_pre_hook(lambda m, args, number=number: set_weights(m, args, number))
        with torch.no_grad():
            expected.append(model(**row).logits[0])
    with torch.no_grad():
        found = method._scores(inputs, ["green"])["green"]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-3, atol=1e-3)
    assert method.predict(inputs, ["green"] * 9).answers == torch.stack(expected).argmax(-1).tolist()


def test_oracle_gives_mlps_the_weights_of_the_expert():
    material = make_material("bert")
    method = WEMoE(**UNTRAINED)
    method.fit(material)
    base, experts = body_tensors(material)
    inputs, tasks = mixed_batch(material)
    expected = []
    for row, task in zip(rows(inputs), tasks, strict=True):
        index = TASKS.index(task)
        body = {
            name: experts[name][index] if is_mlp(name) else tensor + 0.3 * sum(e - tensor for e in experts[name])
            for name, tensor in base.items()
        }
        expected.append(int(logits_of(material, task, body, row).argmax()))
    prediction = method.predict(inputs, tasks, oracle=True)
    assert prediction.answers == expected
    assert prediction.tasks == tasks
    assert all(expert.fixed is None and expert.mask is None for expert in method.experts)
    with pytest.raises(TaskError, match="WEMoE needs the task of every row for oracle routing"):
        method.predict(inputs, oracle=True)


@pytest.mark.parametrize("kind", ["bert", "clip"])
def test_unknown_takes_the_surest_head_and_runs_the_body_once(kind):
    material = make_material(kind)
    method = WEMoE(**UNTRAINED)
    method.fit(material)
    inputs, _ = mixed_batch(material)
    layer = method.shared.modules["red"].get_submodule(method.experts[0].names[0].removesuffix(".weight"))
    passes = []
    layer.register_forward_hook(lambda *args: passes.append(1))
    prediction = method.predict(inputs)
    assert len(passes) == 1
    separate = {}
    for task in TASKS:
        with torch.no_grad():
            separate.update(method._scores(inputs, [task]))
    assert (prediction.tasks, prediction.answers) == most_confident(separate)
    assert len(passes) == 4


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_method_that_remembers_answers_alike_and_computes_once(kind):
    material = make_material(kind)
    method, forgetful = (WEMoE(steps=1, rows_per_task=2, remember=r, progress=False) for r in (True, False))
    method.fit(material)
    forgetful.fit(material)
    inputs, tasks = mixed_batch(material)
    assert method.predict(inputs) == forgetful.predict(inputs)
    layer = method.shared.modules["red"].get_submodule(method.experts[0].names[0].removesuffix(".weight"))
    layer.register_forward_hook(lambda *args: pytest.fail("ran again"))
    assert method.predict(inputs) == forgetful.predict(inputs)
    order = [8, 3, 1]
    some = {name: value[order] for name, value in inputs.items()}
    of = [tasks[row] for row in order]
    assert method.predict(some, of) == forgetful.predict(some, of)


@pytest.mark.parametrize("kind", ["bert", "clip", "t5", "gpt2"])
def test_a_mixed_batch_is_one_row_at_a_time(kind):
    material = make_material(kind)
    method = WEMoE(steps=2, rows_per_task=2, progress=False)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    for options in ({}, {"tasks": tasks}, {"tasks": tasks, "oracle": True}):
        together = method.predict(inputs, **options)
        for number, row in enumerate(rows(inputs)):
            own = {**options, "tasks": [tasks[number]]} if options else {}
            alone = method.predict(row, **own)
            assert alone.answers == [together.answers[number]]
            assert (alone.tasks or [None]) == ([None] if together.tasks is None else [together.tasks[number]])
    if kind in ("t5", "gpt2"):
        assert method.predict(inputs).tasks is None


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_training_lowers_the_entropy_and_moves_routers_only(kind):
    material = make_material(kind)
    kept = {name: tensor.clone() for name, tensor in expert_weights(material).base.items()}
    method = WEMoE(steps=12, rows_per_task=8, learning_rate=1e-2, validation_rows=0, progress=False)
    method.fit(material)
    assert method.state()["last_entropy"] < 0.97 * method.state()["first_entropy"]
    assert all(torch.equal(kept[name], tensor) for name, tensor in method.weights.base.items())
    assert not any(p.requires_grad for expert in method.experts for p in expert.router.parameters())


def test_two_fits_are_alike():
    material = make_material("bert")
    fits = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        method = WEMoE(steps=2, rows_per_task=2, progress=False)
        method.fit(dataclasses.replace(material, shared={}))
        fits.append(method.entropies)
    assert fits[0] == fits[1]


def test_training_sees_no_labels():
    material = make_material("bert")
    unlabelled = {task: dataclasses.replace(data, answers=None) for task, data in material.train.items()}
    method = WEMoE(steps=1, rows_per_task=2, validation_rows=0, progress=False)
    method.fit(dataclasses.replace(material, train=unlabelled, validation={}))
    assert len(method.entropies) == 1


def test_the_routers_kept_are_those_with_the_best_validation_accuracy(monkeypatch):
    material = make_material("bert")
    states = []
    accuracies = iter([0.25, 0.75, 0.5, 0.75])

    def rated(self, batches):
        assert {task: sum(part.rows for part in parts) for task, parts in batches.items()} == dict.fromkeys(TASKS, 6)
        states.append([p.detach().clone() for expert in self.experts for p in expert.router.parameters()])
        return next(accuracies)

    monkeypatch.setattr(WEMoE, "_accuracy", rated)
    method = WEMoE(steps=5, rows_per_task=2, learning_rate=1e-2, validation_rows=6, check_every=2, progress=False)
    method.fit(material)
    assert method.validation_accuracies == {0: 0.25, 2: 0.75, 4: 0.5, 5: 0.75}
    assert method.state()["kept_step"] == 2 and method.state()["validation_accuracy"] == 0.75
    kept = [p for expert in method.experts for p in expert.router.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(kept, states[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(kept, states[3], strict=True))


def test_validation_accuracy_is_that_of_predictions_under_the_true_heads():
    material = make_material("bert")
    method = WEMoE(steps=1, rows_per_task=2, validation_rows=8, progress=False)
    method.fit(material)
    batches = validation_batches(material, 8)
    expected = []
    for task in TASKS:
        (part,) = batches[task]
        answers = method.predict(part.inputs, [task] * part.rows).answers
        expected.append(np.mean([answer == truth for answer, truth in zip(answers, part.answers, strict=True)]))
    assert method._accuracy(batches) == pytest.approx(np.mean(expected))
    with pytest.raises(ConfigError, match="check_every must be at least 1, not 0"):
        WEMoE(check_every=0)


def test_storage_is_one_body_the_vectors_of_mlps_and_the_routers():
    method = WEMoE(**UNTRAINED)
    method.fit(make_material("bert"))
    body = sum(tensor.numel() for tensor in method.weights.base.values())
    mlps = 2 * (16 * 24 + 24 + 24 * 16 + 16)
    routers = 2 * (16 * 16 + 16 + 16 * 3 + 3)
    assert method.storage_bytes() == 4 * (body + 3 * mlps + routers)


def test_layers_that_run_in_another_order_are_refused():
    method = WEMoE(**UNTRAINED)
    method.fit(make_material("bert"))
    last = method.shared.modules["red"].get_submodule(method.experts[0].names[-1].removesuffix(".bias"))
    with pytest.raises(ConfigError, match=r"must run first, but 'bert.*intermediate.*' did not"):
        last(torch.zeros(1, 24))


def test_a_model_without_mlps_is_told_so():
    material = make_material("resnet")
    assert isinstance(material.readout, Classifier)
    with pytest.raises(ConfigError, match="WEMoE mixes the MLPs of a model, but no neighbouring linear layers"):
        WEMoE(**UNTRAINED).fit(material)
