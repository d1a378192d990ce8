"""The measurements of bytes.py: experts and systems that keep them in few bytes, on the rows of each task."""

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
from bytes_table import FLOAT, Point, as_digits, as_hex, from_digits, from_hex
from experiment import RETEX, Study, run_cells
from measuring import Batch, batches, recovery_bytes
from tqdm.auto import tqdm

from retex_hf import RetexConfig, RetexModel
from retex_hf.baselines import expert_weights, make
from retex_hf.baselines.compressed import BEST, Compressed
from retex_hf.baselines.merges import source_body
from retex_hf.build.plan import prepare
from retex_hf.config import matches
from retex_hf.data.readout import Answer
from retex_hf.errors import ConfigError
from retex_hf.evaluation import TaskData
from retex_hf.evaluation.run import is_right
from retex_hf.merging.expert_weights import Weights

# The bits of rounded systems whose size follows from them: by error alone, the most would be the best.
FIXED_BITS = 3
MERGED, ONE_RANK, AROUND_BASE = "merged alone", "one rank, int8", "ReTeX on the base"
LARGEST_RANK = 1024
BASE_MERGE = {"method": "task_arithmetic", "scale": 0.0}
ON_MERGED, ON_BASE = {"reference": "average"}, {"reference": "pretrained"}


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

Known = dict[tuple[str, str, str], dict[str, Any]]
"""Values of cells by method, width and state."""


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

    def read(self, file: Path) -> dict[str, Any]:
        """Return an earlier run's results, if its experts answered the same rows alike."""
        results = json.loads(file.read_text(encoding="utf-8"))
        if results["experts_correct"] != as_hex(self.experts_correct):
            raise ConfigError(f"{file}: its experts answered other rows, or answered them differently.")
        if results["recipe"]["config"].get("exclude", []) != self.exclude:
            raise ConfigError(f"{file}: its systems recover other tensors; the recipe's `exclude` must be the same.")
        return results

    def learn(self, file: Path) -> None:
        """Take the rivals of an earlier run's results."""
        for point in self.read(file)["points"]:
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
