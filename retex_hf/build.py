"""From a base and experts to a merged model and its recovery module, parameter by parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .checkpoints import (
    Checkpoint,
    ExpertSet,
    Inventory,
    Source,
    check_experts,
    check_related,
    is_open_clip,
    open_source,
    read_finite,
    take_inventory,
)
from .config import RetexConfig, matches
from .errors import CheckpointError, ConfigError
from .libraries import hf_transformers, library_of, openclip
from .merging import Merger, get_merger, merge_methods
from .parts import RetexParts
from .recovery import History, Targets, TrainingConfig, plan_layouts, relative_errors, solve_all, train
from .recovery.processes import run_dealt

SOLVERS = ("closed_form", "adam")


def build(
    base: Any,
    experts: Mapping[str, Any],
    config: RetexConfig,
    *,
    solver: str = "closed_form",
    training: TrainingConfig | None = None,
    accelerator: Accelerator | None = None,
    model_config: str | dict[str, Any] | None = None,
    check_base: bool = True,
    token: str | None = None,
    cache_dir: str | None = None,
    progress: bool = True,
) -> RetexParts:
    """Merge the experts and find the recovery of each. See `RetexModel.from_experts`."""
    tasks = _check_tasks(experts)
    if solver not in SOLVERS:
        raise ConfigError(f"solver must be one of {SOLVERS}, not {solver!r}.")
    if training is not None and solver != "adam":
        raise ConfigError('training= is for solver="adam"; the closed form has nothing to train.')
    options = {"token": token, "cache_dir": cache_dir}
    base_source = open_source(base, "the base", **options)
    sources = {task: open_source(spec, f"expert {task!r}", **options) for task, spec in experts.items()}
    model = _load_skeleton(base_source, sources, model_config)
    library = library_of(model)
    inventory = take_inventory(model)

    expert_set = _open_experts(model, library, inventory, base_source, sources, config)
    if check_base:
        check_related(expert_set, inventory.shapes)
    merger = _open_merger(config, expert_set, model, library, inventory, options)
    merged = model.state_dict()
    changed = _merge(expert_set, merger, merged, accelerator, progress)
    for name in inventory.integers:
        if name in expert_set.base:
            merged[name].copy_(expert_set.base.read(name))
    pretrained = {}
    if config.feature_source == "pretrained":
        pretrained = {name: expert_set.read_base(name).to(merged[name].dtype).clone() for name in expert_set.names}

    targets = Targets(
        expert_set,
        merged,
        names=[name for name in expert_set.names if changed[name] and not matches(name, config.exclude)],
        expert_numbers=sum(merged[name].numel() for name in expert_set.names),
    )
    layouts = plan_layouts(targets, config, inventory.convolutions, accelerator, progress)
    history = History()
    if solver == "closed_form":
        recovery, errors = solve_all(targets, layouts, config, accelerator, progress)
    else:
        recovery = train(targets, layouts, config, training or TrainingConfig(), accelerator, progress, history)
        errors = relative_errors(targets, recovery)

    heads = {
        task: {name: read_finite(expert, name).to(merged[name].dtype).clone() for name in expert_set.heads}
        for task, expert in expert_set.experts.items()
    }
    labels = _labels(model, library, sources, heads)
    # The merged model must also stand alone, and its own library knows one head only: the first task's.
    replace_tensors(model, heads[tasks[0]])
    if tasks[0] in labels:
        library.set_labels(model, labels[tasks[0]])
    filled = dataclasses.replace(
        config,
        tasks=tasks,
        merge=_published_merge(config.merge),
        base_model=base_source.provenance,
        experts={task: source.provenance for task, source in sources.items()},
        labels=labels,
    )
    side_folder = base_source.folder or next((s.folder for s in sources.values() if s.folder), None)
    return RetexParts(
        filled,
        model,
        recovery,
        heads,
        errors,
        pretrained=pretrained,
        side_folder=side_folder,
        history=history.records,
    )


def _merge(
    experts: ExpertSet,
    merger: Merger,
    merged: dict[str, Tensor],
    accelerator: Accelerator | None,
    progress: bool,
) -> dict[str, bool]:
    """Write the merged tensors into the model; returns in which of them some expert differs from the merge."""

    alone = accelerator is None or accelerator.num_processes == 1

    def work(name: str) -> tuple[Tensor | None, bool]:
        base = read_finite(experts.base, name)
        tensors = [read_finite(expert, name) for expert in experts.experts.values()]
        merged[name].copy_(merger(name, base, tensors))
        # What is stored is the rounded merge, so differences are taken from that.
        differs = any(not torch.equal(tensor.to(merged[name].dtype), merged[name]) for tensor in tensors)
        return None if alone else merged[name], differs

    costs = {name: float(merged[name].numel()) for name in experts.names}
    done = run_dealt(costs, work, accelerator, "Merging", progress)
    for name, (tensor, _) in done.items():
        if tensor is not None:
            merged[name].copy_(tensor)
    return {name: differs for name, (_, differs) in done.items()}


def _check_tasks(experts: Mapping[str, Any]) -> list[str]:
    if not isinstance(experts, Mapping) or not experts:
        raise ConfigError("experts must be a non-empty dict of task name to checkpoint.")
    for task in experts:
        if not isinstance(task, str) or not task or task != task.strip():
            raise ConfigError(f"A task name must be a non-empty string without surrounding spaces, not {task!r}.")
    return list(experts)


def _load_skeleton(base: Source, sources: dict[str, Source], model_config: str | dict[str, Any] | None) -> nn.Module:
    """The model that will hold the merged weights: the experts' class, because that is the one with heads.

    Experts that are bare tensors have no class; then it is the base's.
    """
    kinds = {task: kind for task, source in sources.items() if (kind := _architecture(source)) is not None}
    for task, kind in kinds.items():
        first_task, first_kind = next(iter(kinds.items()))
        if kind != first_kind:
            raise CheckpointError(
                f"{sources[task].label} is a {kind}, but expert {first_task!r} is a {first_kind}: "
                "experts must share one architecture."
            )
    source = sources[next(iter(kinds))] if kinds else base
    if source.model is not None:
        model = deepcopy(source.model).eval()
    elif source.folder is not None:
        library = openclip if is_open_clip(source.folder) else hf_transformers
        model = library.load(source.folder, strict=False)  # checked below, with all the others
    else:
        raise CheckpointError(
            "Bare tensors do not say which model they belong to: give the base as a folder, a Hub id or a module."
        )
    library = library_of(model)
    if library is openclip:
        openclip.describe(model, model_config, base.folder, base.model)
    return model.requires_grad_(False)


def _architecture(source: Source) -> str | None:
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
    def align(source: Source) -> tuple[Checkpoint, list[str]]:
        entries, unexpected = library.align(model, source)
        return Checkpoint.from_entries(source.label, entries, inventory), unexpected

    base_checkpoint, _ = align(base)  # what the base has beyond the experts (a pre-training head) is not used
    aligned = {task: align(source) for task, source in sources.items()}
    if config.heads == "auto":
        head_names = library.head_names(model, list(inventory.shapes))
    else:
        head_names = {name for name in inventory.shapes if matches(name, config.heads)}
    return check_experts(
        inventory,
        base_checkpoint,
        {task: checkpoint for task, (checkpoint, _) in aligned.items()},
        {task: unexpected for task, (_, unexpected) in aligned.items()},
        head_names,
    )


def _open_merger(
    config: RetexConfig,
    experts: ExpertSet,
    model: nn.Module,
    library: ModuleType,
    inventory: Inventory,
    options: dict[str, Any],
) -> Merger:
    if isinstance(config.merge, dict):
        method_options = {key: value for key, value in config.merge.items() if key != "method"}
        return get_merger(config.merge["method"], method_options, experts)
    if config.merge in merge_methods() or not _is_checkpoint(config.merge):
        return get_merger(config.merge, {}, experts)
    source = open_source(config.merge, "the merged checkpoint", **options)
    merged = Checkpoint.from_entries(source.label, library.align(model, source)[0], inventory)
    for name in experts.names:
        if name not in merged:
            raise CheckpointError(f"{merged.label} lacks tensor {name!r} of the model.")
        if merged.shape(name) != inventory.shapes[name]:
            raise CheckpointError(
                f"{merged.label}: tensor {name!r} has shape {merged.shape(name)}, not {inventory.shapes[name]}."
            )
    return lambda name, _base, _experts: read_finite(merged, name).float()


def _is_checkpoint(merge: str) -> bool:
    """Whether `merge` can be a path or Hub id; a bare word that is no path is a misspelled method."""
    return "/" in merge or ":" in merge or Path(merge).exists()


def _published_merge(merge: str | dict[str, Any]) -> str | dict[str, Any]:
    """What the artifact says of the merge: no path of the machine it was built on."""
    return Path(merge).name if isinstance(merge, str) and Path(merge).exists() else merge


def _labels(
    model: nn.Module, library: ModuleType, sources: dict[str, Source], heads: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """What each task's head means. Its width is read off the head, the names from the checkpoint where it has them."""
    width = library.num_labels(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    labels = {}
    for task, head in heads.items():
        outputs = [name for name in head if shapes[name] and shapes[name][0] == width]
        if width is None or not outputs:
            continue
        count = head[outputs[-1]].shape[0]
        labels[task] = library.labels_of(sources[task])
        if len(labels[task].get("id2label", {})) != count:
            labels[task]["id2label"] = {str(index): f"LABEL_{index}" for index in range(count)}
    return labels


def replace_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put tensors behind parameters and buffers in place, of any shape; tied names follow."""
    current = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        current[name].data = tensor.clone()
