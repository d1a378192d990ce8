"""Intervals: against standard errors that are known, and paired where rows are shared."""

from __future__ import annotations

import numpy as np
import pytest

from retex_hf import RetexError
from retex_hf.evaluation.bootstrap import interval, paired_difference, resampled_accuracies


def rows(accuracy: float, count: int) -> np.ndarray:
    return np.arange(count) < round(accuracy * count)


def test_spread_is_that_of_a_binomial():
    samples = resampled_accuracies({"a": rows(0.8, 500)[None], "b": rows(0.5, 200)[None]}, resamples=20_000)
    assert samples.shape == (20_000, 1, 2)
    errors = [(0.8 * 0.2 / 500) ** 0.5, (0.5 * 0.5 / 200) ** 0.5]
    assert samples.mean(0)[0] == pytest.approx([0.8, 0.5], abs=1e-3)
    assert samples.std(0)[0] == pytest.approx(errors, rel=0.02)
    # Tasks are drawn apart from each other, so their variances add up in the mean.
    mean = samples[:, 0].mean(-1)
    assert mean.std() == pytest.approx(np.hypot(*errors) / 2, rel=0.02)
    found = interval(0.65, mean)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * np.hypot(*errors) / 2, rel=0.03)


def test_a_seed_gives_the_same_draws_for_any_methods():
    one = {"a": rows(0.7, 50)[None]}
    two = {"a": np.stack([rows(0.2, 50), rows(0.7, 50)])}
    np.testing.assert_array_equal(resampled_accuracies(one, seed=1)[:, 0], resampled_accuracies(two, seed=1)[:, 1])
    assert (resampled_accuracies(one, seed=1) != resampled_accuracies(one, seed=2)).any()


def test_differences_are_paired():
    generator = np.random.default_rng(0)
    first = generator.random(400) < 0.7
    second = first & (np.arange(400) % 40 != np.flatnonzero(first)[0] % 40)  # never right where the first is wrong
    found = paired_difference({"a": first}, {"a": second})
    lost = (first & ~second).mean()
    assert found.value == pytest.approx(lost) and found.excludes_zero
    # The spread of a share of `lost`, not that of two accuracies near 0.7, which would hide the difference.
    assert found.high - found.low == pytest.approx(2 * 1.96 * (lost * (1 - lost) / 400) ** 0.5, rel=0.1)
    backwards = paired_difference({"a": second}, {"a": first})
    assert (backwards.value, backwards.low, backwards.high) == pytest.approx((-found.value, -found.high, -found.low))
    assert not paired_difference({"a": first}, {"a": first}).excludes_zero


def test_figures_that_are_not_defined_are_left_out():
    assert interval(1.0, [np.nan, 1.0, 1.0]).low == 1.0


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(RetexError, match="on the same rows"):
        paired_difference({"a": np.ones(3)}, {"a": np.ones(4)})
    with pytest.raises(RetexError, match="at least one resample"):
        resampled_accuracies({"a": np.ones((1, 3))}, resamples=0)
