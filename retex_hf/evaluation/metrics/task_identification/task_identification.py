"""Share of inputs whose task is identified."""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

DESCRIPTION = """
Task identification: the share of the inputs of a task that are assigned to it, averaged over tasks, so that a task
with many inputs counts no more than one with few.
"""

INPUTS = """
Args:
    predictions: The task that each input was assigned to.
    references: The task that it belongs to.
Returns:
    task_identification: The mean over tasks.
    by_task: The share of each task.
"""


def identified_by_task(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the share of each task's inputs that are identified as such; tasks in order of first appearance.

    >>> from retex_hf.evaluation.metrics.task_identification.task_identification import identified_by_task
    >>> identified_by_task(["a", "b", "b"], ["a", "a", "b"])
    {'a': 0.5, 'b': 1.0}
    """
    found: dict[str, list[bool]] = {}
    for prediction, reference in zip(predictions, references, strict=True):
        found.setdefault(reference, []).append(prediction == reference)
    return {task: sum(rows) / len(rows) for task, rows in found.items()}


class TaskIdentification(evaluate.Metric):
    """Share of inputs whose task is identified."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(predictions=datasets.Value("string"), references=datasets.Value("string")),
        )

    def _compute(  # type: ignore[override]  # columns come by name
        self, predictions: Sequence[str], references: Sequence[str]
    ) -> dict[str, Any]:
        shares = identified_by_task(predictions, references)
        return {"task_identification": sum(shares.values()) / len(shares), "by_task": shares}
