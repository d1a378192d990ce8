"""The inputs and correct answers of one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .readout import Answer


@dataclass(frozen=True)
class TaskData:
    """Inputs of one task and their correct answers: class indices, or texts for generators."""

    name: str
    inputs: Sequence[Any]
    answers: Sequence[Answer]
    label_names: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.inputs)
