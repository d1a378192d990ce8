"""Folders that are opened once, and changed relative to their handle: no link is ever followed on the way.

A name in an open folder is a plain name, without a path. Where the system knows no handles of folders (Windows), the
same calls are made by path.
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
# Neither follows a link nor waits for the other end of a pipe.
READ_FILE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
HELD = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
EXCHANGE = 2  # of Linux's renameat2
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class OpenFolder:
    """A folder that is no link, held open; all names are of entries in it."""

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
        # A held path is a link of the system's own, to a folder that somebody has opened as here.
        flags = OPEN_FOLDER & ~getattr(os, "O_NOFOLLOW", 0) if HELD.fullmatch(str(at)) else OPEN_FOLDER
        return cls(path, os.open(at, flags, dir_fd=within) if HAS_HANDLES else None)

    @property
    def held(self) -> Path:
        """A path to this very folder, for those who know no handles, while it is open.

        Whoever may write where the folder lies could put another one, or a link, under its name meanwhile. Where the
        system has no such paths, this is that of its name.
        """
        if self._handle is None:
            return self.path
        held = Path(f"/proc/{os.getpid()}/fd/{self._handle}")
        try:
            return held if os.path.samestat(held.stat(), os.fstat(self._handle)) else self.path
        except OSError:
            return self.path

    def number(self) -> int:
        """The inode of the folder, by which another process knows it again."""
        return (self.path.stat() if self._handle is None else os.fstat(self._handle)).st_ino

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def _at(self, name: str) -> str | Path:
        return self.path / name if self._handle is None else name

    @contextmanager
    def _named(self, other: OpenFolder | None = None) -> Iterator[None]:
        """Give errors whole paths: the system knows only names, where calls are relative to a handle."""
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
        """Return what the file system says of an entry itself, a link not followed; None where there is none."""
        try:
            return os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def has_folder(self, name: str) -> bool:
        """Whether an entry is a folder: a real one, and of this user, so that others have not put it here."""
        state = self.state(name)
        return state is not None and stat.S_ISDIR(state.st_mode) and is_own(state)

    def make(self, name: str, mode: int = 0o777) -> None:
        """Make a folder. Whatever has that name already, if only a link, is an error."""
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
        """Let two entries change places in one step; False (and nothing done) where the system has no such step."""
        if not sys.platform.startswith("linux"):
            return False
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "renameat2"):
            return False
        names = os.fsencode(name), os.fsencode(other_name)
        if library.renameat2(self._handle, names[0], other._handle, names[1], EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in NO_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), str(other.path / other_name))

    def remove(self, name: str) -> None:
        """Remove an entry and all that is in it. Links are removed, never followed.

        Folders of this user that may not be written are made writable first: they could not be emptied otherwise.
        """
        state = self.state(name)
        with suppress(FileNotFoundError):  # nothing is there, or another process has removed it meanwhile
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
    """Whether an entry belongs to the user of this process."""
    return not hasattr(os, "geteuid") or state.st_uid == os.geteuid()


def is_private(state: os.stat_result) -> bool:
    """Whether an entry belongs to the user of this process, and nobody else may write it."""
    return is_own(state) and not (hasattr(os, "geteuid") and state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def kind_of(state: os.stat_result) -> str:
    """Say what an entry is: a link, a folder, a file, a pipe, a socket or a device."""
    return KINDS.get(stat.S_IFMT(state.st_mode), "a device")


def is_held(path: Path) -> bool:
    """Whether a path begins with that of a folder that is held open, see `OpenFolder.held`."""
    return HELD.match(str(path)) is not None


def named(path: Path) -> Path:
    """Return a path as people know it: without that of a folder that is held open."""
    return Path(os.path.realpath(path.parent)) / path.name if is_held(path) else path


def lstat(path: Path) -> os.stat_result | None:
    """Return what the file system says of a path itself, a link not followed; None where there is nothing."""
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
