"""Consensus against a computation entry by entry in numpy, and how it chooses its options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import FAMILIES, tokens
from helpers import TASKS, make_experts
from test_methods import Tensors, flat
from torch import Tensor

from retex_hf import ConfigError, InputError
from retex_hf.build.plan import load_expert_weights
from retex_hf.data.readout import Classifier
from retex_hf.merging import get_merger, learn_options
from retex_hf.merging.calibration import Batch, Calibration
from retex_hf.merging.consensus import THRESHOLDS, consensus_vector, tall_mask
from retex_hf.merging.expert_weights import WeightTensors
from retex_hf.merging.scales import SCALES


def plain_consensus(base: np.ndarray, experts: list[np.ndarray], limits: list[float], scale: float) -> np.ndarray:
    merged = base.astype(np.float64)
    for entry in range(len(base)):
        vector = [float(expert[entry]) - float(base[entry]) for expert in experts]
        claims = 0
        for task, value in enumerate(vector):
            others = sum(other for number, other in enumerate(vector) if number != task)
            claims += abs(value) > limits[task] * abs(others)
        if claims >= 2:
            merged[entry] += scale * sum(vector)
    return merged


@pytest.mark.parametrize("thresholds", [0.4, 1, 2.5, {"x": 0.2, "y": 0.6, "z": 1.5, "w": 3.0}])
def test_consensus_entry_by_entry(thresholds):
    tensors = Tensors()
    merged = flat(tensors, tensors.merge("consensus", thresholds=thresholds, scale=0.7))
    base = tensors.vector(tensors.base).numpy()
    experts = [tensors.vector(tensors.experts[task]).numpy() for task in tensors.tasks]
    limits = [thresholds[task] if isinstance(thresholds, dict) else thresholds for task in tensors.tasks]
    expected = plain_consensus(base, experts, limits, 0.7)
    kept = expected != base
    assert 0 < kept.sum() < len(base) or thresholds == 0.4
    np.testing.assert_allclose(merged.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_entry_needs_two_tasks():
    vectors = [
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.tensor([0.0, 1.0, 0.0, 2.0]),
        torch.tensor([0.0, 0.0, 0.0, 1.0]),
    ]
    total = sum(vectors)
    assert tall_mask(vectors[0], total, 0.5).tolist() == [True, True, False, False]
    assert consensus_vector(vectors, [0.5] * 3).tolist() == [0.0, 2.0, 0.0, 0.0]
    # The third task's claim to the last entry begins just below: 1 > threshold * 2.
    assert consensus_vector(vectors, [0.5, 0.5, 0.49]).tolist() == [0.0, 2.0, 0.0, 3.0]


def test_one_number_is_that_number_for_every_task():
    tensors = Tensors()
    same = {task: 0.4 for task in tensors.tasks}
    one, each = (tensors.merge("consensus", thresholds=value, scale=0.5) for value in (0.4, same))
    assert torch.equal(tensors.vector(one), tensors.vector(each))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thresholds": {"x": 0.2}, "scale": 1}, r"thresholds must have one number per task \['x', 'y', 'z', 'w'\]"),
        ({"thresholds": None, "scale": 1}, "thresholds must be a number, not None"),
        ({"thresholds": 0.2, "scale": "1"}, "scale must be a number, not '1'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=f"RetexConfig.merge: {message}"):
        Tensors().merge("consensus", **options)


# ---- choosing by accuracy --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """Experts that are always right, because the answers are theirs."""
    torch.manual_seed(0)
    base = FAMILIES["bert-classifier"].make().eval()
    experts = make_experts(base, scale=1.0)
    batches = {}
    for task in TASKS:
        inputs = [tokens(20), tokens(20)]
        with torch.no_grad():
            batches[task] = [Batch(i, experts[task](**i).logits.argmax(-1).tolist()) for i in inputs]
    return Calibration(load_expert_weights(base, experts), Classifier(), batches, progress=False)


def plain_accuracy(calibration: Calibration, body: dict[str, Tensor], task: str) -> float:
    module = calibration.weights.module(body, task)
    with torch.no_grad():
        right = [
            module(**batch.inputs).logits.argmax(-1) == torch.tensor(batch.answers)
            for batch in calibration.batches[task]
        ]
    return torch.cat(right).double().mean().item()


def test_options_are_the_best_of_the_grid(calibration):
    weights = calibration.weights
    found = learn_options("consensus", {}, calibration)
    totals = {name: vectors.sum(0) for name, vectors in weights.vectors.items()}
    for index, task in enumerate(TASKS):
        scores = []
        for threshold in THRESHOLDS:
            body = {}
            for name, base in weights.base.items():
                vector = weights.vectors[name][index]
                mask = vector.abs() > threshold * (totals[name] - vector).abs()
                body[name] = torch.where(mask, base + totals[name], base)
            scores.append(plain_accuracy(calibration, body, task))
        assert len(set(scores)) > 1
        assert found["thresholds"][task] == THRESHOLDS[scores.index(max(scores))]
    limits = list(found["thresholds"].values())
    agreed = {name: consensus_vector(vectors, limits) for name, vectors in weights.vectors.items()}
    scores = []
    for scale in SCALES:  # these experts are always right, so the ratio is the accuracy
        body = {name: base + scale * agreed[name] for name, base in weights.base.items()}
        scores.append(sum(plain_accuracy(calibration, body, task) for task in TASKS))
    assert len(set(scores)) > 1
    assert found["scale"] == SCALES[scores.index(max(scores))]


@pytest.mark.parametrize(
    ("method", "grid"),
    [("task_arithmetic", [n / 10 for n in range(1, 11)]), ("ties", [n / 10 for n in range(1, 26)])],
)
def test_scales_are_the_best_of_the_grid(calibration, method, grid):
    weights = calibration.weights
    grid = sorted([*grid, 1 / 3])
    found = learn_options(method, {"scale": "auto"}, calibration)
    scores = []
    for scale in grid:
        merger = get_merger(method, {"scale": scale}, WeightTensors(weights))
        body = {n: merger(n, base, [base + v for v in weights.vectors[n]]) for n, base in weights.base.items()}
        scores.append(sum(plain_accuracy(calibration, body, task) for task in TASKS))
    assert len(set(scores)) > 1
    # At another order of additions an answer may flip: the scale found is as good as the best to one row.
    assert scores[grid.index(found["scale"])] >= max(scores) - 1 / 40


def test_what_is_given_is_not_chosen(calibration):
    found = learn_options("consensus", {"thresholds": 0.45}, calibration)
    assert found["thresholds"] == 0.45 and found["scale"] in SCALES
    found = learn_options("consensus", {"scale": 0.33}, calibration)
    assert found["scale"] == 0.33 and set(found["thresholds"].values()) <= set(THRESHOLDS)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (None, "Task 'red': a calibration batch has no \"labels\", and this merge chooses by accuracy"),
        ([1, 2], "Task 'red': the labels of a calibration batch of 20 rows must be as many class indices or texts"),
        ([[1]] * 20, "Task 'red': the labels of a calibration batch of 20 rows must be as many class indices or texts"),
        ([7] * 20, "Task 'red': its expert answers no calibration row correctly; check the labels"),
    ],
)
def test_bad_labels_are_named(calibration, answers, message):
    batches = {**calibration.batches, "red": [Batch(calibration.batches["red"][0].inputs, answers)]}
    spoilt = Calibration(calibration.weights, Classifier(), batches, progress=False)
    with pytest.raises(InputError, match=message):
        learn_options("consensus", {}, spoilt)
