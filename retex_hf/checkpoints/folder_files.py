"""Reading of the files of a checkpoint's folder that are not weights, and private copies of them for libraries.

A library that is given a folder reads whatever it finds there, including unchecked files, and more of them with every
release. Given a copy of the checked files, it can read nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RetexError
from ..utils.atomic_file import write_errors
from ..utils.atomic_folder import scratch_folder
from ..utils.strict_files import parse_json, read_file

SCRATCH_PREFIX = "retex-read-"


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder: as they are on the disk, or (`verified`) with the content that was checked."""

    folder: Path
    verified: Mapping[str, bytes] | None = None

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file() if self.verified is None else name in self.verified

    def read(self, name: str, error: type[RetexError] = CheckpointError) -> bytes:
        """Return the content of a file."""
        if self.verified is None:
            return read_file(self.folder / name, error)
        if name not in self.verified:
            raise error(f"{self.folder / name} does not exist.")
        return self.verified[name]

    def json(self, name: str, error: type[RetexError] = CheckpointError) -> dict[str, Any]:
        """Return the object in a JSON file."""
        path = str(self.folder / name)
        try:
            text = self.read(name, error).decode()
        except UnicodeDecodeError:
            raise error(f"{path} is not text in UTF-8.") from None
        return parse_json(text, path, error, infinite=True)


@contextmanager
def private_copy(files: Mapping[str, bytes | Mapping[str, Any]]) -> Iterator[Path]:
    """Write files (bytes, or values to be written as JSON) to a temporary folder that exists within this context."""
    with scratch_folder(SCRATCH_PREFIX) as scratch:
        folder = scratch / "files"
        with write_errors(scratch.parent):
            for path, content in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                (folder / path).write_bytes(data)
        yield folder
