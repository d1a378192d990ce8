"""EMR: the defining equations, number by number, and the whole method against an independent computation."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from families import FAMILIES
from helpers import TASKS, make_experts
from materials import make_material, mixed_batch

from retex_hf.baselines import EMR
from retex_hf.baselines.emr import elect, mean_magnitudes
from retex_hf.build.plan import load_expert_weights
from retex_hf.data.readout import Classifier
from retex_hf.errors import TaskError
from retex_hf.evaluation.method import Material


def emr_by_hand(vectors: dict[str, np.ndarray]) -> tuple[dict, dict, list[float]]:
    """Unified vector, masks and scales by loops over single numbers, in float64."""
    unified, masks = {}, {}
    count = len(next(iter(vectors.values())))
    own, masked = [0.0] * count, [0.0] * count
    for name, stacked in vectors.items():
        flat = stacked.reshape(count, -1).astype(np.float64)
        unified[name], masks[name] = np.zeros(flat.shape[1]), np.zeros(flat.shape, bool)
        for entry in range(flat.shape[1]):
            gamma = 1 if flat[:, entry].sum() > 0 else -1
            for task in range(count):
                masks[name][task, entry] = flat[task, entry] * gamma > 0
            kept = [abs(flat[task, entry]) for task in range(count) if masks[name][task, entry]]
            unified[name][entry] = gamma * max(kept, default=0.0)
        for task in range(count):
            own[task] += np.abs(flat[task]).mean()
            masked[task] += np.abs(masks[name][task] * unified[name]).mean()
    return unified, masks, [a / b for a, b in zip(own, masked, strict=True)]


def test_a_mean_of_zero_counts_as_negative():
    vectors = torch.tensor([[2.0, -1.0, 0.0], [-2.0, 1.0, 0.0]])
    unified, masks = elect(vectors)
    assert unified.tolist() == [-2.0, -1.0, 0.0]
    assert masks.tolist() == [[False, True, False], [True, False, False]]


def test_elected_vector_masks_and_magnitudes_are_those_of_the_equations():
    generator = torch.Generator().manual_seed(3)
    vectors = {"matrix": torch.randn(4, 5, 7, generator=generator), "bias": torch.randn(4, 3, generator=generator)}
    vectors["bias"][:, 1] = 0
    unified, masks, scales = emr_by_hand({name: stacked.numpy() for name, stacked in vectors.items()})
    sums = torch.zeros(2, 4, dtype=torch.float64)
    for name, stacked in vectors.items():
        found, found_masks = elect(stacked)
        np.testing.assert_allclose(found.flatten().numpy(), unified[name], rtol=1e-6)
        assert (found_masks.flatten(1).numpy() == masks[name]).all()
        sums += torch.stack(mean_magnitudes(stacked, found, found_masks))
    np.testing.assert_allclose((sums[0] / sums[1]).numpy(), scales, rtol=1e-6)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_bodies_of_a_whole_model_agree_with_an_independent_computation(family):
    base = FAMILIES[family].make().eval()
    experts = make_experts(base)
    material = Material(base, experts, {}, {}, dict, Classifier())
    method = EMR()
    method.fit(material)

    names = list(load_expert_weights(base, experts).base)
    origin = {name: base.state_dict()[name].double().numpy() for name in names}
    vectors = {
        name: np.stack([experts[task].state_dict()[name].double().numpy() for task in TASKS]) - origin[name]
        for name in names
    }
    unified, masks, scales = emr_by_hand(vectors)
    np.testing.assert_allclose(method.scales.numpy(), scales, rtol=1e-5)
    for index, task in enumerate(TASKS):
        body = method.body(task)
        assert body.keys() == origin.keys()
        for name in names:
            offset = (scales[index] * masks[name][index] * unified[name]).reshape(origin[name].shape)
            np.testing.assert_allclose(body[name].numpy(), origin[name] + offset, rtol=1e-5, atol=1e-6)


def test_storage_is_two_bodies_one_bit_per_number_and_task_and_scales():
    material = make_material("bert")
    method = EMR()
    method.fit(material)
    tensors = [tensor for name, tensor in material.base.state_dict().items() if tensor.is_floating_point()]
    bodies = 2 * 4 * sum(tensor.numel() for tensor in tensors)
    bits = 3 * sum(-(-tensor.numel() // 8) for tensor in tensors)
    assert method.storage_bytes() == bodies + bits + 3 * 4 and method.packed_bytes() == bits


def test_an_expert_that_is_the_base_stays_the_base():
    base = FAMILIES["bert"].make().eval()
    experts = {**make_experts(base), "unchanged": deepcopy(base)}
    method = EMR()
    method.fit(Material(base, experts, {}, {}, dict, Classifier()))
    for name, tensor in method.body("unchanged").items():
        assert torch.equal(tensor, base.state_dict()[name])


def test_the_task_must_be_known():
    material = make_material("bert")
    method = EMR()
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    assert method.modes == ("known",)
    assert method.predict(inputs, tasks).tasks == tasks
    with pytest.raises(TaskError, match="EMR has no router: name the task of every row"):
        method.predict(inputs)
