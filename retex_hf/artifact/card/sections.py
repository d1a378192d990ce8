"""Model cards written by a program and a person: generated text is recognised by its digest, all else is the person's.

A generated section stands between `<!-- retex:usage 3fa9c1d2 -->` and `<!-- /retex:usage -->`; the number is a digest
of its text. As long as the text matches the digest, an update replaces the section. An edited section belongs to the
person, as does all text outside sections. The same holds for the metadata at the top: the digests of generated values
are in a comment. Another comment holds the digest of everything the person wrote, as of the card's creation or last
push. If a push found that text changed on the Hub and kept it, the comment holds the digest of that text too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ...config import LARGEST_INTEGER
from ...errors import ArtifactError, brief
from ...utils.strict_files import parse_yaml

# Each pattern matches within one line, so that reading a card takes linear time.
MARKER = re.compile(r"^<!-- (?P<end>/?)retex:(?P<name>\w+)(?: (?P<digest>\w+))? -->$", re.MULTILINE)
METADATA = re.compile(r"\n?^<!-- retex-metadata(?P<records>[^>\n]*) -->\n?", re.MULTILINE)
WRITTEN = re.compile(r"\n?^<!-- retex-written (?P<digests>[\w ]+) -->\n?", re.MULTILINE)
# The Hub's ids of libraries are lower-case with hyphens. Cards used to have the name of the package.
LIBRARY, FORMER_LIBRARY = "retex-hf", "retex_hf"


@dataclass(frozen=True)
class Section:
    """A section of a card: its text, the digest in its opening marker, and its position including both markers."""

    name: str
    digest: str | None
    text: str
    start: int
    end: int

    @property
    def is_intact(self) -> bool:
        """Return whether the text is unchanged since it was generated."""
        return digest(self.text) == self.digest


def find_sections(card: str) -> list[Section]:
    """Return the sections of a card. An opening marker without a closing one is text, as are markers within a section.

    >>> from retex_hf.artifact.card.sections import find_sections
    >>> card = "<!-- retex:lost -->\\n<!-- retex:usage 3fa9c1d2 -->\\nRun it.\\n<!-- /retex:usage -->"
    >>> [(section.name, section.text) for section in find_sections(card)]
    [('usage', 'Run it.\\n')]
    """
    markers = list(MARKER.finditer(card))
    ends: dict[str, list[re.Match[str]]] = {}
    for marker in reversed(markers):
        if marker["end"] and marker["digest"] is None:
            ends.setdefault(marker["name"], []).append(marker)
    found, place = [], 0
    for marker in markers:
        later = ends.get(marker["name"], [])
        while later and later[-1].start() < marker.end():
            later.pop()
        if not marker["end"] and later and marker.start() >= place:
            text = card[marker.end() + 1 : later[-1].start()]
            place = later[-1].end()
            found.append(Section(marker["name"], marker["digest"], text, marker.start(), place))
    return found


def replace_sections(card: str, replace: Callable[[Section], str]) -> str:
    """Replace each section of a card, markers included, by the text that `replace` returns."""
    pieces, place = [], 0
    for section in find_sections(card):
        pieces += [card[place : section.start], replace(section)]
        place = section.end
    return "".join([*pieces, card[place:]])


def stamp(body: str) -> str:
    """Add the digest to each section of newly generated text."""
    return replace_sections(body, lambda section: _section(section.name, section.text))


def update(
    previous: str | None,
    metadata: Mapping[str, Any],
    body: str,
    where: str,
    lasting: Collection[str] = (),
    *,
    pushed: bool | None = None,
) -> str:
    """Merge generated `metadata` and `body` into a `previous` card that a person may have edited.

    Sections that a person removed stay out. To a card that this library did not write (no section, another library),
    all sections are appended. Keys that are no longer in `metadata` are removed, unless they are `lasting`. `where`
    names the card in messages. For a push, `pushed` tells whether `previous` is the local card (True) or the Hub's
    (False).
    """
    body = stamp(body)
    if previous is None:
        return _join(metadata, {key: digest(value) for key, value in metadata.items()}, body)
    known, text, block = split(previous, where)
    records, written = _read_records(text), [] if pushed else _read_written(text)[:1]
    if pushed is False:
        written.append(_digest_of_written(known, records, text))
    text = WRITTEN.sub("", METADATA.sub("", text))
    last = {key: known[key] for key in lasting if key in known and key not in metadata}
    merged, records = _merge_metadata(known, {**metadata, **last}, records)
    sections = {section.name: body[section.start : section.end] for section in find_sections(body)}
    if find_sections(text) or known.get("library_name") in (LIBRARY, FORMER_LIBRARY):
        whole = text
        text = replace_sections(
            whole, lambda old: sections.get(old.name, "") if old.is_intact else whole[old.start : old.end]
        )
    else:
        text = "\n\n".join([text.rstrip("\n"), *sections.values()]).lstrip("\n")
    return _join(merged, records, text, block if merged == known else None, written)


def choose(ours: str, theirs: str, where: str) -> tuple[str, bool]:
    """Choose between two cards of one model, `ours` on disk and `theirs` on the Hub.

    Return the card that a person changed since ours was last pushed, and whether both were changed; theirs wins then.
    """
    (our_text, our_start), (their_text, their_start) = (_written(card, where) for card in (ours, theirs))
    if their_text in (*their_start[:1], our_text, *our_start):
        return ours, False
    return theirs, our_text not in (*our_start, *their_start)


def _written(card: str, where: str) -> tuple[str, list[str]]:
    """Return the digest of what a person wrote, and the digests recorded earlier."""
    known, text, _ = split(card, where)
    return _digest_of_written(known, _read_records(text), text), _read_written(text)


def _read_written(text: str) -> list[str]:
    found = WRITTEN.search(text)
    return found["digests"].split() if found else []


def _digest_of_written(metadata: Mapping[str, Any], records: Mapping[str, str], body: str) -> str:
    own = {key: value for key, value in metadata.items() if records.get(key) != digest(value)}
    removed = sorted(set(records) - set(metadata))
    body = WRITTEN.sub("", METADATA.sub("", body))
    text = replace_sections(body, lambda section: "" if section.is_intact else body[section.start : section.end])
    return digest([own, removed, text.split()])


def split(card: str, where: str) -> tuple[dict[str, Any], str, str | None]:
    """Return a card's metadata, its text, and the metadata block as written."""
    found = REGEX_YAML_BLOCK.search(card)
    if found is None:
        return {}, card, None
    if not found[2].strip():
        return {}, card[found.end() :], found[2]
    values = parse_yaml(found[2], f"{where}: the block of metadata at the top", ArtifactError)
    return values, card[found.end() :], found[2]


def digest(value: Any) -> str:
    """Return a short digest of a metadata value, or of a text without trailing spaces and surrounding blank lines."""
    if isinstance(value, str):
        value = "\n".join(line.rstrip() for line in value.strip().splitlines())
    text = json.dumps(_writable(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _section(name: str, text: str) -> str:
    return f"<!-- retex:{name} {digest(text)} -->\n{text}<!-- /retex:{name} -->"


def _writable(value: Any) -> Any:
    """Convert a YAML value to JSON: turn non-string keys, dates, bytes and sets into distinguishable strings."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else f"{type(key).__name__}:{brief(key)}": _writable(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(brief(item) for item in value)
    if isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        return hex(value)  # Python refuses to print thousands of decimal digits
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _merge_metadata(
    known: Mapping[str, Any], fresh: Mapping[str, Any], records: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Update values that are unchanged since they were generated; keep what a person set, changed or removed."""
    merged, kept = dict(known), dict(records)
    for key in [*fresh, *(key for key in records if key not in fresh)]:
        if key in records and (key not in known or digest(known[key]) != records[key]):
            continue  # changed or removed by a person
        if key not in fresh:
            del merged[key], kept[key]
        elif key not in records and isinstance(known.get(key), list) and isinstance(fresh[key], list):
            merged[key] = [*known[key], *(item for item in fresh[key] if item not in known[key])]
        elif key in records or key not in known:
            merged[key], kept[key] = fresh[key], digest(fresh[key])
    return merged, kept


def _read_records(text: str) -> dict[str, str]:
    found = METADATA.search(text)
    return dict(pair.split("=") for pair in found["records"].split() if pair.count("=") == 1) if found else {}


def _join(
    metadata: Mapping[str, Any],
    records: Mapping[str, str],
    body: str,
    block: str | None = None,
    written: Sequence[str] = (),
) -> str:
    written = " ".join(written or [_digest_of_written(metadata, records, body)])
    if block is None:  # only plain values are read, so only those are written
        block = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True).strip()
    comment = " ".join(f"{key}={value}" for key, value in records.items())
    comments = f"<!-- retex-metadata {comment} -->\n<!-- retex-written {written} -->\n"
    return f"---\n{block}\n---\n\n{body.strip(chr(10))}\n\n{comments}"
