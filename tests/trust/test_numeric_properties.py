"""Properties that hold for all numbers: of the solver, of residuals and of decisions."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retex_hf.recovery import plan_layout, solve
from retex_hf.routing import Signatures, decide

few = settings(derandomize=True, deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
exponents = st.floats(-30, 30)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def signatures_of(seed: int, tasks: int, width: int, references: int) -> Signatures:
    features = [randn(seed + task, references, width) + task for task in range(tasks)]
    return Signatures.fit(features, 0.5, "layer")


@few
@given(seeds, st.integers(1, 4), st.integers(2, 12), st.integers(2, 12), st.lists(exponents, min_size=1, max_size=4))
def test_more_rank_never_misses_more_and_no_rank_misses_more_than_all(seed, tasks, rows, columns, scales):
    differences = [randn(seed + task, rows, columns) * 10.0 ** scales[task % len(scales)] for task in range(tasks)]
    before = math.inf
    for rank in range(1, min(rows, columns)):
        solution = solve(differences, plan_layout((rows, columns), rank, tasks))
        for factor in (solution.generated, solution.shared):
            assert factor is None or factor.isfinite().all()
        assert 0 <= solution.residual <= solution.energy * (1 + 1e-9)
        assert solution.residual <= before + 1e-9 * solution.energy
        before = solution.residual


@few
@given(seeds, st.integers(1, 5), st.integers(1, 8), st.integers(1, 12), st.integers(0, 3), exponents)
def test_residuals_are_not_negative_and_do_not_see_empty_directions(seed, tasks, width, references, empty, exponent):
    signatures = signatures_of(seed, tasks, width, references)
    rows = randn(seed + 99, 4, width) * 10.0 ** min(exponent, 15)
    residuals = signatures.residuals(rows)
    assert residuals.isfinite().all() and (residuals >= 0).all()
    padded = torch.cat([signatures.basis, torch.zeros(tasks, empty, width)], 1)
    wider = replace(signatures, basis=padded)
    torch.testing.assert_close(wider.residuals(rows), residuals)


@few
@given(seeds, st.integers(1, 5), st.integers(1, 30))
def test_held_out_residuals_are_sorted_and_thresholds_grow_with_the_quantile(seed, tasks, references):
    signatures = signatures_of(seed, tasks, 6, references)
    assert signatures.held_out.shape == (tasks, references if references >= 4 else 0)
    assert (signatures.held_out.diff(dim=1) >= 0).all()
    low, high = (signatures.thresholds(quantile, 1.0) for quantile in (0.3, 0.9))
    assert (low <= high).all() and (low > 0).all()
    if references < 4:
        assert low.isinf().all()
    else:
        expected = signatures.held_out[:, min(math.ceil(0.9 * (references + 1)), references) - 1]
        torch.testing.assert_close(high, expected)
        torch.testing.assert_close(signatures.thresholds(0.9, 2.0), 2 * expected)


@few
@given(
    seeds,
    st.integers(1, 6),
    st.integers(1, 8),
    st.floats(-300, 300),
    exponents,
    st.sampled_from(["hard", "soft", {"method": "hard", "far": "merged"}, {"method": "soft", "far": "merged"}]),
)
def test_a_decision_is_about_single_rows_and_its_probabilities_sum_to_one(seed, tasks, rows, heat, exponent, routing):
    residuals = randn(seed, rows, tasks).abs() * 10.0**exponent
    names = [f"task {number}" for number in range(tasks)]
    thresholds = randn(seed + 1, tasks).abs() * 10.0**exponent
    found = decide(residuals, names, routing, 10.0**heat, thresholds)
    sums = found.probabilities.sum(1)
    torch.testing.assert_close(sums, torch.ones(rows))
    assert torch.equal(found.task_ids, residuals.argmin(1))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    other = decide(residuals[order], names, routing, 10.0**heat, thresholds)
    assert other.tasks == [found.tasks[row] for row in order.tolist()]
    torch.testing.assert_close(other.probabilities, found.probabilities[order])
    if found.abstained is not None:
        assert torch.equal(other.abstained, found.abstained[order])
        assert torch.equal(found.abstained, residuals.amin(1) > thresholds[found.task_ids])
        torch.testing.assert_close(found.weights.sum(1), 1 - found.abstained.float())
