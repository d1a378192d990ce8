"""The five base merges of the paper, for experiments that compare ReTeX on different merges. Each is learnt once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment import Study, run_cells

from retex_hf.baselines.merges import learned_merge
from retex_hf.merging import options_to_learn

# AdaMerging's own 500 steps of 32 rows at a rate of 1e-3 take far longer; tables state the settings used here.
MERGES: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "task arithmetic": {"method": "task_arithmetic", "scale": 0.3},
    "TIES": {"method": "ties"},
    "consensus": {"method": "consensus"},
    "AdaMerging": {"method": "adamerging", "steps": 60, "learning_rate": 1e-2, "rows_per_task": 8},
}
ROWS = 64


def learn_merges(study: Study, work: Path, names: Sequence[str] = tuple(MERGES)) -> dict[str, dict[str, Any]]:
    """Return merges as `RetexConfig.merge` takes them, with learnt options filled in; stored as cells."""
    return {name: learned(study, work, MERGES[name]) for name in names}


def learned(study: Study, work: Path, merge: dict[str, Any]) -> dict[str, Any]:
    """Return one merge with learnt options filled in; stored as a cell, for all methods and experiments."""
    if not learns(merge):
        return merge
    cell = {f"merge {merge['method']}": lambda: learned_merge(study.material, merge, ROWS)}
    (value,) = run_cells(work / "cells", cell, merge_identity(study, merge), progress=False).values()
    return value


def merge_identity(study: Study, merge: dict[str, Any]) -> dict[str, Any]:
    """Return what a learnt merge depends on, without test settings, so that experiments with other rows share it."""
    whole = study.identity("merges", merge=merge, rows=ROWS)
    kept = ("suite", "base", "experts", "data", "readout", "train_rows", "max_length")
    whole["recipe"] = {key: whole["recipe"][key] for key in kept}
    whole["models"] = {task: version for task, version in whole["models"].items() if task in ("", *study.tasks)}
    return whole


def learns(merge: dict[str, Any]) -> bool:
    """Return whether a merge has options that must be learnt from data."""
    method, options = merge["method"], {option: value for option, value in merge.items() if option != "method"}
    return bool(options_to_learn(method, options))
