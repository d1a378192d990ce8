"""Export of an artifact for vLLM: adapters of all tasks, an index of the weights, and what the server must be told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...artifact.export_files import AUTO, EXPORT_NAME, EXPORT_VERSION, MERGED, MODEL_INDEX, adapter_folder
from ...artifact.schema import described_weights, read_description
from ...artifact.state import RetexParts
from ...artifact.writing import check_replaceable, write_export
from ...backends import hf_transformers, library_of
from ...checkpoints.adapters import ADAPTER_STEM, PREFIX
from ...config import BASE, routing_options
from ...errors import ArtifactError, ConfigError, RetexError
from ...routing import Signatures
from ...utils.atomic_folder import check_target
from .lora import Adapter, LoraExport, make_adapter, write_adapter
from .lora.vllm_support import embeddings_of, served_rank

# Factors under peft's names, and whether they are applied first.
FACTORS = {"lora_A.weight": True, "lora_B.weight": False, "lora_embedding_A": True, "lora_embedding_B": False}


@dataclass(frozen=True)
class VllmExport:
    """What was exported: the adapter of each task, and the rank that the server must admit."""

    folder: Path
    adapters: dict[str, LoraExport]
    max_rank: int

    def __str__(self) -> str:
        size = sum(adapter.bytes for adapter in self.adapters.values())
        lines = [f"{self.folder}: adapters of {len(self.adapters)} tasks for vLLM, {size / 1e6:.2f} MB."]
        for task, adapter in self.adapters.items():
            if adapter.left_out:
                names = sorted(
                    {name.rpartition(".")[2] if "norm" not in name else "norms" for name in adapter.left_out}
                )
                lines.append(
                    f"Task {task!r} leaves out {len(adapter.left_out)} tensors that vLLM has no place for "
                    f"({', '.join(names)}): {adapter.left_out_share:.2%} of the difference."
                )
        return "\n".join(lines)


def export_vllm(parts: RetexParts, artifact: str | Path, output: str | Path | None = None) -> VllmExport:
    """Add to an artifact what vLLM needs to serve it, or write a copy that has it. See `RetexModel.export_vllm`."""
    source = check_target(artifact)
    folder = source if output is None else check_replaceable(output)
    _check_model(parts)
    _, section = read_description(source, verify=not parts.unverified)
    if any(section.get(key) != value for key, value in described_weights(parts).items()):
        raise ArtifactError(f"{source} holds the weights of another model: save this one first.")
    adapters = {task: make_adapter(parts, task, "vllm", alike=True) for task in parts.config.tasks}
    rank = served_rank(max(max(adapter.summary.lora.values()) for adapter in adapters.values()))

    def write(new: Path) -> None:
        for task, adapter in adapters.items():
            place = new / adapter_folder(task)
            place.mkdir(parents=True)
            write_adapter(adapter, place)
            check_shapes(parts.model, place / f"{ADAPTER_STEM}.safetensors", parts.heads[task])
        if not (source / MODEL_INDEX).is_file():
            (new / MODEL_INDEX).write_text(_index(source) + "\n", encoding="utf-8")
        (new / EXPORT_NAME).write_text(_described(parts, adapters, rank) + "\n", encoding="utf-8")

    write_export(source, folder, write)
    places = {task: replace(found.summary, folder=folder / adapter_folder(task)) for task, found in adapters.items()}
    return VllmExport(folder, places, rank)


def _check_model(parts: RetexParts) -> None:
    """Refuse what vLLM cannot serve, or cannot route."""
    if library_of(parts.model) is not hf_transformers:
        raise ConfigError(f"vLLM serves models of transformers, not a {type(parts.model).__name__}.")
    embeddings_of(type(parts.model).__name__)
    if taken := [task for task in parts.config.tasks if task in (AUTO, MERGED, BASE)]:
        raise ConfigError(f"A task is called {taken[0]!r}, which a request to the server says for something else.")
    if parts.config.vocabulary:
        raise ConfigError("The tasks have vocabularies of their own, and vLLM has one for all adapters.")
    options = routing_options(parts.config.routing)
    if options["method"] == "soft" or options["far"] == "soft":
        raise ConfigError('Soft routing mixes experts, and vLLM runs one adapter per prompt: set routing to "hard".')
    if not isinstance(parts.signatures, Signatures):
        raise RetexError(
            "The model has no signatures of reference inputs, which the server routes by: call fit_signatures, or run "
            "`retex sign`, first."
        )


def check_shapes(model: nn.Module, file: Path, heads: Mapping[str, Tensor]) -> None:
    """Refuse an adapter whose factors do not fit the model's weights: vLLM does not compare them."""
    weights = {**model.state_dict(), **heads}
    with safe_open(file, framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118  (not a dict)
            shape = tuple(tensors.get_slice(key).get_shape())
            expected = _expected_shape(key.removeprefix(PREFIX), shape, weights)
            if shape != expected:
                raise ArtifactError(f"{file}: tensor {key!r} has shape {shape}, expected {expected}.")


def _expected_shape(name: str, shape: tuple[int, ...], weights: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """Return the shape that a tensor of an adapter must have, whatever its rank; None for one that fits nothing."""
    for part, is_first in FACTORS.items():
        if name.endswith(f".{part}"):
            rows, columns = weights[f"{name.removesuffix(part)}weight"].shape
            if "embedding" in part:  # its factors are those of the transpose
                rows, columns = columns, rows
            return (shape[0], columns) if is_first else (rows, shape[-1])
    return tuple(weights[name].shape) if name in weights else None


def _index(artifact: Path) -> str:
    """Return a shard index over the one file of weights: without one, vLLM reads every safetensors file beside it."""
    file = artifact / "model.safetensors"
    with safe_open(file, framework="pt") as tensors:
        names = sorted(tensors.keys())
    index = {"metadata": {"total_size": file.stat().st_size}, "weight_map": dict.fromkeys(names, file.name)}
    return json.dumps(index, indent=2)


def _described(parts: RetexParts, adapters: dict[str, Adapter], rank: int) -> str:
    config = getattr(parts.model, "config", None)
    summaries = {task: adapter.summary for task, adapter in adapters.items()}
    widths = [len(tensor) for head in parts.heads.values() for tensor in head.values()]
    values = {
        "version": EXPORT_VERSION,
        "architecture": type(parts.model).__name__,
        "dtype": str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch."),
        "max_lora_rank": rank,
        "max_labels": max(widths, default=None),
        "adapters": {
            task: {"folder": adapter_folder(task), "left_out": sorted(found.left_out), "share": found.left_out_share}
            for task, found in summaries.items()
        },
    }
    return json.dumps(values, indent=2)
