"""`retex serve` as a process: from the command to an answer, SIGHUP, SIGTERM in the middle of a stream, and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served_models import llama

from retex_hf import ConfigError
from retex_hf.cli import main
from retex_hf.serving import launch
from retex_hf.serving.options import ServeOptions
from retex_hf.serving.vllm import launch as vllm_launch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


class Process:
    """A running `retex serve`."""

    def __init__(self, artifact: Path, log: Path) -> None:
        command = [sys.executable, "-m", "retex_hf.cli", "serve", str(artifact), "--port", "0", "--max-wait-ms", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RETEX_API_KEY": "of-the-environment"}
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True)
        line = self.process.stdout.readline()
        found = re.fullmatch(
            r"Serving (.+) at (http://127\.0\.0\.1:\d+) \(models: auto, merged, red, green, blue\)\n", line
        )
        assert found, (line, log.read_text())
        assert found[1] == str(artifact)
        headers = {"authorization": "Bearer of-the-environment"}
        self.http = httpx.Client(base_url=found[2], timeout=60, headers=headers, trust_env=False)

    def log(self) -> list[dict]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def logged(self, event: str) -> bool:
        return any(entry["event"] == event for entry in self.log())


@pytest.fixture(scope="module")
def process(artifact, tmp_path_factory) -> Iterator[Process]:
    running = Process(artifact, tmp_path_factory.mktemp("log") / "log")
    yield running
    running.http.close()
    running.process.kill()
    running.process.wait()


def wait_for(process: Process, event: str) -> None:
    end = time.monotonic() + 60
    while not process.logged(event):
        assert time.monotonic() < end, process.log()
        time.sleep(0.02)


def test_from_the_command_to_the_end(process):
    assert httpx.get(f"{process.http.base_url}/v1/models", trust_env=False).status_code == 401
    body = {"prompt": "rose ruby", "max_tokens": 40, "temperature": 2, "seed": 3}
    wanted = process.http.post("/v1/completions", json=body).json()["choices"][0]
    process.process.send_signal(signal.SIGHUP)
    wait_for(process, "reloaded")
    received: list[str] = []
    with process.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line and not received:  # the text has begun
                process.process.send_signal(signal.SIGTERM)
            if line:
                received.append(line)
    assert received[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: "))["choices"][0] for line in received[:-1]]
    assert "".join(event["text"] for event in events) == wanted["text"]
    assert process.process.wait(60) == 0
    assert [entry["event"] for entry in process.log() if entry["event"] != "request"] == [
        "engine", "serving", "reloaded", "shutting down", "stopped",
    ]  # fmt: skip
    assert process.log()[0]["engine"] == "embedded" and "vllm is not installed" in process.log()[0]["reason"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{process.http.base_url}/health", trust_env=False)


def test_wrong_commands_say_one_sentence(artifact, capsys):
    for arguments, says in (
        (["--engine", "vllm"], "The engine vllm cannot be used: vllm is not installed."),
        (["--port", "99999"], "--port must be from 0 to 65535, not 99999."),
        (["--max-length", "8"], "--max-length is for models that classify or embed; prompts are not truncated."),
    ):
        assert main(["serve", str(artifact), *arguments]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert says in said, said


def test_a_port_that_is_taken_says_one_sentence(artifact, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(artifact), "--engine", "embedded", "--port", str(port)]) == 2
    assert f"--port {port} cannot be listened on" in capsys.readouterr().err


@pytest.fixture
def with_vllm(monkeypatch):
    """Pretend that vLLM is installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "vllm" else found(name))


def test_the_engine_is_vllm_where_it_can_be(monkeypatch, with_vllm, tmp_path):
    asked = []
    monkeypatch.setattr(vllm_launch, "why_not", lambda artifact: None)
    monkeypatch.setattr(vllm_launch, "serve", lambda artifact, options: asked.append((artifact, options)) or 7)
    options = ServeOptions()
    assert launch.serve(str(tmp_path), options) == 7
    assert launch.serve(str(tmp_path), options, "vllm") == 7
    assert asked == [(tmp_path, options)] * 2
    with pytest.raises(ConfigError, match="--max-batch must be above 0"):
        launch.serve(str(tmp_path), ServeOptions(max_batch=0))


def test_what_vllm_cannot_do_is_left_to_the_embedded_engine(with_vllm, artifact, tmp_path):
    """With `--engine vllm` the same sentence is the error; no setting is ignored."""
    assert "export" in launch.why_not_vllm(str(artifact), ServeOptions())  # it has not been exported
    assert "is no folder" in launch.why_not_vllm("org/some-model", ServeOptions())
    said = launch.why_not_vllm(str(artifact), ServeOptions(max_batch=8))
    assert said == "--max-batch is a setting of the embedded engine; vLLM takes its own from RETEX_VLLM_ARGS."
    with pytest.raises(ConfigError, match="The engine vllm cannot be used: --pooling is a setting"):
        launch.serve(str(artifact), ServeOptions(pooling="last"), "vllm")
