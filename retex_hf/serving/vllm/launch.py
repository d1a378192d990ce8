"""Start of `vllm serve` on an exported artifact."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Protocol

from ...artifact.export_files import MERGED
from ...errors import RetexError
from .exported import Exported, read_exported
from .plugin import RetexPlugin

# Slots for adapters, which vLLM keeps in the memory of the device; more adapters take turns.
MOST_SLOTS = 16
# Further arguments of `vllm serve`, as a shell would read them.
MORE_ARGUMENTS = "RETEX_VLLM_ARGS"
# Plugins that vLLM loads unless VLLM_PLUGINS names others.
LOADED_BY_DEFAULT = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
FORWARDED = (signal.SIGTERM, signal.SIGINT)


class Endpoint(Protocol):
    """The settings of an endpoint that vLLM is told."""

    host: str
    port: int
    api_key: str | None


def why_not(artifact: Path) -> str | None:
    """Return why vLLM cannot serve an artifact, or None if it can."""
    try:
        read_exported(artifact)
    except RetexError as error:
        return str(error)
    return None


def serve(artifact: Path, options: Endpoint) -> int:
    """Run `vllm serve` on an exported artifact until it ends; return its exit code. Signals are passed on to it."""
    exported = read_exported(artifact)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments(exported, options)]
    command += shlex.split(os.environ.get(MORE_ARGUMENTS, ""))
    process = subprocess.Popen(command, env=environment(options, os.environ))

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def arguments(exported: Exported, options: Endpoint) -> list[str]:
    """Return the arguments of `vllm` for an artifact.

    vLLM would run float32 weights in bfloat16, so it is told the artifact's own dtype.
    """
    tasks = len(exported.tasks)
    modules = [
        json.dumps({"name": task, "path": str(folder), "base_model_name": MERGED})
        for task, folder in exported.adapters.items()
    ]
    flags = ["serve", str(exported.folder), "--host", options.host, "--port", str(options.port)]
    flags += ["--served-model-name", MERGED, "--dtype", exported.dtype, "--enable-lora"]
    flags += ["--max-lora-rank", str(exported.max_rank)]
    # One slot stays empty: see `check_slots` in plugin.py.
    flags += ["--max-loras", str(min(tasks + 1, MOST_SLOTS)), "--max-cpu-loras", str(tasks + 1)]
    if exported.max_labels is not None:
        flags += ["--max-lora-cls-labels", str(exported.max_labels)]
    return [*flags, "--lora-modules", *modules]


def environment(options: Endpoint, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of `vllm`: the plugin besides those it would load, and the key out of the arguments."""
    if "VLLM_PLUGINS" in given:
        named = [name for name in given["VLLM_PLUGINS"].split(",") if name]
    else:
        named = sorted({point.name for group in LOADED_BY_DEFAULT for point in entry_points(group=group)})
    plugins = ",".join(dict.fromkeys([*named, RetexPlugin.name]))
    key = {} if options.api_key is None else {"VLLM_API_KEY": options.api_key}
    return {**given, "VLLM_PLUGINS": plugins, **key}
