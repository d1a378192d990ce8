"""Choice of the engine that serves an artifact."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, RetexError
from .options import ServeOptions

Choice = Literal["auto", "embedded", "vllm"]
VLLM = "retex_hf.serving.vllm.launch"


def serve(artifact: str, options: ServeOptions, engine: Choice = "auto") -> int:
    """Serve an artifact until the process is told to stop; return the exit code."""
    options.check()
    missing = _missing_for_vllm()
    if engine == "vllm" and missing is not None:
        raise ConfigError(f"The engine vllm cannot be used: {missing}.")
    if engine == "vllm" or (engine == "auto" and missing is None):
        return _vllm(artifact, options)
    try:
        from .logs import log, log_to_stderr
        from .server import serve as serve_embedded
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "prometheus_client"):
            raise
        raise RetexError('The endpoint needs uvicorn and prometheus_client: pip install "retex-hf[serve]".') from error
    log_to_stderr()
    if engine == "auto":
        log("engine", engine="embedded", reason=missing)
    return serve_embedded(artifact, options)


def _missing_for_vllm() -> str | None:
    """Return why vLLM cannot serve here, or None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if _spec(VLLM) is None:
        return "this version of retex_hf has no plugin for it"
    return None


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a package around it
        return None


def _vllm(artifact: str, options: ServeOptions) -> int:
    module = importlib.import_module(VLLM)
    return module.serve(Path(artifact), options)
