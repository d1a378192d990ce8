"""Doing things as another user: root sees no permissions, and so none of the faults that they bring."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from retex_hf import RetexError

NOBODY = 65534
SECONDS = 120


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """A temporary folder of `nobody`; those of pytest are closed to other users."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can do things as another user")
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        give(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def give(folder: Path, user: int = NOBODY) -> Path:
    """Let a user own a folder and all that is in it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)
    return folder


def as_nobody(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fork that has the rights of `nobody`; what it returns or refuses comes back.

    What it imports must have been imported: `nobody` may not be able to read where Python lies. It cannot train: torch
    trains in no fork of a process that has trained (see `another_user`).
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            _become_nobody()
            with os.fdopen(sending, "wb") as pipe:
                _answer(pipe, function, arguments)
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        try:
            return _hear(pipe)
        finally:
            os.waitpid(child, 0)


@contextmanager
def another_user(rehearse: Callable[..., Any], *arguments: Any, **environment: str) -> Iterator[Callable[..., Any]]:
    """A process of its own that becomes `nobody`, and calls what it is given.

    It does the job once as root, so that all that the job imports is in its memory.
    """
    said = f"import sys; sys.path[:] = {sys.path!r}; import users; users.obey()"
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", said], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=given
    ) as process:
        assert process.stdin and process.stdout
        requests, answers = process.stdin, process.stdout

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            pickle.dump((function, arguments), requests)
            requests.flush()
            return _hear(answers)

        call(rehearse, *arguments)
        call(_become_nobody)
        yield call
        requests.close()


def obey() -> None:
    """Do what comes over the standard input, and answer over the standard output, until there is no more."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the functions print is no answer
    while True:
        try:
            function, arguments = pickle.load(requests)
        except EOFError:
            return
        signal.alarm(SECONDS)
        _answer(answers, function, arguments)


def _become_nobody() -> None:
    signal.alarm(SECONDS)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def _answer(pipe: IO[bytes], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer: tuple[str, Any] = ("done", function(*arguments))
    except RetexError as error:
        answer = ("refused", (type(error), str(error)))
    except BaseException:
        answer = ("failed", traceback.format_exc())
    pickle.dump(answer, pipe)
    pipe.flush()


def _hear(pipe: IO[bytes]) -> Any:
    try:
        kind, value = pickle.load(pipe)
    except EOFError:
        raise AssertionError("the other process has not answered: it hangs, or was killed") from None
    if kind == "refused":
        raise value[0](value[1])
    assert kind == "done", value
    return value


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Give up what takes longer, such as waiting for the other end of a pipe."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
