"""Stores for the results of a build: in memory, or directly in the safetensors files of a folder.

A build allocates all tensors of a file at once and then fills them one by one. On disk the header is written first and
the file is mapped shared: filling a tensor writes the file through the page cache, and nothing stays in the process's
own memory. A store also records finished pieces of work, so that a build on disk can be killed and resumed.
"""

from __future__ import annotations

import json
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from .sources import SAFETENSORS_DTYPES, TensorInfo

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
PARTS = ("model", "recovery", "heads", "rows", "pretrained")
ALIGNMENT = 64
# Syncing takes time, and losing a few seconds of work costs little.
SYNC_SECONDS = 10.0


class Store(ABC):
    """Tensors to fill and a record of finished work. `shared`: all processes see what one of them writes."""

    shared: bool

    @abstractmethod
    def allocate(
        self, part: str, infos: Mapping[str, TensorInfo], metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Return tensors of these shapes and dtypes, for one part of the artifact (one of `PARTS`).

        `metadata` goes into the index if the part is stored in shards. All processes must call this together.
        """

    @abstractmethod
    def finished(self, stage: str) -> dict[str, Any]:
        """Return the facts that `record` stored for this stage before the build was interrupted, by key."""

    @abstractmethod
    def record(self, stage: str, key: str, facts: Any) -> None:
        """Record that a piece of work is done and its tensors are filled; `facts` (JSON) holds its other results."""


class MemoryStore(Store):
    """Tensors in memory; nothing to resume from."""

    shared = False

    def allocate(
        self, part: str, infos: Mapping[str, TensorInfo], metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        return {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}

    def finished(self, stage: str) -> dict[str, Any]:
        return {}

    def record(self, stage: str, key: str, facts: Any) -> None:
        pass


class FolderStore(Store):
    """Tensors in safetensors files of `folder`; finished work in journals of `journal_folder`, one per process.

    `stems` names the files of each part, with the size above which it is stored in shards (None: never). A journal line
    is written after its tensors have reached the disk.
    """

    shared = True

    def __init__(
        self,
        folder: Path,
        journal_folder: Path,
        stems: Mapping[str, tuple[str, int | None]],
        accelerator: Accelerator | None = None,
    ) -> None:
        self.folder = folder
        self.files: list[Path] = []
        self._stems = stems
        self._accelerator = accelerator
        self._finished = _read_journals(journal_folder)
        rank = 0 if accelerator is None else accelerator.process_index
        self._journal = journal_folder / f"journal-{rank}.jsonl"
        self._pending = ["\n"]  # ends a line that a kill may have cut off
        self._synced = time.monotonic()

    def allocate(
        self, part: str, infos: Mapping[str, TensorInfo], metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        stem, max_shard_size = self._stems[part]
        split = split_state_dict_into_shards_factory(
            dict(infos),
            get_storage_size=tensor_bytes,
            filename_pattern=stem + "{suffix}.safetensors",
            max_shard_size=sum(map(tensor_bytes, infos.values())) if max_shard_size is None else max_shard_size,
        )
        main = self._accelerator is None or self._accelerator.is_main_process
        for file, names in split.filename_to_tensors.items():
            self.files.append(self.folder / file)
            if main:
                create_file(self.files[-1], {name: infos[name] for name in names})
        if split.is_sharded:
            self.files.append(self.folder / f"{stem}.safetensors.index.json")
            if main:
                index = {"metadata": {**(metadata or {}), **split.metadata}, "weight_map": split.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True)
                self.files[-1].write_text(text + "\n", encoding="utf-8")
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()
        tensors: dict[str, Tensor] = {}
        for file, names in split.filename_to_tensors.items():
            tensors |= map_file(self.folder / file, {name: infos[name] for name in names})
        return {name: tensors[name] for name in infos}

    def finished(self, stage: str) -> dict[str, Any]:
        return self._finished.get(stage, {})

    def record(self, stage: str, key: str, facts: Any) -> None:
        self._pending.append(json.dumps([stage, key, facts]) + "\n")
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Sync all tensors to the disk, then write the journal lines that record them."""
        for file in self.files:
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.writelines(self._pending)
            journal.flush()
            os.fsync(journal.fileno())
        self._pending.clear()
        self._synced = time.monotonic()


def _read_journals(folder: Path) -> dict[str, dict[str, Any]]:
    finished: dict[str, dict[str, Any]] = {}
    for journal in sorted(folder.glob("journal-*.jsonl")):
        for line in journal.read_text(encoding="utf-8").splitlines():
            try:
                stage, key, facts = json.loads(line)
            except ValueError:  # cut off by a kill
                continue
            finished.setdefault(stage, {})[key] = facts
    return finished


def tensor_bytes(info: TensorInfo) -> int:
    """Return the size of a tensor in a file, in bytes."""
    return prod(info.shape) * info.dtype.itemsize


def create_file(path: Path, infos: Mapping[str, TensorInfo]) -> None:
    """Create a safetensors file of its full size, with tensors to be filled; a matching file keeps its content."""
    header, size = encode_header(infos)
    if path.is_file() and path.stat().st_size == size:
        with path.open("rb") as file:
            if file.read(len(header)) == header:
                return
    path.unlink(missing_ok=True)  # it may be a hard link to a file of a finished folder
    with path.open("wb") as file:
        # Reserve the space now: if the disk is full later, writing to the mapping kills the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        file.write(header)


def map_file(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return the tensors of a file that `create_file` made; writing to them writes to the file."""
    header, size = encode_header(infos)
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    tensors = {}
    for name, (start, _) in data_offsets(infos).items():
        info = infos[name]
        first = (len(header) + start) // info.dtype.itemsize
        # torch's annotations lack the form without strides, and the class that `from_file` returns.
        tensors[name] = torch.empty(0, dtype=info.dtype).set_(storage, first, info.shape)  # type: ignore[call-overload]
    return tensors


def encode_header(infos: Mapping[str, TensorInfo]) -> tuple[bytes, int]:
    """Return the header of a safetensors file, padded so that data starts aligned, and the size of the whole file."""
    offsets = data_offsets(infos)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, span in offsets.items():
        info = infos[name]
        entries[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": list(span)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, len(header) + max((end for _, end in offsets.values()), default=0)


def data_offsets(infos: Mapping[str, TensorInfo]) -> dict[str, tuple[int, int]]:
    """Return start and end of each tensor: wide dtypes first, so that all are aligned, as the format allows no gaps."""
    offsets, end = {}, 0
    for name in sorted(infos, key=lambda name: -infos[name].dtype.itemsize):
        start, end = end, end + tensor_bytes(infos[name])
        offsets[name] = (start, end)
    return offsets
