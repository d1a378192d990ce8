"""The short table of docs/benchmarks.md on rules of identification, from the results of routing_rules.py.

python examples/benchmarks/routing_summary.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corrupted import CLEAN
from experiment import markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
SUITES = ("vision8", "text8")
PARTS = (CLEAN, "corrupted", "worst")
COUNT = "256"


def read(suite: str) -> dict[str, Any]:
    """Return the results of a suite."""
    return json.loads((RESULTS / f"routing_rules_{suite}.json").read_text(encoding="utf-8"))


def summary() -> str:
    """Return the table: for every rule and suite, shares of rows identified with 64 references, and with more."""
    found = {suite: read(suite) for suite in SUITES}
    columns = [
        "rule",
        *(f"{suite}, {part}" for suite in SUITES for part in (*PARTS, f"clean, {COUNT}", f"corrupted, {COUNT}")),
    ]
    rows = []
    for rule in found[SUITES[0]]["conditions"]:
        row: list[Any] = [rule]
        for results in found.values():
            more = results["references"].get(COUNT, {}).get(rule, {})
            row += [results["conditions"][rule][part] for part in PARTS]
            row += [more.get(part, "") for part in (CLEAN, "corrupted")]
        rows.append(row)
    return markdown_table(columns, rows)


if __name__ == "__main__":
    print(summary(), end="")
