"""A lock that threads take in the order in which they asked for it, and hand on between steps of their work."""

from __future__ import annotations

from threading import Condition
from types import TracebackType


class Turns:
    """A fair lock. Batches that generate hand it on after every token, so that none waits for another's last one.

    >>> from retex_hf.serving.turns import Turns
    >>> turns = Turns()
    >>> with turns:
    ...     turns.hand_on()  # returns at once, because nobody waits
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._given = self._current = 0

    def __enter__(self) -> Turns:
        with self._changed:
            own = self._given
            self._given += 1
            self._changed.wait_for(lambda: self._current == own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._current += 1
            self._changed.notify_all()

    def hand_on(self) -> None:
        """Let those run who wait, and return when it is this thread's turn again."""
        self.__exit__(None, None, None)
        self.__enter__()
