"""Cells of a table, each computed once: an interrupted run resumes, and changed settings are computed anew."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

import retex_hf

Cell = Callable[[], Any]


def run_cells(
    folder: Path,
    cells: Mapping[str, Cell],
    identity: Any = None,
    *,
    built: Mapping[str, Any] | None = None,
    only: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Return the values of cells, in their order; read them from an earlier run, else compute and store them.

    Args:
        folder: Folder of finished cells, one JSON file each.
        cells: `{key: function}`; a function returns plain JSON values.
        identity: Everything that the values depend on beside the key (the recipe, the settings), as plain JSON values.
            A file with another identity is not used.
        built: `{key: values}` that only this cell depends on, likewise.
        only: Compute only cells whose key contains this text; others are returned only if they are finished.
        progress: Show a progress bar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {}
    bar = tqdm(cells.items(), desc="cells", unit="cell", disable=not progress)
    for key, compute in bar:
        bar.set_postfix_str(key)
        depends = [identity, built[key]] if built else identity
        file = folder / cell_name(key, depends)
        if file.exists():
            values[key] = json.loads(file.read_text(encoding="utf-8"))["value"]
        elif only is None or only in key:
            text = json.dumps({"key": key, "identity": depends, "value": compute()}, allow_nan=False)
            # Rename when complete, so that no partial file is read; decode the JSON, so that values are the same in
            # every run.
            partial = file.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.rename(file)
            values[key] = json.loads(text)["value"]
    return values


def cell_name(key: str, identity: Any) -> str:
    """Return a readable file name of a cell that depends on key, identity and the library's version."""
    text = json.dumps([retex_hf.__version__, key, identity], sort_keys=True)
    readable = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:60]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
