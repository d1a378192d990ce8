"""Data files of strangers, looked at before foreign native code reads them: what lies about its size ends here."""

from __future__ import annotations

import codecs
import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from datasets import Dataset
from PIL import Image

from ..errors import EvaluationError, first_line
from ..images import read_image
from ..reading import MOST_LEVELS

# How much larger a file may be unpacked: texts and tables become ten to fifty times as large, bombs a thousand times.
MOST_TIMES, ALWAYS_BYTES = 200, 100_000_000
MOST_ROWS = 100_000_000
BLOCK = 1 << 20
BRACKETS = b"[]{}"
OTHERS = bytes(set(range(256)) - set(BRACKETS))
ESCAPE = re.compile(rb"\\[^\n]")


class Images(Sequence[Image.Image]):
    """A column of images, each of which is read when it is asked for.

    Args:
        name: The task, for messages.
        data: A data set.
        column: A column of images that are not decoded: bytes, or paths of files.
    """

    def __init__(self, name: str, data: Dataset, column: str) -> None:
        self._name, self._cells = name, data[column]

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        cell = self._cells[index]
        if cell is None:
            raise EvaluationError(f"Task {self._name!r}: row {index} has no image.")
        where = f"Task {self._name!r}: the image of row {index}"
        if cell["bytes"] is not None:
            return read_image(cell["bytes"], where)
        if cell["path"] is None or "://" in cell["path"]:  # an address, which `datasets` would fetch
            raise EvaluationError(f"{where} is not in the data, and no file.")
        return read_image(cell["path"], f"{where}, {cell['path']},")


def check_text(path: Path, where: str, *, nested: bool) -> None:
    """Refuse a file that is not text in UTF-8, unpacks to far more than it is, or (`nested`) is JSON nested too deeply.

    Native readers of JSON follow every bracket with a call, until the stack ends, and with it the process. `datasets`
    also unpacks archives under any name; those are no text.
    """
    decoder, nesting = codecs.getincrementaldecoder("utf-8")(), Nesting()
    try:
        for block in _blocks(path, where):
            decoder.decode(block)
            if b"\0" in block:
                raise EvaluationError(f"{where} is not text in UTF-8.")
            if nested and nesting.add(block) > MOST_LEVELS:
                raise EvaluationError(f"{where} is nested too deeply: at most {MOST_LEVELS} levels are read.")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise EvaluationError(f"{where} is not text in UTF-8.") from None


def _blocks(path: Path, where: str) -> Iterator[bytes]:
    """Read a file, unpacked, until it is far larger than it was packed."""
    got, most = 0, _most_unpacked(path.stat().st_size)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while block := file.read(BLOCK):
                got += len(block)
                if got > most and path.suffix == ".gz":
                    raise EvaluationError(f"{where} unpacks to more than {MOST_TIMES} times its size.")
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise EvaluationError(f"{where} cannot be read ({first_line(error)}).") from None


class Nesting:
    """How deeply the brackets of JSON are nested, block by block, in time that grows with the length alone.

    >>> from retex_hf.evaluation.data_files import Nesting
    >>> nesting = Nesting()
    >>> nesting.add(b'{"a": [1, "[[[[", ['), nesting.add(b']]}'), nesting.depth
    (3, 3, 0)
    """

    def __init__(self) -> None:
        self.depth, self._within, self._left = 0, False, b""

    def add(self, block: bytes) -> int:
        """Return the depth that was reached in this block, or was there before it."""
        block = self._left + block
        cut = len(block) - (len(block) - len(block.rstrip(b"\\"))) % 2  # half of an escape waits for the rest
        self._left, block = block[cut:], block[:cut]
        deepest = self.depth
        for number, line in enumerate(ESCAPE.sub(b"", block).split(b"\n")):
            # No text of JSON goes on in the next line, whatever a broken line before it says.
            self._within = self._within and number == 0
            parts = line.split(b'"')
            brackets = b"".join(parts[self._within :: 2]).translate(None, OTHERS)
            self._within ^= len(parts) % 2 == 0
            opened = brackets.count(b"[") + brackets.count(b"{")
            if self.depth + opened > MOST_LEVELS:
                deepest = max(deepest, self._deepest(brackets))
            self.depth = max(0, self.depth + 2 * opened - len(brackets))
            deepest = max(deepest, self.depth)
        return deepest

    def _deepest(self, brackets: bytes) -> int:
        steps = np.where(np.isin(np.frombuffer(brackets, np.uint8), list(b"[{")), 1, -1)
        return self.depth + int(np.cumsum(steps).max(initial=0))


def check_parquet(path: Path, where: str) -> None:
    """Refuse a parquet file that is none, or whose tables are far larger than it."""
    try:
        found = pq.read_metadata(path)
        groups = [found.row_group(number) for number in range(found.num_row_groups)]
    except Exception as error:  # whatever Arrow raises on a broken file
        raise EvaluationError(f"{where} cannot be read ({first_line(error)}).") from None
    if found.num_rows > MOST_ROWS:
        raise EvaluationError(f"{where} has {found.num_rows} rows; at most {MOST_ROWS} are read.")
    if sum(group.total_byte_size for group in groups) > _most_unpacked(path.stat().st_size):
        raise EvaluationError(f"{where} unpacks to more than {MOST_TIMES} times its size.")


def read_arrays(path: Path, wanted: Sequence[str], where: str) -> list[np.ndarray]:
    """Read arrays of an `.npz` file, whose headers must say what is there: nothing is allocated on their word."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [key for key in wanted if key not in members]
            if missing:
                raise EvaluationError(f"{where} has no array {missing[0]!r}, only {sorted(members)}.")
            if sum(members[key].file_size for key in wanted) > _most_unpacked(path.stat().st_size):
                raise EvaluationError(f"{where} unpacks to more than {MOST_TIMES} times its size.")
            return [_read_array(archive, members[key]) for key in wanted]
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, OverflowError) as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{where} cannot be read ({first_line(error)}).") from None


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in readers:
            raise ValueError(f"{member.filename} is of version {version}")
        try:
            shape, _, dtype = readers[version](file)
        except Exception:  # whatever Python's parser raises, with which numpy reads it
            raise ValueError(f"{member.filename} has no header that can be read") from None
        size = dtype.itemsize * math.prod(shape)
        if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0 or file.tell() + size != member.file_size:
            raise ValueError(f"{member.filename} does not hold the array that its header says")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _most_unpacked(size: int) -> int:
    return max(ALWAYS_BYTES, MOST_TIMES * size)
