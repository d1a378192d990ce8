"""Names of the files that `retex export --for vllm` adds to an artifact."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from pathlib import Path

from ..errors import ArtifactError

# What was exported: the adapter of each task, and what a server must be told. A save of the model removes it.
EXPORT_NAME = "retex_vllm.json"
EXPORT_VERSION = 1
ADAPTERS = "adapters"
MODEL_INDEX = "model.safetensors.index.json"
# What a request can name besides a task: let the router choose, or run the merged model.
AUTO, MERGED = "auto", "merged"
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def adapter_folder(task: str) -> str:
    """Return the folder of a task's adapter in an artifact; a hash where the name is not that of a folder.

    >>> adapter_folder("snips"), adapter_folder("a/b")
    ('adapters/snips', 'adapters/task_0debd2558bca8fa0')
    """
    hashed = f"task_{hashlib.blake2b(task.encode(), digest_size=8).hexdigest()}"
    return f"{ADAPTERS}/{task if FOLDER_NAME.fullmatch(task) else hashed}"


def is_export_file(name: str) -> bool:
    """Return whether a file of an artifact, by its relative name, is part of an export."""
    return name == EXPORT_NAME or name.startswith(f"{ADAPTERS}/")


def check_adapters(folder: Path, recorded: Container[str]) -> None:
    """Refuse files among the adapters of an exported artifact that are not recorded: servers may read all of them."""
    if EXPORT_NAME not in recorded:
        return
    for path in sorted((folder / ADAPTERS).rglob("*")):
        # A link to a folder is not entered here, but whoever loads an adapter would follow it.
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and path.relative_to(folder).as_posix() not in recorded:
            raise ArtifactError(f"{path} is no file of the export: remove it, or export the artifact again.")
