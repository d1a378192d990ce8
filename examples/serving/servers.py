"""Servers of an artifact in processes of their own: `retex serve`, and vLLM with the plugin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

# Environment in which vLLM starts on a small machine.
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "RETEX_VLLM_ARGS": "--enforce-eager --max-model-len 256",
}
LAUNCH = Path(__file__).resolve().parent / "docker" / "serve.py"
START_SECONDS = 3600.0


@dataclass
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def memory(self) -> int:
        """Return the bytes of the server's processes in memory; shared pages count once per process."""
        first = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in [first, *first.children(recursive=True)])


@contextmanager
def embedded(artifact: str | Path, *options: str) -> Iterator[Server]:
    """Serve an artifact with the embedded engine, on a free port."""
    command = [sys.executable, "-m", "retex_hf.cli", "serve", str(artifact), "--engine", "embedded", "--port", "0"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if found is None:
            sys.exit(f"{' '.join(command)} does not serve: run it by hand to see why.")
        yield Server(int(found[1]), process)
    finally:
        process.terminate()
        process.wait(120)


@contextmanager
def vllm(environment: Path, artifact: Path, log: Path, port: int, processes: int = 1) -> Iterator[Server]:
    """Run `vllm serve` on an exported artifact, with some API server processes; yield it once it answers."""
    command = [str(environment / "bin" / "python"), str(LAUNCH), str(artifact)]
    with log.open("w") as output:
        more = f"{SMALL['RETEX_VLLM_ARGS']} --api-server-count {processes}"
        settings = {**os.environ, **SMALL, "RETEX_VLLM_ARGS": more, "PORT": str(port)}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=settings, text=True)
    try:
        server, until = Server(port, process), time.monotonic() + START_SECONDS
        while not answers(f"{server.address}/health"):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"vLLM did not start: see {log}.")
            time.sleep(2)
        yield server
    finally:
        process.terminate()
        print(f"vLLM ended with code {process.wait(timeout=120)} after SIGTERM.")


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False
