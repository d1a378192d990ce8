"""Tensors that are not what they say: the short form of the trial, and how its outcomes are judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from trust import tensors
from trust.tensors import REFUSED, RIGHT, judge


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the worker reads its size from /proc")
def test_tensors_are_read_rightly_or_refused(tmp_path):
    tallies = tensors.run(tmp_path, progress=False)
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert {tally.name for tally in tallies} == set(tensors.KINDS)
    outcomes = sum((tally.outcomes for tally in tallies), start=type(tallies[0].outcomes)())
    assert set(outcomes) == {RIGHT, REFUSED}
    assert outcomes[REFUSED] > 100 and outcomes[RIGHT] > 30


@pytest.mark.parametrize(
    ("found", "outcome", "expected"),
    [
        ({"outcome": RIGHT, "megabytes": 0}, RIGHT, RIGHT),
        ({"outcome": RIGHT, "megabytes": 0}, REFUSED, "wrong"),
        ({"outcome": RIGHT, "megabytes": 0}, None, RIGHT),
        ({"outcome": RIGHT, "megabytes": 10_000}, RIGHT, "wrong"),
        ({"refusal": "w.bin: tensor 'w' is odd.", "megabytes": 0}, REFUSED, REFUSED),
        ({"refusal": "w.bin: tensor 'w' is odd.", "megabytes": 0}, None, REFUSED),
        ({"refusal": "w.bin: tensor 'w' is odd.", "megabytes": 0}, RIGHT, "wrong"),
        ({"refusal": "Something is odd.", "megabytes": 0}, REFUSED, "wrong"),
        ({"wrong": "crashes the process (exit code -11)"}, None, "wrong"),
    ],
)
def test_an_outcome_that_must_not_be_is_a_problem(found, outcome, expected):
    kind, problem = judge(found, outcome, ("w.bin",))
    assert (kind, problem is not None) == (expected, expected == "wrong")
