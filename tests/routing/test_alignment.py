"""The correction of hidden states at the end of a shared trunk: a ridge regression of low rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retex_hf.routing.alignment import RIDGE, Alignment, align_entries, fit_correction, positions, with_first_tensor
from retex_hf.routing.pooling import Layout
from retex_hf.rows import Along


def correct(states: torch.Tensor, fitted: tuple[torch.Tensor, ...]) -> torch.Tensor:
    down, up, shift = fitted
    return states + states @ down.T @ up + shift


@pytest.mark.parametrize("count", [20, 200], ids=["fewer states than features", "more"])
def test_the_ridge_regression_has_its_closed_form(count):
    """Of full rank, it is the textbook solution, whichever of the two matrices is inverted."""
    torch.manual_seed(0)
    width = 48
    merged, expert = torch.randn(count, width) + 3, torch.randn(count, width)
    states, differences = merged.double().numpy(), (expert - merged).double().numpy()
    mean, shift = states.mean(0), differences.mean(0)
    ridge = RIDGE * np.square(states - mean).sum() / width
    gram = (states - mean).T @ (states - mean) + ridge * np.eye(width)
    mapping = np.linalg.inv(gram) @ (states - mean).T @ (differences - shift)
    expected = states + shift + (states - mean) @ mapping
    found = correct(merged, fit_correction(merged, expert, rank=width))
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-4)


def test_the_rank_is_spent_on_the_largest_fitted_values():
    """No other projection of the fitted differences on so many directions leaves less of them."""
    torch.manual_seed(0)
    merged = torch.randn(300, 12) * torch.linspace(3, 0.1, 12)
    expert = merged + merged @ torch.randn(12, 12) * 0.3
    whole = correct(merged, fit_correction(merged, expert, rank=12)) - merged
    for rank in (1, 3, 6):
        found = correct(merged, fit_correction(merged, expert, rank=rank)) - merged
        values = torch.linalg.svdvals(whole - whole.mean(0))
        torch.testing.assert_close((whole - found).norm(), values[rank:].norm(), rtol=1e-3, atol=1e-3)


def test_a_shift_of_low_rank_is_found():
    torch.manual_seed(0)
    merged, direction = torch.randn(4000, 16), torch.randn(2, 16)
    expert = merged + merged @ torch.randn(16, 2) @ direction + torch.arange(16.0)
    found = correct(merged, fit_correction(merged, expert, rank=2))
    assert (found - expert).norm() < 1.2 * RIDGE * (merged - expert).norm()  # it shrinks by its weight


def test_equal_states_need_no_correction():
    states = torch.randn(50, 8)
    assert torch.equal(correct(states, fit_correction(states, states)), states)


def test_more_directions_than_features_are_padded():
    down, up, shift = fit_correction(torch.randn(50, 8), torch.randn(50, 8), rank=32)
    assert down.shape == up.shape == (32, 8) and shift.shape == (8,)
    assert not up[8:].any()


def alignment(tasks: int = 3, width: int = 4) -> Alignment:
    torch.manual_seed(1)
    return Alignment.fit([(torch.randn(30, width), torch.randn(30, width)) for _ in range(tasks)], rank=2)


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
    aligned, mask = align_entries((hidden, "kept"), layout, found, weights), None
    assert aligned[1] == "kept"
    torch.testing.assert_close(aligned[0].movedim((rows, features), (0, -1)), found(plain, weights))
    states, owner = positions(hidden, layout, {}, mask, rows=3)
    assert torch.equal(states, plain.reshape(-1, 4))
    assert owner.tolist() == [row for row in range(3) for _ in range(10)]


def test_padding_is_left_out():
    hidden, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 1, 0]])
    states, owner = positions(hidden, Layout(Along(0, 1), 2), {}, mask, rows=2)
    assert torch.equal(states, torch.stack([hidden[0, 0], hidden[0, 1], hidden[1, 1]]))
    assert owner.tolist() == [0, 0, 1]


def test_only_the_first_numbers_of_an_output_change():
    output = {"ids": torch.ones(2, dtype=torch.long), "states": [torch.ones(2), torch.ones(2)]}
    changed = with_first_tensor(output, lambda tensor: tensor + 1)
    assert torch.equal(changed["ids"], output["ids"])
    assert [part.tolist() for part in changed["states"]] == [[2, 2], [1, 1]]
    assert output["states"][0].tolist() == [1, 1]
