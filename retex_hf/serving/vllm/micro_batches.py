"""Routing of concurrent requests in common batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


class MicroBatches(Generic[Given, Found]):
    """Calls a function of a list on what several coroutines ask for, one call at a time, in a thread.

    What arrives while a call runs waits for the next. So a single request waits for nothing, and many share passes. If
    a common call fails, each request is tried alone, so that one does not fail for another.
    """

    def __init__(self, function: Callable[[Sequence[Given]], list[Found]]) -> None:
        self._function = function
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retex-router")
        self._waiting: list[tuple[list[Given], asyncio.Future[list[Found]]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, items: Sequence[Given]) -> list[Found]:
        """Return the function's results for these items."""
        future: asyncio.Future[list[Found]] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(items), future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            taken = [(items, future) for items, future in taken if not future.done()]  # a client may have left
            try:
                found = await self._call([item for items, _ in taken for item in items])
            except Exception as error:
                if len(taken) == 1:
                    _settle(taken[0][1], error)
                    continue
                for items, future in taken:
                    await self._alone(items, future)
                continue
            start = 0
            for items, future in taken:
                _settle(future, found[start : start + len(items)])
                start += len(items)

    async def _alone(self, items: list[Given], future: asyncio.Future[list[Found]]) -> None:
        try:
            _settle(future, await self._call(items))
        except Exception as error:
            _settle(future, error)

    async def _call(self, items: list[Given]) -> list[Found]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._function, items)


def _settle(future: asyncio.Future[list[Found]], result: list[Found] | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
