"""Routers without data, against their equations in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import TASKS
from materials import make_material, mixed_batch
from torch import nn

from retex_hf.baselines import MASS, Arrow, Individual, SpectR, make
from retex_hf.errors import ConfigError


def fitted(method, kind="bert"):
    material = make_material(kind)
    method.fit(material)
    return method, material


def linear_inputs(method, inputs) -> dict[str, np.ndarray]:
    """The inputs (rows, tokens, d) of all linear layers of the pre-trained body, read here by hooks of our own."""
    weights = method.weights
    model, heard = weights.module(weights.base, weights.tasks[0]), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in weights.base:
            module.register_forward_pre_hook(
                lambda module, args, name=name: heard.__setitem__(name, args[0].double().numpy())
            )
    with torch.no_grad():
        model(**inputs)
    return {name: found for name, found in heard.items() if found.ndim == 3}


def spectra(method, name) -> list[tuple[np.ndarray, np.ndarray]]:
    updates = method.weights.vectors[f"{name}.weight"].double().numpy()
    return [np.linalg.svd(update, full_matrices=False)[1:] for update in updates]


def mean_of_softmax(strengths: dict[str, np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Mean over layers and unmasked tokens of the softmax over tasks of (rows, tokens, T)."""
    found = []
    for values in strengths.values():
        shares = np.exp(values - values.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        found.append((shares * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True))
    return np.mean(found, 0)


@pytest.mark.parametrize(("method", "rank"), [(SpectR(rank=3), 3), (Arrow(), 1)])
def test_responses_of_every_layer_equal_the_formula(method, rank):
    method, material = fitted(method)
    inputs, _ = mixed_batch(material)
    strengths = {}
    for name, hidden in linear_inputs(method, inputs).items():
        columns = []
        for values, vectors in spectra(method, name):
            seen = hidden @ vectors[:rank].T
            columns.append(np.abs(seen[..., 0]) if rank == 1 else np.linalg.norm(seen * values[:rank], axis=-1))
        strengths[name] = np.stack(columns, -1)
    assert set(strengths) == set(method.spectra) - {"bert.pooler.dense"}  # which runs after the last block
    expected = mean_of_softmax(strengths, inputs["attention_mask"].numpy())
    with torch.no_grad():
        found = method.task_scores(inputs).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert method.choose(inputs) == [TASKS[index] for index in expected.argmax(1)]


def test_mass_is_the_distance_to_the_span_at_one_layer():
    layer = "bert.encoder.layer.0.intermediate.dense"
    method, material = fitted(MASS(rank=4, layer=layer))
    inputs, _ = mixed_batch(material)
    mask = inputs["attention_mask"].numpy()[:, :, None]
    rows = (linear_inputs(method, inputs)[layer] * mask).sum(1) / mask.sum(1)
    columns = []
    for _, vectors in spectra(method, layer):
        basis = vectors[:4]
        columns.append(np.linalg.norm(rows - rows @ basis.T @ basis, axis=1))
    with torch.no_grad():
        found = -method.task_scores(inputs).numpy()
    np.testing.assert_allclose(found, np.stack(columns, 1), rtol=1e-3, atol=1e-4)
    assert method.choose(inputs) == [TASKS[index] for index in np.stack(columns, 1).argmin(1)]


def test_the_layer_of_mass_is_in_the_last_block_or_as_said():
    method, _ = fitted(MASS())
    assert method.layer.startswith("bert.encoder.layer.1.")
    with pytest.raises(ConfigError, match="MASS: layer must be one of"):
        fitted(MASS(layer="nowhere"))


@pytest.mark.parametrize("name", ["mass", "spectr", "arrow"])
def test_rows_run_on_the_experts_that_are_chosen(name):
    method, material = fitted(make(name))
    inputs, tasks = mixed_batch(material)
    experts = Individual()
    experts.fit(material)
    known = method.predict(inputs, tasks)
    assert known.answers == experts.predict(inputs, tasks).answers
    unknown = method.predict(inputs)
    assert unknown.tasks == method.choose(inputs)
    assert unknown.answers == experts.predict(inputs, unknown.tasks).answers
    assert method.storage_bytes() == experts.storage_bytes()


@pytest.mark.parametrize("kind", ["gpt2", "clip"])
def test_other_layers_and_families(kind):
    method, material = fitted(SpectR(rank=2), kind)
    scores = method.task_scores(mixed_batch(material)[0])
    assert scores.shape == (9, 3)
    torch.testing.assert_close(scores.sum(1), torch.ones(9))


def test_models_without_linear_layers_are_refused():
    with pytest.raises(ConfigError, match="needs a linear layer"):
        fitted(SpectR(), "resnet")


def test_a_rank_below_one_is_refused():
    with pytest.raises(ConfigError, match="SpectR: rank must be at least 1, not 0"):
        SpectR(rank=0)
