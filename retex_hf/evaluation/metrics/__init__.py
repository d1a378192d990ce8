"""Metrics over many tasks. Each folder is an `evaluate` module that loads by its path, without a network.

The scripts import nothing from the package, because `evaluate.load` copies them out of it; the rest of the library
uses their functions on arrays.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import EvaluationError
from .exact_match.exact_match import matches
from .normalised_accuracy.normalised_accuracy import normalised

METRICS = ("exact_match", "normalised_accuracy", "task_identification")


def metric_path(name: str) -> Path:
    """Return the folder of a metric, as `evaluate.load(str(...))` takes it.

    >>> from retex_hf.evaluation import metric_path
    >>> metric_path("exact_match").name
    'exact_match'
    """
    if name not in METRICS:
        raise EvaluationError(f"There is no metric {name!r}; the metrics are {', '.join(METRICS)}.")
    return Path(__file__).resolve().parent / name


__all__ = ["METRICS", "matches", "metric_path", "normalised"]
