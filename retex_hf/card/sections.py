"""A card that a program and a person both write: what was generated is known by its digest, all else is the person's.

A generated section stands between `<!-- retex:usage 3fa9c1d2 -->` and `<!-- /retex:usage -->`; the number is a digest
of its text. As long as the text matches it, an update replaces the section. Edited, it is the person's, and so is all
text outside sections. The same holds for the metadata at the top: the digests of generated values are in a comment.
Another comment holds the digest of all that is the person's, as it was when the card was made or pushed; and, where
a push found that changed on the Hub and kept it, the digest of that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import yaml_dump

from ..errors import ArtifactError
from ..reading import parse_yaml

SECTION = re.compile(
    r"^<!-- retex:(?P<name>\w+)(?: (?P<digest>\w+))? -->\n(?P<text>.*?)^<!-- /retex:(?P=name) -->$",
    re.MULTILINE | re.DOTALL,
)
METADATA = re.compile(r"\n?^<!-- retex-metadata(?P<records>[^>]*) -->\n?", re.MULTILINE)
WRITTEN = re.compile(r"\n?^<!-- retex-written (?P<digests>[\w ]+) -->\n?", re.MULTILINE)
LIBRARY = "retex_hf"


def stamp(body: str) -> str:
    """Give each section of freshly generated text its digest."""
    return SECTION.sub(lambda found: _section(found["name"], found["text"]), body)


def update(
    previous: str | None,
    metadata: Mapping[str, Any],
    body: str,
    where: str,
    lasting: Collection[str] = (),
    *,
    pushed: bool | None = None,
) -> str:
    """The whole card: generated `metadata` and `body`, brought into what a person made of the `previous` card.

    Sections that a person took out stay out. A card that never was ours (no section, another library) gets all sections
    behind its own text. `where` names the card in messages. Keys that are not in `metadata` any more are taken out,
    unless they are among the `lasting` ones. `pushed`: whether `previous`, which goes to the
    Hub with this, comes from here, and not from the Hub itself.
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
    sections = {found["name"]: found[0] for found in SECTION.finditer(body)}
    if SECTION.search(text) or known.get("library_name") == LIBRARY:
        text = SECTION.sub(lambda found: sections.get(found["name"], "") if _is_intact(found) else found[0], text)
    else:
        text = "\n\n".join([text.rstrip("\n"), *sections.values()]).lstrip("\n")
    return _join(merged, records, text, block if merged == known else None, written)


def choose(ours: str, theirs: str, where: str) -> tuple[str, bool]:
    """Of two cards of one model, `ours` on disk and `theirs` on the Hub: the one that a person changed since ours was
    last pushed, and whether both were changed; then it is theirs."""
    (our_text, our_start), (their_text, their_start) = (_written(card, where) for card in (ours, theirs))
    if their_text in (*their_start[:1], our_text, *our_start):
        return ours, False
    return theirs, our_text not in (*our_start, *their_start)


def _written(card: str, where: str) -> tuple[str, list[str]]:
    """Digests of what a person wrote: as it is, and as it was."""
    known, text, _ = split(card, where)
    return _digest_of_written(known, _read_records(text), text), _read_written(text)


def _read_written(text: str) -> list[str]:
    found = WRITTEN.search(text)
    return found["digests"].split() if found else []


def _digest_of_written(metadata: Mapping[str, Any], records: Mapping[str, str], body: str) -> str:
    own = {key: value for key, value in metadata.items() if records.get(key) != digest(value)}
    removed = sorted(set(records) - set(metadata))
    text = SECTION.sub(lambda found: "" if _is_intact(found) else found[0], WRITTEN.sub("", METADATA.sub("", body)))
    return digest([own, removed, text.split()])


def split(card: str, where: str) -> tuple[dict[str, Any], str, str | None]:
    """A card's metadata, its text, and the metadata as they are written."""
    found = REGEX_YAML_BLOCK.search(card)
    if found is None:
        return {}, card, None
    if not found[2].strip():
        return {}, card[found.end() :], found[2]
    values = parse_yaml(found[2], f"{where}: the block of metadata at the top", ArtifactError)
    return values, card[found.end() :], found[2]


def digest(value: Any) -> str:
    """A short digest of a section's text (line ends and blank lines around it do not count) or of a metadata value."""
    if isinstance(value, str):
        value = "\n".join(line.rstrip() for line in value.strip().splitlines())
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _section(name: str, text: str) -> str:
    return f"<!-- retex:{name} {digest(text)} -->\n{text}<!-- /retex:{name} -->"


def _is_intact(found: re.Match[str]) -> bool:
    return digest(found["text"]) == found["digest"]


def _merge_metadata(
    known: Mapping[str, Any], fresh: Mapping[str, Any], records: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values that still are as generated are brought up to date; what a person set, changed or removed stays so."""
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
    block = yaml_dump(dict(metadata), sort_keys=False).strip() if block is None else block
    comment = " ".join(f"{key}={value}" for key, value in records.items())
    comments = f"<!-- retex-metadata {comment} -->\n<!-- retex-written {written} -->\n"
    return f"---\n{block}\n---\n\n{body.strip(chr(10))}\n\n{comments}"
