"""The artifact that an endpoint serves, and its exchange for a new one while requests run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import RetexError
from .engine import Engine
from .errors import ApiError
from .logs import log
from .metrics import Metrics
from .options import ServeOptions


@dataclass(eq=False)
class _Held:
    """An engine, and the number of requests that use it."""

    engine: Engine
    users: int = 0
    retired: bool = False


class Service:
    """Holds the current engine. Requests lease it; one that was replaced ends after its last request.

    Args:
        artifact: A folder or Hub id, read again by `reload`.
        options: Settings of the endpoint.
    """

    def __init__(self, artifact: str | Path, options: ServeOptions) -> None:
        self.artifact, self.options, self.metrics = artifact, options, Metrics()
        self._held = _Held(Engine(artifact, options, self.metrics))
        self._reloading = asyncio.Lock()
        self._endings: set[asyncio.Task[None]] = set()
        self.loaded = int(time.time())

    @property
    def engine(self) -> Engine:
        """Return the current engine."""
        return self._held.engine

    @contextmanager
    def lease(self) -> Iterator[Engine]:
        """Use the current engine; it stays until the end of the context, though another one may replace it."""
        held = self._held
        held.users += 1
        try:
            yield held.engine
        finally:
            held.users -= 1
            self._end_if_unused(held)

    async def reload(self) -> None:
        """Load the artifact anew, then let new requests use it. On failure, the old one stays."""
        if self._reloading.locked():
            raise ApiError(409, "A reload is under way: wait for its end.", code="reloading")
        async with self._reloading:
            try:
                engine = await asyncio.to_thread(Engine, self.artifact, self.options, self.metrics)
            except (RetexError, OSError) as error:
                self.metrics.reloads.labels("failed").inc()
                log("reload failed", reason=str(error))
                raise ApiError(500, f"The artifact was not reloaded: {error}", code="reload_failed") from None
            old, self._held = self._held, _Held(engine)
            self.loaded = int(time.time())
            old.retired = True
            self.metrics.reloads.labels("done").inc()
            log("reloaded", tasks=list(engine.names.tasks))
            self._end_if_unused(old)

    def _end_if_unused(self, held: _Held) -> None:
        if held.retired and not held.users:
            ending = asyncio.get_running_loop().create_task(asyncio.to_thread(held.engine.close))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def close(self) -> None:
        """Finish what runs, then stop."""
        await asyncio.gather(*self._endings)
        await asyncio.to_thread(self.engine.close)
