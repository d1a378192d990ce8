"""Summary of an artifact, read from its files without loading the merged model."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..artifact import reading, schema
from ..artifact.sizes import BODY, HEADS, PRETRAINED, RECOVERY, ROWS, SIGNATURES, bytes_of
from ..backends import LIBRARIES
from ..checkpoints.sources import open_files, weight_files
from ..checkpoints.tensor_store import tensor_bytes
from ..config import CONFIG_NAME
from ..errors import ArtifactError, brief
from ..recovery import ComponentGenerator, Generator, RecoveryModule
from ..recovery.layout import GENERATED_FIRST, VECTOR
from ..utils.parameter_names import layer_type
from ..utils.progress import track

MOST_OF_THE_ENERGY = 0.9


def inspect_artifact(folder: Path, *, spectra: bool = True, progress: bool = True) -> dict[str, Any]:
    """Return tasks, layers, storage, provenance and recipe of an artifact as plain values.

    Args:
        folder: The artifact.
        spectra: Also report how many directions hold most of the recovered energy of each matrix, and how the energy is
            spread over tasks. This verifies the checksums of all files and reads all factors.
        progress: Show a progress bar.
    """
    config, section = schema.read_description(folder)
    files, _ = reading.open_artifact(folder, section, verify=spectra)
    recovery, errors = reading.read_recovery(files, section, config)
    layers = {name: _layer(recovery, name, errors.get(name)) for name in recovery}
    if spectra:
        for name in track(recovery, title="Reading spectra", unit="layer", progress=progress):
            layers[name] |= _spectrum(recovery, name, config.tasks)
    signatures = section.get("signatures")
    heads = section.get("heads")
    if not isinstance(heads, dict) or not all(isinstance(head, dict) for head in heads.values()):
        raise ArtifactError(f"{folder / CONFIG_NAME}: the heads are not valid: {brief(heads)}.")
    is_described = isinstance(signatures, dict) and isinstance(signatures.get("feature_layer"), str)
    if signatures is not None and not is_described:
        raise ArtifactError(f"{folder / CONFIG_NAME}: the signatures are not valid: {brief(signatures)}.")
    return {
        "library": section["library"],
        "format_version": section["format_version"],
        "tasks": {
            task: {
                "classes": list(config.labels[task]["id2label"].values()) if task in config.labels else None,
                "expert": config.experts.get(task),
                "head": sorted(section["heads"].get(task, {})),
            }
            for task in config.tasks
        },
        "base_model": config.base_model,
        "config": {name: value for name, value in config.to_dict().items() if name not in ("labels", "experts")},
        "signatures": signatures,
        "layers": layers,
        "storage_bytes": _storage(folder, section),
        "recipe": reading.read_beside(files, schema.RECIPE_NAME, dict),
        "evaluation": reading.read_beside(files, schema.EVALUATION_NAME, dict),
    }


def group_layers(layers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Group layers of one type (all attention queries, say) into one row: ranks, errors, directions, energy."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, layer in layers.items():
        # Norms and biases come in many types but hold few numbers: put them in one group.
        groups.setdefault("norms, biases" if layer["kind"] == VECTOR else layer_type(name), []).append(layer)
    total = sum(layer.get("energy", 0.0) for layer in layers.values())
    rows = []
    for kind, members in groups.items():
        ranks = [layer["rank"] for layer in members if layer["rank"]]
        directions = [layer["directions"] for layer in members if layer.get("directions") is not None]
        found = [layer["error"] for layer in members if layer["error"] is not None]
        rows.append(
            {
                "type": kind,
                "layers": len(members),
                "kind": "/".join(sorted({layer["kind"] for layer in members})),
                "rank": (min(ranks), max(ranks)) if ranks else None,
                "error": median(found) if found else None,
                "directions": median(directions) if directions else None,
                "energy": sum(layer.get("energy", 0.0) for layer in members) / total if total else None,
                "bytes": sum(layer["bytes"] for layer in members),
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])


def _layer(recovery: RecoveryModule, name: str, error: float | None) -> dict[str, Any]:
    layout, generator = recovery[name].layout, recovery.generator_name(name)
    own = recovery.tensors_of([name]) if generator == name else []
    return {
        "shape": list(layout.shape),
        "kind": layout.kind,
        "rank": layout.rank if layout.is_factored else None,
        "error": error,
        "generator": generator,
        "bytes": bytes_of(own),
    }


@torch.no_grad()
def _spectrum(recovery: RecoveryModule, name: str, tasks: list[str]) -> dict[str, Any]:
    """Return the energy of a layer's offsets per task, and per direction that all tasks share."""
    generator, layout = recovery[name], recovery[name].layout
    pairs = list(zip(tasks, recovery.task_embedding, strict=True))
    if not layout.is_factored:
        energies = {task: float(generator(row).double().square().sum()) for task, row in pairs}
        return {"energy": sum(energies.values()), "task_energy": energies, "directions": None}
    grams = _grams(generator, tasks, recovery.task_embedding)
    eigenvalues = torch.linalg.eigvalsh(sum(grams.values())).clamp(min=0).flatten().sort(descending=True).values
    total = float(eigenvalues.sum())
    kept = int((eigenvalues.cumsum(0) < MOST_OF_THE_ENERGY * total).sum()) + 1 if total else 0
    energies = {task: float(gram.diagonal(dim1=-2, dim2=-1).sum()) for task, gram in grams.items()}
    return {"energy": total, "task_energy": energies, "directions": kept}


def _grams(generator: Generator, tasks: list[str], embeddings: Tensor) -> dict[str, Tensor]:
    """Return the Gram matrix of each task's offset, in orthonormal coordinates that do not depend on the task."""
    if isinstance(generator, ComponentGenerator):
        lefts, right = generator.joint_factors(list(embeddings))
        return {task: _gram(left, right) for task, left in zip(tasks, lefts, strict=True)}
    pairs = [generator.factors(embedding) for embedding in embeddings]
    if generator.layout.order != GENERATED_FIRST:  # the shared factor is the first
        pairs = [(right.mT, left.mT) for left, right in pairs]
    return {task: _gram(left, right) for task, (left, right) in zip(tasks, pairs, strict=True)}


def _gram(left: Tensor, right: Tensor) -> Tensor:
    # G S = (G R^T) Q^T with orthonormal Q.
    coordinates = left.double() @ torch.linalg.qr(right.double().mT).R.mT
    return coordinates.mT @ coordinates


def _storage(folder: Path, section: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of the tensors of each part, counted as in `sizes_of`."""
    stems = {
        BODY: LIBRARIES[section["library"]].WEIGHTS_STEM,
        RECOVERY: schema.RECOVERY,
        HEADS: schema.HEADS,
        ROWS: schema.ROWS,
        SIGNATURES: schema.SIGNATURES,
        PRETRAINED: schema.PRETRAINED,
    }
    own = {name for head in section["heads"].values() for name in head}
    sizes = {}
    for part, stem in stems.items():
        if list(folder.glob(f"{stem}*.safetensors")):
            infos = open_files(weight_files(folder, (stem,), suffixes=(".safetensors",)), stem).infos
            # The merged model carries the head of the first task, which is already counted among the heads.
            counted = (info for name, info in infos.items() if part != BODY or name not in own)
            sizes[part] = sum(tensor_bytes(info) for info in counted)
    return sizes
