"""The figures of a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...utils.drawing import new_figure
from ..plots import COLOURS, DPI, plot_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_HEIGHT = 0.16


def draw(name: str, errors: Mapping[str, float], results: Mapping[str, Mapping[str, float | None]], path: Path) -> None:
    """Draw a figure by name: `errors` from the recovery errors, `results` from the measured shares of each task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "errors":
        plot_errors(errors, path)
    else:
        plot_results(results).savefig(path)


def plot_results(results: Mapping[str, Mapping[str, float | None]]) -> Figure:
    """Plot one group of bars per task, one bar per measured share.

    Args:
        results: `{title: {task: share}}`.

    >>> from retex_hf.artifact.card.figures import plot_results
    >>> figure = plot_results({"task known": {"paws": 0.9}, "task unknown": {"paws": 0.8}})
    >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
    [90.0, 80.0]
    """
    tasks = list(dict.fromkeys(task for shares in results.values() for task in shares))
    height = BAR_HEIGHT * (len(results) + 1) * len(tasks) + 1.2
    figure = new_figure(figsize=(7.0, height), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for index, (title, shares) in enumerate(results.items()):
        found = {place: share for place, task in enumerate(tasks) if (share := shares.get(task)) is not None}
        step = 1 / (len(results) + 1)
        places = [place + (index - (len(results) - 1) / 2) * step for place in found]
        axes.barh(
            places,
            [100 * share for share in found.values()],
            height=step,
            color=COLOURS[index % len(COLOURS)],
            alpha=0.8,
            label=title,
        )
    # Matplotlib would read a dollar sign as the start of a formula.
    axes.set_yticks(range(len(tasks)), [task.replace("$", r"\$") for task in tasks], fontsize=8)
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("Rows (%)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, loc="outside lower center", ncols=min(len(results), 4), frameon=False)
    return figure
