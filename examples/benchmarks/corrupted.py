"""Identification and accuracy on corrupted images or texts.

    python examples/benchmarks/corrupted.py --recipe examples/recipes/experiments/vision8.yaml --severities 1 3 5

Only test inputs are corrupted; merging, recovery and reference inputs use clean ones. For ReTeX the table has the
identification of the task, the accuracy with oracle routing and the accuracy with the task unknown; for the merged
models the accuracy under the given head, as in the paper, and with the head chosen. Methods that the recipe names
replace the merged models. Writes `corrupted.{json,md,png}`. 50 test rows per task are used unless `--rows` says
otherwise. `--only` computes only cells (method, kind, severity) with that text in their name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import corruptions
import numpy as np
import text_corruptions
from experiment import RETEX, MethodSpec, Study, lines_figure, load, markdown_table, pack, parse, run, unpack, write
from matplotlib.figure import Figure
from measuring import accuracy, identification, run_each
from merges import MERGES, learn_merges
from PIL import Image

from retex_hf.errors import InputError
from retex_hf.evaluation import Method, TaskData
from retex_hf.evaluation.run import Evaluation

ROWS = 50
CLEAN = "clean"
SEVERITIES = (3, 5)
MERGED = ("average", "AdaMerging")


def corrupted_task(data: TaskData, kind: str, severity: int, seed: int) -> TaskData:
    """Return a task with corrupted inputs, each with its own random draw; arrays stay arrays and pictures pictures."""
    if has_texts(data) and kind in text_corruptions.KINDS:
        return replace(data, inputs=text_corruptions.corrupt_texts(data.inputs, kind, severity, seed))
    if kind not in corruptions.KINDS:
        raise InputError(f"Task {data.name!r}: corruption {kind!r} needs texts, and its inputs are images.")
    inputs = []
    for row, image in enumerate(data.inputs):
        picture = isinstance(image, Image.Image)
        pixels = np.asarray(image.convert("RGB")) if picture else image
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
            raise InputError(
                f"Task {data.name!r}: corruption {kind!r} needs images, and input {row} is a {type(image).__name__}."
            )
        changed = corruptions.corrupt(pixels[None], kind, severity, seed + row)[0]
        inputs.append(Image.fromarray(changed) if picture else changed)
    return replace(data, inputs=inputs)


def has_texts(data: TaskData) -> bool:
    return isinstance(data.inputs[0], str)


class Fitted:
    """Methods, fitted on first use; only the latest is kept, because cells are ordered by method."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._latest: tuple[MethodSpec, Method] | None = None

    def test(self, spec: MethodSpec, kind: str, severity: int) -> Evaluation:
        """Test one method on one kind of test set."""
        if self._latest is None or self._latest[0] != spec:
            method, self._latest = spec.make(), None
            method.fit(self.study.material)
            self._latest = (spec, method)
        tests, seed = self.study.tests, self.study.material.seed
        if kind != CLEAN:
            tests = [corrupted_task(test, kind, severity, seed) for test in tests]
        return replace(self.study, tests=tests).test(self._latest[1], ("known", "unknown"))


def specs(study: Study, merges: Mapping[str, Any]) -> list[MethodSpec]:
    """Return ReTeX and the methods to compare it with: the recipe's methods, or merged models."""
    default = [{"merged": {"merge": merge, "label": name}} for name, merge in merges.items()]
    others = [spec for spec in study.methods(default) if spec.name != RETEX]
    return [MethodSpec.parse({RETEX: {"label": RETEX}}, study.recipe.config), *others]


def as_row(found: Mapping[str, Evaluation]) -> dict[str, float | None]:
    """Return all figures of one test set."""
    row: dict[str, float | None] = {}
    for label, evaluation in found.items():
        if label == RETEX:
            row["task identified"] = identification(evaluation)
        for mode in ("known", "unknown"):
            name = {"known": "oracle" if label == RETEX else "head given", "unknown": "task unknown"}[mode]
            row[f"{label}, {name}"] = accuracy(evaluation, mode) if mode in evaluation.scores else None
    return row


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        "vision8.yaml",
        kinds={"nargs": "+", "choices": [*corruptions.KINDS, *text_corruptions.KINDS], "help": "default: all that fit"},
        severities={"nargs": "+", "type": int, "choices": range(1, 6), "default": list(SEVERITIES), "help": "1 to 5"},
        merges={
            "nargs": "*",
            "choices": list(MERGES),
            "default": list(MERGED),
            "help": "merged models beside it",
        },
    )
    work = arguments.work_dir
    study = load(recipe.with_rows(arguments.rows or ROWS), work, mirror=arguments.mirror)
    kinds = arguments.kinds or (text_corruptions.KINDS if has_texts(study.tests[0]) else corruptions.KINDS)
    conditions = [(CLEAN, 0), *((kind, severity) for severity in arguments.severities for kind in kinds)]
    methods, fitted = specs(study, learn_merges(study, work, arguments.merges)), Fitted(study)
    cells: dict[str, tuple[Any, Callable[[], Any]]] = {}
    for spec in methods:
        for kind, severity in conditions:
            key = f"{spec.label}, {kind} {severity}"
            built = [spec.name, spec.options, kind, severity]
            cells[key] = (built, lambda s=spec, k=kind, v=severity: pack(fitted.test(s, k, v)))
    if arguments.only is not None:
        cells = {key: cell for key, cell in cells.items() if arguments.only in key}
    done = run_each(work, "corrupted", cells, study.identity("corrupted"))
    if arguments.only is not None:
        print(f"Finished {len(done)} cells; run without --only for the table.")
        return
    records = []
    for kind, severity in conditions:
        found = {spec.label: unpack(done[f"{spec.label}, {kind} {severity}"]) for spec in methods}
        records.append({"kind": kind, "severity": severity, **as_row(found)})
    write(work, "corrupted", {"rows": records}, as_markdown(records), as_figure(records))


def as_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Format a table with one row per test set."""
    names = [name for name in records[0] if name not in ("kind", "severity")]
    rows = [[r["kind"], r["severity"] or None, *(r[name] for name in names)] for r in records]
    return "## Corrupted inputs\n\n" + markdown_table(["test set", "severity", *names], rows)


def as_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot a panel per column of the table, a line per corruption over severity; clean inputs are severity 0."""
    names = [name for name in records[0] if name not in ("kind", "severity") and records[0][name] is not None]
    clean, kinds = records[0], list(dict.fromkeys(r["kind"] for r in records if r["kind"] != CLEAN))
    panels = {}
    for name in names:
        panels[name] = {}
        for kind in kinds:
            points = [(0, clean[name]), *((r["severity"], r[name]) for r in records if r["kind"] == kind)]
            panels[name][kind] = tuple(zip(*sorted(points), strict=True))
    return lines_figure(panels, "severity", "accuracy", xticks=sorted({r["severity"] for r in records}))


if __name__ == "__main__":
    run(main)
