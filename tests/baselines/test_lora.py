"""LoRA by truncated SVD: nearest at its rank, exact where it may be, and stored as counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import FAMILIES
from helpers import TASKS, make_experts
from materials import make_material

from retex_hf.baselines import LoRA
from retex_hf.baselines.lora import truncate
from retex_hf.data.readout import Classifier
from retex_hf.errors import ConfigError
from retex_hf.evaluation.method import Material


def fitted(family: str, **options) -> tuple[LoRA, dict]:
    base = FAMILIES[family].make().eval()
    experts = make_experts(base)
    method = LoRA(**options)
    method.fit(Material(base, experts, {}, {}, dict, Classifier()))
    return method, {"base": base, **experts}


@pytest.mark.parametrize("shape", [(6, 11), (11, 6), (8, 8)])
@pytest.mark.parametrize("rank", [1, 3])
def test_the_error_is_the_energy_of_the_discarded_singular_values(shape, rank):
    matrix = torch.randn(shape)
    left, right = truncate(matrix, rank)
    assert left.shape == (shape[0], rank) and right.shape == (rank, shape[1])
    u, values, v = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    error = np.square(matrix.double().numpy() - (left.double() @ right.double()).numpy()).sum()
    np.testing.assert_allclose(error, np.square(values[rank:]).sum(), rtol=1e-5)
    best = (u[:, :rank] * values[:rank]) @ v[:rank]
    np.testing.assert_allclose((left @ right).numpy(), best, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "resnet", "mixtral"])
def test_every_matrix_is_the_nearest_of_its_rank_and_vectors_are_exact(family):
    method, models = fitted(family, rank=2)
    origin = models["base"].state_dict()
    assert method.factors and method.whole
    for task in TASKS:
        body, expert = method.body(task), models[task].state_dict()
        for name, tensor in body.items():
            if name in method.whole:
                torch.testing.assert_close(tensor, expert[name])
                continue
            vector = (expert[name] - origin[name]).double().numpy()
            # Stacked experts of an MoE layer are one matrix each, kernels one row per output channel.
            matrices = vector if vector.ndim == 3 else vector.reshape(1, len(vector), -1)
            found = (tensor - origin[name]).double().numpy().reshape(matrices.shape)
            for matrix, approximation in zip(matrices, found, strict=True):
                discarded = np.square(np.linalg.svd(matrix.squeeze(), compute_uv=False)[2:]).sum()
                np.testing.assert_allclose(np.square(matrix - approximation).sum(), discarded, rtol=1e-3)


def test_vectors_can_be_left_at_the_base():
    method, models = fitted("bert", rank=2, keep_vectors=False)
    for name, tensor in method.body("red").items():
        if tensor.ndim == 1:
            assert torch.equal(tensor, models["base"].state_dict()[name]), name
        else:
            assert not torch.equal(tensor, models["base"].state_dict()[name]), name


def test_factors_that_would_be_larger_are_not_made():
    method, models = fitted("bert", rank=16)
    assert not method.factors
    for name, tensor in method.body("green").items():
        torch.testing.assert_close(tensor, models["green"].state_dict()[name])
    assert method.storage_bytes() == 4 * method.weights.body_bytes()


def test_storage_counts_the_base_the_factors_and_the_vectors():
    material = make_material("bert")
    method, rank = LoRA(rank=3), 3
    method.fit(material)
    expected = 0
    for tensor in material.base.state_dict().values():
        if tensor.is_floating_point():
            own = tensor.numel() if tensor.ndim == 1 else min(rank * sum(tensor.shape), tensor.numel())
            expected += tensor.numel() + 3 * own
    assert method.storage_bytes() == 4 * expected


@pytest.mark.parametrize("rank", [0, -1, 2.5, True])
def test_rank_is_a_positive_integer(rank):
    with pytest.raises(ConfigError, match="LoRA: rank must be a positive integer"):
        LoRA(rank=rank)
