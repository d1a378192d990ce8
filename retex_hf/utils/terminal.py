"""Safe terminal output: control characters in untrusted text are escaped, so that the terminal never acts on them."""

from __future__ import annotations

import json
import re
from typing import Any

# C0 and C1 controls (which begin escape sequences), line and paragraph separators, bidirectional controls, and lone
# surrogates, which cannot be encoded.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, keep: str = "") -> str:
    r"""Return a text with its control characters escaped, except those in `keep`.

    >>> from retex_hf.utils.terminal import visible
    >>> visible("news\x1b[2J")
    'news\\x1b[2J'
    """
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def say(text: Any, **options: Any) -> None:
    """Print a text of one or more lines with its control characters escaped."""
    print(visible(str(text), keep="\n\t"), **options)


def as_json(value: Any, indent: int | None = None) -> str:
    r"""Return a value as JSON, with letters beyond ASCII as they are and control characters escaped.

    >>> from retex_hf.utils.terminal import as_json
    >>> as_json({"naïve": "\x9b2J"})
    '{"naïve": "\\u009b2J"}'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)
