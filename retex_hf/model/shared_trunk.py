"""Fitting a shared trunk: how deep it may be, how its end is aligned with every expert, and what it costs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..artifact.state import RetexParts
from ..errors import ConfigError
from ..execution import ExpertRunner, Group, SharedTrunk, TrunkRecord, forward_inputs, replaying, replays_cache
from ..routing import (
    Alignment,
    Entry,
    FeatureExtractor,
    Signatures,
    answers,
    describe_trunk,
    keeps_cache,
    positions,
    trunk_blocks,
    trunk_parameters,
)
from ..routing.features import Recorded, first_tensor
from ..routing.pooling import Layout
from ..utils.progress import remark, track
from .components import extractor_of, runner_of

Batches = Sequence[Mapping[str, Any]]
# Folds of the references: what aligns a row when the cost is measured was fitted without it.
FOLDS = 4
# Positions of a task that are fitted to: more take time, and change next to nothing.
MOST_POSITIONS = 8192
# Where a model gives no classes or tokens, so many times the tolerance bounds how far outputs move.
WITHOUT_ANSWERS = 10


@dataclass(frozen=True)
class TaskStates:
    """Hidden states (N, d) of the merged model and of an expert at the same positions, and the reference of each."""

    merged: Tensor
    expert: Tensor
    reference: Tensor

    def without(self, fold: int, folds: int) -> tuple[Tensor, Tensor]:
        """Return the pairs of all references but one fold's; of all where there is one fold only."""
        kept = (self.reference % folds != fold) | (folds == 1)
        return self.merged[kept], self.expert[kept]


class TrunkFitter:
    """Fits the alignment at a junction, and measures what a trunk up to there costs, on references of some tasks."""

    def __init__(self, parts: RetexParts, references: Mapping[str, Batches]) -> None:
        self.parts, self.references = parts, references
        self._full = runner_of(parts)
        self._expected: dict[str, tuple[list[Tensor], float]] = {}

    def _group(self, task: str) -> Group:
        return Group(self.parts.config.tasks.index(task), torch.arange(0))

    def states(self, task: str, junction: str) -> TaskStates:
        """Return hidden states at the junction on a task's references."""
        merged = extractor_of(self.parts, [junction])
        pooling = self.parts.config.feature_pooling
        expert = FeatureExtractor(self._full.expert(self._group(task)), [junction], pooling)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        rows = 0
        for batch in self.references[task]:
            recorded = merged.record(batch)
            (own, owner), (theirs, _) = (_positions(each, junction, batch) for each in (recorded, expert.record(batch)))
            found.append((own, theirs, owner + rows))
            rows += recorded.rows
        parts = [torch.cat(part) for part in zip(*found, strict=True)]
        stride = math.ceil(len(parts[0]) / MOST_POSITIONS)
        return TaskStates(*(part[::stride].cpu() for part in parts))

    def cost(self, task: str, trunk: SharedTrunk, states: TaskStates) -> dict[str, float]:
        """Return how much an expert behind the trunk differs from the whole expert on the task's references.

        `change` is the distance between their outputs, relative to the distance between the whole expert and the merged
        model: 0 loses nothing, 1 is as bad as the merged model. `agreement` is the share of answers (classes, or next
        tokens) that stay the same, where a model gives such.
        """
        folds = min(FOLDS, int(states.reference.max()) + 1)
        cross_fitted = Alignment.fit([states.without(fold, folds) for fold in range(folds)])
        runner = _runner_behind(self.parts, trunk)
        expert, rows, found = runner.expert(self._group(task)), 0, []
        extractor = extractor_of(self.parts, [trunk.junction], trunk.blocks)
        for batch in self.references[task]:
            recorded = extractor.record(batch)
            weights = torch.nn.functional.one_hot((torch.arange(recorded.rows) + rows) % folds, folds).float()
            record = record_of(recorded).aligned(
                trunk.junction, recorded.layouts[trunk.junction], cross_fitted, weights
            )
            inputs = extractor.select(batch)
            found.append(replaying(record, None, partial(_answers, expert, inputs, recorded.rows)))
            rows += recorded.rows
        expected, distance = self._whole(task, extractor)
        missed = _distance(expected, found)
        cost = {"change": missed / distance if distance > 0 else 0.0}
        if self._chooses():
            same = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in zip(expected, found, strict=True)])
            cost["agreement"] = same.float().mean().item()
        return cost

    def _whole(self, task: str, extractor: FeatureExtractor) -> tuple[list[Tensor], float]:
        """Return the whole expert's answers, and their distance from those of the merged model."""
        if task not in self._expected:
            inputs = [(extractor.select(batch), extractor.count_rows(batch)) for batch in self.references[task]]
            models = [self._full.expert(self._group(task), recovered) for recovered in (True, False)]
            found, others = ([_answers(model, *one) for one in inputs] for model in models)
            self._expected[task] = (found, _distance(found, others))
        return self._expected[task]

    def _chooses(self) -> bool:
        """Return whether the largest output is the answer: the class of a row, or the next token."""
        kinds = {described.get("problem_type") for described in self.parts.config.labels.values()}
        widths = [len(described["id2label"]) for described in self.parts.config.labels.values()]
        if widths:
            return kinds <= {None, "single_label_classification"} and min(widths) > 1
        can_generate = getattr(self.parts.model, "can_generate", None)
        return can_generate is not None and can_generate()


def with_shared_trunk(parts: RetexParts, references: Mapping[str, Batches], progress: bool) -> RetexParts:
    """Return the parts with a trunk that runs once for all rows whose task is identified; the same parts where
    `shared_trunk="auto"` finds none that is good enough."""
    config, signatures = parts.config, parts.signatures
    assert isinstance(signatures, Signatures)  # a trunk ends at their feature layer, or before
    fitter = TrunkFitter(parts, references)
    depths = _usable_blocks(parts, signatures.feature_layer, references[config.tasks[0]][0])
    if config.shared_trunk is True:
        depths = depths[-1:]
    tried: dict[int, tuple[SharedTrunk, dict[str, Any]]] = {}

    def good(depth: int) -> bool:
        tried[depth] = _fit(fitter, depths[depth], progress)
        return config.shared_trunk is True or mean_cost(tried[depth][1]["cost"]) <= config.trunk_tolerance

    best = _deepest(len(depths), good)
    if best is None:
        if progress:
            remark(
                f"No shared trunk: the shallowest, up to {depths[0]}, changes "
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


def _fit(fitter: TrunkFitter, junction: str, progress: bool) -> tuple[SharedTrunk, dict[str, Any]]:
    """Return a trunk up to a junction, and its description, with its cost."""
    parts, tasks = fitter.parts, fitter.parts.config.tasks
    sample = fitter.references[tasks[0]][0]
    extractor = extractor_of(parts, [junction])
    layout = extractor.record(sample).layouts[junction]
    hidden = first_tensor(extractor.record(sample).outputs[junction])
    blocks = trunk_blocks(parts.model, junction)
    parameters = trunk_parameters(extractor, sample, parts.model)
    states = {task: fitter.states(task, junction) for task in tasks}
    alignment = Alignment.fit([(found.merged, found.expert) for found in states.values()])
    trunk = SharedTrunk(blocks, parameters, layout.features - hidden.ndim, alignment)
    costs = {
        task: fitter.cost(task, trunk, states[task])
        for task in track(tasks, title=f"Aligning experts at {junction}", unit="task", progress=progress)
    }
    cached = keeps_cache(extractor, sample, parts.model)
    return trunk, {
        "junction": junction,
        "axis": trunk.axis,
        "parameters": parameters,
        "cached": cached,
        "replayed": not cached or _replays_cache(parts, junction, sample),
        "cost": costs,
    }


def align_new_task(parts: RetexParts, name: str, batches: Batches) -> tuple[Alignment, dict[str, float]]:
    """Return the alignment of one more task at the junction of a trunk, and its cost."""
    assert parts.config.trunk is not None
    fitter, junction = TrunkFitter(parts, {name: batches}), parts.config.trunk["junction"]
    states = fitter.states(name, junction)
    alignment = Alignment.fit([(states.merged, states.expert)])
    return alignment, fitter.cost(name, trunk_of(parts, alignment), states)


def trunk_of(parts: RetexParts, alignment: Alignment) -> SharedTrunk:
    """Return the shared trunk that a configuration describes."""
    described = parts.config.trunk
    assert described is not None
    blocks = trunk_blocks(parts.model, described["junction"])
    named = {key: described[key] for key in ("parameters", "axis", "cached", "replayed")}
    return SharedTrunk(blocks, alignment=alignment, **named)


def mean_cost(costs: Mapping[str, Mapping[str, float]]) -> float:
    """Return the share of answers that a trunk changes; where there are none, a tenth of the change of outputs."""

    def of_task(cost: Mapping[str, float]) -> float:
        return 1 - cost["agreement"] if "agreement" in cost else cost["change"] / WITHOUT_ANSWERS

    return sum(map(of_task, costs.values())) / len(costs)


def record_of(recorded: Recorded) -> TrunkRecord:
    """Return what a pass has recorded of a trunk."""
    return TrunkRecord(recorded.outputs, recorded.rows, recorded.proof, recorded.reading, recorded.cache)


def _replays_cache(parts: RetexParts, layer: str, sample: Mapping[str, Any]) -> bool:
    """Return whether the merged model gives the same outputs and caches when its trunk is replayed from a record."""
    blocks = trunk_blocks(parts.model, layer)
    recorded = extractor_of(parts, [layer], blocks, with_cache=True).record(sample)
    if recorded.proof.refused:
        return False
    return replays_cache(parts.model, blocks, record_of(recorded), extractor_of(parts, [layer]).select(sample))


def _runner_behind(parts: RetexParts, trunk: SharedTrunk) -> ExpertRunner:
    return runner_of(replace(parts, recovery=parts.recovery.without(trunk.parameters)), trunk=trunk)


def _usable_blocks(parts: RetexParts, layer: str, sample: Mapping[str, Any]) -> list[str]:
    """Return the blocks up to a layer at which hidden states can be aligned."""
    found = extractor_of(parts, trunk_blocks(parts.model, layer)).layouts(sample)
    usable = [block for block, layout in found.items() if isinstance(layout, Layout)]
    if layer not in usable:
        raise ConfigError(f"RetexConfig.shared_trunk: module {layer!r} {found[layer]}.")
    return usable


def _positions(recorded: Recorded, layer: str, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    hidden = first_tensor(recorded.outputs[layer]).float()
    mask = batch.get("attention_mask")
    return positions(hidden, recorded.layouts[layer], recorded.reading, mask, recorded.rows)


@torch.no_grad()
def _answers(model: nn.Module, inputs: Mapping[str, Any], rows: int) -> Tensor:
    """Return the main output of a model at all positions without padding; of a decoder behind an encoder, that for its
    first token."""
    entry, mask = Entry(model), inputs.get("attention_mask")
    if entry.part is not model and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        return answers(model(**forward_inputs(model, inputs, rows))).cpu().double()
    found = answers(entry(**inputs)).cpu().double()
    return found[mask.bool().cpu()] if isinstance(mask, Tensor) and found.shape[:-1] == mask.shape else found


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    return math.sqrt(sum((a - b).square().sum().item() for a, b in zip(some, others, strict=True)))
