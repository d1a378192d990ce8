"""Strict reading of JSON data files before native code reads them: one value at a time, never all at once."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from ..utils.strict_files import MOST_LEVELS, check_encodable, json_decoder
from .data_limits import MOST_COLUMNS

BRACKETS = b"[]{}"
OTHERS = bytes(set(range(256)) - set(BRACKETS))
ESCAPE = re.compile(rb"\\[^\n]")
SPACE = re.compile(r"[ \t\r\n]*")
# Range of integers: readers change the value of larger ones.
LEAST, MOST = -(2**63), 2**63 - 1
LONGEST = len(str(LEAST))


class JsonRows:
    """The rows of a file: consecutive values, or one list of them; `columns` counts the keys of all rows, at any depth.

    Raises `ValueError` on anything but strict JSON, so every other reader interprets accepted files in the same way.

    >>> from retex_hf.data.json_rows import JsonRows
    >>> rows = JsonRows()
    >>> rows.add(b'{"a": 1, "b": {"c": 2}}\\n{"a": 3, "d": [{"c": 4}]}\\n')
    >>> rows.end()
    >>> rows.count, rows.columns
    (2, 5)
    """

    def __init__(self) -> None:
        self.count = self.columns = 0
        self._nesting = Nesting()
        self._keys: dict[str, Any] = {}
        self._waiting: list[bytes] = []

    def add(self, block: bytes) -> None:
        """Read the values that are complete with this block of UTF-8 text."""
        # In text that is not JSON the depth may be wrong, but such text is refused before a reader gets that far.
        if self._nesting.add(block) > MOST_LEVELS:
            raise ValueError(f"it is nested too deeply: at most {MOST_LEVELS} levels are read")
        self._waiting.append(block)
        if not self._nesting.depth and block.endswith(b"\n"):
            self.end()

    def end(self) -> None:
        """Read the remaining values."""
        data, self._waiting = b"".join(self._waiting), []
        text = data.decode("utf-8" if self.count else "utf-8-sig")
        try:
            self._read(text, may_be_halves=rb"\u" in data)
        except json.JSONDecodeError as error:  # its position is relative to this piece, so it is left out
            raise ValueError(f"{error.msg} (row {self.count})") from None

    def _read(self, text: str, may_be_halves: bool) -> None:
        place = _skip(text, 0)
        while place < len(text):
            listed = text[place] == "["
            place = _skip(text, place + 1) if listed else place
            ended = listed and text[place : place + 1] == "]"
            while not ended:
                value, place = DECODER.raw_decode(text, place)
                if may_be_halves:
                    check_encodable(value)
                self._note(value, self._keys)
                self.count += 1
                place = _skip(text, place)
                mark = text[place : place + 1]
                ended = not listed or mark == "]"
                if not ended:
                    if mark != ",":
                        raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
                    place = _skip(text, place + 1)
            place = _skip(text, place + listed)

    def _note(self, value: Any, keys: dict[str, Any]) -> None:
        """Record the keys of a value; the values of a list share theirs, as in a table."""
        for item in value if isinstance(value, list) else ():
            self._note(item, keys)
        for key, item in value.items() if isinstance(value, dict) else ():
            if key not in keys:
                keys[key] = {}
                self.columns += 1
                if self.columns > MOST_COLUMNS:
                    raise ValueError(f"it has more than {MOST_COLUMNS} columns")
            if isinstance(item, (dict, list)):
                self._note(item, keys[key])


def _skip(text: str, place: int) -> int:
    found = SPACE.match(text, place)
    assert found is not None  # it matches no space, too
    return found.end()


def _integer(text: str) -> int:
    if len(text) > LONGEST or not LEAST <= int(text) <= MOST:
        raise ValueError(f"the number {text[:20]} takes more than 64 bits")
    return int(text)


DECODER = json_decoder(parse_int=_integer)


class Nesting:
    """The nesting depth of JSON brackets, computed block by block in linear time.

    >>> from retex_hf.data.json_rows import Nesting
    >>> nesting = Nesting()
    >>> nesting.add(b'{"a": [1, "[[[[", ['), nesting.add(b']]}'), nesting.depth
    (3, 3, 0)
    """

    def __init__(self) -> None:
        self.depth, self._within, self._left = 0, False, b""

    def add(self, block: bytes) -> int:
        """Return the largest depth in this block, including the depth at its start."""
        block = self._left + block
        cut = len(block) - (len(block) - len(block.rstrip(b"\\"))) % 2  # keep an incomplete escape for the next block
        self._left, block = block[cut:], block[:cut]
        deepest = self.depth
        for number, line in enumerate(ESCAPE.sub(b"", block).split(b"\n")):
            # No JSON string continues on the next line, even after a malformed line.
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
