"""Folders that appear whole or not at all: built beside their target, then moved into place."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import FileLock, Timeout

from .errors import ArtifactError

LOCK_NAME, IDENTITY_NAME = "lock", "build.json"


def check_target(folder: Path) -> Path:
    """The absolute path of a folder to be written; its parents are made."""
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; expected a folder to save into.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ArtifactError(f"{folder} cannot be made: a part of its path is a file.") from None
    return folder


def move_into_place(new: Path, folder: Path, own_files: Sequence[str]) -> None:
    """Make `new` the folder. Of a previous one, all but `own_files` (patterns) is kept; it survives a failure."""
    if not folder.exists():
        new.rename(folder)
        return
    _keep_foreign_files(folder, new, own_files)
    retired = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.old"
    folder.rename(retired)
    try:
        new.rename(folder)
    except OSError:
        retired.rename(folder)
        raise
    shutil.rmtree(retired)


def _keep_foreign_files(old: Path, new: Path, own_files: Sequence[str]) -> None:
    for entry in old.iterdir():
        is_folder = entry.is_dir() and not entry.is_symlink()
        if any(entry.match(pattern) for pattern in own_files):
            continue
        if is_folder and (new / entry.name).is_dir():
            _keep_foreign_files(entry, new / entry.name, ())
        elif (new / entry.name).exists():
            continue
        elif is_folder:
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def workshop_of(target: Path) -> Path:
    """Where a folder is built: beside it, under a name that a second start finds again."""
    return target.parent / f".{target.name}.building"


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
    lock = _lock(place, target) if main else None
    try:
        if main:
            _tidy(place, json.loads(json.dumps(identity)), resume)
        if accelerator is not None:
            accelerator.wait_for_everyone()
        try:
            yield place
        except (OSError, MemoryError):
            raise  # a full disk can be cleared, and the build continued
        except Exception:  # wrong input fails again however often it is continued, so nothing of it is left
            shutil.rmtree(place, ignore_errors=True)
            raise
        if main:
            shutil.rmtree(place)
        if accelerator is not None:
            accelerator.wait_for_everyone()
    finally:
        if lock is not None:
            lock.release()


def _lock(place: Path, target: Path) -> FileLock:
    place.mkdir(exist_ok=True)
    lock = FileLock(place / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ArtifactError(f"{target} is being built by another process: wait for it, or stop it.") from None
    return lock


def _tidy(place: Path, identity: dict[str, Any], resume: bool) -> None:
    path = place / IDENTITY_NAME
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    if resume and known == identity:
        return
    for entry in place.iterdir():
        if entry.name == LOCK_NAME:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    path.write_text(json.dumps(identity), encoding="utf-8")
