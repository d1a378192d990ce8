"""What a link leads to is not touched, whatever job meets the link; `trust.links` says what is done."""

from __future__ import annotations

import os

import pytest
from trust import links
from trust.planted import REFUSED, REPLACED, UNTOUCHED

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children that do the jobs are forks")


def test_what_planted_links_lead_to_is_left_alone(tmp_path):
    tallies = links.run(tmp_path, size="short", progress=False)
    assert [problem for tally in tallies for problem in tally.problems] == []
    users = 2 if os.geteuid() == 0 else 1
    assert [tally.tried for tally in tallies] == [*links.SHORT.values()] * users
    for of_user in (tallies[: len(links.SHORT)], tallies[-len(links.SHORT) :]):
        # Neither is everything refused, nor everything taken.
        assert {outcome for tally in of_user for outcome in tally.outcomes} == {REFUSED, REPLACED, UNTOUCHED}
