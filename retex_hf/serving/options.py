"""Settings of an endpoint, whichever engine answers behind it."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError

API_KEY = "RETEX_API_KEY"
# Settings that must be numbers above 0.
POSITIVE = (
    "max_batch", "max_batch_tokens", "max_queue", "max_requests", "max_rows", "max_tokens", "max_prompt_tokens",
    "max_bytes", "timeout", "shutdown_timeout",
)  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class ServeOptions:
    """Settings of an endpoint.

    Args:
        host: The address to listen on. Default: this machine only.
        port: The port to listen on; 0 takes a free one.
        api_key: Key that every request but /health must carry (Authorization: Bearer KEY). Default: the environment
            variable RETEX_API_KEY, which other users of the machine cannot read, else none.
        routing: How inputs are routed to tasks: hard, soft, or {method: hard, far: merged}. Default: as stored in the
            artifact. With far, answers say whether the router abstained.
        execution: How batches of several tasks run: grouped, mixed, or auto, the cheaper one.
        expert_cache: Bytes of recovered experts to keep in memory, such as 2GB.
        max_batch: Most rows that run in one batch.
        max_batch_tokens: Most tokens of a batch, padding and answers included.
        max_wait_ms: How long the first row of a batch waits for others, in milliseconds.
        max_queue: Most rows that wait for a batch; requests beyond are refused with status 429.
        max_requests: Most requests that are open at a time; others are refused with status 429.
        max_rows: Most rows of a request: texts, images, or prompts times n.
        max_tokens: Most tokens of a generated answer.
        max_prompt_tokens: Most tokens of a prompt; at most what the model takes.
        max_bytes: Most bytes of a request's body.
        timeout: Longest time that a request may take, in seconds, waiting included.
        shutdown_timeout: Longest time to finish open requests after SIGTERM, in seconds.
        max_length: Truncate texts to classify or to embed to this many tokens. Default: as in the recipe, else the
            tokenizer's limit.
        pooling: How encoders without modules of SentenceTransformers make one vector of many. Default: mean.
        classes: For models of images and texts: a JSON file of the classes of each task, {task: [names]}.
        prompt: For those: the template that a class name is put into.
        revision: Branch, tag or commit of a Hub id.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = dataclasses.field(default=None, repr=False)
    routing: str | dict[str, Any] | None = None
    execution: Literal["auto", "grouped", "mixed"] = "auto"
    expert_cache: str = "2GB"
    max_batch: int = 32
    max_batch_tokens: int = 16_384
    max_wait_ms: float = 5.0
    max_queue: int = 1024
    max_requests: int = 1024
    max_rows: int = 128
    max_tokens: int = 1024
    max_prompt_tokens: int = 8192
    max_bytes: int = 10_000_000
    timeout: float = 300.0
    shutdown_timeout: float = 60.0
    max_length: int | None = None
    pooling: Literal["mean", "first", "last"] | None = None
    classes: Path | None = None
    prompt: str = "a photo of a {}."
    revision: str | None = None

    @property
    def model_options(self) -> dict[str, Any]:
        """Return further options for `RetexModel.from_pretrained`: where the model runs."""
        return {}

    def check(self) -> None:
        """Refuse values that no endpoint can have."""
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag_of(name)} must be above 0, not {getattr(self, name)}.")
        if not 0 <= self.max_wait_ms <= 60_000:
            raise ConfigError(f"--max-wait-ms must be from 0 to 60000, not {self.max_wait_ms}.")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("The API key must be printable ASCII characters, and at least one.")
        try:
            socket.getaddrinfo(self.host, self.port)
        except (OSError, UnicodeError):
            raise ConfigError(f"--host {self.host!r} is not an address of this machine.") from None


def flag_of(name: str) -> str:
    """Return the flag of the command line that sets a field."""
    return "--" + name.replace("_", "-")
