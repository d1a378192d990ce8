"""A warm process that runs trials under limits of time and memory, so that a crash or a hang is noticed."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from retex_hf import RetexError

Answer = dict[str, Any]


class Bounded:
    """Answers questions with `answer`, a function of a module, which may return a mapping with keys of its own.

    `seconds` and `megabytes` (the growth of the process) are added to it. Instead there may be a `refusal`, the
    sentence of a `RetexError`, or `wrong`, a description of the fault. A process that crashes or hangs is replaced.
    """

    def __init__(self, answer: Callable[[Any], Answer], *, seconds: float, room: int) -> None:
        self._answer, self._seconds, self._room = answer, seconds, room

    def __enter__(self) -> Bounded:
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.send(None)
        self._process.join(self._seconds)
        self._stop()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._answer, self._room), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()  # wait until the process is warm

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def ask(self, question: Any) -> Answer:
        """Return the answer to a question, or what went wrong."""
        try:
            self._connection.send(question)
            if self._connection.poll(self._seconds):
                return self._connection.recv()
            failure = f"hangs for over {self._seconds:.0f} seconds"
        except (EOFError, OSError):
            self._process.join()
            failure = f"crashes the process (exit code {self._process.exitcode})"
        self._stop()
        self._start()
        return {"wrong": failure, "seconds": 0.0, "megabytes": 0}


def _serve(connection: Connection, answer: Callable[[Any], Answer], room: int) -> None:
    import torch
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
    connection.send(None)
    while (question := connection.recv()) is not None:
        before, start = _peak(), time.monotonic()
        found = _attempt(answer, question)
        connection.send({**found, "seconds": time.monotonic() - start, "megabytes": _peak() - before})


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _attempt(answer: Callable[[Any], Answer], question: Any) -> Answer:
    try:
        return answer(question)
    except RetexError as error:
        text = str(error)
        if "\n" in text:
            return {"wrong": f"is refused so: {text[:300]!r}"}
        if asks_for_memory(error):
            return {"wrong": f"asks for more memory than there is: {text[:300]!r}"}
        return {"refusal": text}
    except BaseException as error:  # report any error as a problem, and stay ready for the next question
        return {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}


def asks_for_memory(error: BaseException | None) -> bool:
    """Return whether an error was caused by a lack of memory."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
