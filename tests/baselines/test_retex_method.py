"""ReTeX as a method: the model's own answers, and the storage of its artifact."""

from __future__ import annotations

import pytest
import torch
from helpers import TASKS
from materials import make_material, mixed_batch
from safetensors import safe_open

from retex_hf import RetexConfig, RetexModel
from retex_hf.baselines import Individual, SiM
from retex_hf.baselines.retex import Retex


def fitted(method, material):
    method.fit(material)
    return method


@pytest.mark.parametrize("kind", ["bert", "vit", "clip", "t5", "gpt2"])
def test_exact_recovery_answers_as_the_experts(kind):
    material = make_material(kind)
    method = fitted(Retex(RetexConfig(rank="full")), material)
    inputs, tasks = mixed_batch(material)
    known = method.predict(inputs, tasks)
    assert known == fitted(Individual(), material).predict(inputs, tasks)
    assert method.predict(inputs, tasks, oracle=True) == known
    # The same references and the same body, so the same routing.
    assert method.predict(inputs) == fitted(SiM(), material).predict(inputs)


def test_soft_routing_mixes_by_the_probabilities():
    material = make_material("bert")
    config = RetexConfig(rank=4, routing="soft", temperature=3.0)
    method = fitted(Retex(config, name="soft"), material)
    inputs, _ = mixed_batch(material)
    routing = method.model.identify(**inputs)
    assert routing.probabilities.max() < 0.99
    expected = method.model(**inputs, task=routing.probabilities).logits.argmax(-1).tolist()
    prediction = method.predict(inputs)
    assert prediction.answers == expected and prediction.tasks == routing.tasks


def test_a_finished_model_is_used_as_it_is():
    material = make_material("bert")
    model = RetexModel.from_experts(material.base, material.experts, RetexConfig(rank=2), progress=False)
    method = fitted(Retex(model=model), material)
    assert method.model is model
    assert model.signatures is not None
    before = model.signatures
    fitted(Retex(model=model), material)
    assert model.signatures is before


def test_the_mean_error_is_that_of_the_parameters_whose_error_is_known():
    material = make_material("bert")
    model = RetexModel.from_experts(material.base, material.experts, RetexConfig(rank=2), progress=False)
    method = fitted(Retex(model=model), material)
    first, second, *others = model.recovery_errors
    model.recovery_errors = {first: 0.5, second: 0.25, **dict.fromkeys(others)}
    assert method.state()["mean_recovery_error"] == 0.375
    model.recovery_errors = dict.fromkeys(model.recovery_errors)
    assert method.state()["mean_recovery_error"] is None


def test_weight_signatures_need_no_inputs():
    material = make_material("bert")
    method = fitted(Retex(RetexConfig(rank=4, signatures="weights")), material)
    inputs, _ = mixed_batch(material)
    assert method.model.signatures is None
    assert method.predict(inputs).tasks == method.model.identify(**inputs).tasks


@pytest.mark.parametrize("options", [{}, {"recovery_dtype": "int8"}, {"feature_source": "pretrained"}])
@pytest.mark.parametrize("kind", ["bert", "resnet", "t5"])
def test_storage_is_that_of_the_artifact_without_heads(kind, options, tmp_path):
    material = make_material(kind)
    method = fitted(Retex(RetexConfig(rank=4, **options)), material)
    method.model.save_pretrained(tmp_path)
    heads = {name for head in method.model.heads.values() for name in head}
    stored = 0
    for file in tmp_path.glob("*.safetensors"):
        if file.name == "retex_heads.safetensors":
            continue
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a file is no dict)
                tensor = tensors.get_tensor(name)
                counter = file.name == "model.safetensors" and tensor.dtype == torch.int64
                if not counter and name not in heads:
                    stored += tensor.numel() * tensor.element_size()
    assert method.storage_bytes() == stored
    parts = list(method.model.parts().recovery.parameters())
    rounded = sum(part.nbytes for part in parts if part.dtype != torch.float32)  # numbers, and their scales
    assert method.packed_bytes() == rounded and (rounded > 0) == ("recovery_dtype" in options)


def test_learned_merges_learn_from_the_material():
    material = make_material("bert")
    merge = {"method": "adamerging", "steps": 1, "rows_per_task": 4}
    method = fitted(Retex(RetexConfig(rank=4, merge=merge), calibration_rows=8), material)
    coefficients = method.model.retex_config.merge["coefficients"]
    assert set(coefficients) == set(TASKS)
    assert set(method.state()["merge"]["coefficients"]) == set(TASKS)
    assert all(isinstance(value, float) for value in method.state()["merge"]["coefficients"].values())
