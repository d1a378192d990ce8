"""The manifest of an artifact: size and SHA-256 of each file, recorded on writing and compared on reading.

Content is read in chunks, several files at a time, and not kept in memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..config import CONFIG_NAME
from ..errors import ArtifactError, brief, shorten
from ..utils.progress import SECONDS_WITHOUT_BAR, track
from ..utils.strict_files import check_links

logger = logging.getLogger(__name__)

PIECE = 1 << 20
MOST_THREADS = 8
IF_MEANT = (
    "It is damaged, or belongs to another artifact; if the change is intentional, record it with "
    "`retex verify FOLDER --record` (or load with verify=False and call save_description(FOLDER))."
)
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


def record(folder: Path, names: Iterable[str], known: Mapping[str, FileRecord] | None = None) -> dict[str, FileRecord]:
    """Return size and digest of files of a folder. A digest in `known` is reused if the size is unchanged."""
    known = known or {}
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    kept = {name: known[name] for name, size in sizes.items() if name in known and known[name].size == size}
    digests = _digests(folder, {name: size for name, size in sizes.items() if name not in kept}, "Recording files")
    return {name: kept.get(name) or FileRecord(sizes[name], digests[name]) for name in sizes}


def to_json(records: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    return {name: {"size": found.size, "sha256": found.sha256} for name, found in records.items()}


def from_json(path: Path, values: Any) -> dict[str, FileRecord]:
    """Parse the file records of a configuration (at `path`, for messages). Refuse names that leave the folder."""
    if not isinstance(values, dict):
        raise ArtifactError(f"{path}: 'files' must be an object, not {brief(values)}.")
    records = {}
    for name, value in values.items():
        if not is_inside(name):
            raise ArtifactError(f"{path} lists the file {brief(name)}, which is not the name of a file beside it.")
        size, digest = (value.get("size"), value.get("sha256")) if isinstance(value, dict) else (None, None)
        if (
            not isinstance(size, int)
            or isinstance(size, bool)
            or size < 0
            or not isinstance(digest, str)
            or not SHA256.fullmatch(digest)
            or len(value) != 2
        ):
            raise ArtifactError(f"{path}: the entry of {name!r} is not valid: {brief(value)}.")
        records[name] = FileRecord(size, digest)
    return records


def is_inside(name: str) -> bool:
    """Return whether a name is that of a file in a folder or below it, on every system."""
    return not any(part in ("", ".", "..") or re.search(r"[\\:\0]", part) for part in name.split("/"))


def check(folder: Path, records: Mapping[str, FileRecord], *, content: bool = True) -> int:
    """Compare files with their records: their full content, or without `content` only their existence and size.

    Returns:
        Number of bytes read.
    """
    for name, expected in records.items():
        size = check_file(folder, name).st_size
        if size != expected.size and content:
            raise _changed(folder, name, f"it has {size} bytes, not {expected.size}")
        if size != expected.size:
            logger.warning("%s has %d bytes; %s records %d.", folder / name, size, CONFIG_NAME, expected.size)
    if not content:
        return 0
    sizes = {name: expected.size for name, expected in records.items()}
    for name, digest in _digests(folder, sizes, "Checking files").items():
        compare(folder, name, records[name], FileRecord(sizes[name], digest))
    return sum(sizes.values())


def read_verified(folder: Path, name: str, expected: FileRecord) -> bytes:
    """Return the content of a file, after comparing these very bytes with its record."""
    size = check_file(folder, name).st_size
    if size != expected.size:
        raise _changed(folder, name, f"it has {size} bytes, not {expected.size}")
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise ArtifactError(f"{folder / name} cannot be read: {error.strerror}.") from None
    compare(folder, name, expected, FileRecord(len(data), hashlib.sha256(data).hexdigest()))
    return data


def compare(folder: Path, name: str, expected: FileRecord, found: FileRecord) -> None:
    """Refuse a file whose size or SHA-256 is not the recorded one."""
    if found.size != expected.size:
        raise _changed(folder, name, f"it has {found.size} bytes, not {expected.size}")
    if found.sha256 != expected.sha256:
        raise _changed(folder, name, f"its SHA-256 begins with {found.sha256[:12]}, not {expected.sha256[:12]}")


def check_file(folder: Path, name: str) -> os.stat_result:
    """Return the status of a file of an artifact; refuse one that is not regular (a pipe would never end).

    Links are checked by `check_links`.
    """
    path = folder / name
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path} is missing, but {CONFIG_NAME} lists it.") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(found.st_mode):
        raise ArtifactError(f"{path} is not a file, but {CONFIG_NAME} lists it as one.")
    if not os.access(path, os.R_OK):
        raise ArtifactError(f"{path} cannot be read: permission denied.")
    check_links([path], folder, ArtifactError)
    return found


def check_strays(folder: Path, records: Mapping[str, FileRecord], patterns: Iterable[str]) -> None:
    """Refuse files that match `patterns`, and so would be read with the artifact, but are not in its manifest."""
    patterns = tuple(patterns)
    stray = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in records
        and entry.name != CONFIG_NAME
        and any(fnmatchcase(entry.name, pattern) for pattern in patterns)
    )
    if stray:
        raise ArtifactError(
            f"{folder} also holds {shorten(stray)}, which would be read with the artifact but which {CONFIG_NAME} does "
            "not list: remove it."
        )


def _changed(folder: Path, name: str, difference: str) -> ArtifactError:
    return ArtifactError(f"{folder / name} is not the file that {CONFIG_NAME} records: {difference}. {IF_MEANT}")


def _digests(folder: Path, sizes: Mapping[str, int], title: str) -> dict[str, str]:
    with (
        track(title=title, unit="B", total=sum(sizes.values()), delay=SECONDS_WITHOUT_BAR, leave=False) as bar,
        ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool,
    ):
        found = {name: pool.submit(_sha256, folder / name, bar) for name in sizes}
        return {name: digest.result() for name, digest in found.items()}


def _sha256(path: Path, bar: Any) -> str:
    digest, piece = hashlib.sha256(), bytearray(PIECE)
    view = memoryview(piece)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                digest.update(view[:count])
                bar.update(count)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()
