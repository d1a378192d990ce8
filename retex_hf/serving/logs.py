"""Structured logs: one JSON object per line, without prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

logger = logging.getLogger("retex_hf.serving")


class JsonLines(logging.Formatter):
    """Formats records as JSON. Of exceptions only the class and the places are shown: messages may quote inputs."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)
            entry |= {"error": type(error).__name__, "at": [f"{frame.filename}:{frame.lineno}" for frame in frames]}
        return json.dumps(entry)


def log(event: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Write an event with its fields."""
    logger.log(level, event, extra={"fields": fields}, exc_info=error)


def log_to_stderr() -> None:
    """Send the logs of this library's endpoint, and those of uvicorn, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("retex_hf.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        configured = logging.getLogger(name)
        configured.handlers, configured.propagate = [handler], False
        configured.setLevel(level)
