"""The correction of hidden states at the end of a shared trunk: a ridge regression of low rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retex_hf.routing import alignment as module
from retex_hf.routing.alignment import (
    Alignment,
    Correction,
    Moments,
    align_entries,
    entries,
    regressors,
    unmasked,
    with_first_tensor,
)
from retex_hf.routing.pooling import Layout
from retex_hf.rows import Along

RIDGE = 0.1


def fit(merged: torch.Tensor, expert: torch.Tensor, ridge: float = RIDGE) -> Correction:
    """The correction of hidden states (n, ..., d), all of them unmasked."""
    return Moments.of(unmasked(regressors(merged), None), unmasked(expert - merged, None)).correction(ridge)


def correct(states: torch.Tensor, fitted: Correction) -> torch.Tensor:
    return states + fitted(states)


@pytest.mark.parametrize("count", [20, 200], ids=["fewer states than features", "more"])
def test_the_ridge_regression_has_its_closed_form(count):
    """Of full rank, it is the textbook solution."""
    torch.manual_seed(0)
    width = 48
    merged, expert = torch.randn(count, width) + 3, torch.randn(count, width)
    states, differences = merged.double().numpy(), (expert - merged).double().numpy()
    mean, shift = states.mean(0), differences.mean(0)
    ridge = RIDGE * np.square(states - mean).sum() / width
    gram = (states - mean).T @ (states - mean) + ridge * np.eye(width)
    mapping = np.linalg.inv(gram) @ (states - mean).T @ (differences - shift)
    expected = states + shift + (states - mean) @ mapping
    found = correct(merged, fit(merged, expert))
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-4)


def test_moments_of_folds_add_up():
    torch.manual_seed(0)
    merged, expert = torch.randn(60, 8) + 3, torch.randn(60, 8)
    parts = [Moments.of(merged[own], (expert - merged)[own]) for own in (slice(0, 10), slice(10, 60))]
    assert parts[0].count == 10
    torch.testing.assert_close(
        correct(merged, (parts[0] + parts[1]).correction(RIDGE)), correct(merged, fit(merged, expert))
    )
    assert not torch.allclose(correct(merged, parts[1].correction(RIDGE)), correct(merged, fit(merged, expert)))


def test_the_rank_is_spent_on_the_largest_fitted_values(monkeypatch):
    """No other projection of the fitted differences on so many directions leaves less of them."""
    torch.manual_seed(0)
    merged = torch.randn(300, 12) * torch.linspace(3, 0.1, 12)
    expert = merged + merged @ torch.randn(12, 12) * 0.3
    whole = correct(merged, fit(merged, expert)) - merged
    for rank in (1, 3, 6):
        monkeypatch.setattr(module, "RANK", rank)
        assert fit(merged, expert).down.shape == (rank, 12)
        found = correct(merged, fit(merged, expert)) - merged
        values = torch.linalg.svdvals(whole - whole.mean(0))
        torch.testing.assert_close((whole - found).norm(), values[rank:].norm(), rtol=1e-3, atol=1e-3)


def test_a_shift_of_low_rank_is_found(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(module, "RANK", 2)
    merged, direction = torch.randn(4000, 16), torch.randn(2, 16)
    expert = merged + merged @ torch.randn(16, 2) @ direction + torch.arange(16.0)
    found = correct(merged, fit(merged, expert))
    assert (found - expert).norm() < 1.2 * RIDGE * (merged - expert).norm()  # it shrinks by its weight


def test_equal_states_need_no_correction():
    states = torch.randn(50, 8)
    assert torch.equal(correct(states, fit(states, states)), states)


@pytest.mark.parametrize("shape", [(50, 8), (6, 5, 5, 8)])
def test_no_correction_has_the_shapes_of_the_others(shape):
    states = torch.randn(shape)
    moments = Moments.of(unmasked(regressors(states), None), unmasked(torch.randn(shape), None))
    nothing, other = moments.no_correction(), moments.correction(RIDGE)
    for part in ("down", "up", "shift"):
        assert getattr(nothing, part).shape == getattr(other, part).shape
    assert torch.equal(correct(states, nothing), states)


def test_a_map_is_corrected_by_what_is_around_a_position():
    """A difference that layers have mixed from neighbours is found, and is not where each position is taken alone."""
    torch.manual_seed(0)
    maps, kernel = torch.randn(40, 6, 5, 4), torch.randn(4, 4, 3, 3) * 0.3
    wide = torch.cat([maps[:, :1], maps, maps[:, -1:]], 1)
    wide = torch.cat([wide[:, :, :1], wide, wide[:, :, -1:]], 2)
    expert = maps + torch.nn.functional.conv2d(wide.permute(0, 3, 1, 2), kernel).permute(0, 2, 3, 1)
    fitted = fit(maps, expert, ridge=1e-6)
    assert fitted.down.shape == (4, 4, 3, 3)
    torch.testing.assert_close(correct(maps, fitted), expert, rtol=1e-3, atol=1e-3)
    alone = correct(maps.flatten(0, 2), fit(maps.flatten(0, 2), expert.flatten(0, 2), ridge=1e-6))
    assert (alone - expert.flatten(0, 2)).norm() > 0.5 * (maps - expert).norm()


def test_wide_maps_are_corrected_position_by_position(monkeypatch):
    monkeypatch.setattr(module, "MOST_REGRESSORS", 9 * 4)
    assert regressors(torch.randn(2, 3, 3, 4)).shape == (2, 3, 3, 36)
    assert regressors(torch.randn(2, 3, 3, 5)).shape == (2, 3, 3, 5)
    assert regressors(torch.randn(2, 9, 4)).shape == (2, 9, 4)


def alignment(tasks: int = 3, width: int = 4) -> Alignment:
    torch.manual_seed(1)
    return Alignment.of([fit(torch.randn(30, width), torch.randn(30, width)) for _ in range(tasks)])


def test_corrections_are_mixed_by_weights():
    found, hidden = alignment(), torch.randn(2, 5, 4)
    pure = [found(hidden, torch.eye(3)[[task, task]]) - hidden for task in range(3)]
    weights = torch.tensor([[0.5, 0.2, 0.3], [0.0, 0.0, 0.0]])
    expected = hidden[0] + sum(weight * part[0] for weight, part in zip(weights[0], pure, strict=True))
    mixed = found(hidden, weights)
    torch.testing.assert_close(mixed[0], expected)
    assert torch.equal(mixed[1], hidden[1])


def test_tasks_come_and_go():
    whole, hidden = alignment(), torch.randn(1, 4)
    again = whole.without(1).joined_by(Alignment(whole.down[1:2], whole.up[1:2], whole.shift[1:2]))
    for old, new in ((0, 0), (2, 1), (1, 2)):
        assert torch.equal(whole(hidden, torch.eye(3)[[old]]), again(hidden, torch.eye(3)[[new]]))


@pytest.mark.parametrize(("rows", "features"), [(0, 2), (0, 1), (1, 2), (2, 0)])
def test_features_may_lie_along_any_axis(rows, features):
    found, plain = alignment(), torch.randn(6, 5, 4)  # two entries for each of three rows
    weights = torch.eye(3).repeat_interleave(2, 0)
    other = ({0, 1, 2} - {rows, features}).pop()
    hidden = plain.permute(*(torch.tensor([rows, other, features]).argsort().tolist()))
    layout = Layout(Along(rows, 2), features)
    aligned = align_entries((hidden, "kept"), layout, found, weights)
    assert aligned[1] == "kept"
    torch.testing.assert_close(aligned[0].movedim((rows, features), (0, -1)), found(plain, weights))
    assert torch.equal(unmasked(entries(hidden, layout), None), plain.reshape(-1, 4))


def test_padding_is_left_out():
    hidden, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 1, 0]])
    expected = torch.stack([hidden[0, 0], hidden[0, 1], hidden[1, 1]])
    assert torch.equal(unmasked(hidden, mask), expected)


def test_only_the_first_numbers_of_an_output_change():
    output = {"ids": torch.ones(2, dtype=torch.long), "states": [torch.ones(2), torch.ones(2)]}
    changed = with_first_tensor(output, lambda tensor: tensor + 1)
    assert torch.equal(changed["ids"], output["ids"])
    assert [part.tolist() for part in changed["states"]] == [[2, 2], [1, 1]]
    assert output["states"][0].tolist() == [1, 1]
