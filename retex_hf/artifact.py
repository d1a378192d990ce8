"""A ReTeX folder on disk: written whole or not at all, checked before use. The one place that knows file names."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from accelerate.utils import convert_file_size_to_int
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from .card import write_card
from .checkpoints.sources import Source, open_files, weight_files
from .config import CONFIG_NAME, RetexConfig, read_config_file
from .errors import ArtifactError, CheckpointError, ConfigError, first_line, shorten
from .execution import in_own_dtypes, is_plain
from .folders import check_target, move_into_place
from .libraries import LIBRARIES, library_of
from .parts import RetexParts
from .recovery import Layout, OffsetGenerator, RecoveryModule, ScaleGenerator
from .recovery.shapes import KINDS, MATRIX, ORDERS
from .recovery.storage import stored_parts
from .routing import Signatures, WeightSignatures
from .side_files import copy_side_files

FORMAT_VERSION = 1
RECOVERY, SIGNATURES, HEADS, PRETRAINED = (
    "retex_recovery",
    "retex_signatures",
    "retex_heads",
    "retex_pretrained",
)
TRAINING_NAME, RECIPE_NAME, EVALUATION_NAME = "retex_training.json", "retex_recipe.yaml", "retex_evaluation.json"
TASK_EMBEDDING = "task_embedding"
# Files that a new save replaces; everything else in the folder belongs to the user and is kept.
OWN_FILES = (
    "retex_*", "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "open_clip_config.json", "open_clip_model.safetensors",
)  # fmt: skip
# What else shows that a folder holds a model already.
FOREIGN_MODELS = ("adapter_config.json", "pytorch_model*.bin", "open_clip_pytorch_model.bin")


def write(
    parts: RetexParts, folder: Path, max_shard_size: str | int, *, name: str | None = None, figures: bool = False
) -> None:
    """Write a folder. It appears complete or not at all; a previous one survives a failure; foreign files are kept.

    `name` and `figures` are those of `write_card`.
    """
    folder = check_replaceable(folder)
    scratch = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    scratch.mkdir()
    try:
        library_of(parts.model).save(parts.model, scratch, max_shard_size)
        _write_weights(parts, scratch, max_shard_size)
        _write_description(parts, scratch)
        write_card(parts, scratch, previous=folder, name=name, figures=figures)
        move_into_place(scratch, folder, OWN_FILES)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(folder: Path) -> Path:
    """The absolute path of a folder to save into; one that holds a model of its own, and no artifact, is refused."""
    folder = check_target(folder)
    if not (folder / CONFIG_NAME).exists():
        found = sorted(file.name for pattern in (*OWN_FILES, *FOREIGN_MODELS) for file in folder.glob(pattern))
        if found:
            raise ArtifactError(
                f"{folder} holds {found[0]}, of a model that is no ReTeX artifact and would be lost: expected a folder "
                "of its own for the artifact."
            )
    return folder


def rewrite_description(parts: RetexParts, folder: Path) -> None:
    """Write again all that is small in a folder; its weights stay as they are, and must be those of `parts`."""
    folder = check_target(folder)
    _, section = read_description(folder)
    if any(section.get(key) != value for key, value in _described_weights(parts).items()):
        raise ArtifactError(f"{folder} holds the weights of another model: save this one as a whole.")
    scratch = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    scratch.mkdir()
    try:
        weights = [
            file
            for pattern in OWN_FILES
            for file in folder.glob(pattern)
            if ".safetensors" in file.suffixes and not file.name.startswith(SIGNATURES)
        ]
        for file in weights:
            _link(file, scratch / file.name)
        finish(parts, scratch, [scratch / file.name for file in weights], folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _link(file: Path, copy: Path) -> None:
    """One more name for a file's content, or a copy where the file system has none such."""
    try:
        copy.hardlink_to(file.resolve())
    except OSError:
        shutil.copy2(file, copy)


def finish(parts: RetexParts, scratch: Path, weights: Iterable[Path], folder: Path) -> None:
    """Complete a folder whose `weights` are there already, and move it into place; see `write`."""
    known = set(weights)
    for left in scratch.iterdir():  # by a build that was killed here
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        elif left not in known:
            left.unlink()
    library_of(parts.model).save_config(parts.model, scratch)
    _write_description(parts, scratch)
    write_card(parts, scratch, previous=folder)
    move_into_place(scratch, folder, OWN_FILES)


def stems(library: ModuleType, max_shard_size: str | int) -> dict[str, tuple[str, int | None]]:
    """The file names of each part of a folder's weights, and the size above which a part is stored in shards."""
    try:
        limit = convert_file_size_to_int(max_shard_size)
    except ValueError:
        raise ConfigError(
            f'max_shard_size must be a number of bytes or a size such as "5GB", not {max_shard_size!r}.'
        ) from None
    return {
        "model": (library.WEIGHTS_STEM, limit if library.SHARDED else None),
        "recovery": (RECOVERY, limit),
        "heads": (HEADS, None),
        "pretrained": (PRETRAINED, None),
    }


def head_key(task: str, name: str) -> str:
    """The name of one task's head tensor in the file of all heads."""
    return f"{task}/{name}"


def _write_weights(parts: RetexParts, folder: Path, max_shard_size: str | int) -> None:
    """All weights besides the merged model's."""
    save_torch_state_dict(
        _recovery_tensors(parts.recovery),
        folder,
        filename_pattern=RECOVERY + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    _save(parts.pretrained, folder / f"{PRETRAINED}.safetensors")
    _save(
        {head_key(task, name): tensor for task, head in parts.heads.items() for name, tensor in head.items()},
        folder / f"{HEADS}.safetensors",
    )


def _write_description(parts: RetexParts, folder: Path) -> None:
    """All files that are small: what the folder is, how tasks are recovered and identified, tokenizers."""
    if parts.side_folder is not None:
        copy_side_files(parts.side_folder, folder)
    section: dict[str, Any] = {"format_version": FORMAT_VERSION, **_described_weights(parts), "signatures": None}
    if parts.signatures is not None:
        signatures = parts.signatures
        section["signatures"] = {"feature_layer": signatures.feature_layer}
        if isinstance(signatures, WeightSignatures):
            tensors = {"centre": signatures.centre}
        else:
            tensors = {"mean": signatures.mean, "basis": signatures.basis}
            section["signatures"] |= {"rank": signatures.basis.shape[1], "width": signatures.mean.shape[1]}
        _save(tensors, folder / f"{SIGNATURES}.safetensors")
    if parts.history:
        (folder / TRAINING_NAME).write_text(json.dumps(parts.history) + "\n", encoding="utf-8")
    if parts.recipe is not None:
        text = yaml.safe_dump(parts.recipe, sort_keys=False, allow_unicode=True)
        (folder / RECIPE_NAME).write_text(text, encoding="utf-8")
    if parts.evaluation is not None:
        (folder / EVALUATION_NAME).write_text(json.dumps(parts.evaluation, indent=2) + "\n", encoding="utf-8")
    text = json.dumps({**parts.config.to_dict(), "artifact": section}, indent=2)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def _described_weights(parts: RetexParts) -> dict[str, Any]:
    """What the configuration says of the weights beside the merged model's."""
    return {
        "library": library_of(parts.model).NAME,
        "recovery": {name: _entry_to_json(parts.recovery, name, parts.errors.get(name)) for name in parts.recovery},
        "heads": {
            task: {name: list(tensor.shape) for name, tensor in head.items()} for task, head in parts.heads.items()
        },
    }


def _recovery_tensors(recovery: RecoveryModule) -> dict[str, Tensor]:
    tensors = {TASK_EMBEDDING: recovery.task_embedding}
    for name in recovery:
        scale = recovery.scale(name)
        modules = {f"{name}.scale": scale} if scale is not None else {}
        if recovery.generator_name(name) == name:
            modules[name] = recovery[name]
        for prefix, module in modules.items():
            tensors |= {f"{prefix}.{part}": parameter for part, parameter in module.named_parameters()}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    if tensors:
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, path, metadata={"format": "pt"})


def _entry_to_json(recovery: RecoveryModule, name: str, error: float | None) -> dict[str, Any]:
    """How one parameter is recovered: its layout, where its generator is, and how large the error is."""
    layout = recovery[name].layout
    values: dict[str, Any] = {"shape": list(layout.shape), "kind": layout.kind}
    if layout.kind == MATRIX:
        values |= {"batch": layout.batch, "rows": layout.rows, "columns": layout.columns, "rank": layout.rank}
        values |= {"order": layout.order, "inner_rank": layout.inner_rank}
    return values | {
        "generator": recovery.generator_name(name),
        "scaled": recovery.scale(name) is not None,
        "error": error,
    }


def read_description(folder: Path) -> tuple[RetexConfig, dict[str, Any]]:
    """The configuration of a folder, and what it says of the folder itself."""
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
    return config, section


def read(folder: Path, **load_options: Any) -> RetexParts:
    """Read and check a folder. Nothing is trusted before it has been compared with the configuration."""
    config, section = read_description(folder)
    recovery, errors = read_recovery(folder, section, config)
    heads = _read_heads(folder, section, config)
    signatures = _read_signatures(folder, section, config)
    pretrained = {}
    if config.feature_source == "pretrained":
        source = _open(folder, PRETRAINED)
        pretrained = {name: source.read(name) for name in source.infos}
    model = _load_model(folder, section["library"], load_options)
    _check_fits(folder, model, recovery, heads, pretrained)
    heads = {task: in_own_dtypes(model, head) for task, head in heads.items()}
    history = read_beside(folder / TRAINING_NAME, list) or []
    recipe = read_beside(folder / RECIPE_NAME, dict)
    evaluation = read_beside(folder / EVALUATION_NAME, dict)
    return RetexParts(
        config, model, recovery, heads, errors, signatures, pretrained, folder, history, recipe, evaluation
    )


def read_beside(path: Path, kind: type) -> Any:
    """What an optional YAML or JSON file holds; None where there is no such file."""
    if not path.is_file():
        return None
    is_yaml = path.suffix == ".yaml"
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ArtifactError(f"{path} is not valid {'YAML' if is_yaml else 'JSON'}: {first_line(error)}.") from None
    if not isinstance(value, kind):
        raise ArtifactError(f"{path} must hold a {kind.__name__}, not a {type(value).__name__}.")
    return value


def _load_model(folder: Path, library: str, load_options: dict[str, Any]) -> nn.Module:
    try:
        model = LIBRARIES[library].load(folder, **load_options)
    except CheckpointError as error:
        raise ArtifactError(f"{folder}: the merged model does not load: {error}") from error
    return model.requires_grad_(False)


def _open(folder: Path, stem: str) -> Source:
    try:
        return open_files(weight_files(folder, (stem,), suffixes=(".safetensors",)), stem)
    except CheckpointError as error:
        raise ArtifactError(str(error)) from None


def _check_tensors(
    source: Source,
    expected: Mapping[str, tuple[int, ...]],
    where: str,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Names and shapes must be those expected, dtypes too where given; else any floating-point one will do."""
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
        if dtypes is None and not info.dtype.is_floating_point:
            raise ArtifactError(f"{where}: tensor {name!r} has dtype {info.dtype}, expected floating point.")
        if dtypes is not None and info.dtype != dtypes[name]:
            raise ArtifactError(
                f"{where}: tensor {name!r} has dtype {info.dtype}, but {CONFIG_NAME} asks for {dtypes[name]}."
            )


def read_recovery(
    folder: Path, section: dict[str, Any], config: RetexConfig
) -> tuple[RecoveryModule, dict[str, float]]:
    """The recovery module over a folder's mapped files, and the relative error of every parameter."""
    entries = {name: _Entry.from_json(folder, name, e) for name, e in _dict(section, "recovery", folder).items()}
    for name, entry in entries.items():
        if entry.generator not in entries or entries[entry.generator].layout != entry.layout:
            raise ArtifactError(f"{folder / CONFIG_NAME}: {name!r} cannot share the generator of {entry.generator!r}.")
    source = _open(folder, RECOVERY)
    embedding_dim = config.task_embedding_dim or len(config.tasks)
    parts = {
        name: stored_parts(entry.layout, embedding_dim, f"{name}.bias" in source.infos, config.recovery_dtype)
        for name, entry in entries.items()
        if entry.generator == name
    }
    expected = {TASK_EMBEDDING: ((len(config.tasks), embedding_dim), torch.float32)}
    for name, stored in parts.items():
        expected |= {f"{name}.{part}": info for part, info in stored.items()}
    for name, entry in entries.items():
        if entry.scaled:
            scale = {"weight": ((embedding_dim,), torch.float32), "bias": ((), torch.float32)}
            expected |= {f"{name}.scale.{part}": info for part, info in scale.items()}
    shapes, dtypes = ({name: info[index] for name, info in expected.items()} for index in (0, 1))
    _check_tensors(source, shapes, f"{folder / RECOVERY}*.safetensors", dtypes)

    # Tensors stay mapped to the file: of the tasks that are not used, nothing is ever read.
    made = {
        name: OffsetGenerator.of_parts(entries[name].layout, {p: source.read(f"{name}.{p}") for p in stored})
        for name, stored in parts.items()
    }
    generators = {name: made[entry.generator] for name, entry in entries.items()}
    scales = {
        name: ScaleGenerator(source.read(f"{name}.scale.weight"), source.read(f"{name}.scale.bias"))
        for name, entry in entries.items()
        if entry.scaled
    }
    errors = {name: entry.error for name, entry in entries.items()}
    return RecoveryModule(source.read(TASK_EMBEDDING), generators, scales), errors


@dataclass(frozen=True)
class _Entry:
    """What the configuration says of one recovered parameter."""

    layout: Layout
    generator: str
    scaled: bool
    error: float | None

    @classmethod
    def from_json(cls, folder: Path, name: str, values: Any) -> _Entry:
        try:
            fields = {"generator": name, "scaled": False, "error": None, **values}
            own = {key: fields.pop(key) for key in ("generator", "scaled", "error")}
            layout = Layout(**{key: tuple(value) if key == "shape" else value for key, value in fields.items()})
            valid = _is_valid(layout) and isinstance(own["generator"], str) and isinstance(own["scaled"], bool)
        except (TypeError, AttributeError):
            valid = False
        if not valid:
            raise ArtifactError(f"{folder / CONFIG_NAME}: the recovery of {name!r} is described by {values!r}.")
        return cls(layout, **own)


def _is_valid(layout: Layout) -> bool:
    sizes = (*layout.shape, layout.batch, layout.rows, layout.columns, layout.rank, layout.inner_rank or 1)
    if layout.kind not in KINDS or layout.order not in ORDERS:
        return False
    if not all(isinstance(size, int) and 0 <= size < 2**40 for size in sizes):
        return False
    if layout.kind != MATRIX:
        return True
    return torch.Size(layout.shape).numel() == torch.Size(layout.stacked_shape).numel() and layout.rank > 0


def _read_heads(folder: Path, section: dict[str, Any], config: RetexConfig) -> dict[str, dict[str, Tensor]]:
    listed = _dict(section, "heads", folder)
    if set(listed) != set(config.tasks):
        raise ArtifactError(
            f"{folder / CONFIG_NAME} lists heads for {sorted(listed)}, but its tasks are {config.tasks}."
        )
    expected = {head_key(task, name): shape for task in listed for name, shape in _dict(listed, task, folder).items()}
    if not expected:
        return {task: {} for task in config.tasks}
    source = _open(folder, HEADS)
    _check_tensors(source, expected, f"{folder / HEADS}.safetensors")
    return {task: {name: source.read(head_key(task, name)).clone() for name in listed[task]} for task in config.tasks}


def _read_signatures(
    folder: Path, section: dict[str, Any], config: RetexConfig
) -> Signatures | WeightSignatures | None:
    if section.get("signatures") is None:
        return None
    described = _dict(section, "signatures", folder)
    from_weights = config.signatures == "weights"
    tasks, layer, rank, width = (len(config.tasks), *(described.get(key) for key in ("feature_layer", "rank", "width")))
    sizes_given = isinstance(rank, int) and isinstance(width, int)
    if not isinstance(layer, str) or not (from_weights or sizes_given):
        raise ArtifactError(f"{folder / CONFIG_NAME}: the signatures are described by {described!r}.")
    source = _open(folder, SIGNATURES)
    expected = {"centre": (tasks,)} if from_weights else {"mean": (tasks, width), "basis": (tasks, rank, width)}
    _check_tensors(source, expected, f"{folder / SIGNATURES}.safetensors")
    tensors = [source.read(name).clone() for name in expected]
    return (WeightSignatures if from_weights else Signatures)(*tensors, layer)


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
    if getattr(model, "is_quantized", False):
        # Quantised layers keep other tensors under other names, as their library sees fit.
        shapes = {name: shape for name, shape in shapes.items() if name in tensors and is_plain(tensors[name])}
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
