"""DaWin: experts mixed by their entropies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import assert_all_modes, body_tensors, logits_of, raw, rows
from helpers import TASKS
from materials import make_material, mixed_batch

from retex_hf.baselines.dawin import DaWin, cluster_means
from retex_hf.errors import ConfigError


def shares_by_hand(material, row, head=None) -> np.ndarray:
    """softmax(-H), every expert under its own head, or all under the head of one task."""
    _, bodies = body_tensors(material)
    entropies = []
    for number, task in enumerate(TASKS):
        body = {name: tensors[number] for name, tensors in bodies.items()}
        logits = logits_of(material, head or task, body, row)[0].double().numpy()
        probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        entropies.append(-(probabilities * np.log(probabilities)).sum())
    weights = np.exp(-np.array(entropies))
    return weights / weights.sum()


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_bodies_are_those_of_the_equation(kind):
    material = raw(make_material(kind))
    method = DaWin(scale=0.2)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    unknown = [shares_by_hand(material, row) for row in rows(inputs)]
    known = [shares_by_hand(material, row, task) for row, task in zip(rows(inputs), tasks, strict=True)]
    assert np.abs(np.array(known) - unknown).max() > 0.05
    found = method.route(inputs)
    np.testing.assert_allclose(method.shares(found, None), unknown, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(method.shares(found, tasks), known, rtol=1e-3, atol=1e-4)
    base, experts = body_tensors(material)

    def by_hand(row, coefficients, head):
        body = {
            name: tensor + 0.2 * 3 * sum(c * (e - tensor) for c, e in zip(coefficients, experts[name], strict=True))
            for name, tensor in base.items()
        }
        return logits_of(material, head, body, row)

    heads = [TASKS[int(np.argmax(of))] for of in unknown]
    assert_all_modes(method, inputs, tasks, unknown, heads, by_hand, known)


def test_a_method_that_remembers_keeps_the_entropies_of_all_heads():
    material = make_material("vit")
    method, forgetful = DaWin(remember=True), DaWin()
    method.fit(material)
    forgetful.fit(material)
    inputs, tasks = mixed_batch(material)
    assert method.predict(inputs) == forgetful.predict(inputs)
    method.route = lambda _: pytest.fail("ran again")
    assert method.predict(inputs, tasks) == forgetful.predict(inputs, tasks)


@pytest.mark.parametrize("kind", ["clip", "t5", "gpt2"])
def test_other_readouts(kind):
    material = make_material(kind)
    method = DaWin(scale=1 / 3)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    # With scale * T = 1 the corners are the experts.
    right = [material.validation[task].answers[row] for row, task in enumerate(tasks)]
    assert method.predict(inputs, tasks, oracle=True).answers == right
    alone = [method.predict(row) for row in rows(inputs)]
    together = method.predict(inputs)
    assert together.tasks == [prediction.tasks[0] for prediction in alone]
    assert together.answers == [prediction.answers[0] for prediction in alone]


def test_storage_is_the_base_and_all_experts():
    method = DaWin()
    method.fit(make_material("bert"))
    assert method.storage_bytes() == 4 * 4 * sum(tensor.numel() for tensor in method.weights.base.values())


def test_clusters_share_the_mean_of_their_lambdas():
    points = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.8, 0.2], [0.2, 0.8], [0.7, 0.3]])
    first, second = [0.8, 0.2], [0.15, 0.85]
    expected = torch.tensor([first, second, first, second, first])
    torch.testing.assert_close(cluster_means(points, 2), expected)
    torch.testing.assert_close(cluster_means(points, 1), points.mean(0).expand(5, 2))
    torch.testing.assert_close(cluster_means(points, 9), points)


def test_a_batch_in_clusters_has_so_many_bodies():
    material = make_material("bert")
    method = DaWin(clusters=2)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    coefficients = method.coefficients(method.shares(method.route(inputs), None))
    assert len(coefficients.unique(dim=0)) == 2
    assert len(method.predict(inputs, tasks).answers) == 9
    with pytest.raises(ConfigError, match="clusters must be at least 1"):
        DaWin(clusters=0)
