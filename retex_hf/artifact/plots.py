"""Plots of a build: plain data in, a matplotlib `Figure` out, written to a file if a path is given.

Figures are made without pyplot, so they need neither global state nor a display. matplotlib is the extra `plots`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..errors import RetexError
from ..utils.atomic_file import whole_file
from ..utils.atomic_folder import check_target
from ..utils.drawing import new_figure, require_matplotlib
from ..utils.parameter_names import layer_type

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..workflows.analysis import StoragePoint

Records = Sequence[Mapping[str, Any]]

FIGURES_FOLDER = "figures"
DPI = 150
# Okabe and Ito's palette, which is safe for common kinds of colour blindness, without its yellow, which is too pale for
# lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# A relative error below this is float32 rounding: the parameter is stored exactly.
EXACT = 1e-6
# Longer legends are placed outside the axes.
LEGEND_INSIDE = 4
LEGEND_ROWS = 24
GAMMA_COLUMNS = 4
MOST_TICKS = 32
# In inches, at LEGEND_FONT points: the width of a character and the height of a line (the width of a vertical label).
LEGEND_FONT, CHARACTER_WIDTH, LABEL_WIDTH = 7, 0.06, 0.2
# One over the share of a run's records that its running mean covers; it is centred so that it does not lag.
MEAN_SHARE = 20


def plot_losses(records: Records | Mapping[str, Records], path: str | Path | None = None) -> Figure:
    """Plot loss and relative error over the steps of training.

    A record covers only the few tasks drawn in one step, so long runs also get a running mean over pale values.

    Args:
        records: Records of `recovery.History` (`model.training_history`), or `{label: records}` to compare runs.
        path: File to save the figure to.

    >>> from retex_hf.artifact.plots import plot_losses
    >>> records = [{"step": 50, "loss": 4.0, "relative_error": 1.0}, {"step": 100, "loss": 1.0, "relative_error": 0.5}]
    >>> figure = plot_losses(records)
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['Loss per task drawn', 'Relative error of the tasks drawn']
    """
    runs = records if isinstance(records, Mapping) else {"": records}
    _require(runs and all(runs.values()), "There are no training records to plot.")
    figure, (above, below) = _figure(runs, height=6.0, rows=2)
    for index, (label, run) in enumerate(runs.items()):
        steps = _column(run, "step")
        for axes, key in ((above, "loss"), (below, "relative_error")):
            _draw_with_mean(axes, steps, _column(run, key), _plain(label), _line_style(index))
    above.set(title="Training of the recovery module", ylabel="Loss per task drawn")
    below.set(xlabel="Optimizer step", ylabel="Relative error of the tasks drawn")
    for axes in (above, below):
        _log_if_wide(axes)
    if isinstance(records, Mapping):
        _add_legend(figure, above)
    return _finish(figure, path)


def plot_gammas(records: Records, path: str | Path | None = None) -> Figure:
    """Plot the affine variant's gamma, averaged over tasks, over the steps of training, by type of layer.

    Each type has a panel; its line is the mean over the layers of the type, its band their minimum and maximum.

    Args:
        records: Records of `recovery.History` (`model.training_history`) with `RetexConfig(recovery="affine")`.
        path: File to save the figure to.

    >>> from retex_hf.artifact.plots import plot_gammas
    >>> gamma = {"layer.0.query.weight": 1.0, "layer.1.query.weight": 0.5}
    >>> figure = plot_gammas([{"step": 50, "gamma": gamma}])
    >>> figure.axes[0].get_title(), figure.axes[0].lines[0].get_ydata().tolist()
    ('layer.query.weight', [0.75])
    """
    records = [record for record in records if record.get("gamma")]
    _require(records, 'No gamma was recorded: only training with RetexConfig(recovery="affine") has one.')
    types = _by_type(records[0]["gamma"])
    steps = _column(records, "step")
    # One panel per type, because bands of many types would overlap.
    columns = min(len(types), GAMMA_COLUMNS)
    rows = -(-len(types) // columns)
    figure, panels = _figure((), width=max(2.6 * columns, 4.0), height=1.8 * rows + 1.0, rows=rows, columns=columns)
    for axes, (kind, names) in zip(panels, types.items(), strict=False):
        values = [[record["gamma"][name] for name in names] for record in records]
        means = [sum(row) / len(row) for row in values]
        axes.plot(steps, means, label=_plain(kind), marker=_marker_if_sparse(steps), markersize=3, **_line_style(0))
        least, greatest = [min(row) for row in values], [max(row) for row in values]
        axes.fill_between(steps, least, greatest, color=COLOURS[0], alpha=0.25, linewidth=0)
        axes.axhline(1.0, color="0.5", linewidth=0.8, zorder=0)
        axes.set_title(_two_lines(_plain(kind)), fontsize=7)
        axes.tick_params(labelsize=7, labelbottom=True)
    # Gammas differ from 1 in the third digit; an axis offset would hide the 1.
    panels[0].ticklabel_format(axis="y", useOffset=False)
    for axes in panels[len(types) :]:
        axes.remove()
    figure.suptitle(
        r"$\gamma$ by type of layer, averaged over tasks: mean, least and greatest of its layers", fontsize=10
    )
    figure.supxlabel("Optimizer step", fontsize=9)
    figure.supylabel(r"$\gamma$ (1 = as merged)", fontsize=9)
    return _finish(figure, path)


def plot_energy_ratios(ratios: Mapping[str, Tensor | Sequence[float]], path: str | Path | None = None) -> Figure:
    """Plot the paper's rho_q: the share of each task's difference in its top q singular directions.

    Args:
        ratios: `{task: rho_q for q = 1, 2, ...}`, as in `Analysis.energy_ratios`.
        path: File to save the figure to.

    >>> from retex_hf.artifact.plots import plot_energy_ratios
    >>> figure = plot_energy_ratios({"paws": [0.5, 0.75, 1.0]})
    >>> figure.axes[0].lines[0].get_xdata().tolist()
    [1, 2, 3]
    """
    _require(
        ratios and all(len(values) for values in ratios.values()),
        "There are no energy ratios to plot: they are defined for square matrices only.",
    )
    figure, (axes,) = _figure(ratios)
    for index, (task, values) in enumerate(ratios.items()):
        values = values.tolist() if isinstance(values, Tensor) else list(values)
        counts = list(range(1, len(values) + 1))
        axes.plot(
            counts, values, label=_plain(task), marker=_marker_if_sparse(counts), markersize=3, **_line_style(index)
        )
    axes.set(
        title="Concentration of the experts' differences from the merged model",
        xlabel="$q$ (number of singular directions)",
        ylabel=r"$\rho_q$ (share of the energy, mean over square layers)",
        ylim=(0, 1.03),
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    _add_legend(figure, axes)
    return _finish(figure, path)


def plot_errors(errors: Mapping[str, float], path: str | Path | None = None) -> Figure:
    """Plot the relative error of every recovered parameter, in model order and coloured by type of layer.

    Types that are stored exactly (usually vectors) share one entry of the legend.

    Args:
        errors: `{parameter name: relative error}`, as in `model.recovery_errors`.
        path: File to save the figure to.

    >>> from retex_hf.artifact.plots import plot_errors
    >>> figure = plot_errors({"layer.0.weight": 0.5, "layer.0.bias": 0.0, "layer.1.weight": 0.25, "layer.1.bias": 0.0})
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['stored exactly (2)', 'layer.weight']
    """
    _require(errors, "There are no recovery errors to plot.")
    positions = {name: position for position, name in enumerate(errors)}
    types = _by_type(errors)
    lossy = {kind: names for kind, names in types.items() if any(errors[name] > EXACT for name in names)}
    exact = [name for kind, names in types.items() if kind not in lossy for name in names]
    # Wide enough for one marker per parameter, up to the width of a page; high enough for the labels below.
    width = min(max(6.0, 0.05 * len(errors)), 14.0)
    height = 4.0 + CHARACTER_WIDTH * max(len(_block(name)) for name in errors)
    figure, (axes,) = _figure([*lossy, "stored exactly (000)"], width=width, height=height)
    if exact:
        label = f"stored exactly ({len(exact)})"
        axes.plot([positions[name] for name in exact], [errors[name] for name in exact], ".", color="0.7", label=label)
    for index, (kind, names) in enumerate(lossy.items()):
        axes.plot(
            [positions[name] for name in names],
            [errors[name] for name in names],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[(index // len(COLOURS)) % len(MARKERS)],
            markersize=5,
            linewidth=0.6,
            alpha=0.85,
            label=_plain(kind),
        )
    axes.set(
        title="What recovery misses of the experts' differences, by parameter",
        xlabel="Parameter, in the order of the model",
        ylabel="Relative error",
        xlim=(-1, len(errors)),
    )
    _tick_blocks(figure, axes, list(errors))
    _add_legend(figure, axes)
    return _finish(figure, path)


def plot_storage(points: Sequence[StoragePoint], path: str | Path | None = None) -> Figure:
    """Plot error against storage, for uniform ranks and for budgets of as many bytes.

    Args:
        points: Points from `Analysis.storage_curve` or `error_against_storage`.
        path: File to save the figure to.

    >>> from retex_hf.workflows.analysis import StoragePoint
    >>> from retex_hf.artifact.plots import plot_storage
    >>> figure = plot_storage([StoragePoint(8, 0.02, 0.6, 0.02, 0.5), StoragePoint(16, 0.04, 0.4, 0.04, 0.3)])
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['one rank everywhere', 'a budget of bytes']
    """
    _require(points, "There are no points of error against storage to plot.")
    points = sorted(points, key=lambda point: point.uniform_share)
    figure, (axes,) = _figure((), height=4.5)
    from matplotlib.ticker import LogLocator, NullFormatter  # after `_figure`, which says what to install

    for index, (kind, label) in enumerate((("uniform", "one rank everywhere"), ("budgeted", "a budget of bytes"))):
        shares = [getattr(point, f"{kind}_share") for point in points]
        values = [getattr(point, f"{kind}_error") for point in points]
        axes.plot(shares, values, label=label, marker=MARKERS[index], markersize=4, **_line_style(index))
    for point in points:
        place = (point.uniform_share, point.uniform_error)
        axes.annotate(f"r={point.rank}", place, (3, 5), textcoords="offset points", fontsize=7, color=COLOURS[0])
    axes.set(
        title="Recovery error against storage",
        xlabel="Stored bytes (share of all experts')",
        ylabel="Relative error (all tasks and parameters)",
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    _add_legend(figure, axes)
    return _finish(figure, path)


def save_figures(
    folder: str | Path,
    *,
    records: Records | Mapping[str, Records] | None = None,
    energy_ratios: Mapping[str, Tensor | Sequence[float]] | None = None,
    errors: Mapping[str, float] | None = None,
    storage: Sequence[StoragePoint] | None = None,
) -> dict[str, Path]:
    """Draw all figures that have data into `folder/figures`; skip those whose data is None or empty.

    Args:
        folder: Usually the folder of a saved model, whose card then shows the figures.
        records: Training records (`losses.png`, and `gammas.png` where one run recorded gammas).
        energy_ratios: See `plot_energy_ratios` (`energy_ratios.png`).
        errors: See `plot_errors` (`errors.png`).
        storage: See `plot_storage` (`storage.png`).

    Returns:
        `{name: path}` of the files written.
    """
    if isinstance(records, Mapping):
        records = {label: run for label, run in records.items() if run}
    runs = list(records.values()) if isinstance(records, Mapping) else [records or []]
    with_gammas = [run for run in runs if any(record.get("gamma") for record in run)]
    drawings: dict[str, tuple[Callable[..., Figure], Any]] = {
        "losses": (plot_losses, records),
        "gammas": (plot_gammas, with_gammas[0] if len(with_gammas) == 1 else None),
        "energy_ratios": (plot_energy_ratios, energy_ratios),
        "errors": (plot_errors, errors),
        "storage": (plot_storage, storage),
    }
    drawings = {name: drawing for name, drawing in drawings.items() if drawing[1]}
    if not drawings:
        return {}
    require_matplotlib()  # before the folder is created
    figures = check_target(Path(folder) / FIGURES_FOLDER)
    paths = {name: figures / f"{name}.png" for name in drawings}
    for name, (draw, data) in drawings.items():
        draw(data, paths[name])
    return paths


def _by_type(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by type, keeping the order of both."""
    types: dict[str, list[str]] = {}
    for name in names:
        types.setdefault(layer_type(name), []).append(name)
    return types


def _block(name: str) -> str:
    """Return the part of a model that a parameter belongs to: up to the first number, else two levels up."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[: max(len(parts) - 2, 1)])


def _tick_blocks(figure: Figure, axes: Axes, names: list[str]) -> None:
    """Label the blocks of a model along the x axis and shade every other one."""
    blocks, start = [], 0
    for block, members in groupby(names, _block):
        end = start + len(list(members))
        blocks.append((block, start, end))
        start = end
    for _, start, end in blocks[1::2]:
        axes.axvspan(start - 0.5, end - 0.5, color="0.5", alpha=0.07, linewidth=0, zorder=0)
    gap = LABEL_WIDTH * len(names) / figure.get_figwidth()
    shown: list[tuple[str, float]] = []
    for block, start, end in blocks[:: -(-len(blocks) // MOST_TICKS)]:
        centre = (start + end - 1) / 2
        if not shown or centre - shown[-1][1] >= gap:
            shown.append((block, centre))
    axes.set_xticks(
        [centre for _, centre in shown], [_plain(block) for block, _ in shown], rotation=90, fontsize=LEGEND_FONT
    )


def _column(records: Records, key: str) -> list[float]:
    for record in records:
        _require(key in record, f"A training record has no {key!r}; it holds {sorted(record)}.")
    return [record[key] for record in records]


def _figure(
    labels: Collection[str], *, width: float = 7.0, height: float = 4.5, rows: int = 1, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with room for a legend of these labels, and its axes, row by row."""
    if len(labels) > LEGEND_INSIDE:
        # Text, and the line sample in front of it.
        width += -(-len(labels) // LEGEND_ROWS) * (CHARACTER_WIDTH * max(map(len, labels)) + 0.6)
    figure = new_figure(figsize=(width, height), dpi=DPI, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=columns > 1, squeeze=False).ravel().tolist()
    for axes in grid:
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def _add_legend(figure: Figure, axes: Axes) -> None:
    # Matplotlib's default handles omit labels that begin with an underscore, as a task's name may.
    named = [(line, str(line.get_label() or "")) for line in axes.lines]
    shown = {line: label for line, label in named if label and not label.startswith("_child")}
    handles, labels = list(shown), list(shown.values())
    if len(handles) > LEGEND_INSIDE:
        columns = -(-len(handles) // LEGEND_ROWS)
        figure.legend(handles, labels, loc="outside right upper", fontsize=LEGEND_FONT, frameon=False, ncols=columns)
    else:
        axes.legend(handles, labels, fontsize=8)


def _line_style(index: int) -> dict[str, Any]:
    """Return the style of a line, varying colours first, then dashes: 28 distinct styles."""
    dashes = LINES[(index // len(COLOURS)) % len(LINES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes, "linewidth": 1.4}


def _marker_if_sparse(values: Sequence[float]) -> str | None:
    """Return a marker if there are few points; a single point would draw no line."""
    return "o" if len(values) <= 20 else None


def _draw_with_mean(
    axes: Axes, steps: Sequence[float], values: Sequence[float], label: str, style: dict[str, Any]
) -> None:
    """Draw a curve; if it is long, draw it pale with its running mean on top."""
    window = len(values) // MEAN_SHARE
    if window < 2:
        axes.plot(steps, values, label=label, marker=_marker_if_sparse(steps), markersize=3, **style)
        return
    axes.plot(steps, values, **style | {"linewidth": 0.8, "alpha": 0.3})
    around = [values[max(0, index - window // 2) : index + window // 2 + 1] for index in range(len(values))]
    axes.plot(steps, [sum(part) / len(part) for part in around], label=label, **style)


def _two_lines(text: str, length: int = 34) -> str:
    """Break a long dotted name at the dot nearest to its middle."""
    dots = [index for index, letter in enumerate(text) if letter == "."]
    if len(text) <= length or not dots:
        return text
    middle = min(dots, key=lambda index: abs(index - len(text) / 2))
    return f"{text[:middle]}\n{text[middle:]}"


def _log_if_wide(axes: Axes) -> None:
    """Use a logarithmic y axis if the data are positive and span more than a factor of ten."""
    drawn = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines]
    values = [float(value) for heights in drawn for value in heights if isfinite(value)]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")


def _plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as a formula."""
    return text.replace("$", r"\$")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise RetexError(message)


def _finish(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        with whole_file(path) as file:
            figure.savefig(file)
    return figure
