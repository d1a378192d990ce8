"""Draw the picture of the README: accuracy against added storage, task unknown, from the result files.

    python examples/benchmarks/plot_results.py

Reads the tables "Task unknown" of `results/vision8.md`, `text8.md` and `text_to_text.md`; writes
`docs/assets/results.svg`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "assets" / "results.svg"
SUITES = {
    "vision8": "Vision: TinyViT, 8 tasks",
    "text8": "Text: MiniLM, 8 tasks",
    "text_to_text": "T5: Flan-T5-small, 6 tasks",
}
LABELLED = {  # method -> offset of its label, in points
    "average": (7, -4), "TIES": (7, 5), "ID-EMR": (6, -12), "ID-LoRA": (7, -11), "Twin-Merging": (8, -22),
    "SiM": (-12, -15), "ReTeX": (-4, 8),
}  # fmt: skip


def task_unknown(text: str) -> dict[str, tuple[float, float]]:
    """Return `{method: (storage added, normalised accuracy)}`, in per cent, of the section "Task unknown"."""
    section = text.split("## Task unknown", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    end = next((i for i, line in enumerate(lines[1:], 1) if line.startswith("| method")), len(lines))
    found = {}
    for line in lines[2:end]:
        row = dict(zip(header, (cell.strip().strip("*") for cell in line.strip("|").split("|")), strict=True))
        found[row["method"]] = float(row["storage, added"]), float(row["normalised"].split()[0])
    return found


def draw(axes: Axes, title: str, methods: dict[str, tuple[float, float]]) -> None:
    """Draw one suite; the variants of ReTeX are left out."""
    for name, point in methods.items():
        if name.startswith("ReTeX") and name != "ReTeX":
            continue
        ours = name == "ReTeX"
        axes.scatter(*point, s=90 if ours else 28, marker="*" if ours else "o", color="#bc4c00" if ours else "#57606a")
        if name in LABELLED:
            style = {"color": "#bc4c00", "weight": "bold"} if ours else {"color": "#1f2328"}
            axes.annotate(name, point, LABELLED[name], textcoords="offset points", fontsize=8, **style)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("storage added, % of all experts", fontsize=9)
    axes.set_xlim(-4, 108)
    axes.set_ylim(0, 109)
    axes.tick_params(labelsize=8)
    axes.grid(color="#d0d7de", linewidth=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURE)
    output = parser.parse_args().output
    # Text stays text and ids stay the same, so that the same tables give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "retex"})
    figure, panels = pyplot.subplots(1, len(SUITES), figsize=(10, 3.3), sharey=True, layout="constrained")
    for axes, (suite, title) in zip(panels, SUITES.items(), strict=True):
        draw(axes, title, task_unknown((RESULTS / f"{suite}.md").read_text(encoding="utf-8")))
    panels[0].set_ylabel("accuracy, % of the experts'", fontsize=9)
    figure.savefig(output, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
