"""A limit on what all open requests hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function by which a request holds more, up to the end of the context.

        It refuses what would be too much. A request that is alone may always have its own.
        """
        own = 0

        def hold(amount: int) -> None:
            nonlocal own
            if self._held > own and self._held + amount > self._most:
                held = f"Open requests hold {self._held} of {self._most} {self._unit} already"
                raise too_many(f"{held}: try again later.", 1)
            self._held += amount
            own += amount

        try:
            yield hold
        finally:
            self._held -= own

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Hold an amount; see `share`."""
        with self.share() as hold:
            hold(amount)
            yield
