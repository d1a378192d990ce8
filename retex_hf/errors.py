"""The exceptions of this library: `except RetexError` catches everything it raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

# The brackets that `repr` puts around the items of a container.
BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}"), frozenset: ("frozenset({", "})"),
}  # fmt: skip


class RetexError(Exception):
    """Base class of all errors of this library. The message is one sentence for the user."""


class ConfigError(RetexError, ValueError):
    """A field of `RetexConfig` holds a value that is not allowed."""


class CheckpointError(RetexError):
    """A base or expert checkpoint cannot be read, or does not fit the others."""


class ArtifactError(RetexError):
    """A saved ReTeX folder is incomplete or damaged, or a folder is not a ReTeX folder."""


class WriteError(RetexError, OSError):
    """A file or folder cannot be written: the disk is full, read-only or failing. Previous content is unchanged."""


class HubError(RetexError):
    """The Hub cannot be reached, or refuses a download or upload."""


class TaskError(RetexError, ValueError):
    """`task=` names a task that does not exist, or does not fit the batch."""


class InputError(RetexError, ValueError):
    """A batch cannot be routed or split by task."""


class EvaluationError(RetexError, ValueError):
    """Data, or the answers of a method, cannot be used for an evaluation."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's exception, to quote in an error message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def brief(value: object, limit: int = 200) -> str:
    """Return the `repr` of a value for an error message, cut off after `limit` characters.

    Only the part that is shown is visited: `repr` takes exponential time for nested tuples that hold the next one
    twice.

    >>> from retex_hf.errors import brief
    >>> brief({"a": [1, (2.5,)]}), brief("abc" * 9, 5), brief([[[[]]]], 3)
    ("{'a': [1, (2.5,)]}", "'abca...", '[[[...')
    """
    text = ""
    for part in _parts(value, limit):
        text += part
        if len(text) > limit:
            return f"{text[:limit]}..."
    return text


def _parts(value: Any, limit: int) -> Iterator[str]:
    """Yield the `repr` of a value in pieces; every level yields a piece first, so only levels shown are entered."""
    if type(value) in (str, bytes):
        yield repr(value[: limit + 1])
    elif type(value) in BRACKETS and value:
        first, last = BRACKETS[type(value)]
        yield first
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _parts(item, limit)
            if isinstance(value, dict):
                yield ": "
                yield from _parts(value[item], limit)
        yield "," + last if isinstance(value, tuple) and len(value) == 1 else last
    else:
        yield _whole(value)


def _whole(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, or deep nesting
        return f"a very long {type(value).__name__}"


def shorten(names: Iterable[object], limit: int = 3) -> str:
    """List a few names for an error message: `'a', 'b', 'c' and 7 more`."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
