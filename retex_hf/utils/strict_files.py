"""Strict parsing of untrusted JSON and YAML files, within limits, with one-sentence errors.

Both formats allow duplicate keys (parsers differ in which one counts), numbers that are none (`NaN`), nesting that
exhausts the stack, and aliases that multiply. Well-behaved writers produce none of these; they are rejected.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from ..errors import RetexError, brief, first_line

LARGEST_SIZE = 2**40

# A tokenizer.json of a large vocabulary has 30 MB; a shard index of a thousand layers has less than one.
MOST_JSON_BYTES = 100_000_000
# For recipes and the metadata of cards. PyYAML reads about 100 kB a second.
MOST_YAML_BYTES = 500_000
# Values of a YAML document, with every alias expanded.
MOST_YAML_VALUES = 100_000
MOST_LEVELS = 64
# Python's limit for converting between integers and decimal text. Longer ones in other bases it can read but not write.
MOST_DIGITS = 4300
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# PyYAML reads these as lists of tuples, which it cannot write.
UNREAD = ("tag:yaml.org,2002:omap", "tag:yaml.org,2002:pairs")
# A JSON string, with escaped quotes and backslashes removed beforehand, and any run of characters without brackets.
STRING, NO_BRACKETS = re.compile('"[^"]*"'), re.compile(r"[^\[\]{}]+")
# What half a character (a surrogate) is written as; two of them may be a whole one.
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def is_count(value: Any) -> bool:
    """Return whether a value of a file is a whole number that can be a size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_SIZE


def read_json(
    path: Path,
    error: type[RetexError],
    *,
    kind: type | None = dict,
    name: str | None = None,
    infinite: bool = False,
) -> Any:
    """Read a JSON file and return its value.

    Args:
        path: The file.
        error: Class of the error to raise if it cannot be read.
        kind: Type that the value must have; None: any.
        name: Name of the file in error messages; default: its path.
        infinite: Accept `Infinity` and `NaN`, which are not JSON, but which configurations of transformers hold
            (`time_step_limit` of Mamba).
    """
    name = str(path) if name is None else name
    return parse_json(
        read_text(path, error, most=MOST_JSON_BYTES, name=name), name, error, kind=kind, infinite=infinite
    )


def read_yaml(path: Path, error: type[RetexError], *, kind: type | None = dict, name: str | None = None) -> Any:
    """Read a YAML file of plain values and return its value. The arguments are those of `read_json`."""
    name = str(path) if name is None else name
    return parse_yaml(read_text(path, error, most=MOST_YAML_BYTES, name=name), name, error, kind=kind)


def parse_json(
    text: str, name: str, error: type[RetexError], *, kind: type | None = dict, infinite: bool = False
) -> Any:
    """Parse a JSON text and return its value; `name` names the source in error messages.

    >>> from retex_hf.errors import ConfigError
    >>> from retex_hf.utils.strict_files import parse_json
    >>> parse_json('{"rank": 8, "rank": 64}', "config.json", ConfigError)
    Traceback (most recent call last):
    ...
    retex_hf.errors.ConfigError: config.json is not valid JSON: the key 'rank' appears twice.
    """
    try:
        _check_levels(text)
        value = json_decoder(infinite=infinite).decode(text)
        if HALF_CHARACTER.search(text):  # few texts have any, and encoding a large one again takes seconds
            check_encodable(value)
    except ValueError as problem:
        raise error(f"{name} is not valid JSON: {first_line(problem).rstrip('.')}.") from None
    return _checked(value, kind, name, error, "a JSON object")


def json_decoder(*, infinite: bool = False, parse_int: Callable[[str], int] | None = None) -> json.JSONDecoder:
    """Return a JSON decoder that refuses duplicate keys and, unless `infinite`, `NaN` and infinite numbers."""
    return json.JSONDecoder(
        object_pairs_hook=_unique,
        parse_int=parse_int,
        parse_float=None if infinite else _finite,
        parse_constant=None if infinite else _refuse_constant,
    )


def check_encodable(value: Any) -> None:
    """Refuse, with a `ValueError`, a JSON value that cannot be encoded as text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None


def parse_yaml(text: str, name: str, error: type[RetexError], *, kind: type | None = dict) -> Any:
    """Parse a YAML text of plain values and return its value; aliases are limited.

    >>> from retex_hf.errors import ConfigError
    >>> from retex_hf.utils.strict_files import parse_yaml
    >>> parse_yaml("{base: org/base, experts: &e {a: org/a}, again: *e}", "recipe.yaml", ConfigError)
    {'base': 'org/base', 'experts': {'a': 'org/a'}, 'again': {'a': 'org/a'}}
    """
    if len(text) > MOST_YAML_BYTES:
        raise error(f"{name} has {len(text)} characters; at most {MOST_YAML_BYTES} are read.")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _count(node, {})
        value = None if node is None else loader.construct_document(node)
    except RecursionError:
        raise error(f"{name} is not valid YAML: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as problem:
        raise error(f"{name} is not valid YAML: {_reason(problem)}.") from None
    except (AttributeError, KeyError, TypeError):  # PyYAML raises these for `!!bool maybe` and the like
        raise error(f"{name} is not valid YAML: a value does not fit its tag.") from None
    return _checked(value, kind, name, error, "keys and values")


def check_links(files: Iterable[Path], folder: Path, error: type[RetexError]) -> None:
    """Refuse files of a folder that are symbolic links to files outside of it.

    An untrusted folder could otherwise have any file of this machine read, and published with the result. Links within
    the Hub's cache are allowed: from a snapshot to the blobs of its repository, or of the whole cache.
    """
    home = folder.resolve()
    roots = [home]
    snapshot = next((place for place in (home, *home.parents) if place.parent.name == "snapshots"), None)
    if snapshot is not None:
        roots += [snapshot.parents[1] / "blobs", snapshot.parents[2] / "blobs"]
    for file in files:
        try:
            target = file.resolve()
        except (OSError, RuntimeError):  # RuntimeError: before Python 3.13
            raise error(f"{file} is a link to itself.") from None
        if not any(target.is_relative_to(root) for root in roots):
            raise error(f"{file} is a link to {target}, which is outside of {folder}: put the file itself there.")


def read_file(path: Path, error: type[RetexError], *, most: int = MOST_JSON_BYTES, name: str | None = None) -> bytes:
    """Return the content of a regular file of at most `most` bytes; the other arguments are those of `read_json`."""
    name = str(path) if name is None else name
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would never end
            raise error(f"{name} is not a file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(most + 1) if size <= most else b""
        if max(size, len(content)) > most:
            raise error(f"{name} has {max(size, len(content))} bytes; at most {most} are read.")
        return content
    except FileNotFoundError:
        raise error(f"{name} does not exist.") from None
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        raise error(f"{name} cannot be read: {getattr(problem, 'strerror', None) or first_line(problem)}.") from None


def read_text(path: Path, error: type[RetexError], *, most: int, name: str | None = None) -> str:
    """Return the text of a file of at most `most` bytes; see `read_file`."""
    try:
        return read_file(path, error, most=most, name=name).decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{name or path} is not text in UTF-8.") from None


def _checked(value: Any, kind: type | None, name: str, error: type[RetexError], mapping: str) -> Any:
    if kind is not None and not isinstance(value, kind):
        words = mapping if kind is dict else f"a {kind.__name__}"
        raise error(f"{name} must hold {words}, not a {type(value).__name__}.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {brief(key)} appears twice")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _check_levels(text: str) -> None:
    """Refuse deep nesting before parsing: Python's C parser recurses on the thread's stack, which may be small."""
    brackets = NO_BRACKETS.sub("", STRING.sub("", text.replace("\\\\", "").replace('\\"', "")))
    level = 0
    for bracket in brackets:
        level += 1 if bracket in "[{" else -1
        if level > MOST_LEVELS:
            raise ValueError("it is nested too deeply")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with a limit on the number of values."""

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.composed += 1
        if self.composed > MOST_YAML_VALUES:
            raise ValueError(f"it holds more than {MOST_YAML_VALUES} values")
        return super().compose_node(parent, index)


def _count(node: yaml.Node, known: dict[int, int | None], level: int = 0) -> int:
    """Count the values of a document with every alias expanded; `known` holds the counts of visited nodes.

    Counting comes before construction, which already expands merge keys (`<<`).
    """
    if level > MOST_LEVELS:
        raise ValueError("it is nested too deeply")
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise ValueError("it contains itself")
        return count
    known[id(node)], count = None, 1
    if node.tag in UNREAD:
        raise ValueError(f"it has a value with the tag {node.tag.rpartition(':')[2]!r}, which is not read")
    if isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS:
        width = 1.21 if "x" in node.value else 1  # decimal digits per hexadecimal digit
        if width * len(node.value) > MOST_DIGITS:
            raise ValueError(f"it holds a number of more than {MOST_DIGITS} digits")
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    for part in () if isinstance(node, yaml.ScalarNode) else node.value:
        for child in part if isinstance(part, tuple) else (part,):
            count += _count(child, known, level + 1)
    if count > MOST_YAML_VALUES:
        raise ValueError(f"it holds more than {MOST_YAML_VALUES} values, with every alias written out")
    known[id(node)] = count
    return count


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[Hashable] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            # Compare as Python would: 1, 0x1 and 1.0 are the same key.
            merges = key.tag == "tag:yaml.org,2002:merge"
            value = key.value if merges else yaml.SafeLoader("").construct_object(key)
            if value in seen:
                raise ValueError(f"the key {key.value!r} appears twice (line {key.start_mark.line + 1})")
            seen.add(value)


def _reason(problem: Exception) -> str:
    """Return PyYAML's complaint and its line number in one line; its own messages have several."""
    mark, problem_text = getattr(problem, "problem_mark", None), getattr(problem, "problem", None)
    reason = (problem_text or first_line(problem)).rstrip(".")
    return reason if mark is None else f"{reason} (line {mark.line + 1})"
