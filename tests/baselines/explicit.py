"""Mixtures of experts by hand: whole models with explicit weights, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers import TASKS
from torch import Tensor

from retex_hf.data.readout import Classifier
from retex_hf.evaluation.method import Material, Method


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


def assert_all_modes(
    method: Method,
    inputs: Mapping[str, Tensor],
    tasks: Sequence[str],
    shares: np.ndarray,
    heads: Sequence[str],
    by_hand: Callable[[dict[str, Tensor], np.ndarray, str], Tensor],
    known: np.ndarray | None = None,
) -> None:
    """A method that mixes by `shares` (rows, T) answers, in each mode, as the mixture made by hand for every row.

    `known` are its shares where the task is known, if these differ.
    """
    one_hot = np.eye(len(TASKS))[[TASKS.index(task) for task in tasks]]
    for prediction, coefficients, under in (
        (method.predict(inputs), shares, heads),
        (method.predict(inputs, tasks), shares if known is None else known, tasks),
        (method.predict(inputs, tasks, oracle=True), one_hot, tasks),
    ):
        assert prediction.tasks == under
        expected = [by_hand(*each) for each in zip(rows(inputs), coefficients, under, strict=True)]
        assert_rows_close(prediction.answers, expected)
