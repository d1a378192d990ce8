"""All that is known before a tensor is merged: base and experts are open, and fit one model and each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import nn

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
from .config import TASK_NAME, RetexConfig, is_task_name, matches
from .errors import CheckpointError, ConfigError, brief
from .estimate import BuildEstimate, estimate_build
from .expert_weights import ExpertWeights
from .libraries import hf_transformers, library_of, openclip
from .merged import copy_on_meta, resize_tensors
from .merging import merge_methods, options_to_learn
from .paths import as_path
from .recipe import PACKAGES, describe_build
from .recovery import TrainingConfig
from .store import tensor_bytes


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
        if merge_checkpoint(self.config) is None and options_to_learn(*merge_method(self.config)):
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
        if (merge := merge_checkpoint(self.config)) is not None:
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


def check_tasks(experts: Mapping[str, Any]) -> list[str]:
    """The names of the tasks; refuses what is no name."""
    if not isinstance(experts, Mapping) or not experts:
        raise ConfigError("experts must be a non-empty dict of task name to checkpoint.")
    for task in experts:
        if not is_task_name(task):
            raise ConfigError(f"A task name must be {TASK_NAME}, not {brief(task)}.")
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
        with library.limited(source.folder, source):
            if kind not in (None, architecture_of(source, base)):
                config = hf_transformers.load_config(source.folder)
                model = hf_transformers.from_config(kind, config, config.dtype, on_meta)
            elif on_meta:
                model = library.load_on_meta(source.folder, source)
            else:
                model = library.load(source.folder, source, strict=False)
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


def merge_checkpoint(config: RetexConfig) -> str | None:
    """The path or Hub id of a finished merge, where `merge` is one; a bare word that is no path is a method."""
    merge = config.merge
    if isinstance(merge, dict) or merge in merge_methods():
        return None
    return merge if "/" in merge or ":" in merge or as_path(merge, ConfigError).exists() else None


def merge_method(config: RetexConfig) -> tuple[str, dict[str, Any]]:
    """Name and options of a merge that is a method."""
    if not isinstance(config.merge, dict):
        return config.merge, {}
    return config.merge["method"], {key: value for key, value in config.merge.items() if key != "method"}


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
        generic = {str(index): f"LABEL_{index}" for index in range(count)}
        if labels[task].get("id2label", {}).keys() != generic.keys():
            labels[task]["id2label"] = generic
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
