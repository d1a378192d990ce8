"""Choice of a merge's scale by accuracy: for merges that are the base plus a factor times one direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError
from ..utils.progress import track

if TYPE_CHECKING:
    from .calibration import Calibration
    from .registry import Merger

# Of a sum of task vectors, as the authors of TIES try them for task arithmetic, and of consensus.
SCALES = tuple(step / 10 for step in range(1, 11))
# Of a mean, which is shorter than the sum: the authors of TIES try 0.8 to 2.5.
MEAN_SCALES = tuple(step / 10 for step in range(1, 26))
Accuracy = Callable[[Mapping[str, Tensor], str], float]
"""`accuracy(body, task)` returns the share of a task's rows that a body answers correctly."""


def best_scale(
    calibration: Calibration, direction: Mapping[str, Tensor], candidates: Sequence[float], accuracy: Accuracy
) -> float:
    """Return the scale `s` for which `W_0 + s * direction` has the best accuracy; the first among equals.

    The accuracy is relative to that of each task's expert, averaged over tasks.
    """
    weights = calibration.weights
    best = {task: accuracy(weights.expert_body(task), task) for task in weights.tasks}
    hopeless = [task for task in weights.tasks if best[task] == 0]
    if hopeless:
        raise InputError(f"Task {hopeless[0]!r}: its expert answers no calibration row correctly; check the labels.")

    def normalised(scale: float) -> float:
        body = {name: base + scale * direction[name] for name, base in weights.base.items()}
        return sum(accuracy(body, task) / best[task] for task in weights.tasks)

    return max(candidates, key=normalised)


@torch.no_grad()
def scale_of(calibration: Calibration, merger: Merger, scales: Sequence[float]) -> float:
    """Return the best scale of a merge that is linear in it, given the merge at scale 1.

    It is one of `scales`, or `1 / T`, at which task arithmetic is the average.
    """
    weights = calibration.weights
    direction = {
        name: merger(name, base, [base + vector for vector in weights.vectors[name]]) - base
        for name, base in weights.base.items()
    }
    candidates = sorted({*scales, 1 / len(weights.tasks)})
    rounds = len(weights.tasks) * (len(candidates) + 1)
    with track(total=rounds, title="Choosing by accuracy", unit="run", progress=calibration.progress) as bar:

        def accuracy(body: Mapping[str, Tensor], task: str) -> float:
            bar.update()
            return calibration.accuracy(body, task)

        return best_scale(calibration, direction, candidates, accuracy)
