"""A local Hub for tests: the real client talks to it over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_hub import LocalHub

WRITE, READ = "hf_writes", "hf_reads"


@contextmanager
def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: Mapping[str, str] | None = None
) -> Iterator[LocalHub]:
    """Serve a folder, and make it the Hub of this process. The person at the keyboard is not logged in."""
    with LocalHub(folder, tokens=tokens or {WRITE: "write", READ: "read"}) as hub:
        connect(hub.endpoint, monkeypatch, folder)
        yield hub


def connect(endpoint: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What `HF_ENDPOINT` does for a process that starts with it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
