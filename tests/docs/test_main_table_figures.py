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
SUITES = {"vision": "vision8", "text": "text8"}
FORMER = {"vision": "former_vision8", "text": "former_text8", "T5": "former_text_to_text"}
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
            found["storage"] = {"added_rounded": float(row["storage, added"]) / 100}
    return methods


def figures() -> dict[str, dict[str, Any]]:
    """Return the methods of each suite from its result file."""
    return {name: side_by_side.read(RESULTS / f"{suite}.json") for name, suite in SUITES.items()}


def test_the_main_table_is_that_of_the_results():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert side_by_side.table(figures()) in page
    for suite in SUITES.values():
        text = (RESULTS / f"{suite}.md").read_text(encoding="utf-8")
        written, found = of_page(text), side_by_side.read(RESULTS / f"{suite}.json")
        assert list(written) == list(found)
        for name, method in written.items():
            for mode, values in method["modes"].items():
                whole = found[name]["modes"][mode]["normalised"]["value"]
                assert abs(values["normalised"]["value"] - whole) < 0.00051


def test_the_differences_that_the_page_names_are_those_of_the_results():
    said = " ".join(
        (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split("## Former settings")[0].split()
    )
    both = ("ID-EMR", "ID-LoRA (SVD)", "SiM")
    for suite, rivals in (("vision8", both), ("text8", (*both, "Twin-Merging"))):
        text = (RESULTS / f"{suite}.md").read_text(encoding="utf-8")
        for rival in rivals:
            found = re.search(rf"^- ReTeX minus {re.escape(rival)}: (.*)$", text, re.MULTILINE)[1]
            assert f"{rival} {found}" in said


def test_the_former_main_table_is_that_of_its_pages():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    pages = {name: (RESULTS / f"{suite}.md").read_text(encoding="utf-8") for name, suite in FORMER.items()}
    assert side_by_side.table({name: of_page(text) for name, text in pages.items()}) in page


def test_the_table_of_the_readme_is_a_part_of_it():
    page = (ROOT / "README.md").read_text(encoding="utf-8").split("## Results", 1)[1]
    lines = [line for line in page.splitlines() if line.startswith("| ") and "method" not in line]
    suites = figures()
    shown = 0
    for line in lines:
        name, *cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if name not in suites["vision"]:
            break
        whole = [side_by_side.column(methods, name) for methods in suites.values()]
        assert cells == [cell for columns in whole for cell in columns], name
        shown += 1
    assert shown >= 5


def test_fourteen_tasks_are_those_of_the_results():
    methods = side_by_side.read(RESULTS / "text14.json")
    text = (RESULTS / "text14.md").read_text(encoding="utf-8").split("## Task unknown\n", 1)[1]
    lines = [line for line in text.split("Accuracy by task")[0].splitlines() if line.startswith("|")]
    assert "\n".join(lines).replace("**", "") in (page := (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    found = {row["method"]: row for row in first_table(text)}
    for name, row in found.items():
        figures = methods[name]["modes"]["unknown"]
        assert row["normalised"].split()[0] == f"{100 * figures['normalised']['value']:.1f}"
        assert row["identified"] == f"{100 * figures['identification']['mean']['value']:.1f}"
    leads = [
        float(found[f"ReTeX, {count} references"]["identified"])
        - float(found[f"Twin-Merging, {count} inputs"]["identified"])
        for count in (64, 256)
    ]
    assert f"identifies {leads[0]:.1f} points more rows" in page and f"and {leads[1]:.1f} more with 256" in page
