"""Reading of files that commands take: inputs to answer."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..data.datasets import IMAGE_SUFFIXES, read_line
from ..errors import InputError
from ..utils.images import read_image
from ..utils.paths import as_path
from ..utils.strict_files import parse_json

STANDARD_INPUT = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it before a text
MOST_LINE_BYTES = 10_000_000
TABLES = (".csv", ".parquet", ".npz")
TEXT_COLUMNS = ("text", "sentence", "input")


@dataclass(frozen=True)
class Input:
    """One input to answer: its display text, and its value for the model."""

    shown: str
    value: Any


def read_inputs(sources: Sequence[str], kind: str, column: str | None) -> Iterator[Input]:
    """Read inputs from text files (one per line), JSONL files, images, folders of images, or standard input (`-`)."""
    for source in sources:
        if source == STANDARD_INPUT:
            # Read bytes, so that decoding does not depend on the locale.
            stream = sys.stdin.buffer
            yield from _lines(_numbered(stream, "standard input"), "standard input", kind, column)
            continue
        path = as_path(source, InputError)
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
            if not files:
                raise InputError(f"{path} holds no images.")
            yield from (_image(file, kind) for file in files)
        elif not path.exists():
            raise InputError(f"{path} does not exist.")
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            yield _image(path, kind)
        elif path.suffix.lower() in TABLES:
            raise InputError(f"{path} is a table: expected a text file of one input per line, .jsonl, or images.")
        else:
            with path.open("rb") as stream:
                yield from _lines(_numbered(stream, str(path)), str(path), kind, column)


def _numbered(stream: BinaryIO, where: str) -> Iterator[tuple[int, str]]:
    for number in itertools.count(1):
        line = stream.readline(MOST_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MOST_LINE_BYTES:
            raise InputError(f"{where}, line {number} has more than {MOST_LINE_BYTES} bytes.")
        try:
            text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{where} is not text in UTF-8 (line {number}).") from None
        if text.strip():
            yield number, text.rstrip("\r\n")


def _lines(lines: Iterator[tuple[int, str]], where: str, kind: str, column: str | None) -> Iterator[Input]:
    is_json: bool | None = where.endswith((".jsonl", ".json")) or None
    for number, line in lines:
        if is_json is None and where == "standard input":
            is_json = line.startswith("{")  # the first line decides for all lines
        if not is_json:
            if kind == "image" and not Path(line).exists():
                raise InputError(f"{where}, line {number}: there is no image {line!r}.")
            yield _image(Path(line), kind) if kind == "image" else as_input(read_line(line))
            continue
        row = parse_json(line, f"{where}, line {number}", InputError)
        value = _value_of(row, column, f"{where}, line {number}")
        yield _image(Path(value), kind) if kind == "image" else as_input(value)


def _value_of(row: dict[str, Any], column: str | None, where: str) -> Any:
    names = [column] if column else [name for name in (*TEXT_COLUMNS, "image", "file") if name in row]
    if len(names) != 1 or names[0] not in row:
        raise InputError(f"{where}: say with --input-column which of {sorted(row)} is the input.")
    value = row[names[0]]
    if not (isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value))):
        raise InputError(f"{where}: {names[0]!r} must be a text or a pair of texts, not {value!r}.")
    return value


def as_input(value: str | Sequence[str]) -> Input:
    """Make an input of a text, or of several that belong together."""
    return Input(value, value) if isinstance(value, str) else Input(" | ".join(value), tuple(value))


def _image(path: Path, kind: str) -> Input:
    if kind != "image":
        raise InputError(f"{path} is an image, but the model takes texts.")
    return Input(str(path), read_image(path, str(path)))
