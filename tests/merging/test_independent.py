"""Merges against computations of others: plain numpy always, and mergekit's merge in memory where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_methods import TASKS, Tensors

# ---- numpy -----------------------------------------------------------------------------------------------------------


def numpy_ties(base: np.ndarray, experts: np.ndarray, density: float) -> np.ndarray:
    """TIES on whole vectors with a sort, a vote by mass and a mean over those who agree."""
    vectors = experts.astype(np.float64) - base
    kept = round(density * vectors.shape[1])
    order = np.argsort(-np.abs(vectors), axis=1, kind="stable")
    trimmed = np.zeros_like(vectors)
    for row, largest in enumerate(order[:, :kept]):
        trimmed[row, largest] = vectors[row, largest]
    elected = np.where(trimmed.clip(min=0).sum(0) >= -trimmed.clip(max=0).sum(0), 1, -1)
    agreeing = (np.sign(trimmed) == elected) & (trimmed != 0)
    return base + (trimmed * agreeing).sum(0) / np.maximum(agreeing.sum(0), 1)


@pytest.mark.parametrize("density", [0.1, 0.2, 0.7])
def test_ties_over_the_whole_vector_in_numpy(density):
    tensors = Tensors()
    base = tensors.vector(tensors.base).numpy()
    experts = np.stack([tensors.vector(tensors.experts[task]).numpy() for task in TASKS])
    merged = tensors.vector(tensors.merge("ties", density=density)).numpy()
    assert not np.allclose(merged, base)
    np.testing.assert_allclose(merged, numpy_ties(base, experts, density), rtol=1e-5, atol=1e-6)


# ---- mergekit --------------------------------------------------------------------------------------------------------


@pytest.fixture
def merge_state_dicts():
    methods = pytest.importorskip(
        "mergekit.merge_methods", reason="mergekit is not installed; it is no dependency, only something to agree with"
    )
    return methods.merge_state_dicts


def tensors_of_round_size(dtype: torch.dtype = torch.float32) -> Tensors:
    """A fifth of every tensor is a whole number of entries: mergekit rounds it down, we to the nearest."""
    shapes = {"matrix": (20, 10), "vector": (50,), "convolution": (5, 2, 2, 2)}
    tensors = Tensors()
    tensors.names = list(shapes)
    tensors.base = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    tensors.experts = {
        task: {name: (tensors.base[name] + torch.randn(shape)).to(dtype) for name, shape in shapes.items()}
        for task in TASKS
    }
    return tensors


@pytest.mark.parametrize(
    ("method", "options", "theirs", "parameters"),
    [
        ("average", {}, "linear", {"weight": 1.0}),
        ("task_arithmetic", {"scale": 0.3}, "task_arithmetic", {"weight": 0.3}),
        ("task_arithmetic", {"scale": 0.3}, "task_arithmetic", {"weight": 1.0, "lambda": 0.3}),
        ("ties", {"trim": "tensor"}, "ties", {"weight": 1.0, "density": 0.2, "normalize": True}),
        (
            "ties",
            {"trim": "tensor", "density": 0.6, "scale": 0.4},
            "ties",
            {"weight": 1.0, "density": 0.6, "lambda": 0.4},
        ),
    ],
)
def test_mergekit_agrees(merge_state_dicts, method, options, theirs, parameters):
    tensors = tensors_of_round_size()
    models = dict(tensors.experts)
    if theirs != "linear":
        models = {"base": tensors.base, **models}
    expected = merge_state_dicts(models, theirs, parameters=parameters, base=None if theirs == "linear" else "base")
    merged = tensors.merge(method, **options)
    for name, tensor in merged.items():
        assert not torch.allclose(tensor, tensors.base[name], atol=1e-2)
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
