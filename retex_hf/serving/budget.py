"""A limit on what all open requests hold together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import too_many


class Budget:
    """An amount that requests share, such as bytes.

    >>> from retex_hf.serving.budget import Budget
    >>> budget = Budget(10, "bytes")
    >>> with budget.take(8), budget.take(3):
    ...     pass
    Traceback (most recent call last):
    ...
    retex_hf.serving.errors.ApiError: Open requests hold 8 of 10 bytes already: try again later.
    """

    def __init__(self, most: int, unit: str) -> None:
        self._most, self._unit, self._held = most, unit, 0

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Hold an amount; refuse the request if that would be too much. A single request may always have its own."""
        if self._held and self._held + amount > self._most:
            raise too_many(f"Open requests hold {self._held} of {self._most} {self._unit} already: try again later.", 1)
        self._held += amount
        try:
            yield
        finally:
            self._held -= amount
