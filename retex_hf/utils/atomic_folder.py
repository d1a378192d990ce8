"""Atomic folder writes: a folder is written beside its target, then replaces it.

Beside a folder `name` there may be hidden staging folders: `.name.<random>.saving`, where the next `name` is written,
and `.name.<random>.building`, where a build can be resumed. They are created exclusively, under unpredictable names,
and never entered through a link. A process that works in one holds a lock (`.name.saving.lock`,
`.name.building.lock`). All of these are removed when the work is done. So a staging folder of this user whose lock
nobody holds was left by a killed process, and the next save or build removes it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ..errors import ArtifactError, RetexError, WriteError
from . import unfinished_builds
from .atomic_file import is_write_failure, sync, sync_one, write_errors
from .folder_handles import OpenFolder, kind_of, lstat, named
from .paths import as_path

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

LOCK_NAME, IDENTITY_NAME = "lock", "build.json"
SAVING, BUILDING = "saving", "building"
NEW, RETIRED, REMOVED = "new", "old", "removed"
RANDOM_BYTES = 8
# How long a save waits for another save to the same folder.
WAIT_SECONDS = 60.0


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder is, or lies in, a staging folder, so that it may be incomplete."""
    names = [part.name for part in (folder, *folder.parents)]
    return any(name.startswith(".") and name.endswith((f".{SAVING}", f".{BUILDING}")) for name in names)


def check_target(folder: str | Path) -> Path:
    """Return the absolute path of a folder to be written; make its parents.

    Parents may be links, but the folder itself may not: the user did not name the link's target.
    """
    typed = as_path(folder)
    path = typed.absolute()
    with write_errors(typed):
        if path.name in ("", ".."):
            path = path.resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ArtifactError(f"{typed} cannot be made: a part of its path is a file.") from None
        path = path.parent.resolve(strict=True) / path.name
        state = lstat(path)
    if state is not None and stat.S_ISLNK(state.st_mode):
        raise ArtifactError(f"{path} is a link to {os.readlink(path)}: expected the folder itself.")
    if state is not None and not stat.S_ISDIR(state.st_mode):
        raise ArtifactError(f"{path} is {kind_of(state)}; expected a folder to save into.")
    if is_unfinished(path):
        raise ArtifactError(f"{path} has the name of a staging folder: expected another name.")
    heal(path)
    return path


def check_movable(folder: str | Path) -> Path:
    """Do as `check_target`, and refuse a folder that cannot be replaced as a whole."""
    path = check_target(folder)
    if path.is_mount():
        raise ArtifactError(f"{path} is a mount point and cannot be replaced: expected a folder inside.")
    _check_writable(path)
    return path


def _check_writable(folder: Path) -> None:
    """Refuse a folder that may not be replaced before the work, not after it."""
    note = " (A folder is written beside the one that it replaces.)"
    for place, why in ((folder.parent, note), (folder, "")):
        if os.path.lexists(place) and not os.access(place, os.W_OK | os.X_OK):
            if hasattr(os, "statvfs") and os.statvfs(place).f_flag & os.ST_RDONLY:
                raise WriteError(f"{folder} cannot be written: {os.strerror(errno.EROFS)}.")
            raise WriteError(f"{place} cannot be written: {os.strerror(errno.EACCES)}.{why}")


# ---- saving ----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(folder: str | Path, own_files: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends without an error; otherwise `folder` stays.

    Previous files are kept unless they match `own_files` (patterns) or the new content has a file of that name. The new
    content is synced before it replaces the old, so a power cut leaves one or the other. Concurrent saves to one folder
    wait for each other, up to a time limit.
    """
    folder = check_movable(folder)
    with write_errors(folder), OpenFolder.open(folder.parent) as parent, _saving(parent, folder):
        _put_back(parent, folder.name)
        _clear_leftovers(parent, folder.name, SAVING)
        name = _make_staging(parent, folder.name, SAVING)
        try:
            with parent.inside(name) as staging:
                staging.make(NEW)
                yield staging.held / NEW
                _replace(staging, parent, folder.name, own_files)
        finally:
            if parent.state(folder.name) is not None or not _holds_retired(parent, name):
                _remove_or_warn(parent, name)


def _saving(parent: OpenFolder, folder: Path) -> AbstractContextManager[None]:
    return _held(parent, folder.name, SAVING, f"{folder} is being saved by another process", WAIT_SECONDS)


def _replace(staging: OpenFolder, parent: OpenFolder, name: str, own_files: Sequence[str]) -> None:
    """Replace a folder with `new`, atomically where the system can; see `replacing`.

    Where it cannot, the folder is renamed to `old` first. The previous content ends up in `new` or `old`.
    """
    new, folder = staging.held / NEW, parent.path / name
    state = parent.state(name)
    if state is None:
        sync(new)
        staging.rename(NEW, parent, name)
    else:
        with parent.inside(name) as old:
            keep_files(old.held, new, own_files)
        staging.set_mode(NEW, stat.S_IMODE(state.st_mode))
        sync(new)
        with _same_current_folder(folder):
            try:
                _exchange(staging, parent, name)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # Both lie in one folder, so only an overlay file system can have them on two file systems.
                raise WriteError(
                    f"{folder} lies in a read-only layer of this file system (a container's image, say), where no "
                    "folder can be replaced: expected another folder."
                ) from error
    sync_one(parent.path)


def _exchange(staging: OpenFolder, parent: OpenFolder, name: str) -> None:
    if staging.exchange(NEW, parent, name):
        return
    parent.rename(name, staging, RETIRED)
    try:
        staging.rename(NEW, parent, name)
    except OSError:
        staging.rename(RETIRED, parent, name)
        raise


@contextmanager
def _same_current_folder(folder: Path) -> Iterator[None]:
    """Move a process whose current folder is replaced (`save_pretrained(".")`) to the new folder.

    It would otherwise stay in the retired folder, which is removed.
    """
    try:
        current = Path.cwd()
    except FileNotFoundError:
        current = None
    yield
    if current is not None and current.is_relative_to(folder) and current.is_dir():
        os.chdir(current)


def heal(folder: Path) -> None:
    """Restore a folder that a kill between the two renames of `_exchange` left under its retired name."""
    if lstat(folder) is not None:
        return
    with ExitStack() as stack:
        try:
            parent = stack.enter_context(OpenFolder.open(Path(os.path.realpath(folder.parent))))
        except OSError:  # the parent does not exist or is not readable, so nothing was left there
            return
        if not _retired(parent, folder.name):
            return
        with write_errors(folder), _saving(parent, folder):
            _put_back(parent, folder.name)
            _clear_leftovers(parent, folder.name, SAVING)


def _put_back(parent: OpenFolder, name: str) -> None:
    if parent.state(name) is not None:
        return
    found = _retired(parent, name)
    if len(found) > 1:
        raise ArtifactError(
            f"{parent.path / name} is missing, and both {found[0]} and {found[1]} in {parent.path} hold one: move the "
            f"right folder {RETIRED!r} back, and remove the other."
        )
    for staging_name in found:
        with parent.inside(staging_name) as staging:
            staging.rename(RETIRED, parent, name)


def _retired(parent: OpenFolder, name: str) -> list[str]:
    return [staging for staging in _stagings(parent, name, SAVING) if _holds_retired(parent, staging)]


def _holds_retired(parent: OpenFolder, staging_name: str) -> bool:
    if not parent.has_folder(staging_name):
        return False
    with parent.inside(staging_name) as staging:
        return staging.has_folder(RETIRED)


def remove(folder: Path) -> None:
    """Remove a folder, and staging folders that killed processes left beside it. Refuse a link.

    The folder is renamed first, atomically: a kill leaves all of it, or nothing.
    """
    folder = check_movable(folder)
    with write_errors(folder), OpenFolder.open(folder.parent) as parent, _saving(parent, folder):
        _clear_leftovers(parent, folder.name, SAVING)
        if parent.state(folder.name) is None:
            return
        name = _make_staging(parent, folder.name, SAVING)
        try:
            with parent.inside(name) as staging:
                parent.rename(folder.name, staging, REMOVED)
        finally:
            _remove_or_warn(parent, name)


def keep_files(old: Path, new: Path, leave: Sequence[str] = ()) -> None:
    """Carry over the files of `old` that `new` does not have, except names that match `leave`.

    Files become hard links, so they must not be written to in `new`. Symbolic links are kept as links, and not
    followed. Anything else (a pipe, a device) is refused: opening it could block for ever.
    """
    try:
        with OpenFolder.open(old) as before, OpenFolder.open(new) as after:
            _keep_files(before, after, tuple(leave))
    except RecursionError:
        raise ArtifactError(f"{old} holds folders that are nested too deeply to be kept.") from None


def _keep_files(old: OpenFolder, new: OpenFolder, leave: tuple[str, ...] = ()) -> None:
    for name in old.names():
        if any(fnmatchcase(name, pattern) for pattern in leave):
            continue
        state, there = old.state(name), new.state(name)
        if state is None:  # another process has removed it meanwhile
            continue
        if stat.S_ISDIR(state.st_mode):
            if there is None:
                new.make(name)
            elif not stat.S_ISDIR(there.st_mode):
                continue
            with old.inside(name) as before, new.inside(name) as after:
                _keep_files(before, after)
                if there is None:
                    shutil.copystat(before.held, after.held)
        elif there is not None:
            continue
        elif stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode):
            link(old.held / name, new.held / name)
        else:
            file = named(old.held / name)
            raise ArtifactError(f"{file} is {kind_of(state)}, which is not part of a saved folder: remove it.")


def link(file: Path, copy: Path) -> None:
    """Hard-link a file; copy it where hard links are unsupported. A symbolic link is copied as a link."""
    if not file.is_symlink():
        with suppress(OSError):
            os.link(file, copy)
            return
    try:
        shutil.copy2(file, copy, follow_symlinks=False)
    except PermissionError as error:
        if error.filename != os.fspath(file):
            raise
        raise WriteError(
            f"{named(file)} is not readable, so it cannot be kept: remove it, or make it readable."
        ) from None


def emptied(folder: Path) -> Path:
    """Empty a folder, or make it, in a staging folder of this process; return it."""
    with OpenFolder.open(folder.parent) as parent:
        parent.remove(folder.name)
        parent.make(folder.name)
    return folder


def check_plain(folder: Path) -> None:
    """Refuse a folder that holds anything but files and folders: this library writes no links and no pipes."""
    for where, folders, files in os.walk(folder):
        for path in (Path(where, name) for name in (*folders, *files)):
            state = path.lstat()
            if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
                raise ArtifactError(f"{path} is {kind_of(state)}: expected files and folders only.")


# ---- building --------------------------------------------------------------------------------------------------------


@contextmanager
def together(accelerator: Accelerator | None, enter: Callable[[], AbstractContextManager[Path]]) -> Iterator[Path]:
    """Let all processes work in a folder that the main process enters and leaves; its errors are raised in all."""
    if accelerator is None:
        with enter() as place:
            yield place
        return
    from accelerate.utils import broadcast_object_list

    with ExitStack() as stack:
        found: list[Any] = [None]
        if accelerator.is_main_process:
            try:
                place = stack.enter_context(enter())
                found = [(os.path.realpath(place), place.stat().st_ino)]
            except RetexError as error:
                found = [error]
        broadcast_object_list(found)
        if isinstance(found[0], RetexError):
            raise found[0]
        yield place if accelerator.is_main_process else stack.enter_context(_same_folder(*found[0]))
    accelerator.wait_for_everyone()


@contextmanager
def _same_folder(path: str, number: int) -> Iterator[Path]:
    """Enter a folder that another process has entered; refuse one with another inode."""
    with OpenFolder.open(Path(path)) as folder:
        if folder.number() != number:
            raise WriteError(f"{path} is another folder than the one that the main process works in.")
        yield folder.held


@contextmanager
def workshop(target: Path, identity: dict[str, Any], resume: bool) -> Iterator[Path]:
    """Yield the staging folder in which `target` is built.

    Keep the work of this user's interrupted build of the same `identity`; remove anything else. A build that fails is
    removed; one that is killed, interrupted, or out of disk or memory stays, to be resumed. A second build of the same
    target is refused.
    """
    identity = json.loads(json.dumps(identity))
    taken = f"{target} is being built by another process"
    with (
        write_errors(target),
        OpenFolder.open(target.parent) as parent,
        _held(parent, target.name, BUILDING, taken, 0),
    ):
        name = _interrupted(parent, target) if resume else None
        if name is not None and not _is_work_of(parent, name, identity):
            name = None
        if name is None:
            unfinished_builds.forget(target)  # first, so that a partly cleared folder is never resumed
        _clear_leftovers(parent, target.name, BUILDING, keep=name)
        if name is None:
            name = _make_staging(parent, target.name, BUILDING)
            with parent.inside(name) as staging:
                (staging.held / IDENTITY_NAME).write_text(json.dumps(identity), encoding="utf-8")
                unfinished_builds.note(target, name, staging.number())
        try:
            with parent.inside(name) as staging:
                yield staging.held
        except Exception as error:
            # After a full disk the build can be resumed. Invalid input would fail again, so its folder is removed.
            if not (isinstance(error, MemoryError) or is_write_failure(error)):
                _end_build(parent, target, name)
            raise
        _end_build(parent, target, name)


def interrupted_build(target: Path) -> Path | None:
    """Return the staging folder of this user's interrupted build of `target`; None if there is nothing to resume."""
    with OpenFolder.open(target.parent) as parent:
        name = _interrupted(parent, target)
        return None if name is None else parent.path / name


def _interrupted(parent: OpenFolder, target: Path) -> str | None:
    found = unfinished_builds.recall(target)
    if found is None:
        return None
    name, inode = found
    state = parent.state(name) if name in _stagings(parent, target.name, BUILDING) else None
    return name if state is not None and state.st_ino == inode else None


def _is_work_of(parent: OpenFolder, name: str, identity: dict[str, Any]) -> bool:
    """Return whether an interrupted build has this identity, and holds only what a build writes.

    Its journals are appended to, so they may not be hard links to files elsewhere.
    """
    try:
        with parent.inside(name) as staging:
            place = staging.held
            check_plain(place)
            known = json.loads((place / IDENTITY_NAME).read_text(encoding="utf-8"))
            return known == identity and all(file.is_dir() or file.stat().st_nlink == 1 for file in place.iterdir())
    except (ArtifactError, OSError, ValueError):
        return False


def _end_build(parent: OpenFolder, target: Path, name: str) -> None:
    unfinished_builds.forget(target)
    _remove_or_warn(parent, name)


# ---- staging folders and locks ---------------------------------------------------------------------------------------


def _make_staging(parent: OpenFolder, name: str, kind: str) -> str:
    """Make a new staging folder that only this user can enter; return its name."""
    staging = f".{name}.{secrets.token_hex(RANDOM_BYTES)}.{kind}"
    parent.make(staging, mode=stat.S_IRWXU)
    return staging


def _stagings(parent: OpenFolder, name: str, kind: str) -> list[str]:
    """List the staging folders of a target that belong to this user and are no links."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{{2 * RANDOM_BYTES}}}\.{kind}")
    return [entry for entry in parent.names() if pattern.fullmatch(entry) and parent.has_folder(entry)]


def _clear_leftovers(parent: OpenFolder, name: str, kind: str, keep: str | None = None) -> None:
    """Remove the staging folders that killed processes left; the caller holds their lock."""
    for staging in _stagings(parent, name, kind):
        if staging != keep:
            _remove_or_warn(parent, staging)


def _remove_or_warn(parent: OpenFolder, name: str, others_remove: tuple[int, ...] = ()) -> None:
    """Remove a folder that is no longer needed; if that fails, only warn, because a leftover does no harm.

    Errors with a number of `others_remove` mean that another process removes it.
    """
    try:
        parent.remove(name)
    except (OSError, RecursionError) as error:
        if getattr(error, "errno", None) in others_remove:
            return
        reason = getattr(error, "strerror", None) or "it is nested too deeply"
        logger.warning("%s is left over, and could not be removed: %s.", parent.path / name, reason)


@contextmanager
def _held(parent: OpenFolder, name: str, kind: str, taken: str, seconds: float) -> Iterator[None]:
    """Hold the lock of a target, and remove the lock file afterwards; `taken` begins the error if another holds it."""
    path = parent.path / f".{name}.{kind}.lock"
    state = parent.state(path.name)
    if state is not None and not stat.S_ISREG(state.st_mode):
        raise ArtifactError(f"{path} is {kind_of(state)}, where a lock file belongs: remove it.")
    with suppress(FileExistsError):  # where no file can be made, fail now: waiting for the lock would be in vain
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    # Other users with write access to this folder must be able to take the lock too.
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=seconds, poll_interval=0.02)
    except Timeout:
        raise ArtifactError(f"{taken}: wait for it, or stop it.") from None
    except PermissionError:
        raise WriteError(f"{path} cannot be opened, to lock {name}: Permission denied.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # in a shared folder it may be another user's
            parent.unlink(path.name)
        lock.release()


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder; remove those of the same prefix that killed processes left."""
    home = Path(gettempdir())
    with ExitStack() as stack:
        with write_errors(home):
            parent = stack.enter_context(OpenFolder.open(home.resolve()))
            place, lock = _make_scratch(parent, prefix)
        try:
            yield place
        finally:
            _remove_scratch(parent, place.name)
            lock.release()


def _make_scratch(parent: OpenFolder, prefix: str) -> tuple[Path, FileLock]:
    """Make a temporary folder and take its lock, after removing leftovers of the same prefix."""
    for name in parent.names():
        if name.startswith(prefix) and parent.has_folder(name):
            _remove_if_left(parent, name)
    while True:
        place = Path(mkdtemp(prefix=prefix))
        lock = FileLock(place / LOCK_NAME)
        # Another process may take it for a leftover and remove it before it is locked.
        with suppress(Timeout, FileNotFoundError, FileExistsError):
            lock.acquire(timeout=0)
            return place, lock


def _remove_if_left(parent: OpenFolder, name: str) -> None:
    lock = FileLock(parent.path / name / LOCK_NAME)
    with suppress(Timeout, OSError):  # in use, just removed, or its lock is not a file
        lock.acquire(timeout=0)
        _remove_scratch(parent, name)
        lock.release()


def _remove_scratch(parent: OpenFolder, name: str) -> None:
    """Remove a temporary folder whose lock this process holds.

    The lock lies within the folder. Once it is gone, another process may take the folder for a leftover and make the
    lock anew: the folder is not empty then, and that process removes it.
    """
    _remove_or_warn(parent, name, others_remove=(errno.ENOTEMPTY, errno.EEXIST))
