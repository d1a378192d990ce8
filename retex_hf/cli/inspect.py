"""The command `retex inspect`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import yaml

from ..artifact.hub import find_artifact
from ..artifact.sizes import bytes_of_experts
from ..utils.tables import Table, percent
from ..utils.terminal import as_json, say
from ..workflows.inspection import group_layers, inspect_artifact
from .options import POSITIONAL, Options


@dataclasses.dataclass
class InspectOptions(Options):
    """Describe an artifact: tasks, ranks, recovery errors, spectra, storage, provenance, recipe.

    Nothing is run, and the merged model is not loaded.

    Args:
        artifact: A folder or Hub id.
        layers: Print a line for every layer, instead of one for every type of layer.
        spectra: Read the factors, and report how many directions hold 90 percent of the recovered energy.
        json: Print everything as JSON.
        revision: Branch, tag or commit of a Hub id.
    """

    EXAMPLES = """
        retex inspect my-retex
        retex inspect my-retex --layers --no-spectra
        retex inspect my-retex --json | jq .storage_bytes
    """

    artifact: Annotated[str, POSITIONAL]
    layers: bool = False
    spectra: bool = True
    json: bool = False
    revision: str | None = None

    def run(self) -> None:
        folder = find_artifact(self.artifact, revision=self.revision)
        found = inspect_artifact(folder, spectra=self.spectra, progress=True)
        if self.json:
            say(as_json(found, indent=2))
            return
        say(f"{self.artifact}: {found['library']} model, {len(found['tasks'])} tasks, {_signed(found)}")
        for title, text in (
            ("Tasks", _tasks(found)),
            ("Storage", _storage(found)),
            ("Recovered layers", _layers(found) if self.layers else _layer_types(found)),
            ("Recipe", _recipe(found)),
        ):
            say(f"\n{title}\n{text}")


def _signed(found: dict[str, Any]) -> str:
    signatures = found["signatures"]
    if signatures is None:
        source = found["config"]["signatures"]
        by_weights = "told apart by their weights" + (" until retex sign." if source == "auto" else ".")
        return "no signatures yet (retex sign)." if source == "inputs" else by_weights
    return f"features of {signatures['feature_layer']}."


def _tasks(found: dict[str, Any]) -> str:
    rows = [["base", "", _origin(found["base_model"])]]
    for task, of in found["tasks"].items():
        rows.append([task, "" if of["classes"] is None else str(len(of["classes"])), _origin(of["expert"])])
    return Table(["", "classes", "from"], rows, words=[2]).text()


def _origin(provenance: dict[str, Any] | None) -> str:
    if not provenance:
        return "unknown"
    parts = [str(provenance.get("id", "")), provenance.get("revision"), provenance.get("adapter")]
    return " ".join(str(part) for part in parts if part) + f" ({provenance.get('source', 'unknown')})"


def _storage(found: dict[str, Any]) -> str:
    sizes, tasks = found["storage_bytes"], len(found["tasks"])
    experts = bytes_of_experts(sizes, tasks)
    rows = [[part, f"{size / 1e6:.2f}", percent(size / experts)] for part, size in sizes.items()]
    total = sum(sizes.values())
    rows.append(["together", f"{total / 1e6:.2f}", percent(total / experts)])
    rows.append([f"{tasks} experts", f"{experts / 1e6:.2f}", percent(1.0)])
    return Table(["part", "MB", "% of the experts"], rows).text()


def _layer_types(found: dict[str, Any]) -> str:
    rows = []
    for row in group_layers(found["layers"]):
        low, high = row["rank"] or (None, None)
        ranks = "" if low is None else str(low) if low == high else f"{low}-{high}"
        rows.append([row["type"], str(row["layers"]), row["kind"], ranks, *_figures(row)])
    header = ["type", "layers", "stored as", "rank", "error", "90% in", "energy %", "MB"]
    return Table(header, rows, words=[2]).text()


def _layers(found: dict[str, Any]) -> str:
    total = sum(layer.get("energy", 0.0) for layer in found["layers"].values())
    rows = []
    for name, layer in found["layers"].items():
        energy = layer.get("energy", 0.0) / total if total else None
        shape = "x".join(map(str, layer["shape"])) or "scalar"
        rank = "" if layer["rank"] is None else str(layer["rank"])
        rows.append([name, shape, layer["kind"], rank, *_figures({**layer, "energy": energy})])
    header = ["layer", "shape", "stored as", "rank", "error", "90% in", "energy %", "MB"]
    return Table(header, rows, words=[2]).text()


def _figures(row: dict[str, Any]) -> list[str]:
    error, directions = row["error"], row.get("directions")
    return [
        "" if error is None else f"{error:.3f}",
        "" if directions is None else f"{directions:g}",
        percent(row.get("energy")),
        f"{row['bytes'] / 1e6:.2f}",
    ]


def _recipe(found: dict[str, Any]) -> str:
    if found["recipe"] is None:
        return "none: experts were in memory."
    return yaml.safe_dump(found["recipe"], sort_keys=False, allow_unicode=True).rstrip()
