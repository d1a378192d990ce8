"""References at the end of a shared trunk: what the merged model and an expert have there, and what becomes of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from ..artifact.state import RetexParts
from ..backends import library_of
from ..backends.input_forms import Tokens
from ..execution import ExpertRunner, Group, SharedTrunk, TrunkRecord, forward_inputs, replaying
from ..routing import (
    Alignment,
    Correction,
    Entry,
    FeatureExtractor,
    Moments,
    Signatures,
    answers,
    entries,
    regressors,
    unmasked,
)
from ..routing.features import Recorded, first_tensor
from ..routing.perturbation import perturbed_inputs
from ..rows import NOT_ROWS, Splitter
from .components import extractor_of, runner_of

Batches = Sequence[Mapping[str, Any]]
# Folds of the references: what aligns a row when the cost is measured was fitted without it.
FOLDS = 4
# The differences are known for any input, so that each reference serves in bad weather too, so many times.
# With so many positions per regressor there are enough of them without: those in bad weather would only mislead.
COPIES, ENOUGH = 3, 16
# Positions that are fitted to, of a batch: more take time, and change next to nothing.
MOST_POSITIONS = 8192


@dataclass(frozen=True)
class Part:
    """The rows of a batch of references that are in one fold."""

    fold: int
    inputs: Mapping[str, Any]
    rows: int


class TaskReferences:
    """The references of one task, in folds: a row is in the same fold however it is perturbed."""

    def __init__(self, parts: RetexParts, task: str, batches: Batches) -> None:
        assert isinstance(parts.signatures, Signatures)  # a trunk ends at their feature layer, or before
        self.parts, self.task, self._batches = parts, task, batches
        self._extractor = extractor_of(parts, [parts.signatures.feature_layer])
        self._read = [self._extractor.record(batch) for batch in batches]
        self.total = sum(recorded.rows for recorded in self._read)
        self.folds = min(FOLDS, self.total)
        self._whole = runner_of(parts)

    @property
    def _group(self) -> Group:
        return Group(self.parts.config.tasks.index(self.task), torch.arange(0))

    def split(self, copy: int = 0) -> Iterator[Part]:
        """Yield the references, as they are or as the given copy of them in bad weather, fold by fold."""
        form = library_of(self.parts.model).input_form(self.parts.model)
        tokens, first = form if isinstance(form, Tokens) else None, 0
        for batch, recorded in zip(self._batches, self._read, strict=True):
            rows, splitter = recorded.rows, Splitter(recorded.rows, NOT_ROWS, recorded.reading)
            inputs = perturbed_inputs(batch, tokens, first + (copy - 1) * self.total) if copy else batch
            fold_of_row = (torch.arange(rows) + first) % self.folds
            for fold in fold_of_row.unique().tolist():
                chosen = (fold_of_row == fold).nonzero().flatten()
                yield Part(fold, splitter.take(inputs, chosen), len(chosen))
            first += rows

    def moments(self, junction: str) -> list[Moments]:
        """Return the moments of hidden states at a junction, fold by fold."""
        merged = extractor_of(self.parts, [junction])
        expert = FeatureExtractor(self._whole.expert(self._group), [junction], self.parts.config.feature_pooling)
        found: dict[int, list[Moments]] = {fold: [] for fold in range(self.folds)}
        seen, regressed = 0, 1
        for copy in range(COPIES + 1):
            if seen >= ENOUGH * regressed:
                break
            for part in self.split(copy):
                own, theirs = (_hidden(each.record(part.inputs), junction) for each in (merged, expert))
                mask = part.inputs.get("attention_mask")
                states, differences = (unmasked(states, mask).cpu() for states in (regressors(own), theirs - own))
                seen, regressed = seen + len(states), states.shape[1]
                chosen = _some(len(states), MOST_POSITIONS // self.folds)
                found[part.fold].append(Moments.of(states[chosen], differences[chosen]))
        return [reduce(add, of_fold) for of_fold in found.values()]

    @cached_property
    def answers(self) -> list[Tensor]:
        """Return the answers of the whole expert to each part."""
        return self._answers_of(recovered=True)

    @cached_property
    def distance_of_merged(self) -> float:
        """Return the distance between the answers of the whole expert and those of the merged model with its head."""
        return distance(self.answers, self._answers_of(recovered=False))

    def _answers_of(self, recovered: bool) -> list[Tensor]:
        model = self._whole.expert(self._group, recovered)
        return [self._answer(model, part) for part in self.split()]

    def answers_behind(self, trunk: SharedTrunk) -> Callable[[Sequence[Correction]], list[Tensor]]:
        """Return a function that gives the answers of the expert behind a trunk to each part, with the correction of
        its fold. The trunk runs once."""
        extractor = extractor_of(self.parts, [trunk.junction], trunk.blocks)
        expert = _runner_behind(self.parts, trunk).expert(self._group)
        read = [(part, extractor.record(part.inputs)) for part in self.split()]

        def found(corrections: Sequence[Correction]) -> list[Tensor]:
            return [self._continued(expert, trunk, part, recorded, corrections[part.fold]) for part, recorded in read]

        return found

    def _continued(
        self, expert: nn.Module, trunk: SharedTrunk, part: Part, recorded: Recorded, correction: Correction
    ) -> Tensor:
        alignment, weights = Alignment.of([correction]), torch.ones(recorded.rows, 1)
        record = record_of(recorded).aligned(trunk.junction, recorded.layouts[trunk.junction], alignment, weights)
        return replaying(record, None, partial(self._answer, expert, part))

    def _answer(self, model: nn.Module, part: Part) -> Tensor:
        return _answers(model, self._extractor.select(part.inputs), part.rows)


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the distance between outputs."""
    return math.sqrt(sum((a - b).square().sum().item() for a, b in zip(some, others, strict=True)))


def record_of(recorded: Recorded) -> TrunkRecord:
    """Return what a pass has recorded of a trunk."""
    return TrunkRecord(recorded.outputs, recorded.rows, recorded.proof, recorded.reading, recorded.cache)


def _hidden(recorded: Recorded, junction: str) -> Tensor:
    return entries(first_tensor(recorded.outputs[junction]).float(), recorded.layouts[junction])


def _some(count: int, most: int) -> Tensor:
    """Return which of the positions are fitted to: all of few, the same random ones of more."""
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most].sort().values


def _runner_behind(parts: RetexParts, trunk: SharedTrunk) -> ExpertRunner:
    return runner_of(replace(parts, recovery=parts.recovery.without(trunk.parameters)), trunk=trunk)


@torch.no_grad()
def _answers(model: nn.Module, inputs: Mapping[str, Any], rows: int) -> Tensor:
    """Return the main output of a model at all positions without padding; of a decoder behind an encoder, that for its
    first token."""
    entry, mask = Entry(model), inputs.get("attention_mask")
    if entry.part is not model and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        return answers(model(**forward_inputs(model, inputs, rows))).cpu().double()
    found = answers(entry(**inputs)).cpu().double()
    return found[mask.bool().cpu()] if isinstance(mask, Tensor) and found.shape[:-1] == mask.shape else found
