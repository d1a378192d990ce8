"""Our identifier apart from ReTeX: its residuals, what it is fitted on, what it stores, and SiM on top of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import TASKS, rows_of
from materials import make_material, mixed_batch

from retex_hf import RetexConfig, RetexModel
from retex_hf.baselines import EMR, IdEMR, Identifier, IdLoRA, Individual, LoRA, SiM, expert_weights
from retex_hf.baselines.identifier import shared_identifier
from retex_hf.errors import ConfigError


def fitted(method, material):
    method.fit(material)
    return method


def test_residuals_are_distances_to_subspaces_of_the_average_models_features():
    material = make_material("bert")
    identifier = fitted(
        Identifier(num_reference=20, signature_rank=4, feature_layer=0, identification="residual"), material
    )
    average = material.base
    bodies = [expert.bert.state_dict() for expert in material.experts.values()]
    average.load_state_dict({name: torch.stack([body[name] for body in bodies]).mean(0) for name in bodies[0]})

    def features(inputs) -> np.ndarray:
        with torch.no_grad():
            hidden = average(**inputs, output_hidden_states=True).hidden_states[1].double().numpy()
        mask = inputs["attention_mask"].numpy()[:, :, None]
        return (hidden * mask).sum(1) / mask.sum(1)

    rows = features(mixed_batch(material)[0])
    for index, task in enumerate(TASKS):
        references = features(material.collate(material.sample(task, 20)))
        mean = references.mean(0)
        basis = np.linalg.svd(references - mean, full_matrices=False)[2][:4]
        outside = (rows - mean) @ (np.eye(len(mean)) - basis.T @ basis)
        found = identifier.residuals(mixed_batch(material)[0])[:, index]
        np.testing.assert_allclose(found.numpy(), np.linalg.norm(outside, axis=1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "resnet", "clip", "t5", "gpt2"])
def test_tasks_are_found_and_are_those_of_retex(kind):
    material = make_material(kind, rows=96)
    identifier = shared_identifier(material)
    inputs, _ = mixed_batch(material)
    found = identifier.tasks_of(inputs)
    rows = {task: identifier.tasks_of(material.collate(material.validation[task].inputs)) for task in TASKS}
    right = sum(rows[task].count(task) for task in TASKS) / (96 * len(TASKS))
    # By chance a third; the random image tower of CLIP blurs its inputs more than the others.
    assert right > (0.75 if kind == "clip" else 8 / 9)
    model = RetexModel.from_experts(material.base, material.experts, RetexConfig(rank=2), progress=False)
    model.fit_signatures({task: material.references(task, 64) for task in TASKS}, progress=False)
    assert model.signatures.feature_layer == identifier.signatures.feature_layer
    assert model.identify(**inputs).tasks == found


def test_features_can_come_from_other_bodies():
    material = make_material("bert")
    inputs, _ = mixed_batch(material)
    weights = expert_weights(material)
    green = weights.expert_body("green")
    bodies = {"pretrained": weights.base, "green": green, "average": weights.body(torch.full((3,), 1 / 3))}
    sources = {"pretrained": "pretrained", "green": green, "average": {"method": "average"}}
    found = {}
    for name, source in sources.items():
        found[name] = fitted(Identifier(source, feature_layer=1), material).residuals(inputs)
        expected = fitted(Identifier(bodies[name], feature_layer=1), material).residuals(inputs)
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found["pretrained"], found["average"], rtol=1e-2)
    assert not torch.allclose(found["pretrained"], found["green"], rtol=1e-2)


def test_storage_counts_signatures_and_the_weights_before_the_features():
    material = make_material("bert")
    identifier = fitted(Identifier(num_reference=20, signature_rank=4, feature_layer=0), material)
    signatures = 4 * (3 * (16 + 4 * 16) + 15 * 16)  # means, bases, and all directions but one that are shrunk
    tensors = material.base.state_dict()
    before = [name for name in tensors if name.startswith(("embeddings.", "encoder.layer.0."))]
    trunk = 4 * sum(tensors[name].numel() for name in before if tensors[name].is_floating_point())
    assert identifier.storage_bytes(held=("average",)) == signatures
    assert identifier.storage_bytes(held=("pretrained",)) == identifier.storage_bytes() == signatures + trunk


def test_tied_weights_count_once():
    material = make_material("t5")
    identifier = fitted(Identifier(feature_layer=-1), material)
    encoder = 4 * sum(parameter.numel() for parameter in material.base.encoder.block.parameters())
    embedding = 4 * material.base.shared.weight.numel()
    assert identifier.trunk_bytes() == encoder + embedding


def test_the_default_is_fitted_once_and_a_given_one_for_each_material():
    material = make_material("bert")
    methods = [fitted(method, material) for method in (IdEMR(), IdLoRA(4), SiM())]
    assert len({id(method.identifier) for method in methods}) == 1
    own = Identifier("pretrained", feature_layer=0)
    other = fitted(IdEMR(identifier=own), material)
    assert other.identifier is own and own is not methods[0].identifier
    before = own.signatures
    fitted(IdLoRA(4, identifier=own), material)
    assert own.signatures is before
    other.fit(replace(material, seed=5, shared={}))
    assert own.signatures is not before


@pytest.mark.parametrize("kind", ["bert", "clip", "t5"])
@pytest.mark.parametrize(("identified", "told"), [(IdEMR, EMR), (IdLoRA, LoRA), (SiM, Individual)])
def test_the_identified_task_takes_the_place_of_the_true_one(identified, told, kind):
    material = make_material(kind)
    options = {"rank": 3} if told is LoRA else {}
    method, reference = fitted(identified(**options), material), fitted(told(**options), material)
    inputs, tasks = mixed_batch(material)
    found = shared_identifier(material).tasks_of(inputs)
    assert method.predict(inputs) == reference.predict(inputs, found)
    assert (
        method.predict(inputs, tasks, oracle=True) == method.predict(inputs, tasks) == reference.predict(inputs, tasks)
    )
    assert method.routes and method.modes == ("known", "unknown")
    held = "average" if told is Individual else "pretrained"
    extra = method.storage_bytes() - reference.storage_bytes()
    assert extra == shared_identifier(material).storage_bytes((held,))


def test_methods_that_hold_the_base_store_signatures_only_for_pretrained_features():
    material = make_material("bert")
    identifier = Identifier("pretrained")
    for method, told in ((IdEMR(identifier=identifier), EMR()), (IdLoRA(3, identifier=identifier), LoRA(3))):
        extra = fitted(method, material).storage_bytes() - fitted(told, material).storage_bytes()
        signatures = identifier.signatures
        own = (signatures.mean, signatures.basis, signatures.space.common)
        assert extra == 4 * sum(tensor.numel() for tensor in own)


def test_sim_is_right_where_the_identifier_is():
    material = make_material("bert")
    method = fitted(SiM(), material)
    inputs, tasks = mixed_batch(material)
    prediction = method.predict(inputs)
    rows = [row for row, task in enumerate(tasks) if prediction.tasks[row] == task]
    answers = [material.validation[task].answers[row] for row, task in enumerate(tasks)]
    assert len(rows) >= 8 and [prediction.answers[row] for row in rows] == [answers[row] for row in rows]
    assert rows_of("red", prediction.tasks)


def test_wrong_sources_and_layers_are_named():
    material = make_material("bert")
    with pytest.raises(ConfigError, match=r"lacks tensor 'bert\.embeddings"):
        Identifier({"nothing": torch.zeros(1)}).fit(material)
    with pytest.raises(ConfigError, match=r"RetexConfig.merge must be one of .* not 'magic'"):
        Identifier("magic").fit(material)
    with pytest.raises(ConfigError, match="feature_layer: index 7 is outside"):
        Identifier(feature_layer=7).fit(material)
    with pytest.raises(ConfigError, match="num_reference must be a positive integer"):
        Identifier(num_reference=0)
