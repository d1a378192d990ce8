"""A disk of a few megabytes that can be filled and made read-only; tests are skipped where none can be mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs. Root ignores permission bits, so a folder that may not be written must be a disk like this."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, leave: int) -> None:
        """Take all room but so many bytes."""
        self.empty()
        taken = shutil.disk_usage(self.folder).free - leave
        with self._ballast.open("wb") as file:
            if taken > 0:
                os.posix_fallocate(file.fileno(), 0, taken)

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        _mount("-o", "remount,ro", str(self.folder))
        try:
            yield
        finally:
            _mount("-o", "remount,rw", str(self.folder))

    def names(self) -> set[str]:
        return {entry.name for entry in self.folder.iterdir()} - {self._ballast.name}


@contextmanager
def small_disk(folder: Path, megabytes: int = 4) -> Iterator[SmallDisk]:
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: a mapped file of a failed test must not keep the mount alive.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
