"""A ReTeX folder on disk: written whole or not at all, checked before use. The one place that knows file names."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from .checkpoints.sources import Source, open_files, weight_files
from .config import CONFIG_NAME, RetexConfig, read_config_file
from .errors import ArtifactError, CheckpointError, ConfigError, shorten
from .libraries import LIBRARIES, library_of
from .parts import RetexParts
from .recovery import Layout, OffsetGenerator, RecoveryModule
from .recovery.shapes import KINDS, MATRIX
from .routing import Signatures

FORMAT_VERSION = 1
RECOVERY, SIGNATURES, HEADS, PRETRAINED = (
    "retex_recovery",
    "retex_signatures",
    "retex_heads",
    "retex_pretrained",
)
TASK_EMBEDDING = "task_embedding"
# Files that a new save replaces; everything else in the folder belongs to the user and is kept.
OWN_FILES = (
    "retex_*", "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "open_clip_config.json", "open_clip_model.safetensors",
)  # fmt: skip
SIDE_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model",
    "sentencepiece*.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def write(parts: RetexParts, folder: Path, max_shard_size: str | int) -> None:
    """Write a folder. It appears complete or not at all; a previous one survives a failure; foreign files are kept."""
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; expected a folder to save into.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    scratch.mkdir()
    try:
        _write_files(parts, scratch, max_shard_size)
        if folder.exists():
            _keep_foreign_files(folder, scratch)
            retired = scratch.with_suffix(".old")
            folder.rename(retired)
            try:
                scratch.rename(folder)
            except OSError:
                retired.rename(folder)
                raise
            shutil.rmtree(retired)
        else:
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_files(parts: RetexParts, folder: Path, max_shard_size: str | int) -> None:
    library = library_of(parts.model)
    library.save(parts.model, folder, max_shard_size)
    _copy_side_files(parts.side_folder, folder)
    save_torch_state_dict(
        _recovery_tensors(parts.recovery),
        folder,
        filename_pattern=RECOVERY + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    _save(parts.pretrained, folder / f"{PRETRAINED}.safetensors")
    _save(
        {f"{task}/{name}": tensor for task, head in parts.heads.items() for name, tensor in head.items()},
        folder / f"{HEADS}.safetensors",
    )
    section: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "library": library.NAME,
        "recovery": {
            name: _layout_to_json(parts.recovery[name].layout) | {"error": parts.errors.get(name)}
            for name in parts.recovery
        },
        "heads": {
            task: {name: list(tensor.shape) for name, tensor in head.items()} for task, head in parts.heads.items()
        },
        "signatures": None,
    }
    if parts.signatures is not None:
        signatures = parts.signatures
        _save({"mean": signatures.mean, "basis": signatures.basis}, folder / f"{SIGNATURES}.safetensors")
        section["signatures"] = {
            "feature_layer": signatures.feature_layer,
            "rank": signatures.basis.shape[1],
            "width": signatures.mean.shape[1],
        }
    text = json.dumps({**parts.config.to_dict(), "artifact": section}, indent=2)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def _recovery_tensors(recovery: RecoveryModule) -> dict[str, Tensor]:
    tensors = {TASK_EMBEDDING: recovery.task_embedding}
    for name in recovery:
        for part, parameter in recovery[name].named_parameters():
            tensors[f"{name}.{part}"] = parameter
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    if tensors:
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, path, metadata={"format": "pt"})


def _copy_side_files(source: Path | None, folder: Path) -> None:
    for pattern in SIDE_FILES if source is not None else ():
        for file in source.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _keep_foreign_files(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        if any(entry.match(pattern) for pattern in OWN_FILES) or (new / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    values: dict[str, Any] = {"shape": list(layout.shape), "kind": layout.kind}
    if layout.kind == MATRIX:
        values |= {"batch": layout.batch, "rows": layout.rows, "columns": layout.columns, "rank": layout.rank}
    return values


def read(folder: Path, **load_options: Any) -> RetexParts:
    """Read and check a folder. Nothing is trusted before it has been compared with the configuration."""
    try:
        values = read_config_file(folder / CONFIG_NAME)
    except ConfigError as error:
        raise ArtifactError(f"{folder} is not a ReTeX artifact: {error}") from None
    path = folder / CONFIG_NAME
    section = values.pop("artifact", None)
    if not isinstance(section, dict):
        raise ArtifactError(f'{path} has no "artifact" section: it is a configuration, not a saved model.')
    if section.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {section.get('format_version')!r}; this library reads version {FORMAT_VERSION}."
        )
    if section.get("library") not in LIBRARIES:
        raise ArtifactError(f"{path}: library {section.get('library')!r} is not one of {sorted(LIBRARIES)}.")
    try:
        config = RetexConfig.from_dict(values)
    except (ConfigError, TypeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    if not config.tasks:
        raise ArtifactError(f"{path} names no tasks.")

    recovery, errors = _read_recovery(folder, section, config)
    heads = _read_heads(folder, section, config)
    signatures = _read_signatures(folder, section, config)
    pretrained = {}
    if config.feature_source == "pretrained":
        source = _open(folder, PRETRAINED)
        pretrained = {name: source.read(name).clone() for name in source.infos}
    model = _load_model(folder, section["library"], load_options)
    _check_fits(folder, model, recovery, heads, pretrained)
    return RetexParts(config, model, recovery, heads, errors, signatures, pretrained, folder)


def _load_model(folder: Path, library: str, load_options: dict[str, Any]) -> nn.Module:
    try:
        model = LIBRARIES[library].load(folder, **load_options)
    except CheckpointError as error:
        raise ArtifactError(f"{folder}: the merged model does not load: {error}") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ArtifactError(f"{folder}: the merged model does not load: {reason}") from error
    return model.requires_grad_(False)


def _open(folder: Path, stem: str) -> Source:
    try:
        return open_files(weight_files(folder, (stem,), suffixes=(".safetensors",)), stem)
    except CheckpointError as error:
        raise ArtifactError(str(error)) from None


def _check_tensors(source: Source, expected: dict[str, tuple[int, ...]], where: str) -> None:
    missing = sorted(set(expected) - set(source.infos))
    if missing:
        raise ArtifactError(f"{where} lacks {shorten(missing)}.")
    foreign = sorted(set(source.infos) - set(expected))
    if foreign:
        raise ArtifactError(f"{where} holds {shorten(foreign)}, which {CONFIG_NAME} does not list.")
    for name, shape in expected.items():
        info = source.infos[name]
        if info.shape != tuple(shape):
            raise ArtifactError(f"{where}: tensor {name!r} has shape {info.shape}, expected {tuple(shape)}.")
        if not info.dtype.is_floating_point:
            raise ArtifactError(f"{where}: tensor {name!r} has dtype {info.dtype}, expected floating point.")


def _read_recovery(
    folder: Path, section: dict[str, Any], config: RetexConfig
) -> tuple[RecoveryModule, dict[str, float]]:
    where = f"{folder / RECOVERY}*.safetensors"
    layouts = {
        name: _layout_from_json(folder, name, entry) for name, entry in _dict(section, "recovery", folder).items()
    }
    source = _open(folder, RECOVERY)
    embedding_dim = config.task_embedding_dim or len(config.tasks)
    expected: dict[str, tuple[int, ...]] = {TASK_EMBEDDING: (len(config.tasks), embedding_dim)}
    for name, layout in layouts.items():
        numbers = torch.Size(layout.generated_shape).numel()
        expected[f"{name}.weight"] = (embedding_dim, numbers)
        if f"{name}.bias" in source.infos:
            expected[f"{name}.bias"] = (numbers,)
        if layout.shared_shape is not None:
            expected[f"{name}.shared"] = layout.shared_shape
    _check_tensors(source, expected, where)

    def part(name: str) -> Tensor | None:
        return source.read(name) if name in expected else None

    generators = {
        name: OffsetGenerator(layout, part(f"{name}.weight"), part(f"{name}.bias"), part(f"{name}.shared"))
        for name, layout in layouts.items()
    }
    errors = {name: entry.get("error") for name, entry in section["recovery"].items()}
    return RecoveryModule(source.read(TASK_EMBEDDING), generators), errors


def _layout_from_json(folder: Path, name: str, entry: Any) -> Layout:
    try:
        layout = Layout(**{key: tuple(v) if key == "shape" else v for key, v in entry.items() if key != "error"})
        sizes = (*layout.shape, layout.batch, layout.rows, layout.columns, layout.rank)
        valid = layout.kind in KINDS and all(isinstance(size, int) and 0 <= size < 2**40 for size in sizes)
        if valid and layout.kind == MATRIX:
            numbers = torch.Size(layout.stacked_shape).numel()
            valid = torch.Size(layout.shape).numel() == numbers and layout.rank > 0
    except (TypeError, AttributeError):
        valid = False
    if not valid:
        raise ArtifactError(f"{folder / CONFIG_NAME}: the recovery of {name!r} is described by {entry!r}.")
    return layout


def _read_heads(folder: Path, section: dict[str, Any], config: RetexConfig) -> dict[str, dict[str, Tensor]]:
    listed = _dict(section, "heads", folder)
    if set(listed) != set(config.tasks):
        raise ArtifactError(
            f"{folder / CONFIG_NAME} lists heads for {sorted(listed)}, but its tasks are {config.tasks}."
        )
    expected = {f"{task}/{name}": shape for task in listed for name, shape in _dict(listed, task, folder).items()}
    if not expected:
        return {task: {} for task in config.tasks}
    source = _open(folder, HEADS)
    _check_tensors(source, expected, f"{folder / HEADS}.safetensors")
    return {task: {name: source.read(f"{task}/{name}").clone() for name in listed[task]} for task in config.tasks}


def _read_signatures(folder: Path, section: dict[str, Any], config: RetexConfig) -> Signatures | None:
    if section.get("signatures") is None:
        return None
    described = _dict(section, "signatures", folder)
    tasks, rank, width = len(config.tasks), described.get("rank"), described.get("width")
    if not isinstance(rank, int) or not isinstance(width, int) or not isinstance(described.get("feature_layer"), str):
        raise ArtifactError(f"{folder / CONFIG_NAME}: the signatures are described by {described!r}.")
    source = _open(folder, SIGNATURES)
    _check_tensors(
        source, {"mean": (tasks, width), "basis": (tasks, rank, width)}, f"{folder / SIGNATURES}.safetensors"
    )
    return Signatures(source.read("mean").clone(), source.read("basis").clone(), described["feature_layer"])


def _dict(values: dict[str, Any], key: str, folder: Path) -> dict[str, Any]:
    if not isinstance(values.get(key), dict):
        raise ArtifactError(f"{folder / CONFIG_NAME}: {key!r} must be an object, not {values.get(key)!r}.")
    return values[key]


def _check_fits(
    folder: Path,
    model: nn.Module,
    recovery: RecoveryModule,
    heads: dict[str, dict[str, Tensor]],
    pretrained: dict[str, Tensor],
) -> None:
    """The recovery must belong to this merged model."""
    tensors = model.state_dict()
    shapes = {name: recovery[name].layout.shape for name in recovery}
    shapes |= {name: tuple(tensor.shape) for name, tensor in pretrained.items()}
    for name, shape in shapes.items():
        if name not in tensors:
            raise ArtifactError(f"{folder}: the merged model has no tensor {name!r}, which the recovery restores.")
        if tuple(tensors[name].shape) != shape:
            raise ArtifactError(
                f"{folder}: tensor {name!r} of the merged model has shape {tuple(tensors[name].shape)}, "
                f"but its recovery has {shape}."
            )
    for task, head in heads.items():
        for name in head:
            if name not in tensors:
                raise ArtifactError(f"{folder}: the merged model has no tensor {name!r}, a head of task {task!r}.")
