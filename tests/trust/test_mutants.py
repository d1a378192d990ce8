"""Damaged and forged artifacts are refused, or are the same model: the short form of the trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from trust import mutants
from trust.mutants import ANOTHER, HARMLESS, REFUSED, judge
from trust.mutations import Mutant


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the worker reads its size from /proc")
def test_mutants_are_refused_or_harmless(tmp_path):
    tallies = mutants.run(tmp_path, progress=False)
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert sum(tally.tried for tally in tallies) >= 200
    for tally in tallies:
        assert set(tally.outcomes) <= {REFUSED, HARMLESS, ANOTHER}
        assert tally.outcomes[REFUSED] > tally.tried / 2


@pytest.mark.parametrize(
    ("resealed", "answer", "outcome"),
    [
        (False, {"digest": "same", "finite": True, "megabytes": 0}, HARMLESS),
        (False, {"digest": "other", "finite": True, "megabytes": 0}, "wrong"),
        (True, {"digest": "other", "finite": True, "megabytes": 0}, ANOTHER),
        (True, {"digest": "other", "finite": False, "megabytes": 0}, "wrong"),
        (False, {"digest": "same", "finite": True, "megabytes": 10_000}, "wrong"),
        (False, {"refusal": "model.safetensors is damaged.", "megabytes": 0}, REFUSED),
        (False, {"refusal": "Something is damaged.", "megabytes": 0}, "wrong"),
        (False, {"refusal": "model.safetensors:\nTraceback", "megabytes": 0}, "wrong"),
        (False, {"wrong": "crashes the process (exit code -11)"}, "wrong"),
    ],
)
def test_an_outcome_that_must_not_be_is_a_problem(resealed, answer, outcome):
    mutant = Mutant("bytes", "a bit flipped", lambda folder: None, ("model.safetensors",), resealed)
    found, problem = judge(mutant, answer, "same")
    assert (found, problem is not None) == (outcome, outcome == "wrong")
