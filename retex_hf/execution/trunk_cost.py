"""Cost of leaving the trunk merged, measured on unlabelled reference inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..routing import Entry, FeatureExtractor
from ..routing.trunk_parameters import answers
from .assignment import Group
from .runner import ExpertRunner


@torch.no_grad()
def trunk_cost(
    full: ExpertRunner,
    shared: ExpertRunner,
    references: Mapping[str, Sequence[Mapping[str, Any]]],
    extractor: FeatureExtractor,
) -> dict[str, dict[str, float]]:
    """Return, per task, how much experts with a merged trunk differ from fully recovered ones on the task's inputs.

    `change` is the distance between their outputs, relative to the distance between the fully recovered expert and the
    merged model: 0 loses nothing, 1 is as bad as the merged model. `agreement`, for classifiers, is the share of rows
    whose predicted class stays the same.
    """
    costs = {}
    for task, batches in references.items():
        task_id = full.tasks.index(task)
        group = Group(task_id, torch.arange(0))
        expert = _answers(full.expert(group), batches, extractor)
        trunk, merged = (_answers(shared.expert(group, r), batches, extractor) for r in (True, False))
        distance, missed = _distance(expert, merged), _distance(expert, trunk)
        costs[task] = {"change": missed / distance if distance > 0 else 0.0}
        if full.num_labels(task_id) is not None:
            same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(expert, trunk, strict=True)])
            costs[task]["agreement"] = same.float().mean().item()
    return costs


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    return math.sqrt(sum((a - b).square().sum().item() for a, b in zip(some, others, strict=True)))


def _answers(expert: nn.Module, batches: Sequence[Mapping[str, Any]], extractor: FeatureExtractor) -> list[Tensor]:
    entry = Entry(expert)
    return [answers(entry(**extractor.select(batch))).cpu().double() for batch in batches]
