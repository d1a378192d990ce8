"""The rows of one request, from the queue to their answers, seen from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import torch

from ..errors import RetexError
from .batching import Batcher
from .errors import ApiError, as_api_error
from .metrics import Metrics
from .rows import Done, Event, Failed, Row


class Call:
    """Rows that were put into a queue; leaving its context cancels those without an answer.

    Args:
        rows: The rows.
        batcher: The queue.
        metrics: Counts rows without an answer.
    """

    def __init__(self, rows: Sequence[Row], batcher: Batcher, metrics: Metrics) -> None:
        self.rows, self._batcher, self._metrics = list(rows), batcher, metrics
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Row, Event]] = asyncio.Queue()
        self._answered = 0

    def __enter__(self) -> Call:
        for row in self.rows:
            row.listener = self._listen
        self._batcher.submit(self.rows)
        return self

    def __exit__(self, *error: object) -> None:
        left = [row for row in self.rows if not row.finished]
        if left:
            self._batcher.cancel(left)
        for _ in range(len(self.rows) - self._answered):
            self._metrics.lost(self.rows[0])

    def _listen(self, row: Row, event: Event) -> None:
        """Take an event from a thread that runs a batch."""
        with suppress(RuntimeError):  # the loop has ended, and with it the request
            self._loop.call_soon_threadsafe(self._events.put_nowait, (row, event))

    async def events(self) -> AsyncIterator[tuple[Row, Event]]:
        """Yield events until all rows have an answer; raise the failure of a row."""
        while self._answered < len(self.rows):
            row, event = await self._events.get()
            if isinstance(event, Failed):
                raise as_failure(event.error)
            self._answered += isinstance(event, Done)
            yield row, event

    async def answers(self) -> list[Done]:
        """Return the answers of all rows, in order."""
        found = {row.index: event async for row, event in self.events() if isinstance(event, Done)}
        return [found[row.index] for row in self.rows]


def as_failure(error: Exception) -> Exception:
    """Return the failure of a row as what the client is told; bugs stay as they are."""
    if isinstance(error, RetexError):
        return as_api_error(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return ApiError(503, "The request did not fit into memory: send a shorter one, or try again later.")
    return error
