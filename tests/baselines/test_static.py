"""References without a router: experts, base and merges, and how a head is chosen when nobody names it."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from helpers import TASKS, rows_of, take
from materials import CLASSES, KINDS, make_material, mixed_batch
from transformers import BertModel

from retex_hf import RetexConfig, RetexModel
from retex_hf.baselines import BASELINES, Individual, Merged, ZeroShotBase, expert_weights, make
from retex_hf.baselines.heads import most_confident
from retex_hf.baselines.identifier import shared_identifier
from retex_hf.baselines.merges import describe_merge, learned_merge
from retex_hf.baselines.shared_body import SharedBody
from retex_hf.errors import ConfigError, InputError, TaskError
from retex_hf.evaluation.method import Method, TaskData
from retex_hf.merging.adamerging import learn_coefficients


def fitted(method: Method, material) -> Method:
    method.fit(material)
    return method


def body_bytes(material) -> int:
    """Of the base, which has no heads; tied tensors once."""
    return 4 * sum(p.numel() for p in material.base.parameters()) + 4 * sum(
        b.numel() for b in material.base.buffers() if b.is_floating_point()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_individual_answers_as_the_expert_of_the_true_task(kind):
    material = make_material(kind)
    method = fitted(Individual(), material)
    inputs, tasks = mixed_batch(material)
    prediction = method.predict(inputs, tasks)
    assert prediction.tasks == tasks
    for task in TASKS:
        rows = rows_of(task, tasks)
        own = material.readout.call(material.experts[task], take(inputs, rows))
        assert [prediction.answers[row] for row in rows] == material.readout.answers(own, [task] * len(rows))
    assert method.storage_bytes() == 3 * body_bytes(material)
    assert method.modes == ("known",)
    with pytest.raises(TaskError, match="individual has no router"):
        method.predict(inputs)


@pytest.mark.parametrize("kind", ["bert", "resnet"])
def test_zero_shot_is_the_base_under_the_head_of_each_task(kind):
    material = make_material(kind)
    method = fitted(ZeroShotBase(), material)
    inputs, tasks = mixed_batch(material)
    expected = [None] * len(tasks)
    for task, expert in material.experts.items():
        expert.base_model.load_state_dict(material.base.state_dict())
        for row in rows_of(task, tasks):
            expected[row] = int(expert(**take(inputs, [row])).logits.argmax())
    assert method.predict(inputs, tasks).answers == expected
    assert method.storage_bytes() == body_bytes(material)


@pytest.mark.parametrize("kind", KINDS)
def test_average_is_the_mean_of_the_experts(kind):
    material = make_material(kind)
    method = fitted(Merged("average"), material)
    for name, tensor in method.body("red").items():
        mean = np.mean([expert.state_dict()[name].double().numpy() for expert in material.experts.values()], axis=0)
        np.testing.assert_allclose(tensor.numpy(), mean, rtol=1e-4, atol=1e-6)
    assert method.storage_bytes() == body_bytes(material)


@pytest.mark.parametrize("merge", ["ties", {"method": "task_arithmetic", "scale": 0.2}])
def test_other_merges_are_those_of_the_registry(merge):
    material = make_material("bert")
    config = RetexConfig(merge=merge, exclude=["*"])
    merged = RetexModel.from_experts(material.base, material.experts, config, progress=False).model.state_dict()
    method = fitted(Merged(merge), material)
    for name, tensor in method.body("red").items():
        torch.testing.assert_close(tensor, merged[name])


def test_a_finished_merge_can_be_evaluated(tmp_path):
    material = make_material("bert")
    material.experts["green"].save_pretrained(tmp_path / "finished")
    method = fitted(Merged(str(tmp_path / "finished")), material)
    assert method.name == "finished"
    assert method.state() == {"merge": {"method": "finished"}}
    for name, tensor in method.body("red").items():
        assert torch.equal(tensor, material.experts["green"].state_dict()[name])


@pytest.mark.parametrize("kind", ["bert", "vit", "resnet", "clip"])
def test_the_surest_head_is_the_one_of_least_relative_entropy(kind):
    material = make_material(kind)
    method = fitted(Merged("average"), material)
    inputs, _ = mixed_batch(material)
    doubts, answers = [], []
    for task, classes in CLASSES.items():
        module = method.weights.module(method.body(task), task)
        logits = material.readout.logits(module, inputs, task).detach().double().numpy()
        assert logits.shape[1] == classes
        likely = np.exp(logits - logits.max(1, keepdims=True))
        likely /= likely.sum(1, keepdims=True)
        doubts.append(-(likely * np.log(likely)).sum(1) / log(classes))
        answers.append(logits.argmax(1))
    chosen = np.argmin(doubts, axis=0)
    prediction = method.predict(inputs)
    assert prediction.tasks == [TASKS[index] for index in chosen]
    assert prediction.answers == [answers[index][row] for row, index in enumerate(chosen)]
    with pytest.raises(TaskError, match="average has no router"):
        method.choose(inputs)
    if kind == "bert":
        assert len(set(prediction.tasks)) > 1


def test_relative_entropy_is_fair_to_wide_heads():
    narrow, wide = torch.tensor([[1.0, 0.0]]), torch.full((1, 100), -4.0)
    wide[0, 7] = 4.0
    # The wide head's entropy is larger as a number, and smaller for its width.
    assert most_confident({"narrow": narrow, "wide": wide}) == (["wide"], [7])


def test_a_head_of_one_output_cannot_be_sure():
    with pytest.raises(TaskError, match="head of task 'score' has one output"):
        most_confident({"score": torch.zeros(2, 1), "class": torch.zeros(2, 3)})


@pytest.mark.parametrize("kind", ["bert", "vit", "resnet", "clip"])
def test_all_heads_see_one_pass_of_the_body(kind):
    material = make_material(kind)
    weights, inputs = expert_weights(material), mixed_batch(material)[0]
    body = weights.expert_body("green")
    shared = SharedBody(weights, body)
    passes = []
    layers = {layer for module in shared.modules.values() for layer in module.modules()}
    for layer in layers:
        if isinstance(layer, (torch.nn.LayerNorm, torch.nn.BatchNorm2d)):
            layer.register_forward_hook(lambda module, args, output: passes.append(module))
    found = shared.scores(material.readout, inputs, TASKS)
    assert len(passes) == len(set(passes)) > 0
    for task in TASKS:
        expected = material.readout.logits(weights.module(body, task), inputs, task)
        torch.testing.assert_close(found[task], expected)


def test_heads_inside_the_backbone():
    material = make_material("bert")
    bare = BertModel(material.base.config, add_pooling_layer=False)
    bare.load_state_dict(material.base.state_dict(), strict=False)
    material = replace(material, base=bare)
    weights, inputs = expert_weights(material), mixed_batch(material)[0]
    assert "bert.pooler.dense.weight" in weights.heads["red"]
    body = weights.expert_body("green")
    found = SharedBody(weights, body).scores(material.readout, inputs, TASKS)
    for task in TASKS:
        expected = material.readout.logits(weights.module(body, task), inputs, task)
        torch.testing.assert_close(found[task], expected)


def test_the_head_of_the_identified_task():
    material = make_material("bert")
    method = fitted(Merged("average", head="identifier"), material)
    inputs, _ = mixed_batch(material)
    found = shared_identifier(material).tasks_of(inputs)
    prediction = method.predict(inputs)
    assert method.routes and method.identifier is shared_identifier(material)
    assert prediction == method.predict(inputs, found)
    assert prediction.tasks == found
    assert method.storage_bytes() == body_bytes(material) + method.identifier.storage_bytes(held=("average",))
    # Another body does not hold the weights that the features come from.
    other = fitted(Merged("ties", head="identifier"), material)
    assert other.storage_bytes() - method.storage_bytes() == method.identifier.trunk_bytes() > 0


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_a_merged_generator_needs_no_head(kind):
    material = make_material(kind)
    inputs, tasks = mixed_batch(material)
    for head in ("confidence", "identifier"):
        method = fitted(Merged("average", head=head), material)
        assert not method.routes
        prediction = method.predict(inputs)
        assert prediction.tasks is None
        assert prediction.answers == method.predict(inputs, tasks).answers
        output = material.readout.call(method.module("red"), inputs)
        assert prediction.answers == material.readout.answers(output, tasks)


def test_adamerging_sees_training_inputs_and_is_learned_once():
    material = make_material("bert")
    merge = {"method": "adamerging", "steps": 2, "rows_per_task": 8, "learning_rate": 0.05}
    unvalidated = replace(material, validation={}, shared={})
    method = fitted(Merged(merge, calibration_rows=16), unvalidated)
    batches = {task: [material.collate(material.sample(task, 16))] for task in TASKS}
    weights = expert_weights(material)
    options = {"steps": 2, "rows_per_task": 8, "learning_rate": 0.05, "progress": False}
    expected = learn_coefficients(weights, material.readout.logits, batches, **options)
    for column, (name, base) in enumerate(weights.base.items()):
        body = base + torch.tensordot(expected[:, column], weights.vectors[name], 1)
        torch.testing.assert_close(method.body("red")[name], body, rtol=1e-4, atol=1e-5)
    assert learned_merge(unvalidated, merge, 16) is method.found
    means = method.state()["merge"]["coefficients"]
    assert means == pytest.approx(dict(zip(TASKS, expected.mean(1).tolist(), strict=True)))


def test_adamerging_keeps_its_start_where_training_only_harms():
    """The answers are those of the start, so that no step can beat it."""
    material = make_material("bert")
    start = fitted(Merged({"method": "task_arithmetic", "scale": 0.3}), material)
    validation = {}
    for task, data in material.validation.items():
        answers = start.predict(material.collate(data.inputs), [task] * len(data)).answers
        validation[task] = TaskData(task, data.inputs, answers)
    merge = {"method": "adamerging", "steps": 3, "rows_per_task": 8, "learning_rate": 0.2}
    method = fitted(Merged(merge, calibration_rows=16), replace(material, validation=validation, shared={}))
    for name, tensor in start.body("red").items():
        torch.testing.assert_close(method.body("red")[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_scales_are_chosen_on_validation_data(method):
    material = make_material("bert")
    found = learned_merge(material, {"method": method, "scale": "auto"}, 16)
    tuned = fitted(Merged({"method": method, "scale": "auto"}, calibration_rows=16), material)
    assert tuned.found is found and tuned.state()["merge"]["scale"] == found["scale"]
    fixed = fitted(Merged({"method": method, "scale": found["scale"]}), material)
    assert all(torch.equal(tensor, fixed.body("red")[name]) for name, tensor in tuned.body("red").items())


def test_scales_without_validation_data_are_refused():
    material = replace(make_material("bert"), validation={})
    with pytest.raises(ConfigError, match="'ties' chooses by accuracy on validation data, but there are none"):
        learned_merge(material, {"method": "ties", "scale": "auto"}, 16)


def test_a_method_in_a_mapping_is_the_method_by_its_name():
    material = make_material("bert")
    bare, mapped = (fitted(Merged(m, head="identifier"), material) for m in ("average", {"method": "average"}))
    assert mapped.storage_bytes() == bare.storage_bytes()
    assert mapped.name == bare.name == "average (identified head)"


def test_consensus_is_chosen_on_validation_data():
    material = make_material("bert")
    found = learned_merge(material, "consensus", 16)
    assert set(found["thresholds"]) == set(TASKS) and 0 < found["scale"] <= 1
    # The choice depends on the labels.
    hopeless = {task: TaskData(task, data.inputs, [99] * len(data)) for task, data in material.validation.items()}
    with pytest.raises(InputError, match="answers no calibration row correctly"):
        learned_merge(replace(material, validation=hopeless, shared={}), "consensus", 16)


def test_merges_are_described_in_plain_values():
    assert describe_merge("average") == {"method": "average"}
    learned = {"method": "adamerging", "coefficients": {"red": {"a": 0.25, "b": 0.75}}, "trim": False}
    assert describe_merge(learned) == {"method": "adamerging", "coefficients": {"red": 0.5}, "trim": False}


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match=r"Merged: head must be one of \('confidence', 'identifier'\), not 'true'"):
        Merged(head="true")
    with pytest.raises(ConfigError, match="There is no baseline 'magic'"):
        make("magic")
    material = make_material("bert")
    with pytest.raises(ConfigError, match=r"RetexConfig.merge must be one of .* not 'magic'"):
        Merged("magic").fit(material)


def test_every_baseline_has_a_name_of_its_own():
    names = [make(name).name for name in BASELINES]
    assert len(set(names)) == len(names)
