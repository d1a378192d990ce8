"""The plan of a build: base and experts are opened, and checked against one model and each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypedDict

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..artifact.recipe import PACKAGES, describe_build
from ..artifact.recipe_record import RecipeRecord
from ..backends import (
    DESCRIBED,
    Backend,
    hf_transformers,
    kind_of_model,
    library_of,
    library_of_folder,
    parse_dtype,
    plain_modules,
    sentence_modules,
)
from ..checkpoints import (
    AdapterSource,
    Checkpoint,
    ExpertSet,
    Inventory,
    Source,
    TensorInfo,
    align_source,
    check_experts,
    check_integers,
    check_related,
    open_source,
    read_finite,
    take_inventory,
)
from ..checkpoints.tensor_store import tensor_bytes
from ..checkpoints.tokenizer_files import find_side_folder, tokenizer_folder
from ..checkpoints.vocabulary import align_vocabulary, aligned_view, describe_vocabularies
from ..config import RetexConfig, check_task_name, matches
from ..errors import CheckpointError, ConfigError, first_line
from ..merging import merge_methods, options_to_learn
from ..merging.expert_weights import ExpertWeights
from ..recovery import TrainingConfig
from ..recovery.work_sharing import solved_at_once
from ..utils.devices import CPU, enough_memory, exact_device, parse_device
from ..utils.module_tensors import resize_tensors
from ..utils.paths import as_path
from .estimate import BuildEstimate, estimate_build
from .merged_tensors import copy_on_meta


class HubOptions(TypedDict):
    """The options with which sources are opened."""

    token: str | None
    cache_dir: str | None


@dataclass
class Blueprint:
    """Everything known before the first tensor is merged.

    `model` will hold the merged weights: it is loaded, or on the meta device if the result goes to disk. Its heads have
    the shapes and labels of the first task, because the merged model must also work alone, and its own library knows
    only one head. It is in host memory, where results are written; tensors are read onto `device`, which computes.
    """

    config: RetexConfig
    base: Source
    sources: dict[str, Source]
    model: nn.Module
    library: Backend
    inventory: Inventory
    experts: ExpertSet
    options: HubOptions
    given: dict[str, Any]
    device: torch.device = CPU

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Return the tensors of the merged model, tied ones once."""
        tensors = self.model.state_dict()
        names = (*self.inventory.shapes, *self.inventory.integers)
        return {name: TensorInfo(tuple(tensors[name].shape), tensors[name].dtype) for name in names}

    @property
    def rows(self) -> dict[str, dict[str, TensorInfo]]:
        """Return the rows that each task has beyond the base's vocabulary."""
        tensors = self.model.state_dict()
        return {
            task: {
                name: TensorInfo(self.experts.rows_shape(task, name), tensors[name].dtype)
                for name in self.experts.vocabulary
            }
            for task in self.experts.own
        }

    @property
    def heads(self) -> dict[str, dict[str, TensorInfo]]:
        """Return the tensors that each task stores whole."""
        tensors = self.model.state_dict()
        return {
            task: {name: TensorInfo(expert.shape(name), tensors[name].dtype) for name in self.experts.heads}
            for task, expert in self.experts.experts.items()
        }

    @property
    def body_bytes(self) -> int:
        """Return the bytes of one expert, without its heads."""
        infos = self.infos
        return sum(tensor_bytes(infos[name]) for name in self.experts.names)

    def estimate(self) -> BuildEstimate:
        """Estimate the needs of a build to disk."""
        size = sum(tensor_bytes(info) for source in self.sources.values() for info in source.infos.values())
        vectors = 0
        if merge_checkpoint(self.config) is None and options_to_learn(*merge_method(self.config)):
            # The experts' task vectors, and trimmed copies of them.
            vectors = 2 * len(self.sources)
        estimate = estimate_build(
            self.config,
            self.infos,
            self.heads,
            self.inventory.convolutions,
            size,
            vectors,
            solved_at_once(self.device),
        )
        rows = sum(tensor_bytes(info) for own in self.rows.values() for info in own.values())
        return dataclasses.replace(estimate, disk=estimate.disk + rows)

    def recipe(self, solver: str, training: TrainingConfig | None) -> RecipeRecord | None:
        """Return the recipe of the build, see `describe_build`."""
        opened = [
            (self.given["base"], self.base),
            *zip(self.given["experts"].values(), self.sources.values(), strict=True),
        ]
        revisions = {spec: source.provenance.get("revision") for spec, source in opened if isinstance(spec, str)}
        recipe = describe_build(**self.given, config=self.config, revisions=revisions, solver=solver, training=training)
        return None if recipe is None else RecipeRecord(recipe.stored())

    def identity(self) -> dict[str, Any]:
        """Return everything that the result depends on; an interrupted build of another identity is not continued."""
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
    device: str | torch.device = CPU,
    dtype: torch.dtype | str | None = None,
) -> Blueprint:
    """Open base and experts and check that they fit.

    Args:
        base: As in `RetexModel.from_experts`, like the other arguments.
        experts: The experts.
        config: The configuration.
        on_meta: Keep the model on the meta device, because the merged weights go to disk.
        model_config: Configuration of OpenCLIP modules.
        check_base: Refuse experts that do not descend from the base.
        token: Hub token.
        cache_dir: Hub cache.
        device: Where to compare, merge and solve.
        dtype: Dtype of the merged model; default: that of the first expert.
    """
    dtype = parse_dtype(dtype)
    device = exact_device(parse_device(device))
    tasks = check_tasks(experts)
    options: HubOptions = {"token": token, "cache_dir": cache_dir}
    base_source = open_source(base, "the base", **options)
    sources = {task: open_source(spec, f"expert {task!r}", adapters=True, **options) for task, spec in experts.items()}
    model = _load_skeleton(base_source, sources, model_config, on_meta, dtype)
    library = library_of(model)
    if library is hf_transformers:
        sentence_modules.attach(model, sentence_modules.common_modules((base_source, *sources.values())))
    inventory = take_inventory(model)
    expert_set = _open_experts(model, library, inventory, base_source, sources, config, device)
    # An adapter computes as the base that it is laid over.
    if check_base or any(isinstance(source, AdapterSource) for source in sources.values()):
        check_base_configuration(_shown(model, library, sources), library, base_source)
    if check_base:
        with enough_memory("compare the experts with their base"):
            check_related(expert_set, inventory.shapes)
    labels = read_labels(model, library, sources, expert_set)
    inventory = take_inventory(model)  # a vocabulary may have changed its size
    first = expert_set.experts[tasks[0]]
    resize_tensors(model, {name: first.shape(name) for name in expert_set.heads})
    if tasks[0] in labels:
        library.set_labels(model, labels[tasks[0]])
    reference = tokenizer_folder(base_source)
    if reference is None and not expert_set.own:
        reference = find_side_folder(sources.values())
    vocabulary = describe_vocabularies(library, model, sources, reference, expert_set)
    if vocabulary and not expert_set.own:  # like every head, tables stored whole are the first task's
        library.set_vocabulary(model, expert_set.sizes[tasks[0]], {})
    filled = dataclasses.replace(
        config,
        tasks=tasks,
        base_model=base_source.provenance,
        experts={task: source.provenance for task, source in sources.items()},
        labels=labels,
        vocabulary=vocabulary,
        # Of this build, not of one that the configuration was copied from.
        trunk=None,
        task_bytes=None,
    )
    given = {"base": base, "experts": experts, "model_config": model_config, "check_base": check_base, "dtype": dtype}
    return Blueprint(filled, base_source, sources, model, library, inventory, expert_set, options, given, device)


def check_tasks(experts: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks; refuse invalid names."""
    if not isinstance(experts, Mapping) or not experts:
        raise ConfigError("experts must be a non-empty dict of task name to checkpoint.")
    for task in experts:
        check_task_name(task)
    return list(experts)


def _load_skeleton(
    base: Source,
    sources: dict[str, Source],
    model_config: str | dict[str, Any] | None,
    on_meta: bool,
    dtype: torch.dtype | None,
) -> nn.Module:
    """Return the model that will hold the merged weights, in the experts' class, which is the one with heads.

    Experts that are bare tensors have no class; then it is the base's. If all experts are adapters, it is the base's
    configuration in the class that they adapt. `dtype` overrides the stored one.
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
    model: nn.Module
    # An adapter may ask for another class only of a model of transformers.
    if isinstance(source.model, PreTrainedModel) and kind not in (None, kind_of_model(source.model)):
        model = hf_transformers.from_config(kind, source.model.config, source.model.dtype, on_meta)
    elif source.model is not None:
        model = _copied(source.model, source.label, on_meta).eval()
    elif source.folder is not None:
        library = library_of_folder(source.folder)
        # Missing weights are reported later, with all other mismatches.
        with library.limited(source.folder, source):
            if kind not in (None, architecture_of(source, base)):
                config = hf_transformers.load_config(source)
                assert not isinstance(config.dtype, str)  # transformers has looked up the name
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
    if library in DESCRIBED:
        library.describe(model, model_config, base.folder, base.model)
    if dtype is not None:
        library.cast(model, dtype)
    return model.requires_grad_(False)


def _copied(model: nn.Module, label: str, on_meta: bool) -> nn.Module:
    """Copy a given module, which may be of any class."""
    try:
        return copy_on_meta(model) if on_meta else deepcopy(model).cpu()
    except Exception as error:  # locks, files and non-leaf tensors cannot be copied
        name = type(model).__name__
        raise CheckpointError(f"{label}: this {name} cannot be copied: {first_line(error)}") from error


def maker_of(base: Any, experts: Mapping[str, Any]) -> dict[str, Any]:
    """Return load options for a model built from modules of a user's own class: how to make a copy to load into."""
    given = (spec for spec in (*experts.values(), base) if isinstance(spec, nn.Module))
    modules = (extract_model_from_parallel(spec, keep_torch_compile=False) for spec in given)
    # A PeftModel wraps the class; the model that is built has no wrapper.
    module = next((module for module in modules if not isinstance(module, PeftModel)), None)
    if module is None or library_of(module) is not plain_modules:
        return {}
    return {"make_model": lambda: deepcopy(module).requires_grad_(False)}


def architecture_of(source: Source, base: Source) -> str | None:
    """Return the class of a checkpoint's model, for an adapter on a base; None if it is unknown."""
    if isinstance(source, AdapterSource):
        library = None if base.model is None else library_of(base.model)
        library = library if base.folder is None else library_of_folder(base.folder)
        if library not in (None, hf_transformers):
            return None  # the base's own class is the only one
        config = getattr(base.model, "config", None)
        if base.folder is not None:
            config = hf_transformers.load_config(base)
        return source.architecture(getattr(config, "model_type", None))
    if source.model is not None:
        return kind_of_model(source.model)
    return None if source.folder is None else library_of_folder(source.folder).architecture(source.folder)


def _open_experts(
    model: nn.Module,
    library: Backend,
    inventory: Inventory,
    base: Source,
    sources: dict[str, Source],
    config: RetexConfig,
    device: torch.device,
) -> ExpertSet:
    # Tensors that only the base has (a pre-training head) are not used.
    base_entries, _ = library.align(model, base)
    base_checkpoint = Checkpoint.from_entries(base.label, base_entries, inventory, device)

    integers = {}

    def align(source: Source) -> tuple[Checkpoint, list[str]]:
        entries, unexpected = align_source(library, model, source, base_entries)
        integers[source.label] = {name: entries[name] for name in inventory.integers if name in entries}
        return Checkpoint.from_entries(source.label, entries, inventory, device), unexpected

    aligned = {task: align(source) for task, source in sources.items()}
    check_integers(inventory.integers, integers)
    patterns: list[str] = []
    if isinstance(config.heads, str):  # "auto"
        head_names = library.head_names(model, list(inventory.shapes))
    else:
        patterns = config.heads
        head_names = {name for name in inventory.shapes if matches(name, patterns)}
    checkpoints = {task: checkpoint for task, (checkpoint, _) in aligned.items()}
    found = align_vocabulary(
        model,
        library,
        inventory,
        (tokenizer_folder(base), base_checkpoint),
        {task: (tokenizer_folder(sources[task]), checkpoint) for task, checkpoint in checkpoints.items()},
        patterns,
    )
    own: dict[str, Checkpoint] = {}
    if found is not None and (found.names or found.whole) and config.shared_trunk:
        raise CheckpointError(
            "RetexConfig.shared_trunk needs experts of one vocabulary: a trunk that all tasks share has no tokens "
            "of a single task."
        )
    if found is not None and found.names:
        own = checkpoints
        checkpoints = {task: aligned_view(expert, base_checkpoint, found) for task, expert in own.items()}
        resize_tensors(model, {name: base_checkpoint.shape(name) for name in found.names})
        library.resize_vocabulary(model, found.size, max(found.sizes.values()), base)
        inventory = take_inventory(model)
    experts = check_experts(
        inventory,
        base_checkpoint,
        checkpoints,
        {task: unexpected for task, (_, unexpected) in aligned.items()},
        head_names if found is None else {*head_names, *found.whole},
    )
    if found is not None:
        experts = dataclasses.replace(experts, vocabulary=found.names, own=own, sizes=found.sizes)
    for name in experts.names:
        if base_checkpoint.shape(name) != inventory.shapes[name]:
            raise CheckpointError(
                f"{base_checkpoint.label} and the experts: tensor {name!r} has shape {base_checkpoint.shape(name)}, "
                f"but the model's configuration asks for {inventory.shapes[name]}."
            )
    shown = _shown(model, library, sources)
    for source in sources.values():
        library.check_configuration(shown, source)
    return experts


def _shown(model: nn.Module, library: Backend, sources: dict[str, Source]) -> nn.Module:
    """Return the model to compare others with. The first expert has what a model without values has not: the numbers
    that no checkpoint holds."""
    given = (source.model for source in sources.values() if not isinstance(source, AdapterSource))
    return next((module for module in given if module is not None and library is plain_modules), model)


def check_base_configuration(model: nn.Module, library: Backend, base: Source) -> None:
    """Refuse a base that computes otherwise than the experts, whose model is `model`. The base of transformers' models
    may be of another class, and so of another configuration."""
    if library is hf_transformers:
        return
    found = library if base.model is None else library_of(base.model)
    found = found if base.folder is None else library_of_folder(base.folder)
    if found is library:
        library.check_configuration(model, base, is_base=True)


def merge_checkpoint(config: RetexConfig) -> str | None:
    """Return the path or Hub id of a finished merge, or None if `merge` is a method."""
    merge = config.merge
    if isinstance(merge, dict) or merge in merge_methods():
        return None
    return merge if "/" in merge or ":" in merge or as_path(merge, ConfigError).exists() else None


def merge_method(config: RetexConfig) -> tuple[str, dict[str, Any]]:
    """Return the name and options of a merge method."""
    if not isinstance(config.merge, dict):
        return config.merge, {}
    return config.merge["method"], {key: value for key, value in config.merge.items() if key != "method"}


def read_labels(
    model: nn.Module, library: Backend, sources: dict[str, Source], experts: ExpertSet
) -> dict[str, dict[str, Any]]:
    """Return the labels of each task's head: as many as its width, named as in the checkpoint where possible."""
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
    """Load base and experts into memory, with a build's checks, for methods that cannot work tensor by tensor."""
    return expert_weights_of(prepare(base, experts, config or RetexConfig()))


def expert_weights_of(blueprint: Blueprint) -> ExpertWeights:
    """Return all tensors of a blueprint, in host memory."""
    experts = blueprint.experts

    def read(checkpoint: Checkpoint, name: str) -> Tensor:
        return read_finite(checkpoint, name).float().cpu()

    base = {name: read(experts.base, name) for name in experts.names}
    vectors = {
        name: torch.stack([read(expert, name) - base[name] for expert in experts.experts.values()])
        for name in experts.names
    }
    heads = {task: {name: read(expert, name) for name in experts.heads} for task, expert in experts.experts.items()}
    rows = {
        task: {name: experts.read_rows(task, name).float().cpu() for name in experts.vocabulary} for task in experts.own
    }
    config = blueprint.config
    return ExpertWeights(blueprint.model, base, vectors, heads, config.labels, rows, config.vocabulary)
