"""Filter of HTTP requests: lets through those that the page in a browser makes, each within limits, and no others.

Gradio serves many more routes: calls that bypass the queue, uploads of any kind, URLs that the server fetches. Requests
that are not listed here do not reach it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InputError
from .inputs import MOST_CHARACTERS, MOST_INPUTS
from .uploads import Uploads

READ = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/robots\.txt|/manifest\.json|/pwa_icon(/\d+)?|/(assets|static|svelte)/.+|"
    r"/logout|/gradio_api/(theme\.css|app_id|user|login_check|token|startup-events|queue/data)/?"
)
JOIN, UPLOAD, LOGIN, FILE = "/gradio_api/queue/join", "/gradio_api/upload", "/login", "/gradio_api/file="
SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Limits on concurrent requests, including those that wait for an answer, and on those whose body is being read.
MOST_OPEN, MOST_BODIES = 256, 8
SECONDS = 60.0
# Texts in UTF-8, as browsers send them, and some room for the rest of the request.
MOST_CALL_BYTES = 4 * MOST_INPUTS * (MOST_CHARACTERS + 1) + 100_000
MOST_UPLOAD_BYTES = 100_000_000
MOST_LOGIN_BYTES = 10_000
MOST_CHOICE = 2**31
NO_UPLOAD = f"An upload is of 1 to {MOST_INPUTS} files."


class Refused(Exception):
    """A refused request: an HTTP status and one sentence."""


class Guard:
    """ASGI middleware that lets only the listed requests through, after checking their form.

    Args:
        app: Gradio's app.
        uploads: Store of uploads; None for a page that takes none.
        inputs: Number of values that each function of the page takes, by its index.
    """

    def __init__(self, app: ASGIApp, *, uploads: Uploads | None, inputs: Mapping[int, int]) -> None:
        self._app, self._uploads, self._inputs = app, uploads, inputs
        self._open = self._bodies = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket, which the page does not use
            return
        try:
            with self._counted("_open", MOST_OPEN):
                await self._answer(scope, receive, send)
        except Refused as error:
            status, sentence = error.args
            # Gradio's page shows the text in `detail`.
            await JSONResponse({"detail": sentence}, status)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD") and (READ.fullmatch(path) or self._may_read(path)):
            await self._app(scope, receive, send)
        elif method == "POST" and path == JOIN:
            body = self._checked_call(await self._body(scope, receive, MOST_CALL_BYTES))
            await self._app(*_with_body(scope, receive, body), send)
        elif method == "POST" and path.rstrip("/") == LOGIN:
            body = await self._body(scope, receive, MOST_LOGIN_BYTES)
            await self._app(*_with_body(scope, receive, body), send)
        elif method == "POST" and path == UPLOAD and self._uploads is not None:
            response = await self._upload(scope, receive, self._uploads)
            await response(scope, receive, send)
        else:
            raise Refused(404, "This page has no such address.")

    def _may_read(self, path: str) -> bool:
        """Return whether a path is that of a file which visitors may read."""
        return self._uploads is not None and path.startswith(FILE) and self._uploads.holds(path.removeprefix(FILE))

    @contextmanager
    def _counted(self, name: str, most: int) -> Iterator[None]:
        if getattr(self, name) >= most:
            raise Refused(503, "The page has too many visitors; try again later.")
        setattr(self, name, getattr(self, name) + 1)
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) - 1)

    async def _body(self, scope: Scope, receive: Receive, most: int) -> bytes:
        with self._counted("_bodies", MOST_BODIES), _in_time():
            async with asyncio.timeout(SECONDS):
                return b"".join([chunk async for chunk in Request(scope, _up_to(receive, most)).stream()])

    def _checked_call(self, body: bytes) -> bytes:
        """Return a function call rebuilt from its checked fields only."""
        try:
            call = json.loads(body)
            data, function, session = call["data"], call["fn_index"], call["session_hash"]
            trigger = call.get("trigger_id")
            if not (_is_whole(function) and isinstance(data, list) and self._inputs.get(function) == len(data)):
                raise ValueError
            if not (
                isinstance(session, str) and SESSION.fullmatch(session) and (trigger is None or _is_whole(trigger))
            ):
                raise ValueError
            data = [self._checked_value(value) for value in data]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Refused(422, "This is not a call that the page makes.") from None
        checked = {"data": data, "fn_index": function, "trigger_id": trigger, "session_hash": session}
        return json.dumps(checked).encode()

    def _checked_value(self, value: Any) -> Any:
        """Return a text, a choice, or images that are files of this page: no URL, and no other file of the machine."""
        if value is None or isinstance(value, str) or _is_whole(value):
            return value
        if not isinstance(value, list) or len(value) > MOST_INPUTS or self._uploads is None:
            raise ValueError
        paths = [entry["image"]["path"] for entry in value]
        if not all(isinstance(path, str) and self._uploads.holds(path) for path in paths):
            raise Refused(403, "An image was not uploaded here; upload it again.")
        if len(set(paths)) < len(paths):  # repeating one small upload would make a large call
            raise Refused(422, "An upload is named more than once; add each image once.")
        return [{"image": {"path": path, "meta": {"_type": "gradio.FileData"}}, "caption": None} for path in paths]

    async def _upload(self, scope: Scope, receive: Receive, uploads: Uploads) -> Response:
        if refusal := await self._login(scope):
            return refusal
        request = Request(scope, _up_to(receive, MOST_UPLOAD_BYTES))
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            return PlainTextResponse(NO_UPLOAD, 400)
        try:
            with self._counted("_bodies", MOST_BODIES), _in_time():
                async with (
                    asyncio.timeout(SECONDS),
                    request.form(max_files=MOST_INPUTS, max_fields=0) as form,
                ):
                    kept = uploads.keep(
                        (file.filename or "", file.file, file.size)
                        for file in form.getlist("files")
                        if isinstance(file, UploadFile) and file.size is not None
                    )
                    return JSONResponse(kept) if kept else PlainTextResponse(NO_UPLOAD, 400)
        except InputError as error:
            return PlainTextResponse(str(error), 413)
        except HTTPException:  # starlette raises it for a malformed form or for too many files
            return PlainTextResponse(NO_UPLOAD, 400)

    async def _login(self, scope: Scope) -> Response | None:
        """Return gradio's refusal of a visitor who has not logged in, where the page requires a login."""
        answered: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            answered.append(message)

        path = "/gradio_api/login_check"
        await self._app({**scope, "method": "GET", "path": path, "raw_path": path.encode()}, receive, send)
        status = answered[0]["status"]
        return None if status == 200 else PlainTextResponse("Log in first.", status)


@contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise Refused(408, "The request took too long.") from None
    except ClientDisconnect:
        raise Refused(400, "The request ended early.") from None


def _up_to(receive: Receive, most: int) -> Receive:
    """Return a `receive` that refuses a body of more than `most` bytes."""
    got = 0

    async def limited() -> Message:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        if got > most:
            raise Refused(413, f"The request has more than {most} bytes.")
        return message

    return limited


def _with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """Return a request with this body; later messages (such as a disconnect) are passed on."""
    headers = [
        (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")
    ]
    given = False

    async def once() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, once


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST_CHOICE
