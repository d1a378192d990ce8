"""Dynamic batching: rows of concurrent requests wait for one another for a moment, and run together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from time import monotonic

from .errors import ApiError, too_many
from .metrics import Metrics
from .rows import Failed, Row

# Rows that arrive while a batch runs wait for its end, but not longer: then they run beside it, turn by turn.
PATIENCE = 0.25
LONGEST_RETRY = 60
# Tokens of padding that a batch may always have; it may have more up to half of all its tokens.
SMALL_PADDING = 256
# Weight of the latest batch in the estimate of the rate.
RATE_WEIGHT = 0.2


class Batcher:
    """A queue of rows, and threads that run batches of it.

    A batch holds rows of one key, the oldest first. It starts when it is full, or when its oldest row has waited for
    `wait` seconds and no batch runs, or for `PATIENCE` seconds and another thread is free.

    Args:
        run: Answers the rows of a batch, each by `Row.send`.
        metrics: Counts rows and batches.
        rows: Most rows of a batch.
        tokens: Most tokens of a batch, padding included; a single row may have more.
        width: Most tokens that a model takes of one row, padding and answer included; None: any number.
        wait: Seconds.
        queue: Most rows that wait.
        threads: Most batches that run at a time.
    """

    def __init__(
        self,
        run: Callable[[list[Row]], None],
        metrics: Metrics,
        *,
        rows: int,
        tokens: int,
        width: int | None = None,
        wait: float,
        queue: int,
        threads: int = 1,
    ) -> None:
        self._run, self._metrics = run, metrics
        self._rows, self._tokens, self._width, self._wait, self._most = rows, tokens, width, wait, queue
        self._queue: deque[Row] = deque()
        self._changed = Condition()
        self._running, self._closing, self._rate = 0, False, 0.0
        self._threads = [Thread(target=self._work, name=f"retex-batch-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, rows: Sequence[Row]) -> None:
        """Queue rows; refuse all of them if they are too many."""
        with self._changed:
            if self._closing:
                raise ApiError(503, "The endpoint is shutting down: send the request to another one.", code="shutdown")
            if len(rows) > self._most:
                raise ApiError(
                    400, f"The request has {len(rows)} rows; at most {self._most} can wait here at a time.", code="rows"
                )
            if len(self._queue) + len(rows) > self._most:
                raise too_many(
                    f"{len(self._queue)} rows wait already, and at most {self._most} may: try again later.",
                    self._seconds(len(self._queue)),
                )
            now = monotonic()
            for row in rows:
                row.arrived = now
            self._queue.extend(rows)
            self._metrics.queue.set(len(self._queue))
            self._changed.notify_all()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Drop rows that wait, and ask those that run to stop."""
        with self._changed:
            for row in rows:
                row.cancelled = True
            self._drop()
            self._changed.notify_all()

    def close(self) -> None:
        """Finish all rows, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _seconds(self, waiting: int) -> int:
        """Estimate in how many seconds so many rows will have run."""
        return min(LONGEST_RETRY, max(1, math.ceil(waiting / self._rate))) if self._rate else 1

    def _drop(self) -> None:
        if any(row.cancelled for row in self._queue):
            self._queue = deque(row for row in self._queue if not row.cancelled)
            self._metrics.queue.set(len(self._queue))

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            begun = monotonic()
            try:
                self._run_safely(batch)
            finally:
                self._note(len(batch), monotonic() - begun)

    def _note(self, rows: int, seconds: float) -> None:
        with self._changed:
            self._running -= 1
            rate = rows / max(seconds, 1e-6)
            self._rate = rate if not self._rate else (1 - RATE_WEIGHT) * self._rate + RATE_WEIGHT * rate
            self._changed.notify_all()

    def _run_safely(self, batch: list[Row]) -> None:
        """Run a batch. If it fails, run its rows one by one, so that a row that cannot run fails alone.

        A row whose text has been reported in part cannot begin again: it fails too.
        """
        self._metrics.batch_rows.observe(len(batch))
        try:
            self._run(batch)
            left = [row for row in batch if not row.finished and not row.cancelled]
            assert not left, "a batch ended without answering all of its rows"
        except Exception as error:  # of any library: a request must get an answer
            left = [row for row in batch if not row.finished and not row.cancelled]
            for row in left:
                if len(batch) == 1 or row.begun:
                    row.send(Failed(error))
                else:
                    self._run_safely([row])

    def _next(self) -> list[Row] | None:
        """Wait for the next batch and take it; None after the last one."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closing:
                        return None
                    self._changed.wait()
                    continue
                batch, full = self._gather()
                limit = PATIENCE if self._running else self._wait
                left = self._queue[0].arrived + limit - monotonic()
                if full or left <= 0 or (self._closing and not self._running):
                    self._take(batch)
                    return batch
                self._changed.wait(left)

    def _gather(self) -> tuple[list[Row], bool]:
        """Return the rows that may run with the oldest one, and whether no more fit.

        All rows of a batch run for as long as the longest answer takes, on prompts as wide as the longest one. So rows
        of very different lengths run apart: short ones would cost as much as the long ones.
        """
        first = self._queue[0]
        batch, prompt, answer, own = [first], first.tokens, first.answer, first.size
        for row in list(self._queue)[1:]:
            wider = max(prompt, row.tokens) + max(answer, row.answer)
            if row.key != first.key or (self._width is not None and wider > self._width):
                continue
            padded = wider * (len(batch) + 1)
            if padded - own - row.size > max(SMALL_PADDING, padded // 2):
                continue
            if len(batch) >= self._rows or padded > self._tokens:
                return batch, True
            batch.append(row)
            prompt, answer, own = max(prompt, row.tokens), max(answer, row.answer), own + row.size
        return batch, len(batch) >= self._rows

    def _take(self, batch: list[Row]) -> None:
        taken = set(map(id, batch))
        self._queue = deque(row for row in self._queue if id(row) not in taken)
        self._running += 1
        self._metrics.queue.set(len(self._queue))
        now = monotonic()
        for row in batch:
            self._metrics.waited.observe(now - row.arrived)
