"""Accuracy of one model of many tasks, relative to the tasks' own experts."""

from collections.abc import Sequence

import datasets
import evaluate
import numpy as np
from numpy.typing import ArrayLike, NDArray

DESCRIPTION = """
Normalised accuracy: the mean over tasks of accuracy / accuracy of the individual expert. 1 means as good as keeping
every expert.
"""

INPUTS = """
Args:
    predictions: The accuracy on each task.
    references: The accuracy of each task's individual expert, in the same order.
Returns:
    normalised_accuracy: 1 where both are equal.
"""


def normalised(accuracies: ArrayLike, individual: ArrayLike) -> np.float64 | NDArray[np.float64]:
    """Return the mean over tasks (the last axis) of accuracy / accuracy of the individual expert.

    NaN where an expert has no row right: there is nothing to compare with.

    >>> from retex_hf.evaluation.metrics import normalised
    >>> float(normalised([0.5, 0.9], [1.0, 0.9]))
    0.75
    """
    accuracies, individual = np.asarray(accuracies, dtype=float), np.asarray(individual, dtype=float)
    ratios = np.full(np.broadcast_shapes(accuracies.shape, individual.shape), np.nan)
    np.divide(accuracies, individual, out=ratios, where=individual > 0)
    return ratios.mean(-1)


class NormalisedAccuracy(evaluate.Metric):
    """Accuracy relative to individual experts, averaged over tasks."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(predictions=datasets.Value("float64"), references=datasets.Value("float64")),
        )

    def _compute(  # type: ignore[override]  # columns come by name
        self, predictions: Sequence[float], references: Sequence[float]
    ) -> dict[str, float]:
        if min(references) <= 0:
            raise ValueError("Normalised accuracy needs individual experts (references) with an accuracy above 0.")
        return {"normalised_accuracy": float(normalised(predictions, references))}
