"""Texts of strangers on a terminal: shown, and never obeyed."""

from __future__ import annotations

import json
import re
from typing import Any

# C0 and C1 controls (which begin escape sequences), line and paragraph separators, marks that turn the direction of
# writing, and halves of characters, which cannot be encoded.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, keep: str = "") -> str:
    r"""A text with its control characters written out; those in `keep` stay.

    >>> from retex_hf.utils.terminal import visible
    >>> visible("news\x1b[2J")
    'news\\x1b[2J'
    """
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def say(text: Any, **options: Any) -> None:
    """Print a text of several lines, of which nothing is obeyed by the terminal."""
    print(visible(str(text), keep="\n\t"), **options)


def as_json(value: Any, indent: int | None = None) -> str:
    r"""JSON with all letters as they are, and all control characters written out.

    >>> from retex_hf.utils.terminal import as_json
    >>> as_json({"naïve": "\x9b2J"})
    '{"naïve": "\\u009b2J"}'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)
