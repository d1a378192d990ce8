"""Overview of an artifact as HTML: tasks, storage, evaluation, distances between tasks, and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from markupsafe import Markup
from torch import Tensor

from ..artifact.plots import plot_energy_ratios, plot_errors, plot_losses
from ..artifact.sizes import bytes_of_experts, sizes_of
from ..errors import RetexError
from ..evaluation.figures import plot_report
from ..evaluation.run import MODES
from ..model.retex_model import RetexModel
from ..routing import Signatures
from ..utils.drawing import NEEDS_MATPLOTLIB, can_draw
from ..utils.tables import percent
from ..workflows.energy import recovered_energy
from .cards import png_uri

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_LABELS = 4
# Figures wider than this get a row of their own.
WIDE_INCHES = 8.0
# Exceptions raised when a file is not in our format; artifacts are untrusted.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError)
NOT_MEASURED = "Nothing was measured: this artifact carries no evaluation."
NOT_READABLE = "The evaluation that this artifact carries cannot be read: it is not what Report.summary() writes."
NOT_SIGNED = "This artifact has no signatures of reference inputs, so there are no distances to show."


def overview_html(model: RetexModel) -> Markup:
    """Render tables of tasks, storage, measured figures and distances between tasks."""
    sections = {
        "Tasks": tasks_html(model),
        "Storage": storage_html(model),
        "Measured": evaluation_html(model.evaluation),
        "How far apart the tasks are": distances_html(model),
    }
    return Markup('<div class="rx">{}</div>').format(Markup("").join(map(_section, sections, sections.values())))


def figures_html(model: RetexModel) -> Markup:
    """Render all figures that can be drawn from the artifact. Spectra take a few seconds for large models."""
    drawings: list[tuple[Callable[[], Figure], str]] = []
    errors = {name: error for name, error in model.recovery_errors.items() if error is not None}
    if errors:
        text = "Relative error of every recovered parameter: 0 is exact, 1 is the merged value."
        drawings.append((partial(plot_errors, errors), text))
    ratios = recovered_energy(model.recovery, model.tasks)
    if ratios:
        text = "Energy of the stored differences in their top q singular directions. What recovery misses is left out."
        drawings.append((partial(plot_energy_ratios, ratios), text))
    if model.evaluation is not None:
        drawings.append((partial(plot_report, model.evaluation), "Measured accuracy, with intervals."))
    if model.training_history:
        text = "Loss and relative error over the steps of training."
        drawings.append((partial(plot_losses, model.training_history), text))
    if drawings and not can_draw():
        shown = _paragraph(NEEDS_MATPLOTLIB)
    else:
        nothing = _paragraph("There is nothing to draw.")
        shown = Markup("").join(_figure_html(*drawing) for drawing in drawings) or nothing
    return Markup('<div class="rx"><h2>Figures</h2><div class="rx-figures">{}</div></div>').format(shown)


def tasks_html(model: RetexModel) -> Markup:
    """Render one row per task: its classes, and the source of its expert."""
    config = model.retex_config
    rows = [[task, _classes(config.labels.get(task)), _provenance(config.experts.get(task))] for task in model.tasks]
    facts = (
        f"Model: {type(model.model).__name__}. Base: {_provenance(config.base_model)}. Merge: {_method(config.merge)}."
    )
    return _paragraph(facts) + _table(["Task", "Classes", "Expert"], rows, "rx-tasks")


def storage_html(model: RetexModel) -> Markup:
    """Render the storage of the artifact, beside that of all experts stored separately."""
    sizes = sizes_of(model.parts())
    total, experts = sum(sizes.values()), bytes_of_experts(sizes, len(model.tasks))
    rows = [[name.capitalize(), _megabytes(size), percent(size / experts)] for name, size in sizes.items()]
    rows.append(["Together", _megabytes(total), percent(total / experts)])
    rows.append([f"The {len(model.tasks)} experts on their own", _megabytes(experts), percent(1.0)])
    return _table(["Part", "MB", "% of the experts"], rows, "rx-storage", numbers=True)


def evaluation_html(summary: Mapping[str, Any] | None) -> Markup:
    """Render the figures of a stored evaluation: one table per mode, a row per method."""
    if summary is None:
        return _paragraph(NOT_MEASURED)
    try:
        return _evaluation_tables(summary)
    except MALFORMED:
        return _paragraph(NOT_READABLE)


def distances_html(model: RetexModel) -> Markup:
    """Render the residual of each task's mean under each task's signature, shaded by size."""
    if not isinstance(model.signatures, Signatures):
        return _paragraph(NOT_SIGNED)
    residuals = mean_residuals(model.signatures)
    largest = float(residuals.max()) or 1.0
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(task) for task in model.tasks)
    rows = []
    for task, row in zip(model.tasks, residuals.tolist(), strict=True):
        cells = [
            Markup('<td class="rx-number" style="--near:{}">{}</td>').format(
                f"{1 - value / largest:.3f}", f"{value:.2f}"
            )
            for value in row
        ]
        rows.append(Markup('<tr><th scope="row">{}</th>{}</tr>').format(task, Markup("").join(cells)))
    text = (
        f"Residual of the mean of each task's references (rows) under each task's signature (columns), "
        f"at {model.signatures.feature_layer}. The stronger the colour, the nearer."
    )
    table = Markup(
        '<div class="rx-scroll"><table class="rx-table rx-distances"><thead><tr><td></td>{}</tr></thead>'
        "<tbody>{}</tbody></table></div>"
    ).format(head, Markup("").join(rows))
    return _paragraph(text) + table


def mean_residuals(signatures: Signatures) -> Tensor:
    """Return (T, T) distances from the mean of task s to the subspace of task t."""
    with torch.no_grad():
        return signatures.residuals(signatures.mean).cpu()


def _evaluation_tables(summary: Mapping[str, Any]) -> Markup:
    tables = []
    for mode, title in MODES.items():
        found = {name: of["modes"][mode] for name, of in summary["methods"].items() if mode in of["modes"]}
        if not found:
            continue
        tables.append(Markup("<h3>{}</h3>").format(f"Accuracy, {title} (%)"))
        tables.append(_figures_table(found, "accuracy", list(summary["tasks"])))
        identifying = {name: of for name, of in found.items() if "identification" in of}
        if identifying:
            tables.append(Markup("<h3>{}</h3>").format("Inputs identified correctly (%)"))
            tables.append(_figures_table(identifying, "identification", list(summary["tasks"])))
    return Markup("").join(tables)


def _figures_table(found: Mapping[str, Mapping[str, Any]], kind: str, tasks: Sequence[str]) -> Markup:
    rows = [
        [name, *(percent(of[kind]["tasks"][task]["value"]) for task in tasks), percent(of[kind]["mean"]["value"])]
        for name, of in found.items()
    ]
    return _table(["Method", *tasks, "Mean"], rows, f"rx-{kind}", numbers=True)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size >= 1e6 else f"{size / 1e6:.2f}"


def _classes(described: Mapping[str, Any] | None) -> str:
    """Return the number of classes of a head, and the first of them, as text."""
    if not described:
        return "no head of its own"
    labels = [str(label) for label in described["id2label"].values()]
    shown = ", ".join(labels[:SHOWN_LABELS]) + (", …" if len(labels) > SHOWN_LABELS else "")
    return f"{len(labels)}: {shown}"


def _provenance(source: Mapping[str, Any] | None) -> str:
    """Return `id@revision`, as far as it is known."""
    if not source or not source.get("id"):
        return "given in memory"
    revision = source.get("revision")
    return str(source["id"]) + (f"@{str(revision)[:8]}" if revision else "")


def _method(merge: str | Mapping[str, Any]) -> str:
    return merge if isinstance(merge, str) else str(merge["method"])


def _figure_html(draw: Callable[[], Figure], text: str) -> Markup:
    try:
        figure = draw()
    except (*MALFORMED, RetexError):
        return _paragraph(f"{text} The stored data cannot be drawn.")
    wide = Markup(' class="rx-wide"') if figure.get_figwidth() > WIDE_INCHES else ""
    html = Markup('<figure{}><img src="{}" alt="{}"><figcaption>{}</figcaption></figure>')
    return html.format(wide, png_uri(figure), text, text)


def _section(title: str, content: Markup) -> Markup:
    return Markup("<section><h2>{}</h2>{}</section>").format(title, content)


def _paragraph(text: str) -> Markup:
    return Markup('<p class="rx-note">{}</p>').format(text)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], name: str, numbers: bool = False) -> Markup:
    """Render a table whose first column names its rows; with `numbers`, the others are figures."""
    name = f"{name} rx-figures-table" if numbers else name
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(title) for title in header)
    cell = Markup('<td class="rx-number">{}</td>' if numbers else "<td>{}</td>")
    body = [
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(first, Markup("").join(map(cell.format, others)))
        for first, *others in rows
    ]
    return Markup(
        '<div class="rx-scroll"><table class="rx-table {}"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(name, head, Markup("").join(body))
