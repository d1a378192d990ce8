"""Rewrite links that leave docs/: on the site they lead to the repository, or are plain paths without one."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of one page; mkdocs calls this before it reads the page."""

    def rewrite(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        if path.startswith("docs/"):
            return link[0]
        if config.repo_url:
            return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{path}{link[3] or ''})"
        return f"{link[1]} (`{path}`)"

    return LINK.sub(rewrite, markdown)
