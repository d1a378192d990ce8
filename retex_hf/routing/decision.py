"""The decision from residuals, and the record of it that every output carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import routing_options
from ..errors import InputError, shorten

# Lower bound on the temperature, to avoid a division by zero.
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass
class Routing:
    """The task that each row was routed to.

    `task_ids` (rows,) and `tasks` (names) give the task, or under soft routing the likeliest; `weights` (rows, T) are
    the mixing weights of soft recovery; `residuals` and `probabilities` (rows, T) are set where the task was identified
    from the input (with `signatures="weights"` a residual is minus the task's score); `num_labels` is the width of each
    row's own head, where heads differ.

    `abstained` (rows,) is set where `RetexConfig.routing` has `far`, and true for out-of-distribution rows: their task
    is only the nearest. `weights` are then those actually used: all zero for a row that ran on the merged model.

    >>> import torch
    >>> from retex_hf.routing import decide
    >>> residuals, thresholds = torch.tensor([[1.0, 4.0], [7.0, 9.0]]), torch.tensor([2.0, 2.0])
    >>> routing = decide(residuals, ["a", "b"], {"method": "hard", "far": "merged"}, 1.0, thresholds)
    >>> routing.tasks, routing.abstained.tolist(), routing.weights.tolist()
    (['a', 'a'], [False, True], [[1.0, 0.0], [0.0, 0.0]])
    """

    task_ids: Tensor
    tasks: list[str]
    weights: Tensor | None = None
    residuals: Tensor | None = None
    probabilities: Tensor | None = None
    num_labels: list[int | None] | None = None
    abstained: Tensor | None = None


def decide(
    residuals: Tensor,
    tasks: list[str],
    routing: str | dict[str, Any],
    temperature: float,
    thresholds: Tensor | None = None,
    distances: Tensor | None = None,
) -> Routing:
    """Choose the task of smallest residual (the first among equals); under soft routing return the whole distribution
    `softmax(-R / temperature)`.

    With `far` in `routing`, abstain for a row whose distance to the chosen task (rows, T; by default its residual)
    exceeds the threshold of that task (T,). Abstain also for a row without finite residuals if `far` is "merged": its
    residuals count as infinite, and all tasks are equally likely. Otherwise such a row is an error, because no task is
    nearest to it.
    """
    options = routing_options(routing)
    method, far = options["method"], options["far"]
    unknown = ~torch.isfinite(residuals).all(1)
    if unknown.any():
        if far != "merged":
            raise InputError(_no_task(unknown))
        residuals = residuals.masked_fill(unknown.unsqueeze(1), torch.inf)
    nearest, task_ids = residuals.amin(1), residuals.argmin(1)
    above = (residuals - nearest.unsqueeze(1)).masked_fill(unknown.unsqueeze(1), 0)
    probabilities = torch.softmax(-above / max(temperature, SMALLEST), dim=1)
    weights, abstained = probabilities if method == "soft" else None, None
    if far is not None:
        assert thresholds is not None  # given wherever rows may be far
        far_off = nearest if distances is None else distances.gather(1, task_ids.unsqueeze(1)).squeeze(1)
        abstained = unknown | (far_off > thresholds[task_ids])
        near = torch.nn.functional.one_hot(task_ids, len(tasks)).to(residuals.dtype) if weights is None else weights
        weights = torch.where(abstained.unsqueeze(1), 0 if far == "merged" else probabilities, near)
    return Routing(
        task_ids=task_ids,
        tasks=[tasks[index] for index in task_ids.tolist()],
        weights=weights,
        residuals=residuals,
        probabilities=probabilities,
        abstained=abstained,
    )


def _no_task(unknown: Tensor) -> str:
    rows = unknown.nonzero().flatten().tolist()
    which = f"row {rows[0]}" if len(rows) == 1 else f"rows {shorten(rows)}"
    return (
        f"The features of {which} are NaN, infinite or too large, so no task is nearest: name the task with task=, or "
        'let such rows run on the merged model with RetexConfig(routing={"method": "hard", "far": "merged"}).'
    )
