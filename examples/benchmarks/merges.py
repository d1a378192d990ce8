"""The five base merges of the paper, for experiments that compare ReTeX on different merges. Each is learnt once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment import Recipe, Study, run_cells

from retex_hf.baselines.merges import learned_merge
from retex_hf.merging import options_to_learn

# With their authors' settings, which are the defaults of the library; a recipe's `settings` may change them.
MERGES: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "task arithmetic": {"method": "task_arithmetic", "scale": "auto"},
    "TIES": {"method": "ties", "scale": "auto"},
    "consensus": {"method": "consensus"},
    "AdaMerging": {"method": "adamerging"},
}
# Rows per task to learn from without labels, and labelled validation rows to choose by.
ROWS = 128


def merges_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the merges with the settings of a recipe, before anything is learnt."""
    return {name: {**merge, **recipe.settings.get(name, {})} for name, merge in MERGES.items()}


def learn_merges(study: Study, work: Path, names: Sequence[str] = tuple(MERGES)) -> dict[str, dict[str, Any]]:
    """Return merges as `RetexConfig.merge` takes them, with learnt options filled in; stored as cells."""
    merges = merges_of(study.recipe)
    return {name: learned(study, work, merges[name]) for name in names}


def learned(study: Study, work: Path, merge: dict[str, Any], rows: int = ROWS) -> dict[str, Any]:
    """Return one merge with learnt options filled in; stored as a cell, for all methods and experiments."""
    if not learns(merge):
        return merge
    cell = {f"merge {merge['method']}": lambda: learned_merge(study.material, merge, rows)}
    (value,) = run_cells(work / "cells", cell, merge_identity(study, merge, rows), progress=False).values()
    return value


def merge_identity(study: Study, merge: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return what a learnt merge depends on, without test settings, so that experiments with other rows share it."""
    whole = study.identity("merges", merge=merge, rows=rows)
    kept = ("suite", "base", "experts", "data", "readout", "train_rows", "max_length")
    whole["recipe"] = {key: whole["recipe"][key] for key in kept}
    whole["models"] = {task: version for task, version in whole["models"].items() if task in ("", *study.tasks)}
    return whole


def learns(merge: dict[str, Any]) -> bool:
    """Return whether a merge has options that must be learnt from data."""
    method, options = merge["method"], {option: value for option, value in merge.items() if option != "method"}
    return bool(options_to_learn(method, options))
