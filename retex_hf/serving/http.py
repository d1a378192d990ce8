"""The HTTP side of a request: its body within limits, its response, and its end if the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = "application/json"
BODY_SECONDS = 60.0


class Disconnected(Exception):
    """The client went away."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return a request header; the first, if it is given twice."""
    return next((value for key, value in scope["headers"] if key.lower() == name), None)


def check_announced(scope: Scope, most: int) -> None:
    """Refuse a request that announces a body of more bytes."""
    length = header(scope, b"content-length")
    if length is not None and (len(length) > 18 or not length.isdigit() or int(length) > most):
        raise _too_large(most)


async def read_body(scope: Scope, receive: Receive, most: int, hold: Callable[[int], None]) -> bytes:
    """Return the JSON body of a request of at most `most` bytes; `hold` is told of its parts, and may refuse them.

    Parts count as they arrive, not as announced: a client that announces much and sends nothing takes no room.
    """
    check_announced(scope, most)
    kind = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if kind != JSON.encode():
        # A page in a browser can post other types to any address of this machine without asking.
        raise ApiError(415, f"The content type must be {JSON}.", code="content_type")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise _too_large(most)
                hold(len(parts[-1]))
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"The request did not arrive within {BODY_SECONDS:.0f} seconds.", code="timeout") from None


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The request has more than {most} bytes.", code="too_large", headers={"connection": "close"})


async def unless_disconnected(receive: Receive, work: Awaitable[None]) -> None:
    """Await some work; cancel it if the client goes away."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class Reply:
    """Sends one response: a whole one, or a stream of server-sent events.

    Args:
        send: Of the server.
        headers: Sent with every response.
    """

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send, self._headers = send, headers
        self.status, self.streams = 0, False

    async def whole(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        """Send a whole response."""
        given = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
        await self._start(status, given)
        await self._send({"type": "http.response.body", "body": body})

    async def json(self, body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a JSON response."""
        await self.whole(status, json.dumps(body).encode(), JSON, headers)

    async def start_stream(self, headers: dict[str, str]) -> None:
        """Begin a stream of events."""
        self.streams = True
        await self._start(200, {"content-type": "text/event-stream", "cache-control": "no-cache", **headers})

    async def event(self, data: Any) -> None:
        """Send one event, whose data is JSON."""
        await self._part(json.dumps(data))

    async def end_stream(self) -> None:
        """Send OpenAI's last event, and end the stream."""
        await self._part("[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, error: ApiError) -> None:
        """Send a refusal, or end a stream with it."""
        if self.streams:
            await self.event(error.body())
            await self.end_stream()
        elif not self.status:
            await self.json(error.body(), status=error.status, headers=error.headers)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        given = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in {**self._headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": given})

    async def _part(self, data: str) -> None:
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
