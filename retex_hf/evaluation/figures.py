"""The picture of a report: one panel per mode, one bar per method, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.plots import COLOURS, DPI
from ..utils.atomic_file import whole_file
from ..utils.drawing import new_figure
from .run import MODES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_HEIGHT = 0.28
PANEL_WIDTH = 3.2


def plot_report(summary: Mapping[str, Any], path: str | Path | None = None) -> Figure:
    """Plot the normalised accuracy of every method in each mode, or plain mean accuracy where nothing is normalised.

    Args:
        summary: From `Report.summary`.
        path: Where to save the picture.
    """
    methods = summary["methods"]
    modes = [mode for mode in MODES if any(mode in of["modes"] for of in methods.values())]
    names = list(methods)
    # Names, then panels, in inches.
    width = 0.09 * max(map(len, names)) + PANEL_WIDTH * len(modes) + 0.4
    figure = new_figure(figsize=(width, BAR_HEIGHT * len(names) + 1.3), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(modes), sharex=True, sharey=True, squeeze=False)[0]
    normalised = summary["individual"] is not None
    for colour, axes, mode in zip(COLOURS, panels, modes, strict=False):
        found = {name: of["modes"][mode] for name, of in methods.items() if mode in of["modes"]}
        values = {name: of["normalised"] if normalised else of["accuracy"]["mean"] for name, of in found.items()}
        places = [names.index(name) for name in values]
        heights = [100 * value["value"] for value in values.values()]
        below = [100 * max(value["value"] - value["low"], 0.0) for value in values.values()]
        above = [100 * max(value["high"] - value["value"], 0.0) for value in values.values()]
        error = {"ecolor": "0.25", "elinewidth": 1.0, "capsize": 2.0}
        axes.barh(places, heights, height=0.7, color=colour, alpha=0.8, xerr=[below, above], error_kw=error)
        for place, height in zip(places, heights, strict=True):
            axes.text(1.0, place, f"{height:.1f}", va="center", fontsize=7)
        axes.set_title(MODES[mode].capitalize(), fontsize=9)
        axes.grid(True, axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    panels[0].set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names])
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    panels[0].set_xlim(left=0)
    label = "Normalised accuracy (%)" if normalised else "Mean accuracy (%)"
    figure.supxlabel(f"{label}, with {summary['bootstrap']['confidence']:.0%} intervals", fontsize=8)
    if path is not None:
        with whole_file(path) as file:
            figure.savefig(file)
    return figure
