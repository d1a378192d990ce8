"""The five base merges of the paper, for experiments that compare what ReTeX is put on. Each is learned once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment import Study, run_cells

from retex_hf.baselines.weights import expert_weights
from retex_hf.calibration import Batch, Calibration
from retex_hf.merging.registry import learn_options, options_to_learn

# AdaMerging's own 500 steps at a rate of 1e-3 take an hour on one core; these get as far in minutes.
MERGES: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "task arithmetic": {"method": "task_arithmetic", "scale": 0.3},
    "TIES": {"method": "ties"},
    "consensus": {"method": "consensus"},
    "AdaMerging": {"method": "adamerging", "steps": 60, "learning_rate": 1e-2, "rows_per_task": 8},
}
LABELLED = ("consensus",)
ROWS = 64
BATCH = 16


def learn_merges(study: Study, work: Path, names: Sequence[str] = tuple(MERGES)) -> dict[str, dict[str, Any]]:
    """Merges as `RetexConfig.merge` takes them, with everything that had to be learned filled in; kept as cells."""
    return {name: learned(study, work, MERGES[name]) for name in names}


def learned(study: Study, work: Path, merge: dict[str, Any]) -> dict[str, Any]:
    """One merge with everything that had to be learned filled in; kept as a cell, for all methods and experiments."""
    if not learns(merge):
        return merge
    cell = {f"merge {merge['method']}": lambda: learn(study, merge)}
    (value,) = run_cells(work / "cells", cell, merge_identity(study, merge), progress=False).values()
    return value


def merge_identity(study: Study, merge: dict[str, Any]) -> dict[str, Any]:
    """What a learned merge depends on. How it is tested is not part of it: experiments with other rows share it."""
    whole = study.identity("merges", merge=merge, rows=ROWS)
    kept = ("suite", "base", "experts", "data", "readout", "train_rows", "max_length")
    whole["recipe"] = {key: whole["recipe"][key] for key in kept}
    whole["models"] = {task: version for task, version in whole["models"].items() if task in ("", *study.tasks)}
    return whole


def learns(merge: dict[str, Any]) -> bool:
    """Whether a merge has options that must be found from data."""
    return bool(options_to_learn(merge["method"], _options(merge)))


def learn(study: Study, merge: dict[str, Any]) -> dict[str, Any]:
    """A merge with its options found: by accuracy on validation data, or from unlabelled training inputs."""
    labelled = merge["method"] in LABELLED
    batches = {task: calibration_batches(study, task, labelled) for task in study.tasks}
    calibration = Calibration(expert_weights(study.material), study.material.readout, batches)
    return {"method": merge["method"], **learn_options(merge["method"], _options(merge), calibration)}


def calibration_batches(study: Study, task: str, labelled: bool) -> list[Batch]:
    """Some validation rows with their answers, or training inputs without."""
    material = study.material
    if labelled:
        data = material.validation[task]
        rows = random.Random(material.seed).sample(range(len(data)), min(ROWS, len(data)))
        inputs, answers = [data.inputs[row] for row in rows], [data.answers[row] for row in rows]
    else:
        inputs, answers = material.sample(task, ROWS), None
    found = []
    for start in range(0, len(inputs), BATCH):
        part = slice(start, start + BATCH)
        found.append(Batch(material.collate(inputs[part]), None if answers is None else answers[part]))
    return found


def _options(merge: dict[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in merge.items() if option != "method"}
