"""Records of this user's unfinished builds, kept outside of the folders that are built.

A staging folder beside a target may have come with a clone or an archive, and hold untrusted tensors. So a build is
resumed only if a record names it: records lie with the user's other files of Hugging Face's libraries (`HF_HOME`), and
hold the name and the inode of the staging folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from pathlib import Path

from huggingface_hub import constants

from ..errors import WriteError
from .atomic_file import whole_file
from .folder_handles import READ_FILE, is_private, kind_of, lstat

logger = logging.getLogger(__name__)

LIBRARY, NAMESPACE = "retex_hf", "builds"
MOST_BYTES = 100_000


def note(target: Path, name: str, inode: int) -> None:
    """Record that `target` is being built in the staging folder `name` beside it."""
    path = _record_of(target)
    try:
        _check_own(path)
        with whole_file(path) as file:
            file.write_text(json.dumps({"target": str(target), "name": name, "inode": inode}), encoding="utf-8")
            file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so this build cannot be resumed if it is interrupted: set HF_HOME to a "
            "writable folder.",
            path,
            error.strerror or error,
        )


def recall(target: Path) -> tuple[str, int] | None:
    """Return the name and inode of the staging folder of this user's build of `target`; None if there is no record."""
    path = _record_of(target)
    try:
        _check_own(path)
        handle = os.open(path, READ_FILE)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or not is_private(state):
            return None
        try:
            values = json.loads(file.read(MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
    if not isinstance(values, dict) or values.get("target") != str(target):
        return None
    name, inode = values.get("name"), values.get("inode")
    return (name, inode) if isinstance(name, str) and isinstance(inode, int) else None


def forget(target: Path) -> None:
    """Remove the record of a build that has ended."""
    path = _record_of(target)
    try:
        _check_own(path)
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s.", path, error.strerror or error)


def _check_own(path: Path) -> None:
    """Refuse links in place of this library's own folders. (`HF_HOME` itself may be a link.)"""
    for folder in path.parents[:2]:
        state = lstat(folder)
        if state is not None and not stat.S_ISDIR(state.st_mode):
            raise WriteError(f"{folder} is {kind_of(state)}")


def _record_of(target: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(target)).hexdigest()
    return Path(constants.HF_ASSETS_CACHE) / LIBRARY / NAMESPACE / f"{digest[:32]}.json"
