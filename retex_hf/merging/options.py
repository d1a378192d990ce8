"""Checks of merge options that several methods take."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..errors import ConfigError


def check_number(name: str, value: Any) -> None:
    """Refuse what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"RetexConfig.merge: {name} must be a number, not {value!r}.")


def check_density(value: Any) -> None:
    """Refuse what is not a share of entries to keep."""
    check_number("density", value)
    if not 0 < value <= 1:
        raise ConfigError(f"RetexConfig.merge: density must be in (0, 1], not {value!r}.")
