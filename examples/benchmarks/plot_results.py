"""Draw the picture of the README: accuracy and added storage, task unknown, from the result files.

    python examples/benchmarks/plot_results.py

Reads `results/vision8.json` and `text8.json`; writes `docs/assets/results.svg`. Storage counts
every number of 32 bits as one of 8, as in the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import side_by_side
from matplotlib import pyplot
from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "assets" / "results.svg"
SUITES = {
    "vision8": "Vision: TinyViT, 8 tasks",
    "text8": "Text: MiniLM, 8 tasks",
}
METHODS = ["average", "ID-EMR", "ID-LoRA (SVD)", "Twin-Merging", "SiM", "ReTeX"]


def task_unknown(methods: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return `{method: (storage added, normalised accuracy)}`, in per cent, of the methods that run with the task
    unknown."""
    return {
        name: (100 * of["storage"]["added_rounded"], 100 * of["modes"]["unknown"]["normalised"]["value"])
        for name, of in methods.items()
        if "unknown" in of["modes"]
    }


def draw(axes: Axes, title: str, found: dict[str, tuple[float, float]]) -> None:
    """Draw a bar per method: its accuracy, with the storage that it adds written beside it."""
    for row, name in enumerate(METHODS):
        added, accuracy = found[name]
        axes.barh(row, accuracy, height=0.66, color="#bc4c00" if name == "ReTeX" else "#afb8c1")
        inside = accuracy > 60
        place = {"x": accuracy - 1.5, "ha": "right"} if inside else {"x": accuracy + 1.5, "ha": "left"}
        white = inside and name == "ReTeX"
        text = f"{accuracy:.1f}   (+{added:.1f} % storage)"
        axes.text(y=row, s=text, va="center", fontsize=8, color="white" if white else "#1f2328", **place)
    axes.set_yticks(range(len(METHODS)), METHODS)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("accuracy, % of the experts'", fontsize=9)
    axes.set_xlim(0, 101)
    axes.tick_params(labelsize=9, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURE)
    output = parser.parse_args().output
    # Text stays text and ids stay the same, so that the same tables give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "retex"})
    figure, panels = pyplot.subplots(1, len(SUITES), figsize=(10, 2.6), sharey=True, layout="constrained")
    for axes, (suite, title) in zip(panels, SUITES.items(), strict=True):
        draw(axes, title, task_unknown(side_by_side.read(RESULTS / f"{suite}.json")))
    figure.savefig(output, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
