"""The main table of docs/benchmarks.md and the one of the README are those of the result files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import side_by_side

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
SUITES = {"vision": "vision8", "text": "text8", "T5": "text_to_text"}
HEADINGS = {"known": "## Task known", "unknown": "## Task unknown", "oracle": "## Oracle routing"}


def first_table(text: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a text, without emphasis."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].replace("*", "").splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def of_page(text: str) -> dict[str, Any]:
    """Return the figures of a page of results in the form that they have in `main_table.json`."""
    methods: dict[str, Any] = {}
    for mode, heading in HEADINGS.items():
        for row in first_table(text.split(f"{heading}\n", 1)[1]):
            found = methods.setdefault(row["method"], {"modes": {}})
            found["modes"][mode] = {"normalised": {"value": float(row["normalised"].split()[0]) / 100}}
            found["storage"] = {"added": float(row["storage, added"]) / 100}
    return methods


def figures(suite: str) -> dict[str, Any]:
    """Return the figures of a suite from its result file, or from its page where that file is not kept."""
    file = RESULTS / f"{suite}.json"
    if file.exists():
        return side_by_side.read(file)
    return of_page((RESULTS / f"{suite}.md").read_text(encoding="utf-8"))


def test_the_main_table_is_that_of_the_results():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert side_by_side.table({name: figures(suite) for name, suite in SUITES.items()}) in page


def test_the_table_of_the_readme_is_a_part_of_it():
    page = (ROOT / "README.md").read_text(encoding="utf-8").split("## Results", 1)[1]
    lines = [line for line in page.splitlines() if line.startswith("| ") and "method" not in line]
    suites = {name: figures(suite) for name, suite in SUITES.items()}
    shown = 0
    for line in lines:
        name, *cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if name not in suites["vision"]:
            break
        whole = [side_by_side.column(methods, name) for methods in suites.values()]
        assert cells == [cell for known, unknown, _, added in whole for cell in (known, unknown, added)], name
        shown += 1
    assert shown >= 6
