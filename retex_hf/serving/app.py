"""The endpoint as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import unquote

from PIL.Image import Image
from prometheus_client import CONTENT_TYPE_LATEST

from ..errors import RetexError
from .budget import Budget
from .calls import Call
from .engine import CLASSIFIES, EMBEDS, GENERATES, Engine
from .errors import ApiError, as_api_error, too_many
from .fields import parse_body
from .http import Disconnected, Receive, Reply, Scope, Send, header, read_body, unless_disconnected
from .logs import log
from .requests import MOST_PIXELS, GenerationRequest, read_chat, read_completion, read_inputs
from .responses import Completion, classified, embedded, headers_of, model_entry, model_list, usage
from .rows import Decision, Done, Row
from .service import Service
from .streaming import stream

MODELS, RELOAD = "/v1/models", "/admin/reload"
OPEN_PATHS = frozenset({"/health"})
# Bodies and images of the largest size that are held at a time; smaller ones are more.
MOST_BODIES = 16
NOBODY_LEFT = 499  # nginx's status for a client that went away


@dataclass
class Exchange:
    """One request: its body, its reply, and what the log says of it."""

    body: bytes
    reply: Reply
    noted: dict[str, Any] = field(default_factory=dict)

    def note(self, model: str, rows: list[Row], decisions: list[Decision], generated: int = 0) -> None:
        """Note what the log may say: no texts."""
        tasks = Counter(decision.task or "merged" for decision in decisions)
        self.noted |= {
            "model": model,
            "rows": len(rows),
            "tasks": dict(tasks),
            "abstained": sum(decision.abstained for decision in decisions),
            "tokens_read": sum(row.tokens for row in rows),
            "tokens_generated": generated,
        }


Handler = Callable[[Exchange], Awaitable[None]]


class App:
    """The ASGI application over a `Service`."""

    def __init__(self, service: Service) -> None:
        self.service, self.options, self.metrics = service, service.options, service.metrics
        self._open = 0
        self._bytes = Budget(MOST_BODIES * self.options.max_bytes, "bytes")
        self._pixels = Budget(MOST_BODIES * MOST_PIXELS, "pixels")
        self._routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            MODELS: ("GET", self._models),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/embeddings": ("POST", self._embeddings),
            "/classify": ("POST", self._classify),
            RELOAD: ("POST", self._reload),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # a websocket, which nothing here uses
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.shutdown":
                await self.service.close()
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, number = perf_counter(), secrets.token_hex(8)
        exchange = Exchange(b"", Reply(send, {"x-request-id": number}))
        path = scope["path"] if scope["path"] in self._routes else MODELS if _names_model(scope) else "other"
        self._open += 1
        self.metrics.open.set(self._open)
        status = 0
        try:
            await self._answer(scope, receive, exchange)
        except Disconnected:
            status = NOBODY_LEFT
        finally:
            self._open -= 1
            self.metrics.open.set(self._open)
            status = status or exchange.reply.status
            self.metrics.requests.labels(path, str(status)).inc()
            noted = {"status": status, "ms": round(1000 * (perf_counter() - begun), 1), **exchange.noted}
            log("request", id=number, method=scope["method"][:10], path=path, **noted)

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        """Answer a request, or say in one sentence why not."""
        try:
            handler = self._admit(scope)
            async with asyncio.timeout(self.options.timeout):
                if scope["method"] == "GET" or scope["path"] == RELOAD:
                    await unless_disconnected(receive, handler(exchange))
                    return
                with self._bytes.share() as hold:
                    exchange.body = await read_body(scope, receive, self.options.max_bytes, hold)
                    await unless_disconnected(receive, handler(exchange))
        except RetexError as error:
            refused = as_api_error(error)
            exchange.noted["refused"] = refused.code or "invalid_request"
            await exchange.reply.error(refused)
        except TimeoutError:
            exchange.noted["refused"] = "timeout"
            sentence = f"The request took longer than {self.options.timeout:g} seconds."
            await _within(10, exchange.reply.error(ApiError(504, sentence, code="timeout")))
        except Disconnected:
            raise
        except Exception as error:  # a bug: say so, and go on
            log("bug", level=logging.ERROR, error=error)
            await exchange.reply.error(ApiError(500, "The server failed; its log says where.", code="internal_error"))

    def _admit(self, scope: Scope) -> Handler:
        """Return what answers a request; refuse strangers, unknown paths, and more requests than are allowed."""
        path, method = scope["path"], scope["method"]
        if path not in OPEN_PATHS:
            self._check_key(scope)
        wanted, handler = self._routes.get(path, (None, None))
        if handler is None and _names_model(scope):
            wanted, handler = "GET", self._model_handler(path)
        if handler is None or wanted is None:
            raise ApiError(
                404, f"There is no {path[:100]!r} here; there are {', '.join(self._routes)}.", code="no_path"
            )
        if method != wanted:
            raise ApiError(405, f"{path[:100]} takes {wanted} only.", code="method", headers={"allow": wanted})
        if method == "POST" and self._open > self.options.max_requests:
            raise too_many(f"{self.options.max_requests} requests are open already: try again later.", 1)
        return handler

    def _check_key(self, scope: Scope) -> None:
        """Refuse a request without the key, in constant time."""
        key = self.options.api_key
        if key is None:
            return
        kind, _, given = (header(scope, b"authorization") or b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
            raise ApiError(
                401, "The API key is missing or wrong: send it as Authorization: Bearer KEY.",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    # ---- the endpoint itself -----------------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply.json({"status": "ok"})

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.reply.whole(200, self.metrics.text(), CONTENT_TYPE_LATEST)

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply.json(model_list(self.service.engine.names.all, self.service.loaded))

    def _model_handler(self, path: str) -> Handler:
        async def handler(exchange: Exchange) -> None:
            name = self.service.engine.names.check(unquote(path.removeprefix(MODELS + "/")))
            await exchange.reply.json(model_entry(name, self.service.loaded))

        return handler

    async def _reload(self, exchange: Exchange) -> None:
        if self.options.api_key is None:
            raise ApiError(
                403, "Reloading by request needs an API key, which this endpoint does not have: send SIGHUP instead.",
                code="no_api_key",
            )  # fmt: skip
        # Finish a reload whose client went away.
        await asyncio.shield(asyncio.ensure_future(self.service.reload()))
        await exchange.reply.json({"status": "reloaded", "models": self.service.engine.names.all})

    # ---- inputs ------------------------------------------------------------------------------------------------------

    async def _classify(self, exchange: Exchange) -> None:
        await self._inputs(exchange, CLASSIFIES)

    async def _embeddings(self, exchange: Exchange) -> None:
        await self._inputs(exchange, EMBEDS)

    async def _inputs(self, exchange: Exchange, does: str) -> None:
        with self.service.lease() as engine:
            engine.require(does)
            fields, options = parse_body(exchange.body), self.options
            exchange.body = b""
            # Decoding images and counting tokens take a while: not in the loop.
            request = await asyncio.to_thread(read_inputs, fields, options, engine.kind, vectors=does == EMBEDS)
            rows = await asyncio.to_thread(engine.input_rows, request)
            pixels = sum(value.width * value.height for value in request.values if isinstance(value, Image))
            with self._pixels.take(pixels), Call(rows, engine.batcher, self.metrics) as call:
                answers = await call.answers()
        decisions = [answer.decision for answer in answers]
        exchange.note(request.model, rows, decisions)
        if does == EMBEDS:
            body = embedded(request.model, rows, answers, request.base64)
        else:
            body = classified(request.model, rows, answers)
        await exchange.reply.json(body, headers=headers_of(decisions))

    # ---- generation --------------------------------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, chat=False)

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, chat=True)

    async def _generate(self, exchange: Exchange, chat: bool) -> None:
        with self.service.lease() as engine:
            engine.require(GENERATES)
            assert engine.generation is not None
            read = read_chat if chat else read_completion
            request = read(parse_body(exchange.body), self.options, engine.generation.default_sampling())
            exchange.body = b""
            rows = await asyncio.to_thread(engine.generation_rows, request)
            begins = _echoes(engine, request, rows)
            with Call(rows, engine.batcher, self.metrics) as call:
                answers = await self._reported(exchange, request, call, begins, Completion(request.model, chat))
        exchange.note(request.model, rows, [a.decision for a in answers], sum(a.tokens for a in answers))

    async def _reported(
        self, exchange: Exchange, request: GenerationRequest, call: Call, begins: list[str], made: Completion
    ) -> list[Done]:
        """Send the answers, whole or as a stream; return them."""
        if request.stream:
            return await stream(exchange.reply, request, call, begins, made)
        answers = await call.answers()
        texts = [begin + answer.value[0] for begin, answer in zip(begins, answers, strict=True)]
        body = made.body(answers, texts, usage(call.rows, answers, request.copies))
        await exchange.reply.json(body, headers=headers_of([answer.decision for answer in answers]))
        return answers


def _echoes(engine: Engine, request: GenerationRequest, rows: list[Row]) -> list[str]:
    """Return what each text begins with: its prompt, where the request asks for it."""
    if not request.echo:
        return [""] * len(rows)
    assert engine.generation is not None
    task = request.model if request.model in engine.names.tasks else None
    tokenizer = engine.generation.tokenizer(task)
    prompts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in request.prompts]
    return [prompt for prompt in prompts for _ in range(request.copies)]


def _names_model(scope: Scope) -> bool:
    return scope["path"].startswith(MODELS + "/")


async def _within(seconds: float, work: Awaitable[None]) -> None:
    """Await some work, but not longer: the client may not read."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        raise Disconnected from None
