"""Conversion of user input to paths, with one-sentence errors for invalid or unreadable ones."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArtifactError, RetexError

LONGEST_SHOWN = 200


def as_path(typed: str | os.PathLike[str], error: type[RetexError] = ArtifactError) -> Path:
    """Return a path with the home folder (`~`) expanded. It need not exist; if it does, it must be readable.

    Args:
        typed: Path as the user gave it. It may also turn out to be something else, such as a Hub id.
        error: Class of the error to raise if it cannot be a path.

    >>> from retex_hf.utils.paths import as_path
    >>> as_path("~nosuchuser/model")
    Traceback (most recent call last):
    ...
    retex_hf.errors.ArtifactError: ~nosuchuser/model cannot be used: there is no user of that name.
    """
    shown = _shown(os.fspath(typed))
    try:
        path = Path(typed).expanduser()
        is_there = _is_there(path)
    except RuntimeError:
        raise error(f"{shown} cannot be used: there is no user of that name.") from None
    except OSError as problem:  # a name that is too long, a folder that may not be entered, a link to itself
        raise error(f"{shown} cannot be used: {problem.strerror}.") from None
    except ValueError:
        raise error(f"{shown} cannot be used: it holds a character that no path may have.") from None
    if is_there and not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise error(f"{shown} cannot be read: Permission denied.")
    return path


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _shown(text: str) -> str:
    """Return user input for a message: on one line, and cut off where it is long."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
