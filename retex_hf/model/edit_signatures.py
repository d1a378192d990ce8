"""Fitting the signatures of a finished model.

The functions take parts and return new ones; the old ones stay unchanged, so that running calls are not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..artifact.state import RetexParts
from ..backends import as_inputs
from ..errors import InputError, TaskError
from ..execution import task_index
from ..routing import (
    Signatures,
    WeightSignatures,
    as_batches,
    candidate_layers,
    fit_signatures,
    noted,
)
from .components import extractor_of, scorers_of
from .shared_trunk import with_shared_trunk


def sign(
    parts: RetexParts,
    references: Mapping[str, Iterable[Any]] | Iterable[Any],
    *,
    known: dict[Any, Any] | None = None,
    progress: bool = True,
) -> tuple[RetexParts, dict[str, float]]:
    """Return the parts of a model with signatures fitted on references, and held-out accuracies by layer.

    See `RetexModel.fit_signatures`; `known` are findings about kinds of inputs, which are added to.
    """
    if parts.config.signatures == "weights":
        pool = _as_pool(parts, references)
        return _signed(parts, WeightSignatures.fit(scorers_of(parts, known), pool)), {}
    batches = _check_references(parts, references)
    seen: dict[str, list[dict[str, Any]]] = {task: [] for task in batches}
    signatures, accuracies = fit_signatures(
        partial(extractor_of, parts, known=known),
        candidate_layers(parts.model, parts.config),
        {task: noted(batches[task], seen[task]) for task in batches},
        parts.config,
        progress,
    )
    signed = _signed(replace(parts, config=replace(parts.config, trunk=None)), signatures)
    if parts.config.shared_trunk:
        signed = with_shared_trunk(signed, seen, progress)
    return signed, accuracies


def inputs_of(parts: RetexParts, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Return batches as keyword arguments of the model."""
    return map(partial(as_inputs, parts.model), as_batches(batches))


def _signed(parts: RetexParts, signatures: Signatures | WeightSignatures) -> RetexParts:
    # The evaluation and the recipe describe other signatures.
    recipe = None if parts.recipe is None else parts.recipe.signed_in_memory()
    signatures = signatures.to(parts.recovery.task_embedding.device)
    return replace(parts, signatures=signatures, evaluation=None, recipe=recipe)


def _check_references(parts: RetexParts, references: Any) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the batches of every task, in the order of the tasks."""
    tasks = parts.config.tasks
    if not isinstance(references, Mapping):
        raise InputError(
            f"fit_signatures takes a dict of task name to batches, not {type(references).__name__}; "
            f"the tasks are {tasks}."
        )
    for task in references:
        task_index(task, tasks)
    missing = [task for task in tasks if task not in references]
    if missing:
        raise TaskError(f"fit_signatures needs reference inputs for every task; {missing} have none.")
    return {task: inputs_of(parts, references[task]) for task in tasks}


def _as_pool(parts: RetexParts, batches: Any) -> Iterator[dict[str, Any]]:
    if isinstance(batches, Mapping) and any(name in parts.config.tasks for name in batches):
        raise InputError('With signatures="weights" fit_signatures takes one pool of batches, not one per task.')
    return inputs_of(parts, batches)
