"""Atomic file writes: files appear whole or not at all, with one-sentence errors where they cannot be written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..errors import WriteError, first_line
from .folder_handles import READ_FILE, is_held, lstat, named
from .paths import as_path

MAKE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# Errors by which network file systems (SMB, FUSE) report that fsync is unsupported, for files or for folders.
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
# Parts of the messages of `torch.save` when a file cannot be written to its end.
TORCH_SAVE_FAILS = ("inline_container", "iostream error", "PytorchStreamWriter")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends without an error; missing folders are made.

    Existing files at either name are replaced, never written into: they may be links.
    """
    path = as_path(path, WriteError)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        state = lstat(partial)
        if state is not None and stat.S_ISDIR(state.st_mode):
            raise WriteError(f"{path} cannot be written: {partial} is a folder, where the file would be written first.")
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, MAKE_FILE, 0o666))
        try:
            yield partial
            sync_one(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Sync a folder and everything in it to the disk, except links and special files."""
    for where, _, files in os.walk(folder):
        for name in files:
            if stat.S_ISREG(os.lstat(os.path.join(where, name)).st_mode):
                sync_one(Path(where, name))
        sync_one(Path(where))


def sync_one(path: Path) -> None:
    """Sync one file, or the entries of one folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    try:
        handle = os.open(path, READ_FILE)
    except PermissionError:  # a file kept from before that is not readable, so this process did not write it
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full disk, a read-only folder and the like into a `WriteError` that names `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        # An error of a copy names both files, the one that was read first.
        files = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        elsewhere = bool(files) and not any(_is_near(path.absolute(), file) for file in files)
        if error.errno is None or elsewhere or isinstance(error, ConnectionError | TimeoutError):
            raise  # not caused by writing this path
        raise WriteError(f"{named(path)} cannot be written: {os.strerror(error.errno)}.") from error
    except (SafetensorError, RuntimeError) as error:
        if not is_write_failure(error):
            raise
        raise WriteError(f"{named(path)} cannot be written: {_reason(error)}.") from error


def is_write_failure(error: Exception) -> bool:
    """Return whether an error is a failed write; safetensors and `torch.save` have exceptions of their own for that."""
    if isinstance(error, SafetensorError):
        return "I/O error" in str(error)
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in TORCH_SAVE_FAILS)
    return isinstance(error, OSError)


def _is_near(path: Path, other: Path) -> bool:
    """Return whether another path is this one, in it, above it, or in a staging folder beside it (which is held)."""
    other = other.absolute()
    if is_held(other) or other.is_relative_to(path) or path.is_relative_to(other):
        return True
    beside = other.relative_to(path.parent).parts if other.is_relative_to(path.parent) else ()
    return bool(beside) and beside[0].startswith(f".{path.stem}")


def _reason(error: Exception) -> str:
    if isinstance(error, SafetensorError):
        return first_line(error).partition("I/O error: ")[2].partition(" (os error")[0]
    return "a file could not be written to its end (is the disk full?)"
