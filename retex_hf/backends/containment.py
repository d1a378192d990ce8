"""Contain other libraries while they read untrusted files: no prompt, no request, no foreign code, no new process.

Configurations are vetted before a library sees them (`untrusted_config`), but that covers known risks only. This second
line of defence watches the interpreter's audit events, so it also covers unknown keys. It applies per thread: other
threads of the program may use the network meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..utils.locks import making

# Audit events of CPython, and the action that each stands for.
ALWAYS = {
    "builtins.input": "ask a question on the terminal",
    "subprocess.Popen": "start a program",
    "os.system": "start a program",
    "os.exec": "start a program",
    "os.posix_spawn": "start a program",
    "os.startfile": "start a program",
    "pty.spawn": "start a program",
    "pickle.find_class": "unpickle an object",
}
NETWORK = {
    event: "contact another machine"
    for event in (
        "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto",
        "socket.sendmsg", "urllib.Request", "http.client.connect", "ftplib.connect",
    )
}  # fmt: skip
# The package under which transformers imports code that comes with a checkpoint.
FOREIGN_CODE = "transformers_modules"


@dataclass
class _Containment:
    forbidden: dict[str, str]
    tried: list[str] = field(default_factory=list)


_current: ContextVar[_Containment | None] = ContextVar("containment", default=None)


@contextmanager
def contained(path: Path, *, network: bool = False) -> Iterator[None]:
    """Within this context, refuse dangerous actions that a library takes because of the file at `path`.

    A library may swallow the refusal and continue with a fallback that the file does not describe, so it is raised
    again at the end. One thread at a time is in such a context, see `Making`.

    Args:
        path: The file or folder that is read, for the message.
        network: Allow requests, because the caller passed an option that may need them.
    """
    _install()
    containment = _Containment(ALWAYS if network else {**ALWAYS, **NETWORK})
    with making.lock:
        token = _current.set(containment)
        try:
            yield
        except Exception as error:  # whatever a library raises after a refusal, the refusal is what to tell
            if containment.tried:
                raise _refusal(path, containment.tried[0]) from error
            raise
        finally:
            _current.reset(token)
    if containment.tried:
        raise _refusal(path, containment.tried[0])


def _refusal(path: Path, action: str) -> CheckpointError:
    return CheckpointError(f"{path} is refused: to load it, a library would {action}.")


@cache
def _install() -> None:
    """Install the hook once; outside of `contained` it does nothing. (CPython cannot remove audit hooks.)"""
    sys.addaudithook(_watch)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    containment = _current.get()
    if containment is None:
        return
    action = containment.forbidden.get(event)
    if event == "import" and str(arguments[0]).partition(".")[0] == FOREIGN_CODE:
        action = "run code that comes with it"
    if action is not None:
        containment.tried.append(action)
        raise CheckpointError(f"It would {action}.")
