"""The short table of docs/benchmarks.md, from the results of bytes.py.

    python examples/benchmarks/bytes_summary.py

Prints, for every suite and size, the figures of ReTeX, the rival whose answers agree most often with the experts', and
how many rivals are behind ReTeX, level with it (zero is inside the 95 % interval of the difference), and ahead of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment import RETEX, markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
SUITES = ("text8", "vision8", "text_to_text", "causal")
COLUMNS = ["suite", "added (%)", "accuracy", "worst task", "agreement", "best rival, by agreement", "agreement"]
COLUMNS += ["rivals behind / level / ahead, by accuracy", "by agreement"]


def read(suite: str) -> list[dict[str, Any]]:
    """Return the points of a suite's results; none where they are missing."""
    file = RESULTS / f"bytes_{suite}.json"
    return json.loads(file.read_text(encoding="utf-8"))["points"] if file.is_file() else []


def summary(suites: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table of points by suite."""
    rows = []
    for suite, points in suites.items():
        for ours in (point for point in points if point["method"] == RETEX):
            # Of the two forms of a rival only the rounded one counts.
            same = [point for point in points if point["budget"] == ours["budget"] and point["width"] != "float"]
            rivals = [point for point in same if "lead" in point["figures"]]
            if not rivals:
                continue
            best = max(rivals, key=lambda point: point["figures"]["agreement"]["value"])
            figures = [ours["figures"][name]["value"] for name in ("normalised", "worst", "agreement")]
            counts = [counted(rivals, figure) for figure in ("normalised", "agreement")]
            size = f"{100 * ours['budget']:.3g}"
            rows.append([suite, size, *figures, best["method"], best["figures"]["agreement"]["value"], *counts])
    return markdown_table(COLUMNS, rows)


def counted(rivals: Sequence[Mapping[str, Any]], figure: str) -> str:
    """Return how many rivals are behind, level and ahead."""
    leads = [rival["figures"]["lead"][figure] for rival in rivals]
    behind, ahead = sum(lead["low"] > 0 for lead in leads), sum(lead["high"] < 0 for lead in leads)
    return f"{behind} / {len(leads) - behind - ahead} / {ahead}"


if __name__ == "__main__":
    print(summary({suite: read(suite) for suite in SUITES}), end="")
