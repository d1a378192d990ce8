"""Vet the files of an untrusted tokenizer or processor before native code reads them.

`tokenizers` is compiled, and aborts the process when it cannot allocate memory, for example when a chain of
replacements makes a text longer and longer. So the growth of a text is bounded from the file before it is loaded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, brief
from ..utils.strict_files import parse_json
from .untrusted_config import vet_side_config, vet_special_tokens

TOKENIZER, SPECIAL_TOKENS = "tokenizer.json", "special_tokens_map.json"
# Keys of the steps that change a text, in order.
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# Limits on the number of steps in one tokenizer and on their nesting. Real ones have about ten, in two levels.
MOST_STEPS, MOST_LEVELS = 200, 16
# Limit on how much all replacements together may lengthen a text. Real ones replace a blank by one character.
MOST_GROWTH = 1_000
# Longest encoding of a character in UTF-8.
BYTES_PER_CHARACTER = 4
# Limit on the tokens that a template may add to a text.
MOST_ADDED = 1_000
# Keys of numbers that set the length of every text, whatever its content.
LENGTHS = ("length", "max_length", "pad_to_multiple_of", "Fixed", "stride")
LONGEST = 10_000_000


def vetted_side_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a folder's tokenizer and processor files in the form that libraries may read.

    Drop what names code or other files from configurations; refuse a tokenizer that could exhaust memory.
    """
    vetted = dict(files)
    for name, data in files.items():
        if name.endswith(".json"):
            values = _parse(folder / name, data)
            if name.rpartition("/")[2] == TOKENIZER:
                _check_tokenizer(folder / name, values)
            elif name.rpartition("/")[2] == SPECIAL_TOKENS and isinstance(values, dict):
                vetted[name] = json.dumps(vet_special_tokens(values)).encode()
            elif name.endswith("config.json") and isinstance(values, dict):
                vetted[name] = json.dumps(vet_side_config(values)).encode()
    return vetted


def _parse(path: Path, data: bytes) -> Any:
    try:
        return parse_json(data.decode(), str(path), CheckpointError, kind=None, infinite=True)
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not text in UTF-8.") from None


def _check_tokenizer(path: Path, values: Any) -> None:
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(values).__name__}.")
    steps = [step for key in STEPS for step in _steps(path, values.get(key), 0)]
    if len(steps) > MOST_STEPS:
        raise CheckpointError(f"{path} has {len(steps)} steps; at most {MOST_STEPS} are run.")
    growth = 1
    for step in steps:
        growth *= _growth(path, step)
        _check_template(path, step)
        if growth > MOST_GROWTH:
            raise CheckpointError(f"{path} can make a text over {MOST_GROWTH} times as long as it was.")
    for key in ("truncation", "padding"):
        for name, value in _numbers(values.get(key)):
            if name in LENGTHS and not 0 <= value <= LONGEST:
                raise CheckpointError(f"{path}: {key} has {name}={brief(value)}, expected at most {LONGEST}.")


def _steps(path: Path, value: Any, level: int) -> Iterator[Mapping[str, Any]]:
    """Yield all steps within a step."""
    if level > MOST_LEVELS:
        raise CheckpointError(f"{path} nests steps more than {MOST_LEVELS} deep.")
    if isinstance(value, Mapping):
        if "type" in value:
            yield value
        for entry in value.values():
            if isinstance(entry, (Mapping, list)):
                yield from _steps(path, entry, level + 1)
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, (Mapping, list)):
                yield from _steps(path, entry, level)


def _growth(path: Path, step: Mapping[str, Any]) -> int:
    """Return an upper bound on how much a step lengthens a text. A pattern may match every character and between
    characters."""
    characters = step.get("precompiled_charsmap")
    if isinstance(characters, str):
        return _longest_replacement(path, characters)
    content = step.get("content", step.get("prepend", step.get("replacement")))
    return max(1, len(content)) if isinstance(content, str) else 1


def _longest_replacement(path: Path, text: str) -> int:
    """Return the length of the longest replacement in a compiled character map of sentencepiece: the size of its table,
    the table, then all replacements, each ended by a zero byte."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise CheckpointError(f"{path} has a precompiled_charsmap that is not in base 64.") from None
    size = int.from_bytes(data[:4], "little")
    return max(1, *(len(part) // BYTES_PER_CHARACTER for part in data[4 + size :].split(b"\0")))


def _check_template(path: Path, step: Mapping[str, Any]) -> None:
    """Refuse a template that adds more tokens to a text than any task needs."""
    special = step.get("special_tokens")
    if not isinstance(special, Mapping):
        return
    ids = max((len(_list(entry, "ids")) for entry in special.values()), default=0)
    pieces = max(len(_list(step, "single")), len(_list(step, "pair")))
    if ids * pieces > MOST_ADDED:
        raise CheckpointError(f"{path} can add {ids * pieces} tokens to a text; at most {MOST_ADDED} are allowed.")


def _list(values: Any, key: str) -> list[Any]:
    found = values.get(key) if isinstance(values, Mapping) else None
    return found if isinstance(found, list) else []


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if isinstance(entry, (int, float)) and not isinstance(entry, bool):
                yield name, entry
            else:
                yield from _numbers(entry)
