"""Standard streams that may be closed, full, or in an encoding that lacks most characters."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress

ESCAPED = "retex-escaped"


def prepare() -> None:
    """Make the standard streams safe to use.

    Closed streams are redirected to the null device: otherwise the next opened file would take their descriptor and get
    the output. Characters that an encoding lacks are escaped as in JSON, so that JSON output stays valid.
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
        if hasattr(stream, "reconfigure"):  # a program may have replaced the stream
            stream.reconfigure(errors=ESCAPED)


def complain(sentence: str) -> None:
    """Print an error on standard error, if that is possible."""
    with suppress(OSError):
        print(sentence, file=sys.stderr)


def abandon() -> None:
    """Discard output that cannot be written, so that the interpreter does not try again at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2)), error.end
