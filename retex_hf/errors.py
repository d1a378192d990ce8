"""One base error, few children: `except RetexError` catches everything this library raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator

# What `repr` puts around the items of a container.
BRACKETS = {
    list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}"), frozenset: ("frozenset({", "})"),
}  # fmt: skip


class RetexError(Exception):
    """Base class of all errors of this library. The message is one sentence for the person at the keyboard."""


class ConfigError(RetexError, ValueError):
    """A field of `RetexConfig` holds a value that is not allowed."""


class CheckpointError(RetexError):
    """A base or expert checkpoint cannot be read, or does not fit the others."""


class ArtifactError(RetexError):
    """A saved ReTeX folder is incomplete, damaged, or not one."""


class WriteError(RetexError, OSError):
    """A file or folder cannot be written: the disk is full, read-only, or failing. What was there before still is."""


class HubError(RetexError):
    """The Hub cannot be reached, or does not give or take what was asked."""


class TaskError(RetexError, ValueError):
    """`task=` names a task that does not exist, or does not fit the batch."""


class InputError(RetexError, ValueError):
    """A batch cannot be routed or split by task."""


class EvaluationError(RetexError, ValueError):
    """Data cannot be evaluated on, or a method answers what was not asked."""


def first_line(error: Exception) -> str:
    """What another library's exception says, short enough for one sentence of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def brief(value: object, limit: int = 200) -> str:
    """A value for an error message, cut off where it is long.

    Only what is shown is looked at: `repr` of a tuple that holds another one twice, which does likewise, never ends.

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


def _parts(value: object, limit: int) -> Iterator[str]:
    """What `repr` writes, piece by piece. Every level begins with a piece, so no more levels are entered than shown."""
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
    except (ValueError, RecursionError):  # Python does not print integers of thousands of digits, nor what is deep
        return f"a {type(value).__name__} of great length"


def shorten(names, limit: int = 3) -> str:
    """List a few names for an error message: `'a', 'b', 'c' and 7 more`."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
