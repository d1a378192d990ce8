"""Doing things as another user: root sees no permissions, and so none of the faults that they bring."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

    What it imports must have been imported: `nobody` may not be able to read where Python lies.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(SECONDS)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                answer: tuple[str, Any] = ("done", function(*arguments))
            except RetexError as error:
                answer = ("refused", (type(error), str(error)))
            except BaseException:
                answer = ("failed", traceback.format_exc())
            with os.fdopen(sending, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said, "the child has not answered: it hangs, or was killed"
    kind, value = pickle.loads(said)
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
