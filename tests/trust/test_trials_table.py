"""The table of what was tried says what came out, and nothing came out wrong."""

from __future__ import annotations

import json

from trust import report
from trust.tally import Tally


def test_the_page_shows_the_results_that_are_kept():
    results = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    assert set(results) == set(report.TRIALS)
    assert report.page(results) == report.PAGE.read_text(encoding="utf-8")


def test_nothing_that_was_tried_came_out_wrong():
    results = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    tallies = {trial: found["tallies"] for trial, found in results.items()}
    assert all(tally["problems"] == 0 for of_trial in tallies.values() for tally in of_trial)
    tried = {trial: sum(sum(tally["outcomes"].values()) for tally in found) for trial, found in tallies.items()}
    assert tried["mutants"] >= 2000
    assert tried["kills"] >= 300
    assert tried["configurations"] >= 5000
    assert tried["links"] >= 300


def test_problems_are_counted_by_kind_and_in_all():
    fine, broken = Tally("mutants of a"), Tally("mutants of b")
    for _ in range(3):
        fine.add("refused")
    broken.add("harmless")
    broken.add("wrong", "another output (seed 3)")
    assert broken.problems == ["mutants of b: another output (seed 3)"]
    rows = report.table({"mutants": report.describe([fine, broken])}).rows
    assert rows == [
        ["mutants of a", "3", "3 refused", "0"],
        ["mutants of b", "2", "1 harmless, 1 wrong", "1"],
        ["all mutants", "5", "3 refused, 1 harmless, 1 wrong", "1"],
    ]
