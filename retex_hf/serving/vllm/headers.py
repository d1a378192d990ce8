"""The routing of a request in the headers of its response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from .router import Decision

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# A header names the tasks of so many prompts; the body names all.
MOST_IN_HEADER = 64

# The decisions on the prompts of the request that is being answered. A list that is filled, because vLLM runs parts of
# a request in tasks of their own, which see the same list.
current: ContextVar[list[Decision] | None] = ContextVar("retex_decisions", default=None)


def note(decisions: Sequence[Decision]) -> None:
    """Note the decisions on the prompts of the current request."""
    found = current.get()
    if found is not None:
        found[:] = decisions


def headers_of(decisions: Sequence[Decision]) -> list[tuple[bytes, bytes]]:
    """Return headers that say which task answered each prompt, how sure the router was, and whether it abstained.

    >>> from retex_hf.serving.vllm.router import Decision
    >>> headers_of([Decision("law", 0.98765, 1.5)])[0]
    (b'x-retex-task', b'law')
    """
    shown = decisions[:MOST_IN_HEADER]
    values = {
        "x-retex-task": [quote(one.task, safe="") for one in shown],
        "x-retex-probability": [f"{one.probability:.4f}" for one in shown],
        "x-retex-abstained": [str(one.abstained).lower() for one in shown],
    }
    return [(name.encode(), ",".join(texts).encode()) for name, texts in values.items()]


class RoutingHeaders:
    """An ASGI middleware that adds the headers."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        decisions: list[Decision] = []
        token = current.set(decisions)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and decisions:
                message = {**message, "headers": [*message.get("headers", ()), *headers_of(decisions)]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            current.reset(token)
