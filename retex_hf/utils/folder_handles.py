"""Folders that are opened once and changed relative to their handle, so that no symbolic link is ever followed.

A name in an open folder is a plain name, without a path. Where the system has no folder handles (Windows), the same
calls are made by path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HAS_HANDLES = os.mkdir in os.supports_dir_fd
OPEN_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# Opening a file this way neither follows a link nor waits for the other end of a pipe.
READ_FILE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
HELD = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class OpenFolder:
    """A folder (not a link) that is held open; all names are those of entries in it."""

    def __init__(self, path: Path, handle: int | None) -> None:
        self.path, self._handle = path, handle

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[OpenFolder]:
        """Open a folder by its path. The last part of the path may not be a link."""
        folder = cls._opened(path, path, None)
        try:
            yield folder
        finally:
            folder._close()

    @contextmanager
    def inside(self, name: str) -> Iterator[OpenFolder]:
        """Open a folder in this one."""
        with self._named():
            folder = self._opened(self.path / name, self._at(name), self._handle)
        try:
            yield folder
        finally:
            folder._close()

    @classmethod
    def _opened(cls, path: Path, at: str | Path, within: int | None) -> OpenFolder:
        # A held path is a link of the system to a folder that was opened without following links.
        flags = OPEN_FOLDER & ~getattr(os, "O_NOFOLLOW", 0) if HELD.fullmatch(str(at)) else OPEN_FOLDER
        return cls(path, os.open(at, flags, dir_fd=within) if HAS_HANDLES else None)

    @property
    def held(self) -> Path:
        """Return a path to this very folder that is valid while it is open, for code that takes no handles.

        Another user with write access to the parent could put another folder, or a link, under its name meanwhile.
        Where the system has no such paths, this is the ordinary path.
        """
        if self._handle is None:
            return self.path
        held = Path(f"/proc/{os.getpid()}/fd/{self._handle}")
        try:
            return held if os.path.samestat(held.stat(), os.fstat(self._handle)) else self.path
        except OSError:
            return self.path

    def number(self) -> int:
        """Return the inode of the folder, by which another process recognises it."""
        return (self.path.stat() if self._handle is None else os.fstat(self._handle)).st_ino

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def _at(self, name: str) -> str | Path:
        return self.path / name if self._handle is None else name

    @contextmanager
    def _named(self, other: OpenFolder | None = None) -> Iterator[None]:
        """Put full paths into errors: calls relative to a handle report only names."""
        try:
            yield
        except OSError as error:
            if isinstance(error.filename, str):
                error.filename = str(self.path / error.filename)
            if isinstance(error.filename2, str):
                error.filename2 = str((other or self).path / error.filename2)
            raise

    def names(self) -> list[str]:
        """List all entries."""
        return sorted(os.listdir(self.path if self._handle is None else self._handle))

    def state(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, without following links; None if it does not exist."""
        try:
            return os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def has_folder(self, name: str) -> bool:
        """Return whether an entry is a folder (not a link) that belongs to this user, so nobody else planted it."""
        state = self.state(name)
        return state is not None and stat.S_ISDIR(state.st_mode) and is_own(state)

    def make(self, name: str, mode: int = 0o777) -> None:
        """Make a folder. Fail if anything, even a link, has that name already."""
        with self._named():
            os.mkdir(self._at(name), mode, dir_fd=self._handle)

    def set_mode(self, name: str, mode: int) -> None:
        with self._named():
            os.chmod(self._at(name), mode, dir_fd=self._handle)

    def unlink(self, name: str) -> None:
        with self._named():
            os.unlink(self._at(name), dir_fd=self._handle)

    def rename(self, name: str, other: OpenFolder, new_name: str) -> None:
        """Move an entry to another open folder."""
        with self._named(other):
            os.rename(self._at(name), other._at(new_name), src_dir_fd=self._handle, dst_dir_fd=other._handle)

    def exchange(self, name: str, other: OpenFolder, other_name: str) -> bool:
        """Exchange two entries atomically; return False, with nothing done, where the system cannot."""
        if not sys.platform.startswith("linux"):
            return False
        c_library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(c_library, "renameat2"):
            return False
        names = os.fsencode(name), os.fsencode(other_name)
        if c_library.renameat2(self._handle, names[0], other._handle, names[1], EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in NO_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), str(other.path / other_name))

    def remove(self, name: str) -> None:
        """Remove an entry and everything in it. Links are removed, never followed.

        Read-only folders of this user are made writable first: they could not be emptied otherwise.
        """
        state = self.state(name)
        with suppress(FileNotFoundError):  # it does not exist, or another process has removed it meanwhile
            if state is None or not stat.S_ISDIR(state.st_mode):
                self.unlink(name)
                return
            if is_own(state) and state.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                self.set_mode(name, stat.S_IRWXU)
            with self.inside(name) as folder:
                for entry in folder.names():
                    folder.remove(entry)
            with self._named():
                os.rmdir(self._at(name), dir_fd=self._handle)


def is_own(state: os.stat_result) -> bool:
    """Return whether an entry belongs to the user of this process."""
    return not hasattr(os, "geteuid") or state.st_uid == os.geteuid()


def is_private(state: os.stat_result) -> bool:
    """Return whether an entry belongs to the user of this process and nobody else may write to it."""
    return is_own(state) and not (hasattr(os, "geteuid") and state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def kind_of(state: os.stat_result) -> str:
    """Return the kind of an entry in words: a link, a folder, a file, a pipe, a socket or a device."""
    return KINDS.get(stat.S_IFMT(state.st_mode), "a device")


def is_held(path: Path) -> bool:
    """Return whether a path begins with that of a folder that is held open (see `OpenFolder.held`)."""
    return HELD.match(str(path)) is not None


def named(path: Path) -> Path:
    """Return the ordinary path of a file in a folder that is held open; other paths are returned as they are."""
    return Path(os.path.realpath(path.parent)) / path.name if is_held(path) else path


def lstat(path: Path) -> os.stat_result | None:
    """Return the status of a path, without following links; None if it does not exist."""
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
