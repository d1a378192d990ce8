"""Texts of a request as server-sent events, while they are generated."""

from __future__ import annotations

from .calls import Call
from .http import Reply
from .requests import GenerationRequest
from .responses import Completion, headers_of, usage
from .rows import Decision, Done, Event, Routed, Row, Text


class _Stream:
    """A stream that begins when all rows are routed, because its headers name their tasks."""

    def __init__(self, reply: Reply, rows: list[Row], begins: list[str], made: Completion) -> None:
        self._reply, self._rows, self._begins, self._made = reply, rows, begins, made
        self._decisions: dict[int, Decision] = {}
        self._early: list[tuple[Row, Event]] = []

    async def take(self, row: Row, event: Event) -> None:
        """Send an event, or keep it until the stream begins."""
        if isinstance(event, Routed):
            self._decisions[row.index] = event.decision
            if len(self._decisions) == len(self._rows):
                await self._begin()
        elif self._reply.streams:
            await self._send(row, event)
        else:
            self._early.append((row, event))

    async def _begin(self) -> None:
        await self._reply.start_stream(headers_of([self._decisions[row.index] for row in self._rows]))
        for row in self._rows:
            await self._reply.event(self._made.begin(row.index, self._decisions[row.index], self._begins[row.index]))
        for row, event in self._early:
            await self._send(row, event)

    async def _send(self, row: Row, event: Event) -> None:
        if isinstance(event, Done):
            await self._reply.event(self._made.end(row.index, event))
        elif isinstance(event, Text):
            await self._reply.event(self._made.piece(row.index, self._decisions[row.index], event.text))


async def stream(
    reply: Reply, request: GenerationRequest, call: Call, begins: list[str], made: Completion
) -> list[Done]:
    """Send texts as they are generated, and return the answers; `begins` is what each text begins with."""
    sent, answers = _Stream(reply, call.rows, begins, made), dict[int, Done]()
    async for row, event in call.events():
        if isinstance(event, Done):
            answers[row.index] = event
        await sent.take(row, event)
    ordered = [answers[row.index] for row in call.rows]
    if request.usage:
        await reply.event(made.counted(usage(call.rows, ordered, request.copies)))
    await reply.end_stream()
    return ordered
