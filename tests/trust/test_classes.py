"""The classes that are hardest to take apart: every row is what its expert says of it alone. And what a trial sees."""

from __future__ import annotations

import os

import pytest
import torch
from trust import classes
from trust.class_judge import RIGHT
from trust.row_fields import Place, deviations, error, find_places


@pytest.mark.skipif(not hasattr(os, "fork"), reason="every class is judged in a fork")
def test_every_row_is_what_its_expert_says_of_it_alone(tmp_path):
    (tally,) = classes.run(tmp_path, size="short", progress=False)
    assert tally.problems == []
    assert dict(tally.outcomes) == {RIGHT: len(classes.SHORT)}


def test_where_rows_are_is_found_by_value_where_sizes_coincide():
    rows = [{"x": torch.randn(3, 1, 3), "same": torch.ones(3)} for _ in range(3)]
    batch = {"x": torch.cat([row["x"] for row in rows], 1), "same": torch.ones(3), "sum": torch.randn(3, 3)}
    places, dependent = find_places(batch, [{**row, "sum": torch.randn(1, 3)} for row in rows])
    assert places == {"x": Place(1), "same": Place(None)}
    assert dependent == ["sum"]


def test_rows_in_another_order_are_seen():
    rows = [{"x": torch.full((1, 2), float(row))} for row in range(3)]
    batch = torch.cat([row["x"] for row in rows])
    assert deviations({"x": batch}, rows, {"x": Place(0)}) == []
    assert deviations({"x": batch[[0, 2, 1]]}, rows, {"x": Place(0)}) == ["x is off by 5.0e-01"]
    assert deviations({}, rows, {"x": Place(0)}) == ["x is missing"]
    assert deviations({"x": batch[:2]}, rows, {"x": Place(0)}) == [
        "x is [2, 2] for rows of [[1, 2], [1, 2], [1, 2]], or of another kind"
    ]


def test_rows_of_different_lengths_are_compared_as_far_as_they_go():
    rows = [{"x": torch.full((1, length), float(length))} for length in (1, 3, 2)]
    padded = torch.zeros(3, 3)
    for index, row in enumerate(rows):
        padded[index, : row["x"].shape[1]] = row["x"]
    assert find_places({"x": padded}, rows) == ({"x": Place(0)}, [])
    assert deviations({"x": padded}, rows, {"x": Place(0)}) == []
    assert len(deviations({"x": padded[[1, 0, 2]]}, rows, {"x": Place(0)})) == 1
    assert len(deviations({"x": padded[:, :2]}, rows, {"x": Place(0)})) == 1


def test_what_all_rows_share_may_be_given_once_or_for_each():
    rows = [{"x": torch.ones(4)} for _ in range(3)]
    assert deviations({"x": torch.ones(4)}, rows, {"x": Place(None)}) == []
    assert deviations({"x": torch.ones(3, 4)}, rows, {"x": Place(None)}) == []
    rows[1] = {"x": torch.zeros(4)}  # experts differ, so each row must get its own
    assert len(deviations({"x": torch.ones(4)}, rows, {"x": Place(None)})) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_near_anything(value):
    assert error(torch.tensor([1.0, value]), torch.tensor([1.0, 2.0])) == float("inf")
    assert error(torch.tensor([1.0, value]), torch.tensor([1.0, value])) == 0
