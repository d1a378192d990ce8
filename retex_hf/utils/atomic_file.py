"""Files that appear whole or not at all, and what is said where they cannot be written."""

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
# How file systems of other machines (SMB, FUSE) say that they sync by themselves, or that folders cannot be synced.
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
# What `torch.save` says when a file cannot be written to its end.
TORCH_SAVE_FAILS = ("inline_container", "iostream error", "PytorchStreamWriter")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give a place to write what will be at `path` once the block has ended well. The folder is made.

    What lies at either name already is replaced, never written into: it may be a link.
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
    """Bring a folder and all that is in it to the disk. Links are left alone, and so is what is no file."""
    for where, _, files in os.walk(folder):
        for name in files:
            if stat.S_ISREG(os.lstat(os.path.join(where, name)).st_mode):
                sync_one(Path(where, name))
        sync_one(Path(where))


def sync_one(path: Path) -> None:
    """Bring one file, or the names in one folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # which cannot open folders
        return
    try:
        handle = os.open(path, READ_FILE)
    except PermissionError:  # a file that is kept and that we may not read: so it is not we who wrote it
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
    """Say of a full disk, a read-only folder and the like that `path` cannot be written, in one sentence."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        # Of a copy both files are named, the one that was read first.
        files = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        elsewhere = bool(files) and not any(_is_near(path.absolute(), file) for file in files)
        if error.errno is None or elsewhere or isinstance(error, ConnectionError | TimeoutError):
            raise  # not about writing here
        raise WriteError(f"{named(path)} cannot be written: {os.strerror(error.errno)}.") from error
    except (SafetensorError, RuntimeError) as error:
        if not is_write_failure(error):
            raise
        raise WriteError(f"{named(path)} cannot be written: {_reason(error)}.") from error


def is_write_failure(error: Exception) -> bool:
    """Whether an error says that the disk is full or the like; safetensors and `torch.save` have their own for that."""
    if isinstance(error, SafetensorError):
        return "I/O error" in str(error)
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in TORCH_SAVE_FAILS)
    return isinstance(error, OSError)


def _is_near(path: Path, other: Path) -> bool:
    """Whether another path is this one, in it, above it, or in one of the hidden places beside it (which are held)."""
    other = other.absolute()
    if is_held(other) or other.is_relative_to(path) or path.is_relative_to(other):
        return True
    beside = other.relative_to(path.parent).parts if other.is_relative_to(path.parent) else ()
    return bool(beside) and beside[0].startswith(f".{path.stem}")


def _reason(error: Exception) -> str:
    if isinstance(error, SafetensorError):
        return first_line(error).partition("I/O error: ")[2].partition(" (os error")[0]
    return "a file could not be written to its end (is the disk full?)"
