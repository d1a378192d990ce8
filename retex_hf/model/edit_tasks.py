"""Adding a task to a finished model, without the other experts, and deleting one.

The functions take parts and return new ones; the old ones stay unchanged, so that running calls are not disturbed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..artifact.recipe_record import RecipeRecord
from ..artifact.sizes import sizes_of
from ..artifact.state import RetexParts
from ..backends import kind_of_model, library_of, sentence_modules
from ..build.plan import architecture_of, check_base_configuration, check_tasks, read_labels
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
from ..checkpoints.tokenizer_files import tokenizer_folder
from ..checkpoints.vocabulary import align_vocabulary, aligned_view, describe_vocabulary
from ..config import RetexConfig, matches
from ..errors import CheckpointError, ConfigError, RetexError, TaskError, brief, shorten
from ..execution import copy_with, task_index
from ..execution.choice import find_fixed
from ..recovery import Layout, plan_layout
from ..recovery.component_growth import add_to_components, remove_from_components
from ..recovery.growth import Growth, add_to_recovery, remove_from_recovery
from ..recovery.layout import MATRIX
from ..routing import (
    Signatures,
    WeightSignatures,
    held_out_residuals,
    noted,
    reference_features,
)
from ..utils.devices import device_of, enough_memory, exact_device, parse_device
from ..utils.tensor_bank import TensorBank
from .components import extractor_of, scorers_of
from .edit_signatures import inputs_of
from .shared_trunk import align_new_task

MERGED = "the merged model"
# Share of a new task's references below which features that were chosen without it do not serve it.
IDENTIFIED = 0.9
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AddedTask:
    """The result of `add_task`.

    `errors` are the new task's relative errors by parameter, `grown` the increase in rank of each parameter's factors,
    `joined` the parameters that are recovered only now (the other tasks keep the merged values), and `whole` those now
    stored without factors because that is smaller. `added_bytes` is the growth of the recovery, the heads and the
    signatures.
    """

    name: str
    errors: dict[str, float]
    grown: dict[str, int]
    joined: list[str]
    whole: list[str]
    added_bytes: int

    def __str__(self) -> str:
        errors = list(self.errors.values())
        lines = [f"Added task {self.name!r}: {len(errors)} parameters, {self.added_bytes / 1e6:.2f} MB more."]
        if errors:
            lines.append(f"Relative error: {sum(errors) / len(errors):.4f} on average, {max(errors):.4f} at most.")
        if self.grown:
            by = sorted(self.grown.values())
            lines.append(f"The rank of {len(by)} grew, by {by[0]} to {by[-1]}.")
        if self.joined:
            lines.append(f"{len(self.joined)} were as merged for all tasks before: {shorten(self.joined)}.")
        if self.whole:
            lines.append(f"{len(self.whole)} are stored whole now: {shorten(self.whole)}.")
        return "\n".join(lines)


def add_task(
    parts: RetexParts,
    name: str,
    expert: Any,
    *,
    references: Iterable[Any] | None = None,
    base: Any = None,
    tolerance: float | None = None,
    check_base: bool = True,
    token: str | None = None,
    cache_dir: str | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> tuple[RetexParts, AddedTask]:
    """Return the parts of a model with one more task. See `RetexModel.add_task`."""
    config = parts.config
    _check_request(parts, name, expert, references, tolerance)
    device = exact_device(device_of(parts.model) if device is None else parse_device(device))
    inventory = take_inventory(parts.model)
    source = open_source(expert, f"expert {name!r}", adapters=True, token=token, cache_dir=cache_dir)
    below = _open_base(parts, source, base, token, cache_dir)
    experts = _open_expert(parts, name, source, below, inventory, device)
    if check_base:
        check_related(experts, inventory.shapes)
    checkpoint = experts.experts[name]
    own_rows, vocabulary = _joined_rows(parts, name, source, experts, inventory)
    rows = TensorBank(own_rows)
    like = parts.model.state_dict()
    head = {
        n: read_finite(checkpoint, n, like[n].dtype).to(like[n].device, like[n].dtype, copy=True) for n in experts.heads
    }
    heads = TensorBank({**parts.heads, name: head})
    seen: list[dict[str, Any]] = []
    batches = None if references is None else noted(inputs_of(parts, references), seen)
    signatures = parts.signatures
    if isinstance(signatures, Signatures) and batches is not None:
        widened = replace(parts, config=replace(config, vocabulary=vocabulary), rows=rows, heads=heads)
        signatures = _join_signature(widened, signatures, name, batches)
    left_out = {n for n in experts.names if matches(n, config.exclude)}
    joining = _joining(parts, experts, inventory, name, left_out)

    def read(parameter: str) -> tuple[Tensor, Tensor]:
        merged = experts.read_base(parameter)
        return _wide(read_finite(checkpoint, parameter, merged.dtype)), _wide(merged)

    with enough_memory(f"add task {name!r}"):
        if config.storage is not None:
            recovery, growth = add_to_components(
                parts.recovery,
                read,
                joining,
                inventory.convolutions,
                budget=_budget(config, tolerance),
                weighting=config.weighting,
                tolerance=tolerance,
                progress=progress,
            )
        else:
            recovery, growth = add_to_recovery(
                parts.recovery,
                read,
                _tolerances(parts, joining, tolerance),
                joining,
                dtype=config.recovery_dtype,
                affine=config.recovery == "affine",
                progress=progress,
            )
    labels = read_labels(parts.model, library_of(parts.model), {name: source}, experts)
    tokenizers = dict(parts.tokenizers)
    own_tokenizer = tokenizer_folder(source) if vocabulary and vocabulary[name]["tokenizer"] else None
    if own_tokenizer is not None:
        tokenizers[name] = own_tokenizer
    grown = replace(
        parts,
        config=replace(
            config,
            tasks=[*config.tasks, name],
            experts={**config.experts, name: source.provenance},
            labels={**config.labels, **labels},
            vocabulary=vocabulary,
            task_embedding_dim=None if config.task_embedding_dim is None else recovery.task_embedding.shape[1],
        ),
        recovery=recovery,
        heads=heads,
        rows=rows,
        tokenizers=tokenizers,
        errors=_joint_errors(parts.errors, growth),
        recipe=_note_task(parts, name, expert, source, base, tolerance, check_base),
        evaluation=None,
        signatures=signatures,
    )
    if isinstance(signatures, WeightSignatures) and batches is not None:
        centred = WeightSignatures.fit(scorers_of(replace(grown, signatures=None)), batches)
        grown = replace(grown, signatures=centred)
    if config.trunk is not None and isinstance(signatures, Signatures):
        grown = _joined_trunk(grown, signatures, name, seen)
    added = AddedTask(
        name,
        growth.errors,
        growth.grown,
        growth.joined,
        growth.whole,
        sum(sizes_of(grown).values()) - sum(sizes_of(parts).values()),
    )
    return grown, added


def delete_task(parts: RetexParts, name: str) -> RetexParts:
    """Return the parts of a model without one of its tasks. See `RetexModel.delete_task`."""
    config = parts.config
    index = task_index(name, config.tasks)
    if len(config.tasks) == 1:
        raise TaskError(f"{name!r} is the only task; a model of no tasks is the merged model itself.")
    tasks = [task for task in config.tasks if task != name]
    remove = remove_from_recovery if config.storage is None else remove_from_components
    recovery = remove(parts.recovery, index)
    heads = {task: parts.heads[task] for task in tasks}
    labels = _without(config.labels, name)
    model = parts.model
    if index == 0 and heads[tasks[0]]:
        # The merged model on its own uses the head of the first task.
        model = copy_with(model, heads[tasks[0]])
        if tasks[0] in labels:
            library_of(model).set_labels(model, labels[tasks[0]])
    dimension = recovery.task_embedding.shape[1]
    trunk = config.trunk and {**config.trunk, "cost": _without(config.trunk["cost"], name)}
    return replace(
        parts,
        config=replace(
            config,
            tasks=tasks,
            experts=_without(config.experts, name),
            labels=labels,
            vocabulary=_without(config.vocabulary, name),
            trunk=trunk,
            task_embedding_dim=None if config.task_embedding_dim is None and dimension == len(tasks) else dimension,
        ),
        model=model,
        recovery=recovery,
        heads=TensorBank(heads),
        rows=TensorBank(_without(parts.rows, name)),
        tokenizers=_without(parts.tokenizers, name),
        errors={n: error for n, error in parts.errors.items() if n in recovery},
        signatures=None if parts.signatures is None else parts.signatures.without(index),
        recipe=None if parts.recipe is None else parts.recipe.without_task(name),
        evaluation=None,
    )


def delete_tasks(parts: RetexParts, names: list[str]) -> RetexParts:
    """Return the parts of a model without some of its tasks; check all names before deleting any."""
    tasks = parts.config.tasks
    for name in names:
        task_index(name, tasks)
    if len(set(names)) < len(names):
        raise TaskError(f"{names} names a task twice.")
    if 1 < len(names) == len(tasks):
        raise TaskError(f"{names} are all the tasks; a model of no tasks is the merged model itself.")
    for name in names:
        parts = delete_task(parts, name)
    return parts


def select_tasks(parts: RetexParts, names: Iterable[str]) -> RetexParts:
    """Return the parts of a model with some of its tasks only."""
    tasks = parts.config.tasks
    kept = list(names) if isinstance(names, Iterable) else []
    if isinstance(names, str) or not kept:
        raise TaskError(f"Expected a list of tasks, not {names!r}; the tasks are {tasks}.")
    for name in kept:
        task_index(name, tasks)
    for name in tasks:
        if name not in kept:
            parts = delete_task(parts, name)
    return parts


def _check_request(
    parts: RetexParts, name: str, expert: Any, references: Iterable[Any] | None, tolerance: float | None
) -> None:
    """Refuse invalid arguments before anything is opened."""
    check_tasks({name: expert})
    if name in parts.config.tasks:
        raise TaskError(f"The model has a task {name!r} already; its tasks are {parts.config.tasks}.")
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 <= tolerance <= 1):
        raise ConfigError(f"tolerance must be a relative error between 0 and 1, not {tolerance!r}.")
    if references is None and isinstance(parts.signatures, Signatures):
        raise TaskError(
            f"The model tells its tasks apart by reference inputs: give some of {name!r} as references=, batches as "
            "for fit_signatures."
        )
    if references is None and isinstance(parts.signatures, WeightSignatures):
        raise TaskError(
            "The model's scores are centred on a pool of inputs: give a pool as references=, with inputs of all tasks."
        )
    if references is not None and parts.signatures is None:
        raise TaskError(
            'With signatures="weights" a task needs no reference inputs.'
            if parts.config.signatures == "weights"
            else "The model has no signatures that references= could join: add the task without, and call "
            "fit_signatures with inputs of all tasks."
        )
    fixed = find_fixed(parts.model, list(parts.recovery))
    if fixed is not None:
        raise RetexError(
            f"No task can be added, because {fixed!r} of the merged model is quantised or offloaded: load the model "
            "without quantisation and offloading."
        )


def _open_base(parts: RetexParts, source: Source, base: Any, token: str | None, cache_dir: str | None) -> Source | None:
    """Open the base that an adapter is applied to: the caller's, never the one that an artifact's recipe names.

    Return None for other experts, and for a `PeftModel`, which has its own base.
    """
    if not isinstance(source, AdapterSource):
        if base is not None:
            raise ConfigError(f"base= is for experts that are adapters; {source.label} is not one.")
        return None
    if source.own_base:
        if base is not None:
            raise ConfigError(f"base= is for adapters without one; {source.label} is a PeftModel, which has its own.")
        return None
    if base is None:
        named = None if parts.recipe is None else parts.recipe.get("base")
        hint = "" if named is None else f" (the recipe names {brief(named)})"
        raise CheckpointError(f"{source.label} is an adapter: say with base= which model it was trained on{hint}.")
    return open_source(base, "the base", token=token, cache_dir=cache_dir)


def _open_expert(
    parts: RetexParts, name: str, source: Source, base: Source | None, inventory: Inventory, device: torch.device
) -> ExpertSet:
    """Open the new expert with the merged model as its base, with a build's checks."""
    model, library = parts.model, library_of(parts.model)
    kind = architecture_of(source, base or source)
    # An OpenCLIP folder names its library, not a class.
    if kind not in (None, kind_of_model(model), library.NAME):
        raise CheckpointError(
            f"{source.label} is a {kind}, but the other experts are a {kind_of_model(model)}: experts must share one "
            "architecture."
        )
    sentence_modules.check_modules(model, source)
    below = {} if base is None else library.align(model, base)[0]
    entries, unexpected = align_source(library, model, source, below)
    tensors = model.state_dict()
    merged: dict[str, tuple[TensorInfo, Callable[[], Tensor]]] = {
        n: (TensorInfo(tuple(tensors[n].shape), tensors[n].dtype), partial(tensors.__getitem__, n))
        for n in (*inventory.shapes, *inventory.integers)
    }
    check_integers(inventory.integers, {MERGED: merged, source.label: entries})
    heads = list(parts.heads[parts.config.tasks[0]])
    whole = Checkpoint.from_entries(source.label, entries, inventory, device)
    shared = Checkpoint(MERGED, merged, device=device)
    found = align_vocabulary(
        model, library, inventory, (parts.side_folder, shared), {name: (tokenizer_folder(source), whole)}, heads
    )
    if found is not None and found.names and parts.config.trunk is not None:
        raise CheckpointError(f"{source.label} has another vocabulary than the trunk that all tasks share.")
    if found is not None and any(n not in heads and whole.shape(n) == shared.shape(n) for n in found.whole):
        raise CheckpointError(
            f"{source.label} has tokens in other rows than {MERGED}: storing its tensors "
            f"({', '.join(found.whole)}) whole for every task takes a build from all experts."
        )
    expert = whole if found is None else aligned_view(whole, shared, found)
    experts = check_experts(inventory, shared, {name: expert}, {name: unexpected}, set(heads))
    if found is not None:
        experts = replace(experts, sizes=found.sizes)
    names = [] if found is None else found.names
    if parts.rows:
        names = list(next(iter(parts.rows.values())))
    if names:
        experts = replace(experts, vocabulary=names, own={name: whole})
    checkpoint = experts.experts[name]
    for n in experts.heads:
        shape, expected = checkpoint.shape(n), inventory.shapes[n]
        if n not in heads:
            raise CheckpointError(
                f"{source.label}: tensor {n!r} has shape {shape}, but {MERGED} has {expected}: storing it whole for "
                "every task takes a build from all experts."
            )
        if len(shape) != len(expected) or shape[1:] != expected[1:]:
            raise CheckpointError(
                f"{source.label}: tensor {n!r} has shape {shape}, but that of the other experts is {expected}: another "
                "architecture."
            )
    library.check_configuration(model, source)
    if base is not None:
        check_base_configuration(model, library, base)
    return experts


def _joined_rows(
    parts: RetexParts, name: str, source: Source, experts: ExpertSet, inventory: Inventory
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
    """Return the rows and vocabularies of all tasks and the new one; both are empty if all use the model's own."""
    if not experts.sizes:
        return {}, {}
    like, library = parts.model.state_dict(), library_of(parts.model)
    rows, vocabulary = dict(parts.rows), dict(parts.config.vocabulary)
    table = library.vocabulary_names(parts.model, inventory)[0]
    for task in parts.config.tasks if not vocabulary else ():
        size = len(parts.heads[task].get(table, like[table]))
        vocabulary[task] = {"size": size, "token_ids": {}, "tokenizer": False}
    vocabulary[name] = describe_vocabulary(library, parts.model, source, parts.side_folder, experts.sizes[name])
    if experts.vocabulary:
        for task in parts.config.tasks if not rows else ():
            rows[task] = {n: like[n].new_empty((0, *like[n].shape[1:])) for n in experts.vocabulary}
        rows[name] = {
            n: experts.read_rows(name, n, like[n].dtype).to(like[n].device, like[n].dtype, copy=True)
            for n in experts.vocabulary
        }
    sizes, own = ({found[key] for found in vocabulary.values()} for key in ("size", "tokenizer"))
    return (rows, vocabulary) if rows or len(sizes) > 1 or any(own) else ({}, {})


def _joining(
    parts: RetexParts,
    experts: ExpertSet,
    inventory: Inventory,
    name: str,
    left_out: set[str],
) -> dict[str, Layout]:
    """Return the layouts of the parameters that the new expert changes and no other expert did."""
    config = parts.config
    checkpoint = experts.experts[name]
    joining = {}
    for n in experts.names:
        if n in parts.recovery or n in left_out:
            continue
        merged = experts.read_base(n)
        if torch.equal(read_finite(checkpoint, n).to(merged.dtype), merged):
            continue
        # Rank 1 determines the kind of layout; the rank itself is found as it grows.
        joining[n] = plan_layout(
            inventory.shapes[n],
            "full" if config.rank == "full" else 1,
            len(config.tasks) + 1,
            n in inventory.convolutions,
            order=config.factor_order,
        )
    return joining


def _budget(config: RetexConfig, tolerance: float | None) -> float:
    """Return the bytes that one more task may take: as many as each of the others was given."""
    if config.task_bytes is None and tolerance is None:
        raise RetexError(
            "The model does not say how many bytes each of its tasks was given, because it was built by an earlier "
            "version: give tolerance=, or build it again."
        )
    return config.task_bytes or 0.0


def _tolerances(parts: RetexParts, joining: Mapping[str, Layout], tolerance: float | None) -> dict[str, float]:
    """Return the relative error that the new task may have: the given one, or that of the other tasks.

    Parameters in which the others do not differ have no error; use the median over all matrices for them.
    """
    if tolerance is not None:
        return dict.fromkeys([*parts.recovery, *joining], tolerance)
    errors: dict[str, float] = {}
    for name in parts.recovery:
        error = parts.errors.get(name)
        if error is None:
            raise RetexError(f"The recovery error of {name!r} for the other tasks is not known: give tolerance=.")
        errors[name] = error
    matrices = [error for name, error in errors.items() if parts.recovery[name].layout.kind == MATRIX]
    return errors | dict.fromkeys(joining, median(matrices) if matrices else 0.0)


def _joint_errors(errors: Mapping[str, float | None], growth: Growth) -> dict[str, float]:
    """Return an upper bound of the relative errors over all tasks.

    Only the other tasks' joint ratio is known, not its parts; the ratio over all tasks lies between theirs and the new
    one.
    """
    known = {name: max(error, growth.errors[name]) for name, error in errors.items() if error is not None}
    return {**growth.errors, **known}


def _join_signature(
    parts: RetexParts, signatures: Signatures, name: str, batches: Iterable[Mapping[str, Any]]
) -> Signatures:
    """Return the signatures with that of the new task, in the space of the others; warn if that does not tell it."""
    config, space = parts.config, signatures.space.to(torch.device("cpu"))
    features = reference_features(extractor_of(parts, list(space.layers)), name, batches, config.num_reference)
    placed = space(features)
    new = Signatures.fit_in(space, [placed], config.signature_rank)
    joined = signatures.joined_by(new.to(signatures.mean.device))
    own = held_out_residuals(placed, config.signature_rank)
    if len(own):
        others = signatures.residuals(placed.to(signatures.mean.device)).amin(1).cpu()
        share = (own < others).float().mean().item()
        if share < IDENTIFIED:
            logger.warning(
                "Of the references of task %r, %.0f %% are identified by features of %r, which were chosen without it: "
                "call fit_signatures with inputs of all tasks to choose again.",
                name, 100 * share, signatures.feature_layer,
            )  # fmt: skip
    return joined


def _joined_trunk(parts: RetexParts, signatures: Signatures, name: str, batches: list[dict[str, Any]]) -> RetexParts:
    """Return parts whose shared trunk is aligned with the expert of a new task, too."""
    assert parts.config.trunk is not None and signatures.alignment is not None
    alignment, cost = align_new_task(parts, name, batches)
    joined = signatures.alignment.joined_by(alignment.to(signatures.mean.device))
    trunk = {**parts.config.trunk, "cost": {**parts.config.trunk["cost"], name: cost}}
    return replace(parts, config=replace(parts.config, trunk=trunk), signatures=replace(signatures, alignment=joined))


def _note_task(
    parts: RetexParts,
    name: str,
    expert: Any,
    source: Source,
    base: Any,
    tolerance: float | None,
    check_base: bool,
) -> RecipeRecord | None:
    """Return the recipe with the new task; None if the expert or its base exists only in memory."""
    in_files = all(isinstance(spec, (str, os.PathLike)) for spec in (expert, base) if spec is not None)
    if parts.recipe is None or not in_files:
        return None
    options: dict[str, Any] = {} if base is None else {"base": os.fspath(base)}
    options |= {} if tolerance is None else {"tolerance": tolerance}
    options |= {} if check_base else {"check_base": False}
    signed = parts.signatures is not None
    revision = source.provenance.get("revision")
    return parts.recipe.with_task(name, expert, revision=revision, signed_in_memory=signed, **options)


def _without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: value for k, value in values.items() if k != key}


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
