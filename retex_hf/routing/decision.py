"""From residuals to a decision, and the record of it that travels with every output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Routing:
    """Which task each row was given to.

    `task_ids` (rows,) and `tasks` (names) say the task, or under soft routing the likeliest; `weights` (rows, T) are
    the mixing weights of soft recovery; `residuals` and `probabilities` (rows, T) are there where the task was
    identified from the input (with `signatures="weights"` a residual is minus the task's score); `num_labels` is the
    width of each row's own head, where heads differ.
    """

    task_ids: Tensor
    tasks: list[str]
    weights: Tensor | None = None
    residuals: Tensor | None = None
    probabilities: Tensor | None = None
    num_labels: list[int] | None = None


def decide(residuals: Tensor, tasks: list[str], routing: str, temperature: float) -> Routing:
    """The task of smallest residual; under soft routing the whole distribution `softmax(-R / temperature)`."""
    probabilities = torch.softmax(-residuals / temperature, dim=1)
    task_ids = residuals.argmin(1)
    return Routing(
        task_ids=task_ids,
        tasks=[tasks[index] for index in task_ids.tolist()],
        weights=probabilities if routing == "soft" else None,
        residuals=residuals,
        probabilities=probabilities,
    )
