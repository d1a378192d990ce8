"""Choice of the most confident head for a row, for methods without a router."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import torch
from torch import Tensor

from ..data.readout import entropy
from ..errors import TaskError


def most_confident(scores: Mapping[str, Tensor]) -> tuple[list[str], list[int]]:
    """Return, for every row, the task whose head is the most confident, and that head's answer.

    Heads of different width are compared by their entropy relative to its maximum, `log(classes)`.

    >>> import torch
    >>> from retex_hf.baselines.heads import most_confident
    >>> most_confident({"a": torch.tensor([[0.0, 9.0], [0.0, 0.1]]), "b": torch.tensor([[0.0, 1.0], [5.0, 0.0]])})
    (['a', 'b'], [1, 0])
    """
    for task, logits in scores.items():
        if logits.shape[-1] < 2:
            raise TaskError(f"The head of task {task!r} has one output, so it gives no measure of confidence.")
    tasks = list(scores)
    doubts = torch.stack([entropy(logits) / log(logits.shape[-1]) for logits in scores.values()])
    chosen = [tasks[index] for index in doubts.argmin(0).tolist()]
    return chosen, [int(scores[task][row].argmax()) for row, task in enumerate(chosen)]
