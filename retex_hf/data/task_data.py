"""The inputs and correct answers of one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .readout import Answer

Inputs = Sequence[Any] | np.ndarray
"""Inputs of a task, by row."""


@dataclass(frozen=True)
class TaskData:
    """Inputs of one task and their correct answers: class indices, or texts for generators."""

    name: str
    inputs: Inputs
    answers: Sequence[Answer]
    label_names: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.inputs)
