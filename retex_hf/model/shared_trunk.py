"""Fitting a shared trunk: how deep it may be, how its end is aligned with every expert, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ..artifact.state import RetexParts
from ..errors import ConfigError
from ..execution import SharedTrunk, replays_cache
from ..routing import (
    RIDGES,
    Alignment,
    Correction,
    Moments,
    Signatures,
    describe_trunk,
    keeps_cache,
    trunk_blocks,
    trunk_parameters,
)
from ..routing.features import first_tensor
from ..routing.pooling import Layout
from ..utils.progress import remark, track
from .components import extractor_of
from .trunk_references import Batches, TaskReferences, distance, record_of

# Where a model gives no classes or tokens, so many times the tolerance bounds how far outputs move.
WITHOUT_ANSWERS = 10
# References of a task from which `"auto"` trusts what a trunk is said to cost: a few hold out next to nothing.
FEWEST_REFERENCES = 16


@dataclass(frozen=True)
class Fitted:
    """The correction of a task at a junction, and its cost on references that it was not fitted to.

    `change` is the distance between the outputs of the expert behind the trunk and of the whole expert, relative to the
    distance between the whole expert and the merged model: 0 loses nothing, 1 is as bad as the merged model.
    `agreement` is the share of answers (classes, or next tokens) that stay the same, and `lost` the share of right
    answers that is expected to be lost, where a model gives such: an answer that the whole expert found almost as
    likely as its own costs next to nothing.
    """

    correction: Correction
    cost: dict[str, float]


def fit_correction(references: TaskReferences, trunk: SharedTrunk, chooses: bool) -> Fitted:
    """Fit the correction of a task behind a trunk.

    How far the answers to references of the other folds are from the whole expert's decides between no correction and
    the weights of the ridge: it is the strongest restraint that is as good as the best, but for chance.
    """
    folds = references.moments(trunk.junction)
    everything = reduce(add, folds)
    # Of one reference alone, nothing can be held out.
    others = [_without(folds, fold) if len(folds) > 1 else everything for fold in range(len(folds))]
    makes: list[Callable[[Moments], Correction]] = [Moments.no_correction]
    makes += [partial(Moments.correction, ridge=ridge) for ridge in sorted(RIDGES, reverse=True)]
    behind, missed, costs = references.answers_behind(trunk), [], []
    for make in makes:  # answers of one at a time: those of a language model take much memory
        found = behind([make(moments) for moments in others])
        missed.append(misses(references.answers, found, chooses))
        costs.append(_cost(references, found, chooses))
    best = simplest_good(missed)
    return Fitted(makes[best](everything), costs[best])


def simplest_good(missed: Sequence[Tensor]) -> int:
    """Return the first candidate that the best misses less than by no more than chance, of the misses of each.

    The difference of their means is compared to its standard error, over the same outputs.

    >>> import torch
    >>> simplest_good([torch.tensor([9.0, 9.0]), torch.tensor([0.9, 2.5]), torch.tensor([1.0, 2.0])])
    1
    """
    best = min(missed, key=lambda each: each.mean().item())
    excess = [each - best for each in missed]
    return next(i for i, each in enumerate(excess) if each.mean() <= each.std(correction=0) / math.sqrt(len(each)))


def misses(expected: Sequence[Tensor], found: Sequence[Tensor], chooses: bool) -> Tensor:
    """Return how far each output is from the expected one: by the divergence of answers, where there are any."""
    pairs = zip(expected, found, strict=True)
    if not chooses:
        return torch.cat([(a - b).square().flatten(1).sum(1) if a.ndim > 1 else (a - b).square() for a, b in pairs])
    likelihoods = ((a.log_softmax(-1), b.log_softmax(-1)) for a, b in pairs)
    # What both exclude differs by nothing, though infinity minus infinity is no number.
    return torch.cat([(own.exp() * (own - other)).nan_to_num(0.0).sum(-1).flatten() for own, other in likelihoods])


def _without(folds: Sequence[Moments], fold: int) -> Moments:
    return reduce(add, [moments for other, moments in enumerate(folds) if other != fold])


def _cost(references: TaskReferences, found: Sequence[Tensor], chooses: bool) -> dict[str, float]:
    missed, whole = distance(references.answers, found), references.distance_of_merged
    cost = {"change": missed / whole if whole > 0 else 0.0}
    return cost | (changed_answers(references.answers, found) if chooses else {})


def changed_answers(expected: Sequence[Tensor], found: Sequence[Tensor]) -> dict[str, float]:
    """Return the share of answers that stay the same, and of right ones that is expected to be lost."""
    same, lost = [], []
    for own, other in zip(expected, found, strict=True):
        likely, answer = own.softmax(-1), other.argmax(-1)
        same.append((own.argmax(-1) == answer).flatten())
        lost.append((likely.amax(-1) - likely.gather(-1, answer.unsqueeze(-1)).squeeze(-1)).flatten())
    return {"agreement": torch.cat(same).double().mean().item(), "lost": torch.cat(lost).mean().item()}


def _chooses(parts: RetexParts) -> bool:
    """Return whether the largest output is the answer: the class of a row, or the next token."""
    kinds = {described.get("problem_type") for described in parts.config.labels.values()}
    widths = [len(described["id2label"]) for described in parts.config.labels.values()]
    if widths:
        return kinds <= {None, "single_label_classification"} and min(widths) > 1
    can_generate = getattr(parts.model, "can_generate", None)
    return can_generate is not None and can_generate()


def with_shared_trunk(parts: RetexParts, references: Mapping[str, Batches], progress: bool) -> RetexParts:
    """Return the parts with a trunk that runs once for all rows whose task is identified; the same parts where
    `shared_trunk="auto"` finds none that is good enough."""
    config, signatures = parts.config, parts.signatures
    assert isinstance(signatures, Signatures)  # a trunk ends at their feature layer, or before
    by_task = {task: TaskReferences(parts, task, references[task]) for task in config.tasks}
    fewest = min(by_task.values(), key=lambda of_task: of_task.total)
    if config.shared_trunk == "auto" and fewest.total < FEWEST_REFERENCES:
        if progress:
            remark(
                f"No shared trunk: task {fewest.task!r} has {fewest.total} references, and what a trunk costs takes "
                f"{FEWEST_REFERENCES} to tell.",
                in_logs=True,
            )
        return parts
    depths = _usable_blocks(parts, signatures.feature_layer, references[config.tasks[0]][0])
    if config.shared_trunk is True:
        depths = depths[-1:]
    tried: dict[int, tuple[SharedTrunk, dict[str, Any]]] = {}

    def good(depth: int) -> bool:
        tried[depth] = _fit(parts, by_task, references[config.tasks[0]][0], depths[depth], progress)
        return config.shared_trunk is True or mean_cost(tried[depth][1]["cost"]) <= config.trunk_tolerance

    best = _deepest(len(depths), good)
    if best is None:
        if progress:
            remark(
                f"No shared trunk: the shallowest, up to {depths[0]}, loses "
                f"{mean_cost(tried[0][1]['cost']):.1%} of the answers, more than trunk_tolerance allows.",
                in_logs=True,
            )
        return parts
    trunk, described = tried[best]
    if progress:
        remark(describe_trunk(described), in_logs=True)
    aligned = replace(signatures, alignment=trunk.alignment.to(signatures.mean.device))
    return replace(parts, signatures=aligned, config=replace(config, trunk=described))


def _deepest(count: int, good: Callable[[int], bool]) -> int | None:
    """Return the largest depth that is good, by bisection: the deeper, the worse. None where none is."""
    if good(count - 1):
        return count - 1
    low, high = -1, count - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return None if low < 0 else low


def _fit(
    parts: RetexParts,
    references: Mapping[str, TaskReferences],
    sample: Mapping[str, Any],
    junction: str,
    progress: bool,
) -> tuple[SharedTrunk, dict[str, Any]]:
    """Return a trunk up to a junction, and its description, with its cost."""
    extractor = extractor_of(parts, [junction])
    recorded = extractor.record(sample)
    hidden, layout = first_tensor(recorded.outputs[junction]), recorded.layouts[junction]
    width, blocks = hidden.shape[layout.features], trunk_blocks(parts.model, junction)
    parameters = trunk_parameters(extractor, sample, parts.model)
    plain = Alignment(torch.zeros(0, 1, width), torch.zeros(0, 1, width), torch.zeros(0, width))
    trunk = SharedTrunk(blocks, parameters, layout.features - hidden.ndim, plain)
    fitted = {
        task: fit_correction(of_task, trunk, _chooses(parts))
        for task, of_task in track(references.items(), title=f"Aligning at {junction}", unit="task", progress=progress)
    }
    cached = keeps_cache(extractor, sample, parts.model)
    return replace(trunk, alignment=Alignment.of([found.correction for found in fitted.values()])), {
        "junction": junction,
        "axis": trunk.axis,
        "parameters": parameters,
        "cached": cached,
        "replayed": not cached or _replays_cache(parts, junction, sample),
        "cost": {task: found.cost for task, found in fitted.items()},
    }


def align_new_task(parts: RetexParts, name: str, batches: Batches) -> tuple[Alignment, dict[str, float]]:
    """Return the alignment of one more task at the junction of a trunk, and its cost."""
    assert isinstance(parts.signatures, Signatures) and parts.signatures.alignment is not None
    trunk = trunk_of(parts, parts.signatures.alignment)
    fitted = fit_correction(TaskReferences(parts, name, batches), trunk, _chooses(parts))
    return Alignment.of([fitted.correction]), fitted.cost


def trunk_of(parts: RetexParts, alignment: Alignment) -> SharedTrunk:
    """Return the shared trunk that a configuration describes."""
    described = parts.config.trunk
    assert described is not None
    blocks = trunk_blocks(parts.model, described["junction"])
    named = {key: described[key] for key in ("parameters", "axis", "cached", "replayed")}
    return SharedTrunk(blocks, alignment=alignment, **named)


def mean_cost(costs: Mapping[str, Mapping[str, float]]) -> float:
    """Return the share of answers that a trunk loses; where there are none, a tenth of the change of outputs."""

    def of_task(cost: Mapping[str, float]) -> float:
        return cost["lost"] if "lost" in cost else cost["change"] / WITHOUT_ANSWERS

    return sum(map(of_task, costs.values())) / len(costs)


def _replays_cache(parts: RetexParts, layer: str, sample: Mapping[str, Any]) -> bool:
    """Return whether the merged model gives the same outputs and caches when its trunk is replayed from a record."""
    blocks = trunk_blocks(parts.model, layer)
    recorded = extractor_of(parts, [layer], blocks, with_cache=True).record(sample)
    if recorded.proof.refused:
        return False
    return replays_cache(parts.model, blocks, record_of(recorded), extractor_of(parts, [layer]).select(sample))


def _usable_blocks(parts: RetexParts, layer: str, sample: Mapping[str, Any]) -> list[str]:
    """Return the blocks up to a layer at which hidden states can be aligned."""
    found = extractor_of(parts, trunk_blocks(parts.model, layer)).layouts(sample)
    usable = [block for block, layout in found.items() if isinstance(layout, Layout)]
    if layer not in usable:
        raise ConfigError(f"RetexConfig.shared_trunk: module {layer!r} {found[layer]}.")
    return usable
