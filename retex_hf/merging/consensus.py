"""Consensus task arithmetic: sum the task vectors, and keep the entries that matter to at least two tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..utils.progress import track
from .options import check_number, per_task
from .registry import AUTO, Merger, TaskTensors, register_merge
from .scales import SCALES, best_scale

if TYPE_CHECKING:
    from .calibration import Calibration

THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6)
AGREEING_TASKS = 2


def tall_mask(vector: Tensor, total: Tensor, threshold: float) -> Tensor:
    """Return where a task vector exceeds `threshold` times the sum of the others: `|tau_t| > l |tau_MT - tau_t|`."""
    return vector.abs() > threshold * (total - vector).abs()


def consensus_vector(vectors: Sequence[Tensor] | Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return the sum of task vectors where at least two of them claim the entry, and zero elsewhere."""
    total = sum(vectors, torch.zeros_like(vectors[0]))
    claims = torch.zeros(total.shape, dtype=torch.int16, device=total.device)
    for vector, threshold in zip(vectors, thresholds, strict=True):
        claims += tall_mask(vector, total, threshold)
    return total * (claims >= AGREEING_TASKS)


def choose_by_accuracy(
    calibration: Calibration, *, thresholds: float | dict[str, float] | str = AUTO, scale: float | str = AUTO
) -> dict[str, Any]:
    """Choose thresholds and scale by validation accuracy; the smallest among equals.

    A task's threshold maximises its accuracy with its own mask on the summed vector (`theta_0 + m_t tau_MT`). The scale
    maximises the mean over tasks of the accuracy relative to the expert's.
    """
    weights, tasks = calibration.weights, calibration.weights.tasks
    rounds = len(tasks) * ((len(THRESHOLDS) if thresholds == AUTO else 0) + (len(SCALES) + 1 if scale == AUTO else 0))
    with track(total=rounds, title="Choosing by accuracy", unit="run", progress=calibration.progress) as bar:

        def accuracy(body: Mapping[str, Tensor], task: str) -> float:
            bar.update()
            return calibration.accuracy(body, task)

        if thresholds == AUTO:
            totals = {name: vectors.sum(0) for name, vectors in weights.vectors.items()}

            def masked(index: int, threshold: float) -> dict[str, Tensor]:
                masks = {n: tall_mask(v[index], totals[n], threshold) for n, v in weights.vectors.items()}
                return {name: base + masks[name] * totals[name] for name, base in weights.base.items()}

            def best_threshold(index: int, task: str) -> float:
                return max(THRESHOLDS, key=lambda threshold: accuracy(masked(index, threshold), task))

            thresholds = {task: best_threshold(index, task) for index, task in enumerate(tasks)}
        if scale == AUTO:
            limits = _per_task(thresholds, tasks)
            agreed = {name: consensus_vector(vectors, limits) for name, vectors in weights.vectors.items()}
            scale = best_scale(calibration, agreed, SCALES, accuracy)
    return {"thresholds": thresholds, "scale": scale}


@register_merge("consensus", prepare=True, calibrate=choose_by_accuracy)
def consensus(
    tensors: TaskTensors, *, thresholds: float | dict[str, float] | str = AUTO, scale: float | str = AUTO
) -> Merger:
    """Add to the base `scale` times the sum of the task vectors, where at least two tasks claim an entry.

    A task claims the entries in which `|tau_t| > threshold * |sum of the other task vectors|`; `thresholds` is one
    number, or one per task. Both options are chosen by accuracy on labelled `calibration` batches unless given.
    """
    factor = check_number("scale", scale)
    limits = _per_task(thresholds, tensors.tasks)

    def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        base = base.float()
        return base + factor * consensus_vector([expert.float() - base for expert in experts], limits)

    return merge


def _per_task(thresholds: float | dict[str, float] | str, tasks: Sequence[str]) -> list[float]:
    if not isinstance(thresholds, dict):
        thresholds = dict.fromkeys(tasks, check_number("thresholds", thresholds))
    return per_task("thresholds", thresholds, tasks)
