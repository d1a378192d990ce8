"""Twin-Merging: shared expert, truncated rest, router."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import assert_all_modes, body_tensors, logits_of, raw
from helpers import TASKS
from materials import make_material, mixed_batch

from retex_hf.baselines.twin import TwinMerging, router, truncated
from retex_hf.errors import ConfigError

QUICK = {"epochs": 3, "batch_size": 16, "progress": False}


def truncated_by_hand(difference: np.ndarray, ratio: float) -> np.ndarray:
    matrix = np.squeeze(difference)
    if matrix.ndim < 2:
        return difference
    matrix = matrix.reshape(len(matrix), -1)
    rank = int(np.ceil(ratio * min(matrix.shape)))
    if rank * sum(matrix.shape) >= matrix.size:
        return difference
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left[:, :rank] * values[:rank] @ right[:rank]).reshape(difference.shape)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (16, 3, 4, 4), (1, 9, 20)])
def test_matrices_are_cut_to_a_share_of_their_singular_values(shape):
    difference = torch.randn(shape)
    found, numbers = truncated(difference, 0.25)
    np.testing.assert_allclose(found.numpy(), truncated_by_hand(difference.double().numpy(), 0.25), atol=1e-5)
    sides = {(40, 12): (40, 12), (12, 40): (12, 40), (16, 3, 4, 4): (16, 48), (1, 9, 20): (9, 20)}[shape]
    assert numbers == int(np.ceil(0.25 * min(sides))) * sum(sides)


def test_vectors_and_what_factors_would_not_shrink_are_kept_whole():
    for difference in (torch.randn(7), torch.randn(1, 1, 7), torch.randn(4, 4)):
        found, numbers = truncated(difference, 0.5)
        assert torch.equal(found, difference)
        assert numbers == difference.numel()


def test_bodies_are_those_of_the_equation():
    material = raw(make_material("bert"))
    method = TwinMerging(rank_ratio=0.2, **QUICK)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    base, experts = body_tensors(material)
    shared = {name: b + 0.3 * sum(e - b for e in experts[name]) for name, b in base.items()}
    exclusive = {name: [truncated_by_hand(e - shared[name], 0.2) for e in experts[name]] for name in base}
    shares = method.route(inputs).double().numpy()
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
    heads = [TASKS[index] for index in shares.argmax(1)]

    def by_hand(row, coefficients, head):
        body = {
            name: tensor + sum(c * v for c, v in zip(coefficients, exclusive[name], strict=True))
            for name, tensor in shared.items()
        }
        return logits_of(material, head, body, row)

    assert_all_modes(method, inputs, tasks, shares, heads, by_hand)


def test_the_router_reads_the_shared_expert_and_learns_the_tasks():
    material = make_material("bert", rows=96)
    method = TwinMerging(epochs=40, batch_size=16, progress=False)
    method.fit(material)
    rights = []
    for task in TASKS:
        shares = method.route(material.collate(material.validation[task].inputs))
        rights.append((shares.argmax(-1) == TASKS.index(task)).float().mean().item())
    assert sum(rights) / 3 > 0.8
    assert method.state()["router_validation_accuracy"] == pytest.approx(sum(rights) / 3)
    base, experts = body_tensors(material)
    shared = method.gate.extractor.model.state_dict()
    name = "bert.encoder.layer.0.output.dense.weight"
    np.testing.assert_allclose(shared[name], base[name] + 0.3 * sum(e - base[name] for e in experts[name]), atol=1e-5)


def test_router_architecture():
    network = router(8, 3)
    kinds = [type(layer).__name__ for layer in network]
    assert kinds == ["Linear", "BatchNorm1d", "LeakyReLU", "Dropout"] * 2 + ["Linear"]
    assert [tuple(layer.weight.shape) for layer in network if isinstance(layer, torch.nn.Linear)] == [
        (16, 8), (16, 16), (3, 16),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["vit", "clip", "t5", "gpt2"])
def test_with_all_singular_values_the_true_corner_is_the_expert(kind):
    material = make_material(kind)
    method = TwinMerging(rank_ratio=1.0, **QUICK)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    right = [material.validation[task].answers[row] for row, task in enumerate(tasks)]
    assert method.predict(inputs, tasks, oracle=True).answers == right
    assert set(method.predict(inputs).tasks) <= set(TASKS)


def test_storage_is_one_body_the_factors_and_the_router():
    method = TwinMerging(rank_ratio=0.1, **QUICK)
    method.fit(make_material("bert"))
    numbers = 0
    for tensor in method.weights.base.values():
        kept = tensor.numel()
        if tensor.ndim == 2:
            kept = min(kept, int(np.ceil(0.1 * min(tensor.shape))) * sum(tensor.shape))
        numbers += tensor.numel() + 3 * kept
    numbers += sum(tensor.numel() for tensor in method.gate.network.parameters()) + 4 * 32  # and running statistics
    assert method.storage_bytes() == 4 * numbers


def test_two_fits_are_alike():
    inputs, _ = mixed_batch(make_material("bert"))
    shares = []
    for noise in (1, 2):
        torch.manual_seed(0)
        material = make_material("bert")
        torch.manual_seed(noise)
        method = TwinMerging(**QUICK)
        method.fit(material)
        shares.append(method.route(inputs))
    assert torch.equal(*shares)


def test_a_share_outside_its_range_is_refused():
    with pytest.raises(ConfigError, match="rank_ratio must be in"):
        TwinMerging(rank_ratio=0)


def test_a_router_without_training_is_refused():
    with pytest.raises(ConfigError, match="at least one epoch, not 0"):
        TwinMerging(epochs=0)
