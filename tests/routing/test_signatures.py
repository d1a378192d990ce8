"""Signatures against a direct implementation: mean, SVD, projector formed explicitly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retex_hf import RetexError
from retex_hf.routing import Signatures, decide, fit_signature, held_out_accuracy, shallowest_good
from retex_hf.routing.signatures import signature_dimension


def direct_residuals(references: list[Tensor], dimension: int, features: Tensor) -> Tensor:
    """`|| (I - V V^T) (z - mu) ||` with the d x d projector, in float64."""
    columns = []
    for task in references:
        mean = task.double().mean(0)
        _, _, right = torch.linalg.svd(task.double() - mean)
        vectors = right[:dimension].T
        projector = torch.eye(task.shape[1], dtype=torch.float64) - vectors @ vectors.T
        columns.append(((features.double() - mean) @ projector.T).norm(dim=1))
    return torch.stack(columns, 1).float()


@pytest.mark.parametrize("rank", [1, 6, 0.1, 0.5, 20], ids=str)
@pytest.mark.parametrize(("number", "width"), [(64, 96), (64, 16), (12, 40)], ids=["wide", "narrow", "few"])
def test_residuals_equal_the_direct_implementation(number, width, rank):
    references = [torch.randn(number, width) * torch.rand(width) + 2 * torch.randn(width) for _ in range(3)]
    features = torch.randn(10, width)
    largest = min(number, width)
    dimension = min(rank, largest) if isinstance(rank, int) else int(rank * largest)
    dimension = min(dimension, number - 1)  # the directions that centred points span
    signatures = Signatures.fit(references, rank, "layer")
    assert signatures.basis.shape == (3, dimension, width)
    expected = direct_residuals(references, dimension, features)
    torch.testing.assert_close(signatures.residuals(features), expected, rtol=1e-4, atol=1e-4)


def test_the_basis_is_orthonormal_and_the_mean_is_the_mean():
    references = torch.randn(64, 32)
    mean, basis = fit_signature(references, 6)
    torch.testing.assert_close(mean, references.mean(0))
    torch.testing.assert_close(basis @ basis.T, torch.eye(6), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rank", "number", "width", "expected"),
    [(0.1, 64, 768, 6), (0.1, 64, 32, 3), (0.29, 100, 768, 29), (0.01, 64, 768, 1), (1.0, 10, 768, 10),
     (6, 64, 768, 6), (100, 64, 768, 64), (100, 64, 16, 16), (1, 64, 768, 1)],
)  # fmt: skip
def test_the_rank_is_a_number_or_a_ratio(rank, number, width, expected):
    assert signature_dimension(rank, number, width) == expected


def test_fewer_references_than_the_rank_use_the_directions_there_are():
    references = torch.randn(3, 20)
    _, basis = fit_signature(references, 10)
    assert len(basis) == 2
    # Three points span a plane: each lies in its own subspace.
    residuals = Signatures.fit([references, torch.randn(3, 20)], 10, "layer").residuals(references)
    assert residuals[:, 0].max() < 1e-5 < residuals[:, 1].min()


def test_one_reference_is_a_point():
    points = [torch.randn(1, 20), torch.randn(1, 20)]
    signatures = Signatures.fit(points, 0.1, "layer")
    assert signatures.basis.shape == (2, 0, 20)
    features = torch.randn(5, 20)
    expected = torch.stack([(features - point).norm(dim=1) for point in points], 1)
    torch.testing.assert_close(signatures.residuals(features), expected)


def test_tasks_may_have_different_numbers_of_references():
    references = [torch.randn(2, 20), torch.randn(64, 20)]
    features = torch.randn(5, 20)
    residuals = Signatures.fit(references, 6, "layer").residuals(features)
    expected = [direct_residuals([task], rank, features) for task, rank in zip(references, (1, 6), strict=True)]
    torch.testing.assert_close(residuals, torch.cat(expected, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_no_numbers_are_refused(value):
    references = torch.randn(8, 4)
    references[3, 2] = value
    with pytest.raises(RetexError, match="NaN or infinite"):
        fit_signature(references, 2)


@pytest.mark.parametrize("routing", ["hard", "soft"])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
def test_the_decision_is_the_smallest_residual_and_its_softmax(routing, temperature):
    residuals = torch.tensor([[3.0, 1.0, 2.0], [0.5, 4.0, 0.6]])
    decision = decide(residuals, ["a", "b", "c"], routing, temperature)
    assert decision.tasks == ["b", "a"]
    assert decision.task_ids.tolist() == [1, 0]
    exponentials = torch.exp(-residuals / temperature)
    expected = exponentials / exponentials.sum(1, keepdim=True)
    torch.testing.assert_close(decision.probabilities, expected)
    assert torch.equal(decision.residuals, residuals)
    if routing == "soft":
        assert torch.equal(decision.weights, decision.probabilities)
    else:
        assert decision.weights is None


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [([1.0], 0), ([0.7, 0.9, 0.9], 1), ([0.2, 0.9951, 1.0], 1), ([0.2, 0.9949, 1.0], 2), ([1.0, 0.5, 1.0], 0),
     ([0.0, 0.0], 0), ([0.3, 0.9, 0.4], 1)],
)  # fmt: skip
def test_the_shallowest_layer_within_half_a_point_of_the_best_is_chosen(accuracies, expected):
    assert shallowest_good(accuracies) == expected


def test_held_out_accuracy_of_separate_tasks_is_one():
    assert held_out_accuracy([torch.randn(64, 16) + 20 * task for task in range(3)], 0.1) == 1.0


def test_held_out_accuracy_of_tasks_that_are_the_same_is_chance():
    same = torch.randn(64, 16)
    # Ties go to the first task: all of its inputs are right, none of the others'.
    assert held_out_accuracy([same, same, same], 0.1) == pytest.approx(1 / 3)


def test_held_out_accuracy_does_not_see_the_inputs_it_judges():
    # With as many dimensions as references, every task contains its own references exactly, and only those.
    features = [torch.randn(16, 64) for _ in range(4)]
    signatures = Signatures.fit(features, 1.0, "layer")
    seen = [(signatures.residuals(task).argmin(1) == index).float().mean() for index, task in enumerate(features)]
    assert all(accuracy == 1.0 for accuracy in seen)
    assert held_out_accuracy(features, 1.0) < 0.7


def test_held_out_accuracy_averages_over_tasks_of_any_size():
    # 4 inputs of the first task are right, the 40 of the second all look like the first.
    first, stray = torch.zeros(4, 8), torch.zeros(40, 8)
    assert held_out_accuracy([first, stray], 1) == pytest.approx(0.5)


def test_one_reference_per_task_says_nothing_about_accuracy():
    assert held_out_accuracy([torch.randn(1, 8), torch.randn(5, 8)], 1) == 0.0
