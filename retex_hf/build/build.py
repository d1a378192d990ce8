"""Building a merged model and its recovery module from a base and experts, parameter by parameter."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..artifact import reading, writing
from ..artifact.schema import head_key
from ..artifact.state import RetexParts, bank_of_base
from ..checkpoints import Checkpoint, ExpertSet, TensorInfo, check_range, open_source, read_finite, typed_path
from ..checkpoints.tensor_store import FolderStore, Store
from ..checkpoints.tokenizer_files import find_side_folder, tokenizer_folder, warn_of_other_tokenizers
from ..config import RetexConfig, matches, storage_bytes
from ..data.readout import Classifier, Readout
from ..errors import ArtifactError, CheckpointError, ConfigError
from ..merging import Merger, check_calibration, get_merger, learn_options
from ..merging.calibration import Calibration, CalibrationData, read_calibration
from ..recovery import (
    BuildContext,
    History,
    Targets,
    TrainingConfig,
    clear_state,
    plan_layouts,
    relative_errors,
    solve_all,
    train,
)
from ..recovery.storage import solve_storage
from ..recovery.targets import difference_energy
from ..recovery.work_sharing import run_dealt, solved_at_once
from ..utils.atomic_folder import emptied, interrupted_build, together, workshop
from ..utils.devices import device_of, parse_device
from ..utils.progress import remark
from ..utils.tensor_bank import TensorBank
from .estimate import BuildEstimate
from .merged_tensors import FileTensors, MergedTensors, ModelTensors
from .plan import Blueprint, check_tasks, expert_weights_of, merge_checkpoint, merge_method, prepare

MERGING, LEARNING = "Merging", "Learning the merge"
SOLVERS = ("closed_form", "adam")
BUILT = "built"
logger = logging.getLogger(__name__)


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
    device: str | torch.device | None = None,
    progress: bool = True,
    keep_state: bool = False,
    **prepare_options: Any,
) -> RetexParts:
    """Merge the experts and solve for the recovery of each, in memory. See `RetexModel.from_experts`.

    `keep_state` is passed to `train`.
    """
    config = _settled(config, solver, training)
    _check_calibration(config, calibration, readout)
    check_tasks(experts)
    accelerator, device = _share_work(accelerator, device, solver, (base, *experts.values()))
    blueprint = prepare(base, experts, config, device=device, **prepare_options)
    context = BuildContext(accelerator, progress, at_once=solved_at_once(blueprint.device))
    if calibration is not None:
        data = read_calibration(calibration, readout or Classifier(), blueprint.model, list(blueprint.sources))
        blueprint = _learn_merge(blueprint, data, lambda: blueprint, context)
    merged = ModelTensors(blueprint.model, blueprint.inventory)
    return _construct(blueprint, merged, context, _training(solver, training), keep_state)


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
    device: str | torch.device | None = None,
    max_shard_size: str | int = "5GB",
    resume: bool = True,
    progress: bool = True,
    publish: Callable[[RetexParts, Path | None], None] | None = None,
    **prepare_options: Any,
) -> Path:
    """Merge the experts and solve for the recovery of each, parameter by parameter, straight into a folder.

    The folder has the same tensors as one built in memory and saved. Memory grows with the largest tensor, not with the
    model's depth. The artifact is built in a staging folder beside `output_dir` and moved into place at the end. An
    interrupted build is continued when started again, unless `resume` is False or something it depends on has changed.
    `solver="adam"` trains in memory and saves. A merge that is learned from data is learned in memory, once.

    With `publish`, the result is not moved into place: the main process calls `publish(parts, folder)`, which changes
    and writes it. `folder` holds the weights that are already on disk. Several steps thus become one atomic
    replacement: a kill leaves either the old or the new `output_dir`.

    Returns:
        The absolute path of the folder.
    """
    config = _settled(config, solver, training)
    _check_calibration(config, calibration, readout)
    target = writing.check_replaceable(output_dir)
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
            device=device,
            progress=progress,
            keep_state=True,
            **prepare_options,
        )
        if main and publish is not None:
            publish(parts, None)
        elif main:
            writing.write(parts, target, max_shard_size)
        if main:
            clear_state(training or TrainingConfig())
        if accelerator is not None:
            accelerator.wait_for_everyone()
        return target
    accelerator, device = _share_work(accelerator, device, solver, (base, *experts.values()))
    blueprint = prepare(base, experts, config, on_meta=True, device=device, **prepare_options)
    stems = writing.stems(blueprint.library, max_shard_size)
    estimate = blueprint.estimate()
    if main:
        _check_disk(estimate, target)
        if progress:
            remark(f"Building {target.name}: {estimate}")
    identity = blueprint.identity() | {"stems": stems}
    data = None
    if calibration is not None:
        data = read_calibration(calibration, readout or Classifier(), blueprint.model, list(blueprint.sources))
        identity["calibration"] = data.fingerprint()
    with together(accelerator, lambda: workshop(target, identity, resume)) as place:
        folder = place / "artifact"
        folder.mkdir(exist_ok=True)
        store = FolderStore(folder, place, stems, accelerator)
        context = BuildContext(accelerator, progress, store, solved_at_once(blueprint.device))
        if data is not None:
            # Learning runs the model, which must therefore not be on the meta device.
            def loaded() -> Blueprint:
                return prepare(base, experts, config, device=device, **prepare_options)

            blueprint = _learn_merge(blueprint, data, loaded, context)
            store.sync()  # learning may take long: save its result now
        merged = FileTensors(blueprint.model, blueprint.library, blueprint.inventory, store)
        parts = _construct(blueprint, merged, context)
        store.sync()
        if accelerator is not None:
            accelerator.wait_for_everyone()
        if main and publish is not None:
            built = emptied(place / BUILT)  # a killed build may have left part of it
            writing.assemble(parts, store.files, built)
            read = reading.read(built)
            publish(dataclasses.replace(read, side_folder=parts.side_folder, tokenizers=parts.tokenizers), built)
        elif main:
            writing.finish(parts, store.files, target)
    return target


def _check_apart(target: Path, base: Any, experts: Mapping[str, Any], config: RetexConfig) -> None:
    """Refuse to overwrite the base, an expert or the merged checkpoint, any of which may be an artifact."""
    check_tasks(experts)
    sources = {"the base": base, "the merged checkpoint": merge_checkpoint(config)}
    for label, spec in {**sources, **{f"expert {task!r}": expert for task, expert in experts.items()}}.items():
        if isinstance(spec, (str, Path)):
            path = typed_path(str(spec), label).resolve()
            if target in (path, path.parent if path.is_file() else path):
                raise ArtifactError(f"{target} holds {label}: expected another folder for the artifact.")


def _settled(config: RetexConfig, solver: str, training: TrainingConfig | None) -> RetexConfig:
    """Return the configuration with the weighting that the solver uses, after a check that it can solve this at all."""
    if solver not in SOLVERS:
        raise ConfigError(f"solver must be one of {SOLVERS}, not {solver!r}.")
    if solver == "adam" and config.storage is not None:
        raise ConfigError('solver="adam" trains factors of one rank: give RetexConfig.rank instead of storage.')
    if training is not None and solver != "adam":
        raise ConfigError('training= is for solver="adam"; the closed form has nothing to train.')
    return config.with_weighting(solver)


def _training(solver: str, training: TrainingConfig | None) -> TrainingConfig | None:
    """Return the settings of the learned path, or None for the closed form."""
    return (training or TrainingConfig()) if solver == "adam" else None


def _share_work(
    accelerator: Accelerator | None, device: str | torch.device | None, solver: str, given: Iterable[Any]
) -> tuple[Accelerator | None, torch.device]:
    """Return the accelerator and this process's device, which defaults to that of a `given` module."""
    if device is None:
        return accelerator, device_of(*given)
    device = parse_device(device)
    if solver == "adam":
        accelerator = accelerator or Accelerator(cpu=device.type == "cpu")
        if accelerator.device.type != device.type:
            raise ConfigError(
                f'solver="adam" trains where accelerate does, which is {accelerator.device} here and not {device}: '
                "leave out device, or configure accelerate for it."
            )
    if accelerator is not None and device.index is None and device.type == accelerator.device.type:
        return accelerator, accelerator.device  # one GPU per process
    return accelerator, device


def _check_calibration(
    config: RetexConfig, calibration: Mapping[str, Iterable[Any]] | None, readout: Readout | None
) -> None:
    if readout is not None and calibration is None:
        raise ConfigError("readout= says how to read answers to calibration=, which is not given.")
    if merge_checkpoint(config) is None:
        check_calibration(*merge_method(config), calibration is not None)
    elif calibration is not None:
        raise ConfigError(
            f"calibration= is for merge methods that learn from data; {config.merge!r} is merged already."
        )


def _learn_merge(
    blueprint: Blueprint,
    data: CalibrationData,
    loaded: Callable[[], Blueprint],
    context: BuildContext,
) -> Blueprint:
    """Return the blueprint with merge options learned from data, by the main process or by an interrupted build.

    `loaded` returns the same blueprint with a model that can run.
    """
    method, options = merge_method(blueprint.config)
    found: dict[str, Any] | None = context.store.finished(LEARNING).get(method)
    if found is None and context.is_main_process:
        weights = expert_weights_of(loaded())
        found = learn_options(method, options, Calibration(weights, data.readout, data.batches, context.progress))
        context.store.record(LEARNING, method, found)
    if context.accelerator is not None:
        found = broadcast_object_list([found])[0]
    assert found is not None  # by the main process
    config = dataclasses.replace(blueprint.config, merge={"method": method, **found})
    return dataclasses.replace(blueprint, config=config)


def _check_disk(estimate: BuildEstimate, target: Path) -> None:
    # Files of an interrupted build are either reused or deleted.
    left = interrupted_build(target)
    taken = 0 if left is None else sum(file.lstat().st_blocks * 512 for file in left.rglob("*"))
    free = shutil.disk_usage(target.parent).free + taken
    if free < estimate.disk:
        raise ArtifactError(
            f"{target} needs {estimate.disk / 1e9:.2f} GB of disk, but {target.parent} has only {free / 1e9:.2f} GB."
        )


def _construct(
    blueprint: Blueprint,
    merged: MergedTensors,
    context: BuildContext,
    training: TrainingConfig | None = None,
    keep_state: bool = False,
) -> RetexParts:
    """Fill the merged model, the heads and the recovery, one parameter at a time; train the latter if told how."""
    config, experts, inventory = blueprint.config, blueprint.experts, blueprint.inventory
    for pattern in config.exclude:
        if not any(matches(name, [pattern]) for name in experts.names):
            logger.warning("RetexConfig.exclude: no tensor that could be recovered matches %r.", pattern)
    own = _allocate_own(blueprint, context.store)
    energies = _merge(blueprint, merged, own, context)

    targets = Targets(
        experts,
        merged,
        names=[name for name in experts.names if any(energies[name]) and not matches(name, config.exclude)],
        energies=energies,
    )
    history = History()
    if config.storage is not None:
        budget = storage_bytes(config.storage, blueprint.body_bytes * len(experts.tasks))
        config = dataclasses.replace(config, task_bytes=budget / len(experts.tasks))
        recovery, errors = solve_storage(targets, config, inventory.convolutions, budget, context)
    elif training is None:
        layouts = plan_layouts(targets, config, inventory.convolutions)
        recovery, errors = solve_all(targets, layouts, config, context, config.recovery_dtype)
    else:
        layouts = plan_layouts(targets, config, inventory.convolutions)
        recovery = train(targets, layouts, config, training, context, history=history, keep_state=keep_state)
        recovery = recovery.stored_as(config.recovery_dtype)
        errors = relative_errors(targets, recovery)
    tokenizers = {}
    for task, described in config.vocabulary.items():
        if described["tokenizer"]:
            folder = tokenizer_folder(blueprint.sources[task])
            assert folder is not None  # the one that was described
            tokenizers[task] = folder
    warn_of_other_tokenizers(blueprint.base, blueprint.sources, tokenizers)
    return RetexParts(
        config=dataclasses.replace(config, merge=_published_merge(config.merge)),
        model=blueprint.model,
        recovery=recovery,
        heads=TensorBank(own.heads),
        errors=errors,
        pretrained=bank_of_base(own.pretrained),
        side_folder=find_side_folder((blueprint.base, *blueprint.sources.values())),
        history=history.records,
        recipe=blueprint.recipe("closed_form" if training is None else "adam", training),
        rows=TensorBank(own.rows),
        tokenizers=tokenizers,
    )


@dataclass(frozen=True)
class OwnTensors:
    """Tensors beside the merged model: each task's heads and rows of its own tokens, and a copy of the base."""

    heads: dict[str, dict[str, Tensor]]
    rows: dict[str, dict[str, Tensor]]
    pretrained: dict[str, Tensor]

    def named(self, names: Collection[str]) -> list[Tensor]:
        """Return those of some names, of all tasks."""
        groups = (*self.heads.values(), *self.rows.values(), self.pretrained)
        return [tensor for group in groups for name, tensor in group.items() if name in names]


def _allocate_own(blueprint: Blueprint, store: Store) -> OwnTensors:
    def allocate(part: str, wanted: Mapping[str, Mapping[str, TensorInfo]]) -> dict[str, dict[str, Tensor]]:
        infos = {head_key(task, name): info for task, own in wanted.items() for name, info in own.items()}
        stored = store.allocate(part, infos) if infos else {}
        return {task: {name: stored[head_key(task, name)] for name in own} for task, own in wanted.items()}

    pretrained = {}
    if blueprint.config.feature_source == "pretrained":
        infos = blueprint.infos
        pretrained = store.allocate("pretrained", {name: infos[name] for name in blueprint.experts.names})
    return OwnTensors(allocate("heads", blueprint.heads), allocate("rows", blueprint.rows), pretrained)


def _merge(
    blueprint: Blueprint, merged: MergedTensors, stored: OwnTensors, context: BuildContext
) -> dict[str, list[float]]:
    """Fill every tensor of the merged model, the heads and the copy of the base, reading each expert's tensors once.

    Returns, for each merged tensor, the energy of every expert's difference from it.
    """
    experts = blueprint.experts
    own, integers, infos = set(experts.heads), set(blueprint.inventory.integers), blueprint.infos
    body = set(experts.names)
    # Opening a merger may take passes over all experts, so skip it if everything is merged already.
    finished = len(context.store.finished(MERGING)) == len(merged.units)
    merger = None if finished else _open_merger(blueprint)

    def work(unit: tuple[str, ...]) -> dict[str, list[float]]:
        values: dict[str, Tensor | None] = {}
        tensors: dict[str, list[Tensor]] = {}
        for name in unit:
            if name in body:
                base = read_finite(experts.base, name)
                dtype = infos[name].dtype
                tensors[name] = [read_finite(expert, name, dtype) for expert in experts.experts.values()]
                assert merger is not None  # not everything is merged already
                values[name] = check_range(merger(name, base, tensors[name]), "the merge", name, dtype)
                if name in stored.pretrained:
                    stored.pretrained[name].copy_(base)
                for task in experts.own if name in experts.vocabulary else ():
                    stored.rows[task][name].copy_(experts.read_rows(task, name, dtype))
            elif name in own:
                for task, expert in experts.experts.items():
                    stored.heads[task][name].copy_(read_finite(expert, name, infos[name].dtype))
                values[name] = stored.heads[experts.tasks[0]][name]
            elif name in integers:
                values[name] = _read_integer(experts, name)
        merged.write(values)
        # The rounded merge is stored, so compare with that.
        return {
            name: [difference_energy(tensor, merged[name].to(blueprint.device)) for tensor in found]
            for name, found in tensors.items()
        }

    def written(unit: tuple[str, ...]) -> list[Tensor]:
        return [*merged.tensors_of(unit), *stored.named(unit)]

    costs = {unit: float(sum(prod(infos[name].shape) for name in unit if name in infos)) for unit in merged.units}
    done = run_dealt(context, costs, work, MERGING, written)
    return {name: found for facts in done.values() for name, found in facts.items()}


def _read_integer(experts: ExpertSet, name: str) -> Tensor | None:
    """Return a counter or index of the base or the first expert that has it; None if the model computes it."""
    for checkpoint in (experts.base, *experts.experts.values()):
        if name in checkpoint:
            return checkpoint.read(name)
    return None


def _open_merger(blueprint: Blueprint) -> Merger:
    config, experts, inventory = blueprint.config, blueprint.experts, blueprint.inventory
    if merge_checkpoint(config) is None:
        return get_merger(*merge_method(config), experts)
    source = open_source(config.merge, "the merged checkpoint", **blueprint.options)
    entries = blueprint.library.align(blueprint.model, source)[0]
    merged = Checkpoint.from_entries(source.label, entries, inventory, blueprint.device)
    for name in experts.names:
        if name not in merged:
            raise CheckpointError(f"{merged.label} lacks tensor {name!r} of the model.")
        if merged.shape(name) != inventory.shapes[name]:
            raise CheckpointError(
                f"{merged.label}: tensor {name!r} has shape {merged.shape(name)}, not {inventory.shapes[name]}."
            )
    return lambda name, _base, _experts: read_finite(merged, name).float()


def _published_merge(merge: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the merge for the artifact's configuration, without local paths."""
    return Path(merge).name if isinstance(merge, str) and Path(merge).exists() else merge
