"""Growing numbers of tasks at the same bytes per expert, task known.

    python examples/benchmarks/growing.py --work-dir retex-text            # text21.yaml: 4 to 21 text tasks
    python examples/benchmarks/growing.py --sizes 4 21 --shares 0.5 --rows 50

ReTeX with `storage=`, the paper's form (one rank and one shared factor, in int8, at the largest rank that fits), and a
truncated SVD of each task's own difference, rounded (see bytes.py). Figures are means over all tasks of a size, and
over the first ones alone, which every size has: tasks differ in how hard they are. Cells and results as in bytes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bytes_bench import MERGED, ONE_RANK, Bench
from bytes_table import ROUNDED, Point, compare
from experiment import RETEX, Study, lines_figure, load, markdown_table, parse, run, write
from matplotlib.figure import Figure

SIZES = (4, 8, 12, 16, 21)
SHARES = (0.5, 1.0)
SVD = "SVD on merged"


def points_of(study: Study, share: float, work: Path, only: str | None) -> list[tuple[Point, dict[str, np.ndarray]]]:
    """Return the systems at one number of tasks and one size, with the rows that the experts answer correctly."""
    bench = Bench(study, study.tests, "test", work, only)
    found = [bench.merged(), bench.retex(share), bench.one_rank(share), bench.rival(SVD, ROUNDED, share)]
    return [(point, bench.experts_correct) for point in found if point is not None]


def row(point: Point, experts: dict[str, np.ndarray], first: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a system over all its tasks, and over the first ones."""

    def of(tasks: Sequence[str]) -> dict[str, Any]:
        chosen = Point(
            point.method, point.width, point.budget, point.share, point.error, point.state,
            {task: point.correct[task] for task in tasks}, {task: point.agrees[task] for task in tasks},
        )  # fmt: skip
        return compare(chosen, None, {task: experts[task] for task in tasks})

    everything, some = of(list(experts)), of(first)
    return {
        "method": point.method,
        "tasks": len(experts),
        "budget": point.budget,
        "share": point.share,
        "error": point.error,
        **{name: vars(found) for name, found in everything.items()},
        "first": {name: vars(found) for name, found in some.items()},
    }


def markdown(rows: Sequence[dict[str, Any]], first: int) -> str:
    """Format the table."""
    columns = ["method", "tasks", "added (%)", "accuracy", "interval", "worst task", "agreement"]
    columns += [f"accuracy, first {first}", "agreement"]
    lines = []
    for found in rows:
        accuracy = found["normalised"]
        lines.append(
            [
                found["method"],
                found["tasks"],
                f"{100 * found['share']:.3g}",
                accuracy["value"],
                f"{accuracy['low']:.3f} to {accuracy['high']:.3f}",
                *(found[name]["value"] for name in ("worst", "agreement")),
                *(found["first"][name]["value"] for name in ("normalised", "agreement")),
            ]
        )
    return f"# Growing numbers of tasks\n\n{markdown_table(columns, lines)}"


def figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plot accuracy and agreement against the number of tasks."""
    panels = {}
    for title, name in (("normalised accuracy", "normalised"), ("agreement with the expert", "agreement")):
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for found in rows:
            if found["method"] != MERGED:
                xs, ys = lines.setdefault(f"{found['method']}, {100 * found['budget']:.3g} %", ([], []))
                xs.append(found["tasks"])
                ys.append(found[name]["value"])
        panels[title] = lines
    return lines_figure(panels, "tasks", "mean over tasks")


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        "text21.yaml",
        sizes={"type": int, "nargs": "+", "default": SIZES, "help": "numbers of tasks"},
        shares={"type": float, "nargs": "+", "default": SHARES, "help": "added bytes, in per cent of the experts'"},
    )
    study = load(recipe, arguments.work_dir, mirror=arguments.mirror)
    first = study.tasks[: min(arguments.sizes)]
    rows = []
    for share in arguments.shares:
        for size in arguments.sizes:
            found = points_of(study.subset(size), share / 100, arguments.work_dir, arguments.only)
            rows += [row(point, experts, first) for point, experts in found]
    rows = [found for i, found in enumerate(rows) if found not in rows[:i]]  # the merge has no size
    order = (MERGED, RETEX, ONE_RANK, SVD)
    rows.sort(key=lambda found: (order.index(found["method"]), found["budget"], found["tasks"]))
    results = {"recipe": recipe.to_dict(), "sizes": list(arguments.sizes), "first": first, "rows": rows}
    write(arguments.work_dir, "growing", results, markdown(rows, len(first)), figure(rows))


if __name__ == "__main__":
    run(main)
