"""Jobs that are killed with SIGKILL lose nothing; `trust.kills` says what is done."""

from __future__ import annotations

import os

import pytest
from trust import kills
from trust.killed import NEW, PREVIOUS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children that are killed are forks")


def test_killed_jobs_lose_nothing(tmp_path):
    tallies = kills.run(tmp_path, size="short", progress=False)
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert {tally.name.removeprefix("kill: "): tally.tried for tally in tallies} == kills.SHORT
    outcomes = {outcome for tally in tallies for outcome in tally.outcomes}
    assert outcomes == {PREVIOUS, NEW}  # the kills fall on both sides of the moment when a folder changes
    assert sum(tally.tried for tally in tallies) >= 25
