"""Choice of the engine that serves an artifact."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Literal

from ..errors import ConfigError, RetexError
from .options import ServeOptions, flag_of

Choice = Literal["auto", "embedded", "vllm"]


def serve(artifact: str, options: ServeOptions, engine: Choice = "auto") -> int:
    """Serve an artifact until the process is told to stop; return the exit code."""
    options.check()
    reason = None if engine == "embedded" else why_not_vllm(artifact, options)
    if engine == "vllm" and reason is not None:
        raise ConfigError(f"The engine vllm cannot be used: {reason}")
    if engine != "embedded" and reason is None:
        from .vllm import launch

        return launch.serve(Path(artifact), options)
    try:
        from .logs import log, log_to_stderr
        from .server import serve as serve_embedded
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "prometheus_client"):
            raise
        raise RetexError('The endpoint needs uvicorn and prometheus_client: pip install "retex-hf[serve]".') from error
    log_to_stderr()
    if engine == "auto":
        log("engine", engine="embedded", reason=reason)
    return serve_embedded(artifact, options)


def why_not_vllm(artifact: str, options: ServeOptions) -> str | None:
    """Return why vLLM cannot serve an artifact with these options, in a sentence; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed."
    defaults, taken = ServeOptions(), ("host", "port", "api_key")
    own = [field.name for field in fields(ServeOptions) if field.name not in taken]
    changed = [name for name in own if getattr(options, name) != getattr(defaults, name)]
    changed += [name for name, value in options.model_options.items() if value is not None]
    if changed:
        return f"{flag_of(changed[0])} is a setting of the embedded engine; vLLM takes its own from RETEX_VLLM_ARGS."
    if not Path(artifact).is_dir():
        return f"{artifact!r} is no folder: download and export it first (retex export --all --for vllm)."
    from .vllm import launch

    return launch.why_not(Path(artifact))
