"""Standard streams as they may be: closed, full, or of an encoding that lacks most characters."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress

ESCAPED = "retex-escaped"


def prepare() -> None:
    """Make the standard streams safe to use.

    Streams that are closed lead nowhere from now on: else the next file that is opened would take their number, and get
    what is said. What an encoding lacks is written as JSON writes it, so that JSON stays JSON.
    """
    codecs.register_error(ESCAPED, _escaped)
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        nowhere = os.open(os.devnull, os.O_RDWR)
    os.close(nowhere)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a program has put something else in its place
            stream.reconfigure(errors=ESCAPED)


def complain(sentence: str) -> None:
    """Say what is wrong on standard error, if anything can be said there."""
    with suppress(OSError):
        print(sentence, file=sys.stderr)


def abandon() -> None:
    """Let what was said and cannot be written go nowhere, so that the interpreter does not try again at its end."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2)), error.end
