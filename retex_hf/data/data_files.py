"""Check untrusted data files before native code reads them, and refuse those that misstate their size."""

from __future__ import annotations

import codecs
import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from datasets import Dataset
from datasets.utils.extract import Extractor
from PIL import Image

from ..errors import EvaluationError, brief, first_line
from ..utils.images import read_image
from .data_limits import MOST_COLUMNS, MOST_TIMES, check_cells, check_columns, most_unpacked
from .json_rows import JsonRows

BLOCK = 1 << 20
# Match fields as pandas does: quotes count at the beginning only, and text after the closing quote belongs to the
# field.
FIELD = re.compile(rb'(?:"[^"]*(?:""[^"]*)*"?)?[^,\r\n]*')


class Images(Sequence[Image.Image]):
    """A column of images, each decoded on access.

    Args:
        name: The task, for messages.
        data: A dataset.
        column: A column of undecoded images: bytes, or file paths.
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
        if cell["path"] is None or "://" in cell["path"]:  # a URL, which `datasets` would fetch
            raise EvaluationError(f"{where} is neither in the data nor a file.")
        return read_image(cell["path"], f"{where}, {cell['path']},")


def check_json(path: Path, where: str) -> None:
    """Refuse a file that is not strict JSON, unpacks to far more than its size, or is too deep or too wide.

    Native JSON readers recurse at every bracket, so deep nesting would overflow the stack and end the process.
    """
    rows, size = JsonRows(), 0
    for block in _blocks(path, where):
        size += len(block)
        _add(rows, block, where)
    _add(rows, None, where)
    check_cells(where, rows.count, rows.columns, size)
    check_no_archive(path, where)


def _add(rows: JsonRows, block: bytes | None, where: str) -> None:
    try:
        rows.end() if block is None else rows.add(block)
    except ValueError as error:
        raise EvaluationError(f"{where} cannot be read as JSON: {first_line(error).rstrip('.')}.") from None


def check_csv(path: Path, where: str) -> None:
    """Refuse a file that is not text in UTF-8, unpacks to far more than its size, or is too wide."""
    head: list[bytes] = []
    columns: int | None = None
    size, tried, lines = 0, 0, 1
    for block in _blocks(path, where):
        size += len(block)
        lines += block.count(b"\n") + block.count(b"\r")
        if columns is None:
            head.append(block)
            if size >= 2 * tried:  # only when the size has doubled, to keep the total time linear
                columns, tried = csv_columns(b"".join(head), ended=False), size
    if columns is None:
        columns = csv_columns(b"".join(head), ended=True)
    check_columns(where, columns)
    check_cells(where, lines, columns, size)
    check_no_archive(path, where)


@overload
def csv_columns(text: bytes, *, ended: Literal[True]) -> int: ...
@overload
def csv_columns(text: bytes, *, ended: bool) -> int | None: ...
def csv_columns(text: bytes, *, ended: bool) -> int | None:
    """Return how many columns a table has: those of the wider of its first two rows (pandas may make one the index).

    Return None where these rows continue after `text`, unless `ended`; stop early where there are too many columns.

    >>> from retex_hf.data.data_files import csv_columns
    >>> csv_columns(b'a,"b,\\n""c"\\n1,2,3\\n', ended=True), csv_columns(b'a,b\\n"1,2', ended=False)
    (3, None)
    """
    widest, rows, place, start, fields = 0, 0, 0, 0, 1
    while rows < 2:
        found = FIELD.match(text, place)
        assert found is not None  # it matches an empty field, too
        place = found.end()
        widest = max(widest, fields)
        if widest > MOST_COLUMNS:
            return widest
        if place == len(text):
            return widest if ended else None
        if text[place] == ord(","):
            fields += 1
        else:
            rows += bool(text[start:place].strip())  # pandas skips rows that are blank
            start, fields = place + 1, 1
        place += 1
    return widest


def check_no_archive(path: Path, where: str) -> None:
    """Refuse a file that `datasets` would unpack, whatever its name; only gzip files named `.gz` are allowed.

    Call this after checking the content: to detect the format, `datasets` may itself unpack some of the file.
    """
    kind = Extractor.infer_extractor_format(path)
    if kind is not None and (kind, path.suffix) != ("gzip", ".gz"):
        raise EvaluationError(f"{where} is an archive ({kind}): unpack it, and give the file inside.")


def _blocks(path: Path, where: str) -> Iterator[bytes]:
    """Yield a file's text, decompressed, in whole lines unless these are long; refuse it once it is far larger than the
    file."""
    got, most, decoder = 0, most_unpacked(path.stat().st_size), codecs.getincrementaldecoder("utf-8")()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while block := file.read(BLOCK) + file.readline(BLOCK):
                got += len(block)
                if got > most and path.suffix == ".gz":
                    raise EvaluationError(f"{where} unpacks to more than {MOST_TIMES} times its size.")
                decoder.decode(block)
                if b"\0" in block:
                    raise EvaluationError(f"{where} is not text in UTF-8.")
                yield block
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise EvaluationError(f"{where} is not text in UTF-8.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise EvaluationError(f"{where} cannot be read ({first_line(error)}).") from None


def read_arrays(path: Path, wanted: Sequence[str], where: str) -> list[np.ndarray]:
    """Read arrays of an `.npz` file; check their headers against the data before allocating memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [key for key in wanted if key not in members]
            if missing:
                raise EvaluationError(f"{where} has no array {missing[0]!r}, only {sorted(members)}.")
            if sum(members[key].file_size for key in wanted) > most_unpacked(path.stat().st_size):
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
            raise ValueError(f"{member.filename} has version {version}")
        try:
            shape, _, dtype = readers[version](file)
        except Exception:  # numpy parses it with Python's parser, which may raise anything
            raise ValueError(f"{member.filename} has no header that can be read") from None
        if not shape or not all(type(axis) is int for axis in shape):
            raise ValueError(f"{member.filename} has the shape {brief(shape)}, which has no rows")
        size = dtype.itemsize * math.prod(shape)
        if dtype.hasobject or not dtype.itemsize or min(shape) < 0 or file.tell() + size != member.file_size:
            raise ValueError(f"{member.filename} does not hold the array that its header describes")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
