"""Mixtures of experts by hand: whole models with explicit weights, one row at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retex_hf.evaluation.method import Material
from retex_hf.readout import Classifier


class Raw(Classifier):
    """Answers with the logits themselves, so that a test sees more than the largest of them."""

    def answers(self, output: Any, tasks: Sequence[str]) -> list[Tensor]:
        return list(output.logits)


def raw(material: Material) -> Material:
    """The same material, asked for logits."""
    return replace(material, readout=Raw(), shared={})


def body_tensors(material: Material) -> tuple[dict[str, np.ndarray], dict[str, list[np.ndarray]]]:
    """The base's tensors and those of the experts, in float64, by the experts' names; heads left out."""
    prefix = material.experts["red"].base_model_prefix
    base = {f"{prefix}.{name}": value.double().numpy() for name, value in material.base.state_dict().items()}
    states = [expert.state_dict() for expert in material.experts.values()]
    names = [name for name in base if name in states[0] and states[0][name].is_floating_point()]
    return {name: base[name] for name in names}, {name: [s[name].double().numpy() for s in states] for name in names}


@torch.no_grad()
def logits_of(material: Material, task: str, body: Mapping[str, np.ndarray], inputs: Mapping[str, Tensor]) -> Tensor:
    """What the model of a task answers with other tensors for its body."""
    model = deepcopy(material.experts[task])
    tensors = model.state_dict()
    for name, value in body.items():
        tensors[name].copy_(torch.tensor(value))
    return model(**inputs).logits


def rows(inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """A batch as batches of one row."""
    count = len(next(iter(inputs.values())))
    return [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(count)]


def assert_rows_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.view_as(ours), rtol=1e-3, atol=1e-3)
