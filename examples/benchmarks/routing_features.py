"""Features of references and test rows, clean and corrupted, at every block of a suite's averaged model; stored once.

    features = stored(study, work)                 # computes what is missing
    features.pool["agnews"]["clean"]["bert.encoder.layer.3"]     # (rows, d)

Rules of identification are then compared in seconds (see routing_rules.py). References are perturbed as the library
does it (`perturbed_inputs`), and test rows by corruptions.py or text_corruptions.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corruptions
import text_corruptions
import torch
from cells import cell_name
from corrupted import CLEAN, corrupted_task, has_texts
from experiment import Study
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from retex_hf.backends import library_of
from retex_hf.backends.input_forms import Tokens
from retex_hf.baselines.merges import source_body
from retex_hf.baselines.weights import expert_weights
from retex_hf.evaluation import TaskData
from retex_hf.routing import FeatureExtractor, feature_blocks
from retex_hf.routing.perturbation import perturbed_inputs

POOL = 400
SEVERITIES = (1, 3, 5)
PERTURBED = "perturbed"

Features = dict[str, Tensor]
"""Features (rows, d) by block."""


@dataclass(frozen=True)
class StudyFeatures:
    """Features of each task: of its `pool` of references (clean and perturbed), and of its `test` rows by condition."""

    blocks: list[str]
    pool: dict[str, dict[str, Features]]
    test: dict[str, dict[str, Features]]
    unseen: dict[str, Features]

    def save(self, file: Path) -> None:
        """Write a safetensors file, whose names are the paths of the tensors."""
        tensors: dict[str, Tensor] = {}

        def add(found: Any, *path: str) -> None:
            if isinstance(found, Tensor):
                tensors[json.dumps(path)] = found.contiguous()
            else:
                for key, part in found.items():
                    add(part, *path, key)

        for name in ("pool", "test", "unseen"):
            add(getattr(self, name), name)
        save_file(tensors, file, {"blocks": json.dumps(self.blocks)})

    @classmethod
    def load(cls, file: Path) -> StudyFeatures:
        """Read a file that `save` wrote."""
        found: dict[str, Any] = {"pool": {}, "test": {}, "unseen": {}}
        with safe_open(file, "pt") as tensors:
            blocks = json.loads(tensors.metadata()["blocks"])
            paths = sorted(map(json.loads, tensors.keys()), key=lambda path: blocks.index(path[-1]))
            for *path, last in paths:
                place = found
                for key in path:
                    place = place.setdefault(key, {})
                place[last] = tensors.get_tensor(json.dumps([*path, last]))
        return cls(blocks, **found)


def conditions(study: Study) -> list[tuple[str, int]]:
    """Return the kinds of test rows with their severities; clean ones first."""
    kinds = text_corruptions.KINDS if has_texts(study.tests[0]) else corruptions.KINDS
    return [(CLEAN, 0), *((kind, severity) for kind in kinds for severity in SEVERITIES)]


def corrupted(data: TaskData, kind: str, severity: int, seed: int) -> Sequence[Any]:
    """Return a task's inputs in one condition."""
    return data.inputs if kind == CLEAN else corrupted_task(data, kind, severity, seed).inputs


def stored(study: Study, work: Path, rows: int, source: str = "average") -> StudyFeatures:
    """Return the features of a study: up to `rows` corrupted test rows per task, and all clean ones; of the averaged
    model, or of another body that `Identifier` names."""
    unseen = [test.name for test in study.unseen_tests]
    settings = {"pool": POOL, "severities": SEVERITIES, "corrupted": rows, "unseen": unseen, "source": source}
    identity = study.identity("routing features", **settings)
    file = (work / "cells" / cell_name("routing features", identity)).with_suffix(".safetensors")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        _compute(study, rows, source).save(partial)
        partial.rename(file)
    return StudyFeatures.load(file)


def _compute(study: Study, rows: int, source: str) -> StudyFeatures:
    material, weights = study.material, expert_weights(study.material)
    # Features are read below the heads, so any head will do.
    model = weights.module(source_body(weights, source), study.tasks[0])
    blocks = feature_blocks(model)
    extract = FeatureExtractor(model, blocks, study.config().feature_pooling)
    form = library_of(model).input_form(model)
    tokens = form if isinstance(form, Tokens) else None

    def features(inputs: Sequence[Any], perturb: bool = False) -> Features:
        def joined(batch: Mapping[str, Tensor], first: int) -> Tensor:
            found = extract(perturbed_inputs(batch, tokens, first) if perturb else batch)
            widths.extend(part.shape[1] for part in found.values() if len(widths) < len(blocks))
            return torch.cat(list(found.values()), 1)

        widths: list[int] = []
        size = study.recipe.batch_size
        parts = [joined(material.collate(inputs[start : start + size]), start) for start in range(0, len(inputs), size)]
        return dict(zip(blocks, torch.cat(parts).split(widths, 1), strict=True))

    pool, test = {}, {}
    for data in tqdm(study.tests, desc="features", unit="task"):
        sample = material.sample(data.name, POOL)
        pool[data.name] = {CLEAN: features(sample), PERTURBED: features(sample, perturb=True)}
        few = TaskData(data.name, data.inputs[:rows], data.answers[:rows], data.label_names)
        test[data.name] = {CLEAN: features(data.inputs)} | {
            f"{kind} {severity}": features(corrupted(few, kind, severity, material.seed))
            for kind, severity in conditions(study)[1:]
        }
    unseen = {data.name: features(data.inputs) for data in study.unseen_tests}
    return StudyFeatures(blocks, pool, test, unseen)
