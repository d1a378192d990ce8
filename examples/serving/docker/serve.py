"""Serve an exported artifact with vLLM: `python serve.py ARTIFACT`, with HOST, PORT and RETEX_API_KEY as settings."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from retex_hf.serving.vllm.launch import serve


@dataclass
class Options:
    """Where to listen, and the key that requests must carry."""

    host: str = os.environ.get("HOST", "127.0.0.1")
    port: int = int(os.environ.get("PORT", "8000"))
    api_key: str | None = os.environ.get("RETEX_API_KEY") or None


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), Options()))
