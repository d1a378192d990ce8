"""Code blocks of the documents, and the comments that say how to run them.

`<!-- setup: name -->` before a block names a function of `doc_setups` that prepares the folder and the names it uses;
`<!-- not run: reason -->` exempts a block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMENT = re.compile(r"<!-- (setup|not run):(.*?)-->")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it opens, its language and text, its setup, and why it is not run."""

    page: str
    line: int
    language: str
    text: str
    setup: str | None = None
    not_run: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order. A comment belongs to the block on the next line."""
    lines, found, noted, start = page.read_text(encoding="utf-8").splitlines(), [], {}, None
    name = page.relative_to(ROOT).as_posix()
    for number, line in enumerate(lines, start=1):
        if start is None and line.startswith("```"):
            start = number
        elif start is not None and line.rstrip() == "```":
            text = "\n".join(lines[start : number - 1]) + "\n"
            language = lines[start - 1][3:].strip()
            found.append(Block(name, start, language, text, noted.get("setup"), noted.get("not run")))
            start, noted = None, {}
        elif start is None and (comment := COMMENT.fullmatch(line)):
            noted[comment[1]] = comment[2].strip()
        elif start is None:
            assert not noted, f"{name}:{number}: a comment for a block, and no block after it"
    assert start is None and not noted, f"{name}: an open block or a comment without a block"
    return found


def shell_lines(text: str) -> list[str]:
    """Return the commands of a bash block, without comments and with continued lines joined."""
    lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
