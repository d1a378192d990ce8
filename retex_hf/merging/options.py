"""Checks of merge options that several methods share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ..errors import ConfigError, brief

Weights = Mapping[str, float] | Sequence[float] | None
"""A weight per expert: by task, or in the order of the tasks. None gives all the same weight."""

SCALE = 0.3  # of an unweighted sum of task vectors: the best value of task arithmetic for eight tasks
# A seed is hashed, so its range is limited only by the integers that JSON readers keep exact.
LARGEST_SEED = 2**53


def check_number(name: str, value: Any) -> float:
    """Return a value that is a finite number; refuse another."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"RetexConfig.merge: {name} must be a number, not {brief(value)}.")
    return value


def check_density(value: Any) -> None:
    """Refuse a value that is not a share of entries to keep."""
    check_number("density", value)
    if not 0 < value <= 1:
        raise ConfigError(f"RetexConfig.merge: density must be in (0, 1], not {value!r}.")


def check_integer(name: str, value: Any, least: int, most: int) -> None:
    """Refuse a value that is not an integer within a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"RetexConfig.merge: {name} must be an integer from {least} to {most}, not {brief(value)}.")


def per_task(option: str, values: Any, tasks: Sequence[str]) -> list[float]:
    """Return one number per task, in task order, from a mapping by task or from a list in that order.

    >>> from retex_hf.merging.options import per_task
    >>> per_task("weights", {"b": 1, "a": 0.5}, ["a", "b"]), per_task("weights", [0.5, 1], ["a", "b"])
    ([0.5, 1.0], [0.5, 1.0])
    """
    tasks = list(tasks)
    if isinstance(values, (list, tuple)) and len(values) == len(tasks):
        values = dict(zip(tasks, values, strict=True))
    if not isinstance(values, Mapping) or set(values) != set(tasks):
        found = list(values) if isinstance(values, Mapping) else values
        raise ConfigError(
            f"RetexConfig.merge: {option} must have one number per task {brief(tasks)}, not {brief(found)}."
        )
    for task in tasks:
        check_number(f"{option} of task {task!r}", values[task])
    return [float(values[task]) for task in tasks]


def summands(weights: Weights, scale: float | str | None, tasks: Sequence[str]) -> tuple[list[float], float]:
    """Return the weights of task vectors in a sum, and the factor of the sum.

    Weights already state how much of each vector is wanted, so with weights the factor defaults to 1.
    """
    if scale is None:
        scale = SCALE if weights is None else 1.0
    factor = check_number("scale", scale)
    return [1.0] * len(tasks) if weights is None else per_task("weights", weights, tasks), factor


def shares(weights: Weights, tasks: Sequence[str]) -> list[float]:
    """Return the weights of a mean: none is negative, not all are zero. The caller divides by their sum."""
    if weights is None:
        return [1.0] * len(tasks)
    found = per_task("weights", weights, tasks)
    if min(found) < 0 or not any(found):
        raise ConfigError(
            "RetexConfig.merge: weights of a mean must not be negative, nor all zero, but they are "
            f"{brief(dict(zip(tasks, found, strict=True)))}."
        )
    return found
