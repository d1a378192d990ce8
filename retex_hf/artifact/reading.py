"""Reading of an artifact; nothing is trusted before it has been checked against the configuration."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..backends import LIBRARIES, Backend, hf_transformers, library_of, plain_modules, sentence_modules
from ..checkpoints import manifest, take_inventory
from ..checkpoints.folder_files import FolderFiles
from ..checkpoints.sources import Source, TensorInfo
from ..checkpoints.tokenizer_files import is_side_file, side_files, task_tokenizer
from ..config import CONFIG_NAME, RetexConfig
from ..errors import ArtifactError, CheckpointError, brief, shorten
from ..execution import beside_own
from ..recovery import ComponentGenerator, ComponentLayout, Layout, OffsetGenerator, RecoveryModule, ScaleGenerator
from ..recovery.quantize import stored_parts
from ..routing import Signatures, WeightSignatures, stored_shapes
from ..utils.devices import one_device
from ..utils.module_tensors import resize_tensors
from ..utils.strict_files import check_links, is_count, parse_json, parse_yaml, read_file
from ..utils.tensor_bank import TensorBank
from .files import ArtifactFiles
from .recipe_record import RecipeRecord
from .schema import (
    EVALUATION_NAME,
    HEADS,
    OWN_FILES,
    PRETRAINED,
    RECIPE_NAME,
    RECOVERY,
    ROWS,
    SIGNATURES,
    TAKEN_FOR_MODELS,
    TASK_EMBEDDING,
    TRAINING_NAME,
    Entry,
    head_key,
    read_description,
    read_manifest,
)
from .state import RetexParts, bank_of_base

# Attempts at reading a folder that other processes keep replacing.
ATTEMPTS = 10


def read(folder: Path, *, verify: bool = True, check_finite: bool = False, **load_options: Any) -> RetexParts:
    """Read an artifact, checking everything before the model is made.

    Files are opened one after the other, by name. If another process replaces the folder meanwhile, it is read again,
    because its files would belong to two artifacts.

    Args:
        folder: The artifact.
        verify: Compare the contents of all files with their records. Files are read once and the verified bytes are
            used, whatever happens to the files afterwards. Otherwise weights are memory-mapped.
        check_finite: Check every number.
        load_options: Options for the library of the merged model.
    """
    for _ in range(ATTEMPTS):
        before = _generation(folder)
        try:
            files, parts = _read_parts(folder, verify, check_finite, keep=True)
            library = library_of(parts.model)
            options = {**load_options, **_sized_maker(load_options.get("make_model"), parts)}
            model = _load_model(folder, library, files, options)
            _check_layers(folder, model, parts)
        except Exception:  # readers may raise anything while a folder is being replaced
            if before is None or _generation(folder) == before:
                raise
            continue
        if _generation(folder) == before:
            heads = TensorBank({task: beside_own(model, head) for task, head in parts.heads.items()})
            rows = TensorBank({task: beside_own(model, own) for task, own in parts.rows.items()})
            recipe = _recipe_of(parts, files.weights(library.WEIGHTS_STEM), load_options.get("dtype"))
            return dataclasses.replace(parts, model=model, heads=heads, rows=rows, recipe=recipe)
    raise ArtifactError(
        f"{folder} was replaced {ATTEMPTS} times while it was read: load it when it is no longer being saved."
    )


def _recipe_of(parts: RetexParts, stored: Source, dtype: Any) -> RecipeRecord | None:
    """Return the recipe of the loaded model; note in it a dtype other than that of most stored numbers."""
    numbers: Counter[torch.dtype] = Counter()
    for info in stored.infos.values():
        if info.dtype.is_floating_point:
            numbers[info.dtype] += prod(info.shape)
    if parts.recipe is None or not isinstance(dtype, torch.dtype) or not numbers:
        return parts.recipe
    return parts.recipe if numbers.most_common(1)[0][0] == dtype else parts.recipe.cast_to(dtype)


def _generation(folder: Path) -> tuple[int, int] | None:
    """Return an identifier of a folder's configuration file, which every save writes anew."""
    try:
        found = (folder / CONFIG_NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_parts(folder: Path, *, verify: bool = True, check_finite: bool = False) -> tuple[RetexParts, ArtifactFiles]:
    """Read and check an artifact with the merged model on the meta device. Weights stay memory-mapped."""
    files, parts = _read_parts(folder, verify, check_finite, keep=False)
    return parts, files


def _read_parts(folder: Path, verify: bool, check_finite: bool, *, keep: bool) -> tuple[ArtifactFiles, RetexParts]:
    config, section = read_description(folder, verify=verify)
    library = LIBRARIES[section["library"]]
    files, _ = open_artifact(folder, section, verify=verify, keep=keep)
    recovery, errors = read_recovery(files, section, config)
    heads = _read_heads(files, section, config)
    rows = _read_rows(files, section, config)
    signatures = _read_signatures(files, section, config)
    pretrained = _read_pretrained(files) if config.feature_source == "pretrained" else {}
    model = _plan_model(files, library)
    _check_fits(folder, model, recovery, heads, pretrained)
    _check_vocabulary(folder, model, config, rows, heads)
    _check_labels(folder, model, config, heads)
    history = read_beside(files, TRAINING_NAME, list) or []
    if not all(isinstance(entry, dict) for entry in history):
        raise ArtifactError(f"{folder / TRAINING_NAME} must hold a list of records.")
    recipe = read_beside(files, RECIPE_NAME, dict)
    evaluation = read_beside(files, EVALUATION_NAME, dict)
    home = folder.absolute()  # absolute, because the working directory may change before tokenizers are copied
    own = [task for task, described in config.vocabulary.items() if described["tokenizer"]]
    parts = RetexParts(
        config=config,
        model=model,
        recovery=recovery,
        heads=TensorBank(heads),
        errors=errors,
        signatures=signatures,
        pretrained=bank_of_base(pretrained),
        side_folder=home,
        history=history,
        recipe=None if recipe is None else RecipeRecord(recipe),
        evaluation=evaluation,
        unverified=not verify,
        rows=TensorBank(rows),
        tokenizers={task: home / task_tokenizer(task) for task in own},
    )
    if library is not plain_modules:  # the modules of those are known only when they are made
        _check_layers(folder, model, parts)
    if check_finite:
        for source in files.sources():
            check_numbers(source)
    return files, parts


def open_artifact(
    folder: Path, section: dict[str, Any], *, verify: bool, keep: bool = False
) -> tuple[ArtifactFiles, dict[str, manifest.FileRecord]]:
    """Open the files that an artifact records, and refuse unrecorded ones that would be read as part of it."""
    records = read_manifest(folder, section)
    manifest.check_strays(folder, records, (*TAKEN_FOR_MODELS, *(OWN_FILES if verify else ())))
    return ArtifactFiles.open(folder, records, verify=verify, keep=keep), records


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer and processor files of a folder, which may be an artifact.

    Those of an artifact must be as recorded: a changed or added file would change the model's inputs.
    """
    files = list(side_files(folder))
    check_links(files, folder, ArtifactError)
    there = {file.relative_to(folder).as_posix(): file for file in files}
    records = recorded_side_files(folder)
    if records is None:
        return {name: read_file(file, ArtifactError) for name, file in there.items()}
    if stray := sorted(there.keys() - records.keys()):
        raise ArtifactError(
            f"{folder / stray[0]} would be read with the artifact, but {CONFIG_NAME} does not list it: remove it, or, "
            f"if it is intentional, record it with `retex verify {folder} --record`."
        )
    return {name: manifest.read_verified(folder, name, found) for name, found in records.items()}


def read_config_files(folder: Path, name: str) -> FolderFiles:
    """Return the configuration of a folder's model; verify that of an artifact."""
    if not (folder / CONFIG_NAME).exists():
        return FolderFiles(folder)
    _, section = read_description(folder)
    records = read_manifest(folder, section)
    return FolderFiles(folder, {name: manifest.read_verified(folder, name, records[name])} if name in records else {})


def recorded_side_files(folder: Path) -> dict[str, manifest.FileRecord] | None:
    """Return the records of an artifact's tokenizer and processor files; None if the folder is no artifact."""
    if not (folder / CONFIG_NAME).exists():
        return None
    _, section = read_description(folder)
    return {name: found for name, found in read_manifest(folder, section).items() if is_side_file(name)}


def check_numbers(source: Source) -> None:
    """Refuse weights that hold NaN or infinite numbers."""
    for name in source.infos:
        tensor = source.read(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(f"{source.label}: tensor {name!r} holds NaN or infinite numbers.")


def read_beside(files: ArtifactFiles, name: str, kind: type) -> Any:
    """Return the content of an optional YAML or JSON file; None if it does not exist."""
    if not files.has(name):
        return None
    path = str(files.folder / name)
    try:
        text = files.read(name, ArtifactError).decode()
    except UnicodeDecodeError:
        raise ArtifactError(f"{path} is not text in UTF-8.") from None
    if name.endswith(".yaml"):
        return parse_yaml(text, path, ArtifactError, kind=kind)
    return parse_json(text, path, ArtifactError, kind=kind, infinite=True)  # a measurement may be NaN


def _plan_model(files: ArtifactFiles, library: Backend) -> nn.Module:
    source = files.weights(library.WEIGHTS_STEM)
    try:
        if library is hf_transformers:
            sentence_modules.read_modules(files)
        return library.plan(files.folder, source, files=files)
    except CheckpointError as error:
        raise ArtifactError(f"{files.folder}: the merged model does not load: {error}") from error


def _load_model(folder: Path, library: Backend, files: ArtifactFiles, load_options: dict[str, Any]) -> nn.Module:
    try:
        weights = files.weights(library.WEIGHTS_STEM)
        # Weights in memory belong to this model alone; memory-mapped ones would change with their file.
        options = {"files": files, "copy": not files.tensors, **load_options}
        if library is hf_transformers:
            model = library.load(folder, weights, **options)
            sentence_modules.attach(model, sentence_modules.read_modules(files))
        else:
            device = one_device(options.pop("device_map", None))
            model = library.load(folder, weights, **options).to(device)
    except CheckpointError as error:
        raise ArtifactError(f"{folder}: the merged model does not load: {error}") from error
    return model.requires_grad_(False)


def _read_pretrained(files: ArtifactFiles) -> dict[str, Tensor]:
    source = files.weights(PRETRAINED)
    _check_tensors(source, {name: info.shape for name, info in source.infos.items()})
    return {name: source.read(name) for name in source.infos}


def _check_tensors(
    source: Source,
    expected: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Refuse names, shapes or dtypes other than expected; without `dtypes`, accept any floating-point dtype."""
    where = source.label
    missing = sorted(set(expected) - set(source.infos))
    if missing:
        raise ArtifactError(f"{where} lacks {shorten(missing)}, which {CONFIG_NAME} asks for.")
    foreign = sorted(set(source.infos) - set(expected))
    if foreign:
        raise ArtifactError(f"{where} holds {shorten(foreign)}, which {CONFIG_NAME} does not list.")
    for name, shape in expected.items():
        info = source.infos[name]
        if info.shape != tuple(shape):
            raise ArtifactError(
                f"{where}: tensor {name!r} has shape {info.shape}, but {CONFIG_NAME} asks for {tuple(shape)}."
            )
        if dtypes is None and not info.dtype.is_floating_point:
            raise ArtifactError(f"{where}: tensor {name!r} has dtype {info.dtype}, expected floating point.")
        if dtypes is not None and info.dtype != dtypes[name]:
            raise ArtifactError(
                f"{where}: tensor {name!r} has dtype {info.dtype}, but {CONFIG_NAME} asks for {dtypes[name]}."
            )


def read_recovery(
    files: ArtifactFiles, section: dict[str, Any], config: RetexConfig
) -> tuple[RecoveryModule, dict[str, float | None]]:
    """Return the recovery module over an artifact's weights, and the relative error of every parameter."""
    folder = files.folder
    entries = {name: Entry.from_json(folder, name, e) for name, e in _dict(section, "recovery", folder).items()}
    for name, entry in entries.items():
        if isinstance(entry.layout, ComponentLayout) != (config.storage is not None):
            kind = "a budget of storage" if config.storage is None else "one rank"
            raise ArtifactError(f"{folder / CONFIG_NAME}: {name!r} is stored as by {kind}, which its settings are not.")
        if isinstance(entry.layout, ComponentLayout) and entry.layout.num_tasks != len(config.tasks):
            raise ArtifactError(
                f"{folder / CONFIG_NAME}: {name!r} has components of {entry.layout.num_tasks} tasks, but there are "
                f"{len(config.tasks)}."
            )
        if entry.generator not in entries or entries[entry.generator].layout != entry.layout:
            raise ArtifactError(f"{folder / CONFIG_NAME}: {name!r} cannot share the generator of {entry.generator!r}.")
    source = files.weights(RECOVERY)
    embedding_dim = config.task_embedding_dim or len(config.tasks)
    parts = {
        name: _stored_parts(entry.layout, config, f"{name}.bias" in source.infos)
        for name, entry in entries.items()
        if entry.generator == name
    }
    expected = {TASK_EMBEDDING: TensorInfo((len(config.tasks), embedding_dim), torch.float32)}
    for name, stored in parts.items():
        expected |= {f"{name}.{part}": TensorInfo(*info) for part, info in stored.items()}
    for name, entry in entries.items():
        if entry.scaled:
            expected[f"{name}.scale.weight"] = TensorInfo((embedding_dim,), torch.float32)
            expected[f"{name}.scale.bias"] = TensorInfo((), torch.float32)
    shapes = {name: info.shape for name, info in expected.items()}
    _check_tensors(source, shapes, {name: info.dtype for name, info in expected.items()})

    # Do not copy tensors: of a memory-mapped file, tasks that are not used are never read.
    made = {
        name: _generator(folder, name, entries[name].layout, {p: source.read(f"{name}.{p}") for p in stored})
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


def _stored_parts(
    layout: Layout | ComponentLayout, config: RetexConfig, bias: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    if isinstance(layout, ComponentLayout):
        return layout.stored
    return stored_parts(layout, config.task_embedding_dim or len(config.tasks), bias, config.recovery_dtype)


def _generator(
    folder: Path, name: str, layout: Layout | ComponentLayout, parts: Mapping[str, Tensor]
) -> OffsetGenerator | ComponentGenerator:
    if isinstance(layout, Layout):
        return OffsetGenerator.of_parts(layout, parts)
    generator = ComponentGenerator(layout, parts["codes"], parts["scales"], parts.get("index"))
    if generator.index is not None and len(generator.index):
        low, high = (int(value) for value in generator.index.aminmax())
        if low < 0 or high >= layout.rank:
            raise ArtifactError(
                f"{folder}: {name!r} has components of direction {high if low >= 0 else low}, of {layout.rank}."
            )
    return generator


def _read_heads(files: ArtifactFiles, section: dict[str, Any], config: RetexConfig) -> dict[str, dict[str, Tensor]]:
    folder, listed = files.folder, _dict(section, "heads", files.folder)
    if set(listed) != set(config.tasks):
        raise ArtifactError(
            f"{folder / CONFIG_NAME} lists heads for {sorted(listed)}, but its tasks are {config.tasks}."
        )
    return _read_groups(files, listed, config.tasks, HEADS, "head")


def _read_rows(files: ArtifactFiles, section: dict[str, Any], config: RetexConfig) -> dict[str, dict[str, Tensor]]:
    folder = files.folder
    listed = _dict(section, "rows", folder) if "rows" in section else {}
    if any(found and set(found) != set(config.tasks) for found in (listed, config.vocabulary)) or (
        listed and not config.vocabulary
    ):
        raise ArtifactError(
            f"{folder / CONFIG_NAME} lists rows for {sorted(listed)} and vocabularies for {sorted(config.vocabulary)}, "
            f"but its tasks are {config.tasks}."
        )
    return _read_groups(files, listed, list(listed), ROWS, "rows")


def _read_groups(
    files: ArtifactFiles, listed: dict[str, Any], tasks: list[str], stem: str, what: str
) -> dict[str, dict[str, Tensor]]:
    """Read each task's own tensors from one file, in the listed shapes."""
    folder = files.folder
    expected = {head_key(task, name): shape for task in listed for name, shape in _dict(listed, task, folder).items()}
    for key, shape in expected.items():
        if not isinstance(shape, list) or not all(is_count(size) for size in shape):
            raise ArtifactError(f"{folder / CONFIG_NAME}: the {what} {key!r} has the invalid shape {brief(shape)}.")
    if not expected:
        return {task: {} for task in tasks}
    source = files.weights(stem)
    _check_tensors(source, expected)
    return {task: {name: source.read(head_key(task, name)).clone() for name in listed[task]} for task in tasks}


def _read_signatures(
    files: ArtifactFiles, section: dict[str, Any], config: RetexConfig
) -> Signatures | WeightSignatures | None:
    folder = files.folder
    if section.get("signatures") is None:
        if config.trunk is not None:
            raise ArtifactError(f"{folder / CONFIG_NAME} describes a shared trunk, but no signatures that lead to it.")
        return None
    described = _dict(section, "signatures", folder)
    tasks, layer = len(config.tasks), cast("Any", described.get("feature_layer"))
    from_weights = config.signatures == "weights"
    shapes = {"lead": (tasks,)} if from_weights else stored_shapes(described, tasks)
    aligned = not from_weights and described.get("trunk") is not None
    if not isinstance(layer, str) or shapes is None or aligned != (config.trunk is not None):
        raise ArtifactError(f"{folder / CONFIG_NAME}: the signatures are not valid: {described!r}.")
    source = files.weights(SIGNATURES)
    _check_tensors(source, shapes)
    tensors = {name: source.read(name).clone() for name in shapes}
    if from_weights:
        return WeightSignatures(tensors["lead"], layer)
    return Signatures.of_tensors(tensors, described)


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
    """Refuse recovery tensors, heads or base tensors that do not fit the merged model."""
    tensors = model.state_dict()
    recovered = {name: recovery[name].layout.shape for name in recovery}
    of_base = {name: tuple(tensor.shape) for name, tensor in pretrained.items()}
    for stem, what, shapes in ((RECOVERY, "recovery", recovered), (PRETRAINED, "copy of the base", of_base)):
        for name, shape in shapes.items():
            if name not in tensors:
                raise ArtifactError(f"{folder}: the merged model has no tensor {name!r}, which {stem}* has.")
            if tuple(tensors[name].shape) != shape:
                raise ArtifactError(
                    f"{folder}: tensor {name!r} of the merged model has shape {tuple(tensors[name].shape)}, "
                    f"but its {what} has {shape}."
                )
    for task, head in heads.items():
        for name, tensor in head.items():
            if name not in tensors:
                raise ArtifactError(f"{folder}: the merged model has no tensor {name!r}, a head of task {task!r}.")
            if tensor.ndim != tensors[name].ndim:
                raise ArtifactError(
                    f"{folder}: tensor {name!r} has {tensors[name].ndim} axes in the merged model, but {tensor.ndim} "
                    f"in the head of task {task!r}."
                )


def _check_layers(folder: Path, model: nn.Module, parts: RetexParts) -> None:
    """Refuse signatures of modules, and a shared trunk of modules and tensors, that the merged model does not have."""
    signatures, trunk = parts.signatures, parts.config.trunk
    read = signatures.space.layers if isinstance(signatures, Signatures) else ()
    layers = [*(read or (() if signatures is None else (signatures.feature_layer,)))]
    modules, tensors = dict(model.named_modules()), model.state_dict()
    for layer in layers:
        if layer not in modules:
            raise ArtifactError(
                f"{folder / CONFIG_NAME}: the merged model has no module {brief(layer)}, whose features the signatures "
                "describe."
            )
    if trunk is not None and trunk["junction"] not in modules:
        raise ArtifactError(
            f"{folder / CONFIG_NAME}: the merged model has no module {brief(trunk['junction'])}, the end of its shared "
            "trunk."
        )
    for name in () if trunk is None else trunk["parameters"]:
        if name not in tensors:
            raise ArtifactError(f"{folder / CONFIG_NAME}: the merged model has no tensor {brief(name)} of its trunk.")


def _sized_maker(make_model: Any, parts: RetexParts) -> dict[str, Any]:
    """Wrap the caller's function so that heads get the stored size, which is that of the first task."""
    if not callable(make_model) or isinstance(make_model, nn.Module):
        return {} if make_model is None else {"make_model": make_model}
    head = parts.heads[parts.config.tasks[0]]

    def make() -> Any:
        model = make_model()
        if not isinstance(model, nn.Module):
            return model  # refused where its weights are loaded
        known = model.state_dict()
        resize_tensors(
            model,
            {
                name: tuple(tensor.shape)
                for name, tensor in head.items()
                if name in known and known[name].shape[1:] == tensor.shape[1:]
            },
        )
        return model

    return {"make_model": make}


def _check_vocabulary(
    folder: Path,
    model: nn.Module,
    config: RetexConfig,
    rows: Mapping[str, Mapping[str, Tensor]],
    heads: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Refuse rows that do not match the tasks' vocabularies.

    Every task must have the rows that its vocabulary has beyond the merged model's, in the same tensors. Without such
    rows, its vocabulary must have the size of its own tables, or of the merged model's.
    """
    if not config.vocabulary:
        return
    library, tensors = library_of(model), model.state_dict()
    known = library.vocabulary_names(model, take_inventory(model))
    for task, described in config.vocabulary.items() if not rows else ():
        size = len(heads[task].get(known[0], tensors[known[0]])) if known else None
        if described["size"] != size:
            raise ArtifactError(
                f"{folder / CONFIG_NAME} gives task {task!r} {described['size']} tokens, but its tensors have "
                f"{size or 'no'} rows for tokens."
            )
    names = set(next(iter(rows.values()), ()))
    for task, own in rows.items():
        size = config.vocabulary[task]["size"]
        if set(own) != names or not names or not names <= set(known):
            raise ArtifactError(
                f"{folder / CONFIG_NAME} lists rows of {sorted(own)} for task {task!r}; those with a row per token are "
                f"{known}."
            )
        for name, tensor in own.items():
            expected = (max(0, size - len(tensors[name])), *tensors[name].shape[1:])
            if tuple(tensor.shape) != expected:
                raise ArtifactError(
                    f"{folder}: task {task!r} has rows of shape {tuple(tensor.shape)} in {name!r}, but its {size} "
                    f"tokens ask for {expected}."
                )


def _check_labels(
    folder: Path, model: nn.Module, config: RetexConfig, heads: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Refuse labels that do not match the classes of the heads one to one."""
    if config.labels and set(config.labels) != set(config.tasks):
        raise ArtifactError(
            f"{folder / CONFIG_NAME} has labels for {sorted(config.labels)}, but its tasks are {config.tasks}."
        )
    width, shapes = library_of(model).num_labels(model), {name: t.shape for name, t in model.state_dict().items()}
    first = heads[config.tasks[0]]
    outputs = [name for name in first if shapes[name] and shapes[name][0] == width]
    for task, described in config.labels.items():
        classes = len(heads[task][outputs[-1]]) if outputs and outputs[-1] in heads[task] else None
        if classes != len(described["id2label"]):
            raise ArtifactError(
                f"{folder / CONFIG_NAME} names {len(described['id2label'])} labels of task {task!r}, whose head has "
                f"{classes or 'no'} classes."
            )
