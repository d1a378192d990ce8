"""Experts per stored byte: accuracy, and agreement with the experts' own answers, against the bytes that are added.

    python examples/benchmarks/bytes.py --recipe examples/recipes/experiments/text8.yaml --plot
    python examples/benchmarks/bytes.py --rows 50 --shares 0.5 2 --methods ReTeX "SVD on merged" --tasks 4

ReTeX with `storage=` and all systems that keep experts in few bytes (`retex_hf.baselines`), task known. Bytes are those
beside one model and the heads, as a share (in per cent) of the bytes of all experts; rules in
`retex_hf/baselines/compressed.py`. Systems with a knob take the largest setting that fits each of `--shares`; those
without have one size, and ReTeX is built at that size too. Systems that leave the number of bits open run in bfloat16,
which is close to how they were published, and rounded as ReTeX rounds: at the bits, of factors and of vectors, that
leave the least error as ReTeX counts it (those without a knob at 3 bits). Nothing is chosen by rows. "ReTeX on the
base" is ReTeX with the base in place of the merged model: bits by allocation to singular vectors of task vectors, as
in ADAMIX.

Accuracy is relative to each expert's; agreement is the share of rows with the expert's own answer (the same text, where
answers are texts). Differences are paired by rows, with 95 % bootstrap intervals. Every size is a cell with all its
rows, so interrupted runs resume. Writes `--out` (default `<work>/bytes.json`) and beside it `.md`, and with `--plot`
`.png`. `--known` takes rivals from such a file of an earlier run, if its experts answered the same rows alike.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import RETEX, Study, lines_figure, load, markdown_table, parse, run, run_cells
from matplotlib.figure import Figure
from measuring import Batch, batches, recovery_bytes
from tqdm.auto import tqdm

from retex_hf import RetexConfig, RetexModel
from retex_hf.artifact.plots import DPI
from retex_hf.baselines import expert_weights, make
from retex_hf.baselines.compressed import BEST, Compressed
from retex_hf.baselines.merges import source_body
from retex_hf.build.plan import prepare
from retex_hf.config import matches
from retex_hf.data.readout import Answer
from retex_hf.errors import ConfigError
from retex_hf.evaluation import TaskData
from retex_hf.evaluation.bootstrap import Interval, interval, resampled_accuracies
from retex_hf.evaluation.run import is_right
from retex_hf.merging.expert_weights import Weights

SHARES = (0.25, 0.5, 1, 2, 4, 8, 16)
FLOAT, ROUNDED = "float", "rounded"
FORMS = (ROUNDED, FLOAT)
# The bits of rounded systems whose size follows from them: by error alone, the most would be the best.
FIXED_BITS = 3
MERGED, ONE_RANK, AROUND_BASE = "merged alone", "one rank, int8", "ReTeX on the base"
LARGEST_RANK = 1024
BASE_MERGE = {"method": "task_arithmetic", "scale": 0.0}
ON_MERGED, ON_BASE = {"reference": "average"}, {"reference": "pretrained"}
FIGURES = ("normalised", "worst", "agreement")


@dataclass(frozen=True)
class Rival:
    """A system to compare with: its baseline, and whether its size and its bits are open."""

    baseline: str
    options: Mapping[str, Any] = field(default_factory=dict)
    has_knob: bool = True
    has_bits: bool = True


# Those of one reference together: its singular vectors are computed once.
RIVALS = {
    "SVD on merged": Rival("svd", ON_MERGED),
    "Delta-CoMe on merged": Rival("delta_come", ON_MERGED, has_bits=False),
    "Delta-CoMe on merged, scaled": Rival("delta_come", {**ON_MERGED, "scaled": True}, has_bits=False),
    "sparse ternary on merged": Rival("sparse_ternary", ON_MERGED, has_bits=False),
    "BitDelta on merged": Rival("bitdelta", ON_MERGED, has_knob=False, has_bits=False),
    "SVD on base": Rival("svd", ON_BASE),
    "LoRA, linear layers only": Rival("lora_extraction"),
    "TSV-C": Rival("tsv_c"),
    "TSV-C, 1/T": Rival("tsv_c", has_knob=False),
    "Delta-CoMe": Rival("delta_come", ON_BASE, has_bits=False),
    "Delta-CoMe, scaled": Rival("delta_come", {**ON_BASE, "scaled": True}, has_bits=False),
    "sparse ternary": Rival("sparse_ternary", ON_BASE, has_bits=False),
    "BitDelta": Rival("bitdelta", ON_BASE, has_knob=False, has_bits=False),
    "EMR": Rival("stored_emr", has_knob=False),
    "Twin-Merging": Rival("twin_compression"),
}


@dataclass(frozen=True)
class Point:
    """One system at one size. `budget` and `share` (as it is stored) are shares of the experts' bytes; `width` is the
    number of bits, where a system leaves it open."""

    method: str
    width: str
    budget: float
    share: float
    error: float
    state: dict[str, Any]
    correct: dict[str, np.ndarray]
    agrees: dict[str, np.ndarray]

    @property
    def line(self) -> str:
        """Return the system and its form: points of one line differ in size."""
        return f"{self.method}, bfloat16" if self.width == FLOAT else self.method

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with a bit per row."""
        return {**vars(self), "correct": as_hex(self.correct), "agrees": as_hex(self.agrees)}


def as_digits(rows: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return one digit per row.

    >>> as_digits({"a": np.array([True, False])})
    {'a': '10'}
    """
    return {task: "".join("1" if row else "0" for row in found) for task, found in rows.items()}


def as_hex(rows: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return one bit per row in hexadecimal digits, after a leading 1.

    >>> as_hex({"a": np.array([True, False, True, True])})
    {'a': '1b'}
    """
    return {task: f"{int('1' + digits, 2):x}" for task, digits in as_digits(rows).items()}


def from_digits(rows: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Invert `as_digits`."""
    return {task: np.array([digit == "1" for digit in digits]) for task, digits in rows.items()}


Known = dict[tuple[str, str, str], dict[str, Any]]
"""Values of cells by method, width and state."""


def from_hex(rows: Mapping[str, str]) -> dict[str, str]:
    """Return the digits of `as_hex`.

    >>> from_hex({"a": "1b"})
    {'a': '1011'}
    """
    return {task: f"{int(digits, 16):b}"[1:] for task, digits in rows.items()}


class Bench:
    """The experts, the rows of one split, and the cells of what was measured on them."""

    known: Known

    def __init__(self, study: Study, data: Sequence[TaskData], split: str, work: Path, only: str | None) -> None:
        self.study, self.data, self.only = study, {task.name: task for task in data}, only
        self.weights = expert_weights(study.material)
        self.experts_bytes = len(study.tasks) * self.weights.body_bytes()
        self.exclude: list[str] = list(study.recipe.config.get("exclude", []))
        self.average = source_body(self.weights, "average")
        self.cells = work / "cells"
        self.identity = study.identity("bytes", split=split, counts={task.name: len(task) for task in data})
        self._batches: dict[str, list[tuple[list[int], Batch]]] = {}
        self.own: dict[str, list[Answer]] = self._cell("experts", {}, self._own_answers)
        self.known = {}

    def _cell(self, key: str, built: Any, compute: Any) -> Any:
        """Return a stored value, computing it first where needed; None where `--only` leaves it out."""
        only = None if key == "experts" else self.only
        done = run_cells(self.cells, {key: compute}, self.identity, built={key: built}, only=only, progress=False)
        return done.get(key)

    def learn(self, file: Path) -> None:
        """Take the rivals of an earlier run's results."""
        results = json.loads(file.read_text(encoding="utf-8"))
        if results["experts_correct"] != as_hex(self.experts_correct):
            raise ConfigError(f"{file}: its experts answered other rows, or answered them differently.")
        if results["recipe"]["config"].get("exclude", []) != self.exclude:
            raise ConfigError(f"{file}: its systems recover other tensors; the recipe's `exclude` must be the same.")
        for point in results["points"]:
            if point["method"] in RIVALS:
                rows = {part: from_hex(point[part]) for part in ("correct", "agrees")}
                self.known[_known_key(point["method"], point["width"], point["state"])] = {
                    **rows, "error": point["error"]
                }  # fmt: skip

    def _own_answers(self) -> dict[str, list[Answer]]:
        return {task: self.answers(self.weights.expert_body(task), task) for task in self.data}

    @torch.inference_mode()
    def answers(self, body: Weights, task: str) -> list[Answer]:
        """Return the answers of a body under a task's head to the task's rows."""
        material, data = self.study.material, self.data[task]
        if task not in self._batches:  # the same for all systems
            self._batches[task] = list(batches(data.inputs, material.collate, self.study.recipe.batch_size))
        module, found = self.weights.module(body, task), {}
        for rows, inputs in self._batches[task]:
            output = material.readout.call(module, inputs)
            found.update(zip(rows, material.readout.answers(output, [task] * len(rows)), strict=True))
        return [found[row] for row in range(len(data))]

    def correct(self, task: str, answers: Sequence[Answer]) -> np.ndarray:
        """Return which answers are right."""
        return np.array([is_right(one, right) for one, right in zip(answers, self.data[task].answers, strict=True)])

    @property
    def experts_correct(self) -> dict[str, np.ndarray]:
        """Return which rows each expert answers correctly."""
        return {task: self.correct(task, answers) for task, answers in self.own.items()}

    def error(self, body: Weights, task: str) -> float:
        """Return how far a body is from the expert, relative to the average of all experts; without what is excluded
        from recovery."""
        expert = self.weights.expert_body(task)
        names = [name for name in body if not matches(name, self.exclude)]
        missed, whole = (
            sum((other[name] - expert[name]).double().square().sum().item() for name in names)
            for other in (body, self.average)
        )
        return (missed / whole) ** 0.5 if whole else 0.0

    def measure(self, bodies: Iterator[tuple[str, Weights]]) -> dict[str, Any]:
        """Return which rows are answered correctly, and as the expert answers them; and the mean error of weights."""
        correct, agrees, errors = {}, {}, []
        for task, body in bodies:
            answers = self.answers(body, task)
            correct[task] = self.correct(task, answers)
            agrees[task] = np.array([one == own for one, own in zip(answers, self.own[task], strict=True)])
            errors.append(self.error(body, task))
        return {"correct": as_digits(correct), "agrees": as_digits(agrees), "error": float(np.mean(errors))}

    def point(self, method: str, width: str, budget: float, size: int, state: Any, value: Any) -> Point:
        """Return a finished cell as a point."""
        rows = (from_digits(value["correct"]), from_digits(value["agrees"]))
        return Point(method, width, budget, size / self.experts_bytes, value["error"], state, *rows)

    def merged(self) -> Point | None:
        """Measure the average of the experts alone."""
        value = self._cell(MERGED, {}, lambda: self.measure((task, self.average) for task in self.data))
        return None if value is None else self.point(MERGED, "", 0.0, 0, {}, value)

    def retex(self, budget: float) -> Point | None:
        """Measure ReTeX at a share of the experts' bytes."""
        return self._retex(RETEX, {"storage": budget}, budget)

    def around_base(self, budget: float) -> Point | None:
        """Measure ReTeX with the base in place of the merged model."""
        return self._retex(AROUND_BASE, {"storage": budget, "merge": BASE_MERGE}, budget)

    def one_rank(self, budget: float) -> Point | None:
        """Measure the paper's form, one rank and one shared factor, in int8: at the largest rank that fits a share."""

        def size(**options: Any) -> int:
            material, config = self.study.material, RetexConfig(**options, exclude=self.exclude)
            return prepare(material.base, material.experts, config, on_meta=True).estimate().disk

        int8 = {"recovery_dtype": "int8"}
        rank = bisect_right(range(1, LARGEST_RANK), size(storage=budget), key=lambda rank: size(rank=rank, **int8))
        return self._retex(ONE_RANK, {"rank": rank, **int8}, budget) if rank else None

    def _retex(self, label: str, options: dict[str, Any], budget: float) -> Point | None:
        def compute() -> dict[str, Any]:
            config = RetexConfig(**options, exclude=self.exclude)
            material = self.study.material
            model = RetexModel.from_experts(material.base, material.experts, config, progress=False)
            found = self.measure((task, self._recovered(model, task)) for task in self.data)
            return {**found, "bytes": recovery_bytes(model)}

        key = f"{label}, {100 * budget:.4g} %"
        value = self._cell(key, {**options, "exclude": self.exclude}, compute)
        return None if value is None else self.point(label, "", budget, value["bytes"], options, value)

    def _recovered(self, model: RetexModel, task: str) -> Weights:
        state = model.recover(task)
        return {name: state[name].float() for name in self.weights.base}

    def fit(self, rival: Rival, form: str, share: float | None) -> Compressed:
        """Return a rival, fitted."""
        options = {**rival.options, "exclude": self.exclude}
        if share is not None:
            options["storage"] = share
        if rival.has_bits:
            options["bits"] = None if form == FLOAT else FIXED_BITS if share is None else BEST
        method = make(rival.baseline, **options)
        assert isinstance(method, Compressed)
        method.fit(self.study.material)
        return method

    def rival(self, label: str, form: str, share: float | None) -> Point | None:
        """Measure a rival at a share of the experts' bytes, or at its only size."""
        method = self.fit(RIVALS[label], form, share)
        state, size = method.state(), method.added_bytes()
        width = "" if not RIVALS[label].has_bits else FLOAT if form == FLOAT else str(method.bits)
        # Stored by what it keeps: several shares may lead to the same.
        built = {"options": dict(RIVALS[label].options), "width": width, "exclude": self.exclude, "state": state}
        key = f"{label}, {width or 'its'} bits, {100 * size / self.experts_bytes:.4g} %"
        known = self.known.get(_known_key(label, width, state))
        value = known or self._cell(key, built, lambda: self.measure((task, method.body(task)) for task in self.data))
        if value is None:
            return None
        return self.point(label, width, size / self.experts_bytes if share is None else share, size, state, value)


def _known_key(method: str, width: str, state: Any) -> tuple[str, str, str]:
    return method, width, json.dumps(state, sort_keys=True)


def planned(
    labels: Sequence[str], shares: Sequence[float], forms: Sequence[str]
) -> list[tuple[str, str, float | None]]:
    """Return all rivals to measure: label, form, and share of the experts' bytes where it is open."""
    return [
        (label, form, share)
        for label in labels
        for form in (forms if RIVALS[label].has_bits else ("",))
        for share in (shares if RIVALS[label].has_knob else (None,))
    ]


def measure_all(bench: Bench, methods: Sequence[str], shares: Sequence[float], forms: Sequence[str]) -> list[Point]:
    """Return all points: ReTeX at the given shares and at the sizes of rivals that have only one, and the rivals."""
    plan = planned([label for label in RIVALS if label in methods], shares, forms)
    found = [bench.merged()]
    if RETEX in methods:
        found += [bench.retex(share) for share in tqdm(shares, desc=RETEX, unit="cell")]
    if AROUND_BASE in methods:
        found += [bench.around_base(share) for share in tqdm(shares, desc=AROUND_BASE, unit="cell")]
    for one in tqdm(plan, desc="rivals", unit="cell"):
        point = bench.rival(*one)
        found.append(point)
        if point is not None and one[2] is None and RETEX in methods:
            found.append(bench.retex(point.budget))
    return [point for point in found if point is not None]


def by_task(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack the rows of several systems, task by task."""
    return {task: np.stack([one[task] for one in rows]) for task in rows[0]}


def figures(accuracies: np.ndarray, experts: np.ndarray, agreement: np.ndarray) -> dict[str, np.ndarray]:
    """Return the figures of systems from accuracies (..., tasks), those of the experts, and agreements.

    Tasks on which an expert has no row right (in a small sample) are left out.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(experts > 0, accuracies / experts, np.nan)
    return {
        "normalised": np.nanmean(ratios, -1),
        "worst": np.nanmin(ratios, -1),
        "agreement": agreement.mean(-1),
    }


def compare(point: Point, other: Point | None, experts: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, Any]:
    """Return a point's figures with intervals, and those of `other` (ReTeX at the same budget) minus them."""
    rows = [experts, point.correct, point.agrees]
    rows += [] if other is None else [other.correct, other.agrees]
    stacked = by_task(rows)
    drawn = resampled_accuracies(stacked, seed=seed)
    whole = np.stack([found.mean(1) for found in stacked.values()], -1)[None]

    def of(samples: np.ndarray, first: int) -> dict[str, np.ndarray]:
        return figures(samples[:, first], samples[:, 0], samples[:, first + 1])

    values, samples = of(whole, 1), of(drawn, 1)
    found: dict[str, Any] = {name: interval(values[name][0], samples[name]) for name in FIGURES}
    if other is not None:
        others, theirs = of(whole, 3), of(drawn, 3)
        found["lead"] = {
            name: interval(others[name][0] - values[name][0], theirs[name] - samples[name]) for name in FIGURES
        }
    return found


@dataclass(frozen=True)
class Row:
    """A system at a budget, and its figures."""

    point: Point
    results: dict[str, Any]


def tabulate(points: Sequence[Point], experts: Mapping[str, np.ndarray]) -> list[Row]:
    """Return the rows of the table, by budget, ReTeX first."""
    ours = {point.budget: point for point in points if point.method == RETEX}
    different = {(point.budget, point.line): point for point in points}
    order = sorted(different.values(), key=lambda point: (point.budget, point.method != RETEX))
    return [
        Row(point, compare(point, None if point.method == RETEX else ours.get(point.budget), experts))
        for point in order
    ]


def markdown(rows: Sequence[Row], title: str, weight_bytes: int = 4) -> str:
    """Format the summary and the table; the experts' weights have so many bytes each."""
    columns = ["method", "bits", "budget (%)", "added (%)", "bits per weight", "accuracy", "worst task", "agreement"]
    columns += ["error", f"{RETEX} minus this, accuracy", "worst task", "agreement"]
    lines = []
    for row in rows:
        point, lead = row.point, row.results.get("lead")
        cells: list[Any] = [point.method, {FLOAT: "16", "": ""}.get(point.width, point.width)]
        cells += [f"{100 * point.budget:.3g}", f"{100 * point.share:.3g}", f"{8 * weight_bytes * point.share:.2g}"]
        cells += [row.results[name].value for name in FIGURES] + [point.error]
        cells += [None if lead is None else in_points(lead[name]) for name in FIGURES]
        lines.append(cells)
    note = "Differences in points, with 95 % intervals, paired by rows. 16 bits are bfloat16."
    return f"# Bytes: {title}\n\n{summary(rows)}\n{note}\n\n{markdown_table(columns, lines)}"


def summary(rows: Sequence[Row]) -> str:
    """Format, for every figure, how often rivals are behind ReTeX at the same size, level, or ahead.

    Of the two forms of a rival only the rounded one counts, so that no rival counts twice.
    """
    lines = []
    for name in FIGURES:
        leads = [row.results["lead"][name] for row in rows if "lead" in row.results and row.point.width != FLOAT]
        behind, ahead = sum(lead.low > 0 for lead in leads), sum(lead.high < 0 for lead in leads)
        lines.append([name, behind, len(leads) - behind - ahead, ahead])
    columns = ["figure", "rivals behind", "level (zero is inside the interval)", "ahead"]
    return markdown_table(columns, lines)


def in_points(found: Interval) -> str:
    """Format a difference in percentage points.

    >>> in_points(Interval(0.0123, -0.002, 0.03))
    '+1.2 [-0.2, +3.0]'
    """
    value, low, high = (100 * number for number in (found.value, found.low, found.high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def figure(rows: Sequence[Row]) -> Figure:
    """Plot accuracy and agreement against bytes."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for title, name in (("normalised accuracy", "normalised"), ("agreement with the expert", "agreement")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.point.budget > 0:
                ends = lines.setdefault(row.point.line, [])
                ends.append((100 * row.point.share, row.results[name].value))
        panels[title] = {line: ([x for x, _ in ends], [y for _, y in ends]) for line, ends in lines.items()}
    return lines_figure(panels, "added bytes (% of the experts)", "mean over tasks", log_x=True)


def rows_of(study: Study, split: str) -> list[TaskData]:
    """Return the test rows, or as many validation rows, drawn at random once."""
    if split == "test":
        return study.tests
    found = []
    for task, data in study.material.validation.items():
        count = min(study.recipe.rows or len(data), len(data))
        chosen = sorted(random.Random(0).sample(range(len(data)), count))
        inputs = data.inputs[chosen] if hasattr(data.inputs, "dtype") else [data.inputs[row] for row in chosen]
        found.append(replace(data, inputs=inputs, answers=[data.answers[row] for row in chosen], name=task))
    return found


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as plain values."""

    def plain(value: Any) -> Any:
        return vars(value) if isinstance(value, Interval) else {name: plain(one) for name, one in value.items()}

    return {**row.point.as_dict(), "figures": plain(row.results)}


def main() -> None:
    names = [RETEX, AROUND_BASE, *RIVALS]
    recipe, arguments = parse(
        __doc__,
        split={"choices": ("validation", "test"), "default": "test", "help": "rows to answer"},
        shares={"type": float, "nargs": "+", "default": SHARES, "help": "added bytes, in per cent of the experts'"},
        methods={"nargs": "+", "default": names, "choices": names, "metavar": "METHOD", "help": f"of {names}"},
        forms={"nargs": "+", "default": FORMS, "choices": FORMS, "help": "of rivals that leave their bits open"},
        tasks={"type": int, "help": "the first so many tasks; default: all"},
        out={"type": Path, "help": "results; default: bytes.json in the work dir"},
        known={"type": Path, "help": "results of an earlier run, to take rivals from"},
        plot={"action": "store_true", "help": "draw the curves"},
    )
    study = load(recipe, arguments.work_dir, mirror=arguments.mirror)
    if arguments.tasks is not None:
        if not 0 < arguments.tasks <= len(study.tasks):
            raise ConfigError(f"--tasks must be between 1 and {len(study.tasks)}, not {arguments.tasks}.")
        study = study.subset(arguments.tasks)
    bench = Bench(study, rows_of(study, arguments.split), arguments.split, arguments.work_dir, arguments.only)
    if arguments.known is not None:
        bench.learn(arguments.known)
    shares = [share / 100 for share in arguments.shares]
    points = measure_all(bench, arguments.methods, shares, arguments.forms)
    rows = tabulate(points, bench.experts_correct)
    title = f"{arguments.recipe.stem}, {len(study.tasks)} tasks, {arguments.split} rows"
    text, out = markdown(rows, title), arguments.out or arguments.work_dir / "bytes.json"
    results = {
        "recipe": recipe.to_dict(),
        "tasks": study.tasks,
        "split": arguments.split,
        "experts_bytes": bench.experts_bytes,
        "experts_correct": as_hex(bench.experts_correct),
        "points": [as_json(row) for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    if arguments.plot:
        figure(rows).savefig(out.with_suffix(".png"), dpi=DPI)
    print("\n" + text)


if __name__ == "__main__":
    run(main)
