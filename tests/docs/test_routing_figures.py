"""The figures of docs/benchmarks.md and docs/route.md on identification and out-of-distribution rows are those of the
result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import corrupted
import data_free
import far_inputs
import numpy as np
import pytest
import routing_cost
import routing_rules
import routing_summary
import trunk
from experiment import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
FOUND = json.loads((RESULTS / "far_inputs_images.json").read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_results():
    text = far_inputs.markdown(FOUND)
    assert (RESULTS / "far_inputs_images.md").read_text(encoding="utf-8") == text
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for table in text.split("\n\n")[1:]:
        assert table.strip() in page


def test_the_guide_says_what_was_measured():
    page = " ".join((ROOT / "docs" / "route.md").read_text(encoding="utf-8").split())
    at = far_inputs.QUANTILES.index(0.95)
    rows = {name: shares[at] for name, shares in FOUND["rows"].items()}
    left_out = [share for name, share in rows.items() if name.endswith("left out")]
    assert (
        f"takes {100 * rows[far_inputs.OWN]:.1f} % for out-of-distribution, of photographs (cifar10) "
        f"{100 * rows['cifar10']:.0f} %, of noise {100 * rows['noise']:.0f} %, of tasks left out of the build "
        f"{100 * min(left_out) + 1e-9:.0f} to {100 * max(left_out):.0f} %"
    ) in page
    assert f"upside down, {100 * rows['own images, upside down']:.0f} %" in page


@pytest.mark.parametrize("suite", routing_summary.SUITES)
def test_the_tables_of_rules_are_those_of_the_results(suite):
    text = (RESULTS / f"routing_rules_{suite}.md").read_text(encoding="utf-8")
    assert routing_rules.markdown(routing_summary.read(suite)) == text


def test_the_short_table_of_rules_is_that_of_the_results():
    assert routing_summary.summary() in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_default_rule_identifies_corrupted_rows_best_and_is_nowhere_the_worst():
    for suite in routing_summary.SUITES:
        conditions = routing_summary.read(suite)["conditions"]
        for part in (routing_rules.CLEAN, "corrupted"):
            shares = [found[part] for found in conditions.values()]
            assert conditions[routing_rules.DEFAULT][part] > min(shares)
            assert conditions[routing_rules.DEFAULT][part] >= conditions[routing_rules.BEFORE][part]
        best = max(found["corrupted"] for found in conditions.values())
        assert conditions[routing_rules.DEFAULT]["corrupted"] == best


def corrupted_of(suite: str) -> tuple[str, list[dict]]:
    """Return the page and the corrupted conditions of a suite; its table is that of the results."""
    records = json.loads((RESULTS / f"corrupted_{suite}.json").read_text(encoding="utf-8"))["rows"]
    text = corrupted.as_markdown(records)
    assert (RESULTS / f"corrupted_{suite}.md").read_text(encoding="utf-8").strip() == text.strip()
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert text.split("\n\n", 1)[1].strip() in page
    return page, [record for record in records if record["kind"] != corrupted.CLEAN]


def test_accuracy_on_corrupted_images_is_that_of_the_results():
    page, bad = corrupted_of("vision8")
    leads = sorted(record["ReTeX, task unknown"] - record["average, head given"] for record in bad)
    costs = sorted(record["ReTeX, oracle"] - record["ReTeX, task unknown"] for record in bad)
    said = " ".join(page.split())
    assert (
        f"in all {sum(lead > 0 for lead in leads)} conditions; under spatter at severity 5 by {leads[0]:.4f} only"
        in said
    )
    assert f"costs at most {costs[-2]:.4f}, but {costs[-1]:.4f} under spatter" in said


def test_the_table_of_costs_is_that_of_the_results():
    found = json.loads((RESULTS / "routing_cost.json").read_text(encoding="utf-8"))
    text = routing_cost.markdown(found["shapes"])
    assert (RESULTS / "routing_cost.md").read_text(encoding="utf-8") == text
    assert list(found["shapes"]) == list(routing_cost.SHAPES)
    assert text.strip() in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("suite", ["text8", "vision8", "causal"])
def test_the_tables_of_trunks_are_those_of_the_results(suite):
    rows = json.loads((RESULTS / f"trunk_{suite}.json").read_text(encoding="utf-8"))["rows"]
    text = markdown_table(trunk.COLUMNS, [list(row.values()) for row in rows])
    assert (RESULTS / f"trunk_{suite}.md").read_text(encoding="utf-8").strip() == text.strip()
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text.strip() in page
    accuracy = {(row["layers"], row["trunk"]): row["accuracy"] for row in rows}
    if suite == "text8":
        deepest = rows[-1]["layers"]
        none, plain, aligned = (accuracy[deepest, trunk] for trunk in ("none", "as it is", "aligned"))
        assert f"With {deepest[0]} of six blocks shared {aligned:.3f} is kept, aligned, where {none:.3f}" in page
        assert f"and {plain:.3f} with one as it is" in page
    elif suite == "causal":
        whole = accuracy["15 of 30", "none"]
        plain, aligned = (100 * (whole - accuracy["15 of 30", trunk]) for trunk in ("as it is", "aligned"))
        assert f"That is {aligned:.1f} points less than without a trunk, aligned, and {plain:.1f} less as it is" in page
    else:
        plain, aligned = (accuracy["1 of 4", "none"] - accuracy["1 of 4", trunk] for trunk in ("as it is", "aligned"))
        assert f"one shared stage costs {100 * aligned:.1f} points, aligned, and {100 * plain:.1f} as it is" in page


@pytest.mark.parametrize("suite", ["text8", "vision8"])
def test_the_tables_without_data_are_those_of_the_results(suite):
    found = json.loads((RESULTS / f"data_free_{suite}.json").read_text(encoding="utf-8"))
    text = data_free.markdown(found)
    assert (RESULTS / f"data_free_{suite}.md").read_text(encoding="utf-8").strip() == text.strip()
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert text.split("\n\n", 1)[1].strip() in page
    mean = {label: float(np.mean(list(of.values()))) for label, of in found["identified"].items()}
    weights, references = mean[data_free.SCORES], mean[data_free.SIGNATURES]
    said = " ".join(page.split())
    guide = " ".join((ROOT / "docs" / "route.md").read_text(encoding="utf-8").split())
    ahead = 100 * (weights - max(mean[rival] for rival in data_free.RIVALS))
    behind = 100 * (references - weights)
    if suite == "text8":
        assert f"On text weights alone are {behind:.1f} points behind 64 references" in said
        assert f"(sst2), and {ahead:.1f} ahead of the best" in said
        assert f"identified {weights:.3f} of the rows, where 64 references give {references:.3f}" in guide
    else:
        assert f"On images they are {behind:.1f} points behind" in said
        assert f"flowers, and {ahead:.1f} ahead of the best" in said
        assert f"of eight image tasks {weights:.3f} ({references:.3f})" in guide


def test_accuracy_on_corrupted_texts_is_that_of_the_results():
    page, bad = corrupted_of("text8")
    below = {
        (record["kind"], record["severity"])
        for record in bad
        if record["ReTeX, task unknown"] <= record["average, head given"]
    }
    assert below == {("typos", 5), ("truncation", 5), ("cyrillic", 5)}
    assert f"in {len(bad) - len(below)} of {len(bad)} conditions, and below it under typos" in page
