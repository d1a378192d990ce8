"""The figures of docs/benchmarks.md on bytes are those of the result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import bytes_summary
import growing
from bytes_table import Point, as_json, from_digits, from_hex, markdown, tabulate

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_short_table_is_that_of_the_results():
    points = {suite: bytes_summary.read(suite) for suite in bytes_summary.SUITES}
    assert all(points.values())
    assert bytes_summary.summary(points) in PAGE


def test_more_rows_of_t5_are_those_of_the_results():
    results = json.loads((bytes_summary.RESULTS / "bytes_text_to_text_200.json").read_text(encoding="utf-8"))
    small, large = (
        [f"{point['figures'][figure]['value']:.3f}" for figure in ("normalised", "worst")]
        for point in results["points"]
        if point["method"] == "ReTeX"
    )
    expected = f"at 1 % it keeps {small[0]} of the experts (worst task {small[1]}), at 1.5 % {large[0]} ({large[1]})"
    assert expected in " ".join(PAGE.split())


@pytest.mark.parametrize("suite", [*bytes_summary.SUITES, "text_to_text_200"])
def test_the_full_tables_are_those_of_the_results(suite):
    """The figures in the JSON follow from its rows, and the table from its figures."""
    results = json.loads((bytes_summary.RESULTS / f"bytes_{suite}.json").read_text(encoding="utf-8"))
    points = [Point.from_dict(found) for found in results["points"]]
    experts = from_digits(from_hex(results["experts_correct"]))
    table = tabulate(points, experts)
    assert [as_json(row) for row in table] == results["points"]
    text = (bytes_summary.RESULTS / f"bytes_{suite}.md").read_text(encoding="utf-8")
    title = text.splitlines()[0].removeprefix("# Bytes: ")
    assert markdown(table, title) == text


def test_growing_numbers_of_tasks_are_those_of_the_results():
    results = json.loads((bytes_summary.RESULTS / "growing_text21.json").read_text(encoding="utf-8"))
    text = growing.markdown(results["rows"], len(results["first"]))
    assert (bytes_summary.RESULTS / "growing_text21.md").read_text(encoding="utf-8") == text
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| merged")]
    assert "\n".join(lines) in PAGE


def test_the_large_build_is_that_of_the_results():
    text = (bytes_summary.RESULTS / "large_build.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "krylov" in line and not line.startswith("`")]
    assert len(lines) == 2
    for line in lines:
        _, _, _, seconds, _, memory, *_, stated, _ = line.split("|")
        assert f"[{int(seconds):,} s]" in PAGE
        what = "factors" if "rank" in line else "directions"
        assert f"a peak of {float(memory.removesuffix('GB ')):.1f} GB, {what} within {stated.split()[5]} times" in PAGE
