"""Methods whose answers are known beforehand: an input is (task, class), and what goes wrong is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from retex_hf.evaluation import Material, Method, Prediction, TaskData

NAMES = ["red", "green", "blue"]


def toy_tasks(sizes: Sequence[int] = (7, 5, 9), classes: int = 4) -> list[TaskData]:
    """Row i of task t is (t, i mod classes, i), and its class is the second number."""
    return [
        TaskData(name, [(task, row % classes, row) for row in range(size)], [row % classes for row in range(size)])
        for task, (name, size) in enumerate(zip(NAMES, sizes, strict=False))
    ]


def toy_collate(rows: Sequence[Any]) -> dict[str, Tensor]:
    return {"rows": torch.tensor(rows)}


class Toy(Method):
    """Knows every class. Told the task it is right; else it takes rows of `blind` tasks for the first one.

    Args:
        wrong: `{task: rows}` that it gets wrong in every mode.
        blind: Tasks that it does not know from the first.
    """

    routes = True

    def __init__(
        self, name: str = "toy", wrong: Mapping[str, Sequence[int]] | None = None, blind: Sequence[str] = (),
        storage: int = 400,
    ) -> None:  # fmt: skip
        self.name, self.wrong, self.blind, self.storage = name, wrong or {}, blind, storage
        self.asked: list[tuple[int, Any, bool]] = []

    def fit(self, material: Material) -> None:
        pass

    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        self.asked.append((len(inputs["rows"]), None if tasks is None else list(tasks), oracle))
        answers, found = [], []
        for task, label, row in inputs["rows"].tolist():
            name = NAMES[task]
            answers.append(label + 1 if row in self.wrong.get(name, ()) else label)
            found.append(NAMES[0] if name in self.blind else name)
        return Prediction(answers, found if tasks is None else list(tasks))

    def storage_bytes(self) -> int:
        return self.storage

    def state(self) -> dict[str, Any]:
        return {"blind": list(self.blind)}
