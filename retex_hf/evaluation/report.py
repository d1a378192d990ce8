"""Evaluations side by side (means, intervals, storage) as text, JSON, Markdown, a figure and model card entries.

The three modes answer different questions, so they have separate columns, tables and panels.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..errors import EvaluationError
from ..utils.atomic_file import whole_file
from ..utils.atomic_folder import check_target
from ..utils.drawing import NEEDS_MATPLOTLIB, can_draw
from ..utils.tables import Table, bold_best, percent
from .bootstrap import CONFIDENCE, RESAMPLES, Interval
from .comparison import Comparison
from .figures import plot_report
from .run import MODES, Evaluation

logger = logging.getLogger(__name__)


class Report:
    """Figures of methods that were evaluated on the same rows.

    Evaluations of one method under several seeds (same name, different `seed`) become one entry: its rows are averaged
    over seeds, and the standard deviation over seeds stands beside the mean.

    Args:
        evaluations: Results of `evaluate`, in the order of the tables.
        individual: The method to normalise accuracies by, with the task known; None leaves normalised figures out.
        seed: Seed of the bootstrap.
        reference: The method to compare all others with, paired by rows; None compares nothing.
        body_bytes: Size of one model's body; default: the individual experts' storage, divided by their number.
        resamples: Number of bootstrap resamples.
        confidence: Confidence level of the intervals.
    """

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        individual: str | None = "individual",
        seed: int = 0,
        *,
        reference: str | None = None,
        body_bytes: int | None = None,
        resamples: int = RESAMPLES,
        confidence: float = CONFIDENCE,
    ) -> None:
        self.comparison = Comparison(
            evaluations,
            individual,
            seed,
            reference=reference,
            body_bytes=body_bytes,
            resamples=resamples,
            confidence=confidence,
        )
        self.individual, self.reference = individual, reference
        self.methods, self.tasks = list(self.comparison.methods), self.comparison.tasks
        self._summary = self.comparison.summarise()

    def difference(self, first: str, second: str, mode: str) -> Interval:
        """Return the first method's mean accuracy minus the second's in one mode, paired by rows."""
        return self.comparison.difference(first, second, mode)

    def summary(self) -> dict[str, Any]:
        """Return all figures as plain values; they depend only on the evaluations and the seed."""
        return json.loads(json.dumps(self._summary))

    def __str__(self) -> str:
        """Return one line per method, with separate columns for each mode."""
        groups, parts = [("", 1)], [Table(["method"], [[name] for name in self.methods])]
        for mode in self.comparison.modes():
            part = self._mode_table(mode, self.methods, with_method=False)
            groups.append((MODES[mode], len(part.header)))
            parts.append(part)
        storage = [self._storage_cells(name) for name in self.methods]
        groups.append(("storage", len(storage[0])))
        parts.append(Table(self._storage_header(), storage))
        table = Table(
            [title for part in parts for title in part.header],
            [[cell for part in parts for cell in part.rows[row]] for row in range(len(self.methods))],
            _moved([(part.bold, len(part.header)) for part in parts]),
            groups,
        )
        return f"{table.text()}\n\n{self._legend('*')}"

    def markdown(self) -> str:
        """Return one section per mode: a table of means and one of all tasks."""
        sections = ["# Results", self._legend("bold")]
        for mode in self.comparison.modes():
            names = [name for name in self.methods if mode in self._summary["methods"][name]["modes"]]
            whole = self._mode_table(mode, names, with_method=True)
            sections += [f"## {MODES[mode].capitalize()}", whole.markdown(), "Accuracy by task:"]
            sections.append(self._task_table(mode, names, "accuracy").markdown())
            identifying = [name for name in names if "identification" in self._mode(name, mode)]
            if identifying:
                sections += [
                    "Rows taken for their own task:",
                    self._task_table(mode, identifying, "identification").markdown(),
                ]
        return "\n\n".join(sections) + "\n"

    def save(self, folder: str | Path) -> dict[str, Path]:
        """Write `results.json`, `results.md` and, if matplotlib is installed, `results.png`.

        Returns:
            `{name: path}` of the files written.
        """
        folder = check_target(folder)
        paths = {kind: folder / f"results.{kind}" for kind in ("json", "md", "png")}
        text = json.dumps(self._summary, indent=2, ensure_ascii=False)
        with whole_file(paths["json"]) as file:
            file.write_text(text + "\n", encoding="utf-8")
        with whole_file(paths["md"]) as file:
            file.write_text(self.markdown(), encoding="utf-8")
        if can_draw():
            plot_report(self._summary, paths["png"])
            return paths
        # A picture of an earlier report would not show these numbers.
        paths.pop("png").unlink(missing_ok=True)
        logger.warning("The report in %s has no picture. %s", folder, NEEDS_MATPLOTLIB)
        return paths

    def eval_results(
        self,
        dataset_names: Mapping[str, str],
        *,
        method: str = "ReTeX",
        task_type: str = "other",
        split: str = "test",
        metric: str = "accuracy",
    ) -> list[EvalResult]:
        """Return the figures of one method as entries of a model card (`ModelCardData(eval_results=...)`).

        Args:
            dataset_names: Hub name of the data set of each task.
            method: Name of the method.
            task_type: Hub name of the kind of task, such as "text-classification".
            split: Split of the data sets that was evaluated.
            metric: Metric: "accuracy", or "exact_match" for generated texts.
        """
        if method not in self.methods:
            raise EvaluationError(f"There is no method {method!r} in the report; there are {self.methods}.")
        missing = [task for task in self.tasks if task not in dataset_names]
        if missing:
            raise EvaluationError(f"dataset_names does not say which data set task {missing[0]!r} is.")
        results = []
        for task in self.tasks:
            for mode, figures in self._summary["methods"][method]["modes"].items():
                found = {f"{metric} ({MODES[mode]})": (metric, figures["accuracy"]["tasks"][task])}
                if "identification" in figures:
                    share = figures["identification"]["tasks"][task]
                    found["task identification"] = ("task_identification", share)
                results += [
                    EvalResult(
                        task_type=task_type,
                        task_name=task,
                        dataset_type=dataset_names[task],
                        dataset_name=task,
                        dataset_split=split,
                        metric_type=kind,
                        metric_name=title.capitalize().replace("_", " "),
                        metric_value=figure["value"],
                    )
                    for title, (kind, figure) in found.items()
                ]
        return results

    def _mode(self, name: str, mode: str) -> dict[str, Any]:
        return self._summary["methods"][name]["modes"].get(mode, {})

    def _mode_table(self, mode: str, names: Sequence[str], with_method: bool) -> Table:
        """Tabulate the means of one mode; add methods and storage for a table of its own, not for a wider one."""
        found = [self._mode(name, mode) for name in names]
        columns = {"accuracy": lambda of: of["accuracy"]["mean"]}
        if self.individual is not None:
            columns["normalised"] = lambda of: of["normalised"]
        if any("identification" in of for of in found):
            columns["identified"] = lambda of: of.get("identification", {}).get("mean")
        if any("difference" in of for of in found):
            columns[f"minus {self.reference}"] = lambda of: of.get("difference")
        with_interval = {"normalised", f"minus {self.reference}"}
        figures = [[get(of) if of else None for get in columns.values()] for of in found]
        cells = [
            [_cell(figure, title in with_interval) for figure, title in zip(row, columns, strict=True)]
            for row in figures
        ]
        values = [[None if figure is None else figure["value"] for figure in row] for row in figures]
        compete = [place for place, title in enumerate(columns) if not title.startswith("minus ")]
        bold = bold_best(values, self._left_out(names), compete)
        table = Table(list(columns), cells, bold)
        if not with_method:
            return table
        return Table(
            ["method", *table.header, *(f"storage, {title}" for title in self._storage_header())],
            [[name, *row, *self._storage_cells(name)] for name, row in zip(names, cells, strict=True)],
            _moved([(frozenset(), 1), (bold, len(columns))]),
        )

    def _task_table(self, mode: str, names: Sequence[str], kind: str) -> Table:
        found = [self._mode(name, mode)[kind] for name in names]
        values = [[of["tasks"][task]["value"] for task in self.tasks] + [of["mean"]["value"]] for of in found]
        cells = [[name, *map(percent, row)] for name, row in zip(names, values, strict=True)]
        bold = _moved([(frozenset(), 1), (bold_best(values, self._left_out(names)), len(self.tasks) + 1)])
        return Table(["method", *self.tasks, "mean"], cells, bold)

    def _left_out(self, names: Sequence[str]) -> list[int]:
        return [place for place, name in enumerate(names) if name == self.individual]

    def _storage_header(self) -> list[str]:
        return ["MB"] if self.comparison.body_bytes is None else ["total", "added"]

    def _storage_cells(self, name: str) -> list[str]:
        of = self._summary["methods"][name]
        if self.comparison.body_bytes is None:
            return [f"{of['storage_bytes'] / 1e6:.1f}"]
        return [percent(of["storage"]["total"]), percent(of["storage"]["added"])]

    def _legend(self, mark: str) -> str:
        rows, of = sum(self.tasks.values()), self.comparison
        text = f"Per cent, mean over {len(self.tasks)} tasks ({rows} rows, one shuffled stream). "
        if self.individual is not None or self.reference is not None:
            text += (
                f"In brackets: {of.confidence:.0%} interval of {of.resamples} resamples of the rows within each task. "
            )
        if any(len(runs) > 1 for runs in of.methods.values()):
            text += "±: standard deviation over seeds. "
        if self.individual is not None:
            text += f"normalised: relative to {self.individual!r} told the task, averaged over tasks. "
        if self.reference is not None:
            text += f"minus {self.reference}: difference of mean accuracies on the same rows, in points. "
        text += "With the task unknown, a class counts only if the row was taken for its own task. "
        if self.comparison.body_bytes is not None:
            text += "total: everything stored, relative to all experts; added: without one model's body. "
        best = "the best of its column" + ("" if self.individual is None else f", {self.individual!r} aside")
        return f"{text}{mark}: {best}."


def _cell(figure: Mapping[str, float] | None, with_interval: bool) -> str:
    if figure is None:
        return ""
    text = percent(figure["value"])
    if "std" in figure:
        text += f" ± {percent(figure['std'])}"
    return f"{text} [{percent(figure['low'])}, {percent(figure['high'])}]" if with_interval else text


def _moved(parts: Sequence[tuple[frozenset[tuple[int, int]], int]]) -> frozenset[tuple[int, int]]:
    """Shift cell positions in tables that stand side by side, of given widths, to positions in the whole table."""
    whole, start = set(), 0
    for places, width in parts:
        whole |= {(row, start + column) for row, column in places}
        start += width
    return frozenset(whole)
