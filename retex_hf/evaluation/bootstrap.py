"""Confidence intervals by percentile bootstrap over rows, drawn within each task and alike for all methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..errors import EvaluationError

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Return whether zero lies outside of the interval, so that a difference is significant."""
        return self.low > 0 or self.high < 0


def resampled_accuracies(rows: Mapping[str, np.ndarray], *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return the accuracies of several methods on resampled data.

    A task's rows are drawn with replacement, as many as it has. All methods see the same draws, so differences between
    methods are paired; a task's draws depend only on the seed and on the task's position.

    Args:
        rows: For each task an array (methods, rows): 1 where a method is right, 0 where it is wrong.
        resamples: How many times to draw.
        seed: Seed of the draws.

    Returns:
        An array (resamples, methods, tasks).
    """
    if resamples < 1:
        raise EvaluationError(f"A bootstrap needs at least one resample, not {resamples}.")
    drawn = []
    for place, right in enumerate(rows.values()):
        right = np.asarray(right, dtype=np.float64)
        count = right.shape[1]
        # Counting how often each row was drawn turns the means into one matrix product.
        draws = np.random.default_rng([seed, place]).integers(count, size=(resamples, count))
        draws += np.arange(resamples)[:, None] * count
        times = np.bincount(draws.ravel(), minlength=resamples * count).reshape(resamples, count)
        drawn.append(times.astype(np.float64) @ right.T / count)
    return np.stack(drawn, axis=-1)


def interval(value: float, samples: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Return the percentile interval of a figure, from its values on resampled data.

    Resamples on which the figure is undefined are left out.

    >>> from retex_hf.evaluation.bootstrap import interval
    >>> interval(0.5, [0.0, 0.25, 0.5, 0.75, 1.0], confidence=0.5)
    Interval(value=0.5, low=0.25, high=0.75)
    """
    tail = 50 * (1 - confidence)
    low, high = np.nanpercentile(np.asarray(samples, dtype=np.float64), [tail, 100 - tail])
    return Interval(float(value), float(low), float(high))


def paired_difference(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """Return the first method's mean accuracy over tasks minus the second's, paired by rows.

    >>> import numpy as np
    >>> from retex_hf.evaluation.bootstrap import paired_difference
    >>> paired_difference({"a": np.ones(4)}, {"a": np.zeros(4)})
    Interval(value=1.0, low=1.0, high=1.0)
    """
    if {task: len(right) for task, right in first.items()} != {task: len(right) for task, right in second.items()}:
        raise EvaluationError("Two methods can be compared in pairs only on the same rows.")
    differences = {task: np.subtract(right, second[task], dtype=np.float64)[None] for task, right in first.items()}
    samples = resampled_accuracies(differences, resamples=resamples, seed=seed)
    value = np.mean([difference.mean() for difference in differences.values()])
    return interval(value, samples[:, 0].mean(-1), confidence)
