"""Uploaded images: limited in number and size, in the page's own folder, within a disk quota."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from ..data.datasets import IMAGE_SUFFIXES
from ..errors import InputError
from .inputs import MOST_MEGABYTES

# For all uploads at a time; gradio deletes them after an hour.
MOST_KEPT_MEGABYTES = 1000
MOST_KEPT_FILES = 5000


class Uploads:
    """The files that visitors may refer to: their uploads and the page's examples.

    Args:
        parent: Parent of this page's folder; gradio must be allowed to read uploads from it.
        kept: Called with every path, so that gradio deletes it later.
    """

    def __init__(self, parent: Path, kept: Callable[[str], object]) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="retex-", dir=parent)).resolve()
        self.examples: set[str] = set()
        self._kept, self._sizes = kept, dict[str, int]()
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def holds(self, path: str) -> bool:
        """Return whether a visitor may refer to this path."""
        return (path in self._sizes or path in self.examples) and Path(path).is_file()

    def keep(self, files: Iterable[tuple[str, BinaryIO, int]]) -> list[str]:
        """Store files, given by name, content and size, and return their paths; refuse all if any is refused."""
        files = list(files)
        for name, _, size in files:
            if Path(name).suffix.lower() not in IMAGE_SUFFIXES:
                raise InputError(f"A file is none of {', '.join(sorted(IMAGE_SUFFIXES))}.")
            if size > MOST_MEGABYTES * 1_000_000:
                raise InputError(f"A file is larger than {MOST_MEGABYTES} MB.")
        self._sizes = {path: size for path, size in self._sizes.items() if Path(path).exists()}
        together = sum(self._sizes.values()) + sum(size for _, _, size in files)
        if together > MOST_KEPT_MEGABYTES * 1_000_000 or len(self._sizes) + len(files) > MOST_KEPT_FILES:
            raise InputError("The page holds as many uploads as it keeps at a time; try again later.")
        return [self._write(*file) for file in files]

    def _write(self, name: str, content: BinaryIO, size: int) -> str:
        path = str(self.folder / (secrets.token_hex(16) + Path(name).suffix.lower()))
        self._sizes[path] = size
        self._kept(path)
        with open(path, "xb") as file:
            shutil.copyfileobj(content, file)
        return path
