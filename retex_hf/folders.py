"""Folders that appear whole or not at all: written beside their target, then put in its place.

Beside a folder `name` there may be two hidden ones, and both are gone when the work is done: `.name.saving`, where the
next `name` is written, and `.name.building`, where a build can be resumed. Whoever works there holds the lock in it. So
what lies there without a holder was left by a kill, and the next save or build clears it away.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from .errors import ArtifactError, WriteError
from .writing import is_write_failure, sync, sync_one, write_errors

if TYPE_CHECKING:
    from accelerate import Accelerator

LOCK_NAME, IDENTITY_NAME = "lock", "build.json"
SAVING, BUILDING = ".saving", ".building"
NEW, RETIRED = "new", "old"
# How long a save waits for another one into the same folder.
WAIT_SECONDS = 60.0
AT_CURRENT_FOLDER, EXCHANGE = -100, 2  # of Linux's renameat2
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def saving_place(target: Path) -> Path:
    """Where the next content of a folder is written."""
    return target.parent / f".{target.name}{SAVING}"


def workshop_of(target: Path) -> Path:
    """Where a folder is built: beside it, under a name that a second start finds again."""
    return target.parent / f".{target.name}{BUILDING}"


def is_unfinished(folder: Path) -> bool:
    """Whether a folder lies where others are saved or built, so that nobody knows if it is whole."""
    names = [part.name for part in (folder, *folder.parents)]
    return any(name.startswith(".") and name.endswith((SAVING, BUILDING)) for name in names)


def check_target(folder: Path) -> Path:
    """The absolute path of a folder to be written; its parents are made."""
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; expected a folder to save into.")
    with write_errors(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ArtifactError(f"{folder} cannot be made: a part of its path is a file.") from None
    heal(folder)
    return folder


def check_movable(folder: Path) -> Path:
    """`check_target` for a folder that will be replaced as a whole."""
    folder = check_target(folder)
    if folder.is_mount():
        raise ArtifactError(f"{folder} is where a disk is mounted, and cannot be replaced: expected a folder inside.")
    return folder


# ---- saving ----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(folder: Path, own_files: Sequence[str] = ()) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when the block ends well; `folder` survives everything else.

    Of the previous content, all but `own_files` (patterns) is kept, unless the new one has a file of that name. The new
    content is on the disk before it takes its place, so a power cut leaves the one or the other. Savers of one folder
    wait for each other; one that waits too long is refused.
    """
    folder = check_movable(folder)
    place = saving_place(folder)
    with write_errors(folder), _held(place, f"{folder} is being saved by another process", WAIT_SECONDS):
        try:
            _put_back(folder)
            _clear(place)
            new = place / NEW
            new.mkdir()
            yield new
            replace(new, folder, place / RETIRED, own_files)
        finally:
            if folder.exists() or not (place / RETIRED).exists():
                _remove(place)


def replace(new: Path, folder: Path, retired: Path, own_files: Sequence[str] = ()) -> None:
    """Put `new` in the place of `folder`, in one step where the system can; see `replacing`.

    Where it cannot, `folder` is called `retired` for a moment. The previous content is at `new` or `retired` then.
    """
    if not folder.exists():
        sync(new)
        new.rename(folder)
    else:
        keep_files(folder, new, own_files)
        shutil.copymode(folder, new)
        sync(new)
        with _same_current_folder(folder):
            try:
                _change_places(new, folder, retired)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # Both are beside each other, so this is the one way in which they can be on two file systems.
                raise WriteError(
                    f"{folder} lies in a read-only layer of this file system (a container's image, say), where no "
                    "folder can be replaced: expected another folder."
                ) from error
    sync_one(folder.parent)


def _change_places(new: Path, folder: Path, retired: Path) -> None:
    if exchange(new, folder):
        return
    folder.rename(retired)
    try:
        new.rename(folder)
    except OSError:
        retired.rename(folder)
        raise


@contextmanager
def _same_current_folder(folder: Path) -> Iterator[None]:
    """Let a process that works in a folder (`save_pretrained(".")`) work in the one that takes its place.

    It would be left in the retired one otherwise, which is removed.
    """
    try:
        current = Path.cwd()
    except FileNotFoundError:
        current = None
    yield
    if current is not None and current.is_relative_to(folder) and current.is_dir():
        os.chdir(current)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; False (and nothing done) where the system has no such step."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if library.renameat2(AT_CURRENT_FOLDER, names[0], AT_CURRENT_FOLDER, names[1], EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def heal(folder: Path) -> None:
    """Put back a folder that a kill between the two renames of `replace` has left under its retired name."""
    place = saving_place(folder)
    if folder.exists() or not (place / RETIRED).is_dir():
        return
    with write_errors(folder), _held(place, f"{folder} is being saved by another process", WAIT_SECONDS):
        _put_back(folder)
        _remove(place)


def _put_back(folder: Path) -> None:
    retired = saving_place(folder) / RETIRED
    if not folder.exists() and retired.is_dir():
        retired.rename(folder)


def keep_files(old: Path, new: Path, leave: Sequence[str] = ()) -> None:
    """Take along what `new` does not have, but for names that match `leave`.

    Files become links, so nothing may be written into them in `new`.
    """
    for entry in old.iterdir():
        is_folder = entry.is_dir() and not entry.is_symlink()
        if any(entry.match(pattern) for pattern in leave):
            continue
        if is_folder and (new / entry.name).is_dir():
            keep_files(entry, new / entry.name)
        elif os.path.lexists(new / entry.name):
            continue
        elif is_folder:
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=link)
        else:
            link(entry, new / entry.name)


def link(file: str | Path, copy: str | Path) -> None:
    """One more name for a file's content, or a copy where the file system has none such."""
    if not os.path.islink(file):
        with suppress(OSError):
            os.link(file, copy)
            return
    shutil.copy2(file, copy, follow_symlinks=False)


# ---- building --------------------------------------------------------------------------------------------------------


@contextmanager
def workshop(
    target: Path, identity: dict[str, Any], resume: bool, accelerator: Accelerator | None = None
) -> Iterator[Path]:
    """The place where `target` is built; all processes enter and leave together.

    What an interrupted build of the same `identity` left there is kept, anything else is cleared away. A build that
    fails clears up; one that is killed, interrupted, or fails for want of disk or memory leaves the place to its next
    start. One build at a time: a second is refused.
    """
    place = workshop_of(target)
    main = accelerator is None or accelerator.is_main_process
    with write_errors(target):
        if not main:
            accelerator.wait_for_everyone()
            yield place
            accelerator.wait_for_everyone()
            return
        with _held(place, f"{target} is being built by another process", 0):
            _tidy(place, json.loads(json.dumps(identity)), resume)
            if accelerator is not None:
                accelerator.wait_for_everyone()
            try:
                yield place
            except Exception as error:
                # A full disk can be cleared, and the build continued. Wrong input fails again however often it is
                # continued, so nothing of it is left.
                if not (isinstance(error, MemoryError) or is_write_failure(error)):
                    _remove(place)
                raise
            _remove(place)
            if accelerator is not None:
                accelerator.wait_for_everyone()


def _tidy(place: Path, identity: dict[str, Any], resume: bool) -> None:
    path = place / IDENTITY_NAME
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    if resume and known == identity:
        return
    _clear(place)
    path.write_text(json.dumps(identity), encoding="utf-8")


# ---- places that are worked in ---------------------------------------------------------------------------------------


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder in the system's place for temporary files. Those of the same prefix that a kill has left are removed."""
    with write_errors(Path(gettempdir())):
        for left in Path(gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(left)
        while True:
            place = Path(mkdtemp(prefix=prefix))
            lock = FileLock(place / LOCK_NAME)
            with suppress(Timeout, FileNotFoundError):  # another process took it for one that was left
                lock.acquire(timeout=0)
                break
        try:
            yield place
        finally:
            _remove(place)
            lock.release()


def _remove_if_left(place: Path) -> None:
    try:
        facts = place.lstat()
    except FileNotFoundError:  # it was in use a moment ago, and is done
        return
    if not place.is_dir() or place.is_symlink() or (hasattr(os, "getuid") and facts.st_uid != os.getuid()):
        return
    lock = FileLock(place / LOCK_NAME)
    with suppress(Timeout, FileNotFoundError):
        lock.acquire(timeout=0)
        _remove(place)
        lock.release()


@contextmanager
def _held(place: Path, taken: str, seconds: float) -> Iterator[None]:
    """Hold the lock of a place, which is made if need be; `taken` is what a refusal says."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            place.mkdir(exist_ok=True)
        except PermissionError:  # of a folder that may well be writable itself
            raise WriteError(
                f"{place.parent} cannot be written: permission denied. (A folder is written beside the one that it "
                "replaces.)"
            ) from None
        lock = FileLock(place / LOCK_NAME)
        try:
            lock.acquire(timeout=max(0.0, deadline - time.monotonic()), poll_interval=0.02)
            break
        except FileNotFoundError:  # the holder before us has just removed the place
            continue
        except Timeout:
            raise ArtifactError(f"{taken}: wait for it, or stop it.") from None
    try:
        yield
    finally:
        lock.release()


def _clear(place: Path) -> None:
    (place / IDENTITY_NAME).unlink(missing_ok=True)  # first: what is cleared by halves must not be resumed
    for entry in place.iterdir():
        if entry.name == LOCK_NAME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _remove(place: Path) -> None:
    """Remove a place whose lock is held: the lock last, because then the place may be another's."""
    with suppress(OSError):  # what cannot be removed now is cleared away by the next one to work here
        _clear(place)
        (place / LOCK_NAME).unlink(missing_ok=True)
        place.rmdir()
