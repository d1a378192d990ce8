"""A lock with a bounded number of waiting calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

from ..errors import InputError

# Gradio's queue holds further calls, so hardly any call waits here.
MOST_WAITING = 4


class Busy(InputError):
    """Too many calls wait already."""


class Turns:
    """A lock for which only a few callers may wait; further ones are refused."""

    def __init__(self) -> None:
        self._one, self._few = Lock(), BoundedSemaphore(1 + MOST_WAITING)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold the lock, waiting for it if necessary."""
        if not self._few.acquire(blocking=False):
            raise Busy("The page is busy; try again later.")
        try:
            with self._one:
                yield
        finally:
            self._few.release()
