"""Read the docstrings of the library as griffe wants them: doctests under `Examples:`, plain names in backquotes."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(\s*)Example:\s*$", re.MULTILINE)
NAME = re.compile(r"\[(`[^`]+`)\](?![\[(])")


class Docstrings(griffe.Extension):
    """Rewrite docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = NAME.sub(r"\1", text)
