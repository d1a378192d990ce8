"""One body for all tasks, by any merge; a merge that learns from data is learnt once for all methods."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..config import RetexConfig
from ..data.readout import Answer
from ..errors import ConfigError
from ..evaluation.method import Material
from ..merging import get_merger, learn_options, merge_methods, options_to_learn
from ..merging.calibration import Batch, Calibration
from ..merging.expert_weights import ExpertWeights, Weights, WeightTensors
from ..model.retex_model import RetexModel
from .weights import expert_weights

Merge = str | dict[str, Any]
PRETRAINED = "pretrained"
# Learns from inputs alone; other merges choose by accuracy, which takes labels.
UNLABELLED = "adamerging"
CALIBRATION_ROWS = 256
CALIBRATION_BATCH = 32


def learned_merge(material: Material, merge: Merge, rows: int = CALIBRATION_ROWS) -> Merge:
    """Return a merge with its coefficients learnt from data; one that learns nothing is returned unchanged.

    AdaMerging is trained on training inputs without labels (its authors use test inputs), and keeps the step with the
    best accuracy on labelled validation data, where there are any; choices by accuracy are made on validation data too.

    Args:
        material: Data that may be seen.
        merge: As `RetexConfig.merge`.
        rows: Maximum rows per task to learn from, and to choose by.
    """
    method, options = _split(merge)
    if method not in merge_methods() or not options_to_learn(method, options):
        return merge
    if method == UNLABELLED:
        options = {"seed": material.seed, **options}

    def learn() -> dict[str, Any]:
        batches, held_out = validation_batches(material, rows), None
        if method == UNLABELLED:
            samples = {task: material.sample(task, rows) for task in material.tasks}
            held_out = batches or None
            batches = {task: _batches(material, inputs, None) for task, inputs in samples.items()}
        elif not batches:
            raise ConfigError(f"Merge method {method!r} chooses by accuracy on validation data, but there are none.")
        calibration = Calibration(expert_weights(material), material.readout, batches, False, held_out)
        return {"method": method, **learn_options(method, options, calibration)}

    return material.once(f"merge {method} {json.dumps(options, sort_keys=True)} {rows}", learn)


def validation_batches(material: Material, count: int) -> dict[str, list[Batch]]:
    """Draw labelled validation rows of each task at random, in batches; empty if there are no validation data."""
    found = {}
    for task in material.tasks if material.validation else []:
        data = material.validation[task]
        chosen = random.Random(material.seed).sample(range(len(data)), min(count, len(data)))
        found[task] = _batches(material, [data.inputs[row] for row in chosen], [data.answers[row] for row in chosen])
    return found


def _batches(material: Material, inputs: list[Any], answers: list[Answer] | None) -> list[Batch]:
    parts = [slice(start, start + CALIBRATION_BATCH) for start in range(0, len(inputs), CALIBRATION_BATCH)]
    return [Batch(material.collate(inputs[part]), answers and answers[part]) for part in parts]


def shared_body(material: Material, source: str | Mapping[str, Any], rows: int = CALIBRATION_ROWS) -> Weights:
    """Return the body that `source` names, also for a finished merge or one to learn from `rows` rows per task."""
    weights = expert_weights(material)
    if source == PRETRAINED or _is_tensors(source):
        return source_body(weights, source)
    merge = source if isinstance(source, str) else dict(source)
    if _split(merge)[0] in merge_methods():
        return source_body(weights, learned_merge(material, merge, rows))
    config = RetexConfig(merge=merge, exclude=["*"])
    merged = RetexModel.from_experts(material.base, material.experts, config, progress=False).model.state_dict()
    return {name: merged[name].float() for name in weights.base}


@torch.no_grad()
def source_body(weights: ExpertWeights, source: str | Mapping[str, Any]) -> Weights:
    """Return the body that `source` names: `"pretrained"`, a merge without learning, or the tensors themselves."""
    if source == PRETRAINED:
        return weights.base
    if _is_tensors(source):
        missing = [name for name in weights.base if name not in source]
        if missing:
            raise ConfigError(f"The body that features are to come from lacks tensor {missing[0]!r} of the model.")
        return {name: source[name] for name in weights.base}
    merger = get_merger(*_split(source), WeightTensors(weights))
    return {
        name: merger(name, base, [base + vector for vector in weights.vectors[name]])
        for name, base in weights.base.items()
    }


def merge_name(merge: Merge) -> str:
    """Return the name of a merge: the method, or the folder of a finished one."""
    return Path(_split(merge)[0]).name


def describe_merge(merge: Merge) -> dict[str, Any]:
    """Summarise a merge in plain values: no local paths, and means instead of coefficients per task and tensor."""
    options = {}
    for option, value in _split(merge)[1].items():
        by_tensor = isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values())
        options[option] = {task: fmean(inner.values()) for task, inner in value.items()} if by_tensor else value
    return {"method": merge_name(merge), **options}


def _is_tensors(source: str | Mapping[str, Any]) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(source, Mapping) and "method" not in source


def _split(merge: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return method (or checkpoint) and options."""
    if isinstance(merge, str):
        return merge, {}
    return merge["method"], {option: value for option, value in merge.items() if option != "method"}
