"""From a base and experts to a merged model and its recovery module, parameter by parameter."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm.auto import tqdm

from . import artifact
from .calibration import Calibration, CalibrationData, read_calibration
from .checkpoints import (
    AdapterSource,
    Checkpoint,
    ExpertSet,
    Inventory,
    Source,
    TensorInfo,
    align_source,
    check_experts,
    check_related,
    is_open_clip,
    open_source,
    read_finite,
    take_inventory,
)
from .config import RetexConfig, matches
from .errors import ArtifactError, CheckpointError, ConfigError
from .estimate import BuildEstimate, estimate_build
from .expert_weights import ExpertWeights
from .folders import workshop, workshop_of
from .libraries import hf_transformers, library_of, openclip
from .merged import FileTensors, MergedTensors, ModelTensors, copy_on_meta, resize_tensors
from .merging import Merger, check_calibration, get_merger, learn_options, merge_methods, options_to_learn
from .parts import RetexParts
from .readout import Classifier, Readout
from .recipe import PACKAGES, describe_build
from .recovery import History, Targets, TrainingConfig, plan_layouts, relative_errors, solve_all, train
from .recovery.processes import run_dealt
from .side_files import find_side_folder, warn_of_other_tokenizers
from .store import FolderStore, MemoryStore, Store, tensor_bytes

MERGING, LEARNING = "Merging", "Learning the merge"
SOLVERS = ("closed_form", "adam")


@dataclass
class Blueprint:
    """All that is known before a tensor is merged.

    `model` is the merged model to be: loaded, or on the meta device where the result goes to disk. Its heads have the
    shapes and the labels of the first task, because the merged model must also stand alone, and its own library knows
    one head only.
    """

    config: RetexConfig
    base: Source
    sources: dict[str, Source]
    model: nn.Module
    library: ModuleType
    inventory: Inventory
    experts: ExpertSet
    options: dict[str, Any]
    given: dict[str, Any]

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Tensors of the merged model, tied ones once."""
        tensors = self.model.state_dict()
        names = (*self.inventory.shapes, *self.inventory.integers)
        return {name: TensorInfo(tuple(tensors[name].shape), tensors[name].dtype) for name in names}

    @property
    def heads(self) -> dict[str, dict[str, TensorInfo]]:
        """Tensors that each task keeps whole."""
        tensors = self.model.state_dict()
        return {
            task: {name: TensorInfo(expert.shape(name), tensors[name].dtype) for name in self.experts.heads}
            for task, expert in self.experts.experts.items()
        }

    def estimate(self) -> BuildEstimate:
        """What building to disk will need."""
        size = sum(tensor_bytes(info) for source in self.sources.values() for info in source.infos.values())
        vectors = 0
        if _merge_checkpoint(self.config) is None and options_to_learn(*_merge_method(self.config)):
            # The experts' own, and trimmed copies of them.
            vectors = 2 * len(self.sources)
        return estimate_build(self.config, self.infos, self.heads, self.inventory.convolutions, size, vectors)

    def recipe(self, solver: str, training: TrainingConfig | None) -> dict[str, Any] | None:
        """What another build of the same needs, see `describe_build`."""
        opened = [
            (self.given["base"], self.base),
            *zip(self.given["experts"].values(), self.sources.values(), strict=True),
        ]
        revisions = {spec: source.provenance.get("revision") for spec, source in opened if isinstance(spec, str)}
        return describe_build(**self.given, config=self.config, revisions=revisions, solver=solver, training=training)

    def identity(self) -> dict[str, Any]:
        """What the result depends on; an interrupted build of another identity is not continued."""
        sources = {"base": self.base, **{f"expert {task}": source for task, source in self.sources.items()}}
        if (merge := _merge_checkpoint(self.config)) is not None:
            sources["merge"] = open_source(merge, "the merged checkpoint", **self.options)
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "config": self.config.to_dict(),
            "model": {name: [list(info.shape), str(info.dtype)] for name, info in self.infos.items()},
            "sources": {label: source.identity() for label, source in sources.items()},
        }


def prepare(
    base: Any,
    experts: Mapping[str, Any],
    config: RetexConfig,
    *,
    on_meta: bool = False,
    model_config: str | dict[str, Any] | None = None,
    check_base: bool = True,
    token: str | None = None,
    cache_dir: str | None = None,
) -> Blueprint:
    """Open base and experts and check that they fit. `on_meta`: the merged model will be on disk, not in memory."""
    tasks = check_tasks(experts)
    options = {"token": token, "cache_dir": cache_dir}
    base_source = open_source(base, "the base", **options)
    sources = {task: open_source(spec, f"expert {task!r}", adapters=True, **options) for task, spec in experts.items()}
    model = _load_skeleton(base_source, sources, model_config, on_meta)
    library = library_of(model)
    inventory = take_inventory(model)
    expert_set = _open_experts(model, library, inventory, base_source, sources, config)
    if check_base:
        check_related(expert_set, inventory.shapes)
    labels = read_labels(model, library, sources, expert_set)
    first = expert_set.experts[tasks[0]]
    resize_tensors(model, {name: first.shape(name) for name in expert_set.heads})
    if tasks[0] in labels:
        library.set_labels(model, labels[tasks[0]])
    filled = dataclasses.replace(
        config,
        tasks=tasks,
        base_model=base_source.provenance,
        experts={task: source.provenance for task, source in sources.items()},
        labels=labels,
    )
    given = {"base": base, "experts": experts, "model_config": model_config, "check_base": check_base}
    return Blueprint(filled, base_source, sources, model, library, inventory, expert_set, options, given)


def build(
    base: Any,
    experts: Mapping[str, Any],
    config: RetexConfig,
    *,
    solver: str = "closed_form",
    training: TrainingConfig | None = None,
    calibration: Mapping[str, Iterable[Any]] | None = None,
    readout: Readout | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = True,
    **prepare_options: Any,
) -> RetexParts:
    """Merge the experts and find the recovery of each, in memory. See `RetexModel.from_experts`."""
    _check_solver(solver, training)
    _check_calibration(config, calibration, readout)
    blueprint = prepare(base, experts, config, **prepare_options)
    store = MemoryStore()
    if calibration is not None:
        data = read_calibration(calibration, readout or Classifier(), blueprint.model, list(blueprint.sources))
        blueprint = _learn_merge(blueprint, data, lambda: blueprint, store, accelerator, progress)
    merged = ModelTensors(blueprint.model, blueprint.inventory)
    return _construct(blueprint, merged, store, solver, training, accelerator, progress)


def build_folder(
    base: Any,
    experts: Mapping[str, Any],
    config: RetexConfig,
    output_dir: str | Path,
    *,
    solver: str = "closed_form",
    training: TrainingConfig | None = None,
    calibration: Mapping[str, Iterable[Any]] | None = None,
    readout: Readout | None = None,
    accelerator: Accelerator | None = None,
    max_shard_size: str | int = "5GB",
    resume: bool = True,
    progress: bool = True,
    **prepare_options: Any,
) -> None:
    """Merge the experts and find the recovery of each, parameter by parameter, straight into a folder.

    The folder is the one that building in memory and saving would give, tensor by tensor. Memory does not grow with the
    model's depth, but with its largest tensor. It is built beside `output_dir` and moved into place at the end. Killed
    and started again, the build continues (unless `resume` is False, or something it depends on has changed).
    `solver="adam"` trains in memory, and saves. A merge that is learned from data is learned in memory, once.
    """
    _check_solver(solver, training)
    _check_calibration(config, calibration, readout)
    target = artifact.check_replaceable(Path(output_dir))
    _check_apart(target, base, experts, config)
    main = accelerator is None or accelerator.is_main_process
    if solver == "adam":
        parts = build(
            base,
            experts,
            config,
            solver=solver,
            training=training,
            calibration=calibration,
            readout=readout,
            accelerator=accelerator,
            progress=progress,
            **prepare_options,
        )
        if main:
            artifact.write(parts, target, max_shard_size)
        if accelerator is not None:
            accelerator.wait_for_everyone()
        return
    blueprint = prepare(base, experts, config, on_meta=True, **prepare_options)
    stems = artifact.stems(blueprint.library, max_shard_size)
    estimate = blueprint.estimate()
    if main:
        _check_disk(estimate, target)
        if progress:
            tqdm.write(f"Building {target.name}: {estimate}")
    identity = blueprint.identity() | {"stems": stems}
    data = None
    if calibration is not None:
        data = read_calibration(calibration, readout or Classifier(), blueprint.model, list(blueprint.sources))
        identity["calibration"] = data.fingerprint()
    with workshop(target, identity, resume, accelerator) as place:
        folder = place / "artifact"
        folder.mkdir(exist_ok=True)
        store = FolderStore(folder, place, stems, accelerator)
        if data is not None:
            # Learning runs the model, so it needs one that is not on the meta device.
            def loaded() -> Blueprint:
                return prepare(base, experts, config, **prepare_options)

            blueprint = _learn_merge(blueprint, data, loaded, store, accelerator, progress)
            store.sync()  # learning may have taken long
        merged = FileTensors(blueprint.model, blueprint.library, blueprint.inventory, store)
        parts = _construct(blueprint, merged, store, solver, training, accelerator, progress)
        store.sync()
        if accelerator is not None:
            accelerator.wait_for_everyone()
        if main:
            artifact.finish(parts, folder, store.files, target)


def _check_apart(target: Path, base: Any, experts: Mapping[str, Any], config: RetexConfig) -> None:
    """Refuse to build over what is built from: an artifact may itself be the base of another."""
    check_tasks(experts)
    sources = {"the base": base, "the merged checkpoint": _merge_checkpoint(config)}
    for label, spec in {**sources, **{f"expert {task!r}": expert for task, expert in experts.items()}}.items():
        if isinstance(spec, (str, Path)):
            path = Path(str(spec).removeprefix("local-dir:")).expanduser().resolve()
            if target in (path, path.parent if path.is_file() else path):
                raise ArtifactError(f"{target} is where {label} is: expected another folder for the artifact.")


def _check_solver(solver: str, training: TrainingConfig | None) -> None:
    if solver not in SOLVERS:
        raise ConfigError(f"solver must be one of {SOLVERS}, not {solver!r}.")
    if training is not None and solver != "adam":
        raise ConfigError('training= is for solver="adam"; the closed form has nothing to train.')


def _check_calibration(
    config: RetexConfig, calibration: Mapping[str, Iterable[Any]] | None, readout: Readout | None
) -> None:
    if readout is not None and calibration is None:
        raise ConfigError("readout= says how to read answers to calibration=, which is not given.")
    if _merge_checkpoint(config) is None:
        check_calibration(*_merge_method(config), calibration is not None)
    elif calibration is not None:
        raise ConfigError(
            f"calibration= is for merge methods that learn from data; {config.merge!r} is merged already."
        )


def _learn_merge(
    blueprint: Blueprint,
    data: CalibrationData,
    loaded: Callable[[], Blueprint],
    store: Store,
    accelerator: Accelerator | None,
    progress: bool,
) -> Blueprint:
    """The blueprint with the options of its merge found from data, by the main process or by an interrupted build.

    `loaded` gives the same blueprint around a model that can run.
    """
    method, options = _merge_method(blueprint.config)
    found = store.finished(LEARNING).get(method)
    if found is None and (accelerator is None or accelerator.is_main_process):
        weights = expert_weights_of(loaded())
        found = learn_options(method, options, Calibration(weights, data.readout, data.batches, progress))
        store.record(LEARNING, method, found)
    if accelerator is not None:
        found = broadcast_object_list([found])[0]
    config = dataclasses.replace(blueprint.config, merge={"method": method, **found})
    return dataclasses.replace(blueprint, config=config)


def _check_disk(estimate: BuildEstimate, target: Path) -> None:
    # What an interrupted build has taken already is either used or cleared away.
    taken = sum(file.stat().st_blocks * 512 for file in workshop_of(target).rglob("*") if file.is_file())
    free = shutil.disk_usage(target.parent).free + taken
    if free < estimate.disk:
        raise ArtifactError(
            f"{target} needs {estimate.disk / 1e9:.2f} GB of disk, but {target.parent} has only {free / 1e9:.2f} GB."
        )


def _construct(
    blueprint: Blueprint,
    merged: MergedTensors,
    store: Store,
    solver: str,
    training: TrainingConfig | None,
    accelerator: Accelerator | None,
    progress: bool,
) -> RetexParts:
    """Fill the merged model, the heads and the recovery, one parameter at a time."""
    config, experts, inventory = blueprint.config, blueprint.experts, blueprint.inventory
    heads = {(task, name): info for task, head in blueprint.heads.items() for name, info in head.items()}
    kept = {}
    if heads:
        stored = store.allocate("heads", {artifact.head_key(*key): info for key, info in heads.items()})
        kept = {key: stored[artifact.head_key(*key)] for key in heads}
    pretrained = {}
    if config.feature_source == "pretrained":
        infos = blueprint.infos
        pretrained = store.allocate("pretrained", {name: infos[name] for name in experts.names})
    changed = _merge(blueprint, merged, kept, pretrained, store, accelerator, progress)

    targets = Targets(
        experts,
        merged,
        names=[name for name in experts.names if changed[name] and not matches(name, config.exclude)],
        expert_numbers=sum(prod(inventory.shapes[name]) for name in experts.names),
    )
    layouts = plan_layouts(targets, config, inventory.convolutions, accelerator, progress, store)
    history = History()
    if solver == "closed_form":
        recovery, errors = solve_all(targets, layouts, config, accelerator, progress, store, config.recovery_dtype)
    else:
        recovery = train(targets, layouts, config, training or TrainingConfig(), accelerator, progress, history)
        recovery = recovery.stored_as(config.recovery_dtype)
        errors = relative_errors(targets, recovery)
    warn_of_other_tokenizers(blueprint.base, blueprint.sources)
    return RetexParts(
        dataclasses.replace(config, merge=_published_merge(config.merge)),
        blueprint.model,
        recovery,
        {task: {name: kept[task, name] for name in experts.heads} for task in experts.tasks},
        errors,
        pretrained=pretrained,
        side_folder=find_side_folder((blueprint.base, *blueprint.sources.values())),
        history=history.records,
        recipe=blueprint.recipe(solver, training),
    )


def _merge(
    blueprint: Blueprint,
    merged: MergedTensors,
    heads: Mapping[tuple[str, str], Tensor],
    pretrained: Mapping[str, Tensor],
    store: Store,
    accelerator: Accelerator | None,
    progress: bool,
) -> dict[str, bool]:
    """Fill every tensor of the merged model, the heads and the copy of the base, each expert's tensors read once.

    Returns in which of the merged tensors some expert differs from the merge.
    """
    experts = blueprint.experts
    own, integers = set(experts.heads), set(blueprint.inventory.integers)
    body = set(experts.names)
    # Opening a merger may take passes over all experts, so not where everything is merged already.
    finished = len(store.finished(MERGING)) == len(merged.units)
    merger = None if finished else _open_merger(blueprint)

    def work(unit: tuple[str, ...]) -> dict[str, bool]:
        values, tensors = {}, {}
        for name in unit:
            if name in body:
                base = read_finite(experts.base, name)
                tensors[name] = [read_finite(expert, name) for expert in experts.experts.values()]
                values[name] = merger(name, base, tensors[name])
                if name in pretrained:
                    pretrained[name].copy_(base)
            elif name in own:
                for task, expert in experts.experts.items():
                    heads[task, name].copy_(read_finite(expert, name))
                values[name] = heads[experts.tasks[0], name]
            elif name in integers:
                values[name] = _read_integer(experts, name)
        merged.write(values)
        differs = {}
        for name, found in tensors.items():
            # What is stored is the rounded merge, so differences are taken from that.
            stored = merged[name]
            differs[name] = any(not torch.equal(tensor.to(stored.dtype), stored) for tensor in found)
        return differs

    def written(unit: tuple[str, ...]) -> list[Tensor]:
        own_heads = [tensor for (_, name), tensor in heads.items() if name in unit]
        return [*merged.tensors_of(unit), *own_heads, *(pretrained[name] for name in unit if name in pretrained)]

    infos = blueprint.infos
    costs = {unit: float(sum(prod(infos[name].shape) for name in unit if name in infos)) for unit in merged.units}
    done = run_dealt(costs, work, accelerator, MERGING, progress, store=store, written=written)
    return {name: differs for facts in done.values() for name, differs in facts.items()}


def _read_integer(experts: ExpertSet, name: str) -> Tensor | None:
    """A counter or an index of the base, or of the first expert that has it; None where the model computes it."""
    for checkpoint in (experts.base, *experts.experts.values()):
        if name in checkpoint:
            return checkpoint.read(name)
    return None


def check_tasks(experts: Mapping[str, Any]) -> list[str]:
    """The names of the tasks; refuses what is no name."""
    if not isinstance(experts, Mapping) or not experts:
        raise ConfigError("experts must be a non-empty dict of task name to checkpoint.")
    for task in experts:
        if not isinstance(task, str) or not task or task != task.strip():
            raise ConfigError(f"A task name must be a non-empty string without surrounding spaces, not {task!r}.")
    return list(experts)


def _load_skeleton(
    base: Source, sources: dict[str, Source], model_config: str | dict[str, Any] | None, on_meta: bool
) -> nn.Module:
    """The model that will hold the merged weights: the experts' class, because that is the one with heads.

    Experts that are bare tensors have no class; then it is the base's. Where all are adapters, it is the base's
    configuration in the class that they are adapters of.
    """
    kinds = {task: kind for task, source in sources.items() if (kind := architecture_of(source, base)) is not None}
    for task, kind in kinds.items():
        first_task, first_kind = next(iter(kinds.items()))
        if kind != first_kind:
            raise CheckpointError(
                f"{sources[task].label} is a {kind}, but expert {first_task!r} is a {first_kind}: "
                "experts must share one architecture."
            )
    full = [sources[task] for task in kinds if not isinstance(sources[task], AdapterSource)]
    source, kind = (full[0], None) if full else (base, next(iter(kinds.values()), None))
    if source.model is not None and kind not in (None, type(source.model).__name__):
        model = hf_transformers.from_config(kind, source.model.config, source.model.dtype, on_meta)
    elif source.model is not None:
        model = (copy_on_meta(source.model) if on_meta else deepcopy(source.model)).eval()
    elif source.folder is not None:
        library = openclip if is_open_clip(source.folder) else hf_transformers
        # Whether all weights are there is checked below, with all the others.
        if kind not in (None, architecture_of(source, base)):
            config = hf_transformers.load_config(source.folder)
            model = hf_transformers.from_config(kind, config, config.dtype, on_meta)
        else:
            model = library.load_on_meta(source.folder) if on_meta else library.load(source.folder, strict=False)
    else:
        raise CheckpointError(
            "Bare tensors do not say which model they belong to: give the base as a folder, a Hub id or a module."
        )
    library = library_of(model)
    if library is openclip:
        openclip.describe(model, model_config, base.folder, base.model)
    return model.requires_grad_(False)


def architecture_of(source: Source, base: Source) -> str | None:
    """The class of a checkpoint's model, for an adapter on a base; None where nothing says it."""
    if isinstance(source, AdapterSource):
        if openclip.owns(base.model) or (base.folder is not None and is_open_clip(base.folder)):
            return None  # the base's own class, which is the only one
        config = getattr(base.model, "config", None)
        if base.folder is not None:
            config = hf_transformers.load_config(base.folder)
        return source.architecture(getattr(config, "model_type", None))
    if source.model is not None:
        return type(source.model).__name__
    if source.folder is None:
        return None
    return openclip.NAME if is_open_clip(source.folder) else hf_transformers.architecture(source.folder)


def _open_experts(
    model: nn.Module,
    library: ModuleType,
    inventory: Inventory,
    base: Source,
    sources: dict[str, Source],
    config: RetexConfig,
) -> ExpertSet:
    # What the base has beyond the experts (a pre-training head) is not used.
    base_entries, _ = library.align(model, base)
    base_checkpoint = Checkpoint.from_entries(base.label, base_entries, inventory)

    def align(source: Source) -> tuple[Checkpoint, list[str]]:
        entries, unexpected = align_source(library, model, source, base_entries)
        return Checkpoint.from_entries(source.label, entries, inventory), unexpected

    aligned = {task: align(source) for task, source in sources.items()}
    if config.heads == "auto":
        head_names = library.head_names(model, list(inventory.shapes))
    else:
        head_names = {name for name in inventory.shapes if matches(name, config.heads)}
    experts = check_experts(
        inventory,
        base_checkpoint,
        {task: checkpoint for task, (checkpoint, _) in aligned.items()},
        {task: unexpected for task, (_, unexpected) in aligned.items()},
        head_names,
    )
    for name in experts.names:
        if base_checkpoint.shape(name) != inventory.shapes[name]:
            raise CheckpointError(
                f"{base_checkpoint.label} and the experts: tensor {name!r} has shape {base_checkpoint.shape(name)}, "
                f"but the model's configuration asks for {inventory.shapes[name]}."
            )
    return experts


def _open_merger(blueprint: Blueprint) -> Merger:
    config, experts, inventory = blueprint.config, blueprint.experts, blueprint.inventory
    if _merge_checkpoint(config) is None:
        return get_merger(*_merge_method(config), experts)
    source = open_source(config.merge, "the merged checkpoint", **blueprint.options)
    merged = Checkpoint.from_entries(source.label, blueprint.library.align(blueprint.model, source)[0], inventory)
    for name in experts.names:
        if name not in merged:
            raise CheckpointError(f"{merged.label} lacks tensor {name!r} of the model.")
        if merged.shape(name) != inventory.shapes[name]:
            raise CheckpointError(
                f"{merged.label}: tensor {name!r} has shape {merged.shape(name)}, not {inventory.shapes[name]}."
            )
    return lambda name, _base, _experts: read_finite(merged, name).float()


def _merge_checkpoint(config: RetexConfig) -> str | None:
    """The path or Hub id of a finished merge, where `merge` is one; a bare word that is no path is a method."""
    merge = config.merge
    if isinstance(merge, dict) or merge in merge_methods():
        return None
    return merge if "/" in merge or ":" in merge or Path(merge).exists() else None


def _merge_method(config: RetexConfig) -> tuple[str, dict[str, Any]]:
    """Name and options of a merge that is a method."""
    if not isinstance(config.merge, dict):
        return config.merge, {}
    return config.merge["method"], {key: value for key, value in config.merge.items() if key != "method"}


def _published_merge(merge: str | dict[str, Any]) -> str | dict[str, Any]:
    """What the artifact says of the merge: no path of the machine it was built on."""
    return Path(merge).name if isinstance(merge, str) and Path(merge).exists() else merge


def read_labels(
    model: nn.Module, library: ModuleType, sources: dict[str, Source], experts: ExpertSet
) -> dict[str, dict[str, Any]]:
    """What each task's head means. Its width is read off the head, the names from the checkpoint where it has them."""
    width = library.num_labels(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    outputs = [name for name in experts.heads if shapes[name] and shapes[name][0] == width]
    if width is None or not outputs:
        return {}
    labels = {}
    for task, expert in experts.experts.items():
        count = expert.shape(outputs[-1])[0]
        labels[task] = library.labels_of(sources[task])
        if len(labels[task].get("id2label", {})) != count:
            labels[task]["id2label"] = {str(index): f"LABEL_{index}" for index in range(count)}
    return labels


def load_expert_weights(base: Any, experts: Mapping[str, Any], config: RetexConfig | None = None) -> ExpertWeights:
    """Base and experts in memory, checked as a build checks them. For methods that cannot go tensor by tensor."""
    return expert_weights_of(prepare(base, experts, config or RetexConfig()))


def expert_weights_of(blueprint: Blueprint) -> ExpertWeights:
    """All tensors of a blueprint, in memory."""
    experts = blueprint.experts
    base = {name: read_finite(experts.base, name).float() for name in experts.names}
    vectors = {
        name: torch.stack([read_finite(expert, name).float() - base[name] for expert in experts.experts.values()])
        for name in experts.names
    }
    heads = {
        task: {name: read_finite(expert, name).float() for name in experts.heads}
        for task, expert in experts.experts.items()
    }
    return ExpertWeights(blueprint.model, base, vectors, heads, blueprint.config.labels)
