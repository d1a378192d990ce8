"""Measure `retex serve`: requests per second and latency of concurrent clients with inputs of mixed tasks.

Every figure is a ratio within one run: routed requests against the merged model alone, and dynamic batching against one
request at a time, in interleaved rounds. Each answer is compared with that of `RetexModel` for the input alone. The
clients run on the same machine and take their share of its cores.

    python examples/serving/load.py my-retex --data snips=examples/data/text/snips --data ... --output load.json
    python examples/serving/load.py my-llm --inputs prompts.txt --max-tokens 16 --clients 1 8 32 128 --seconds 20
    python examples/serving/load.py my-retex --inputs texts.txt --soak 10      # ten minutes, with the server's memory
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from retex_hf import RetexModel
from retex_hf.data.datasets import load_inputs
from retex_hf.utils.tables import Table
from retex_hf.workflows.predictor import GENERATOR, Predictor, answer_kind, preprocessor_of

MODELS = ("auto", "merged")
SAMPLE_SECONDS = 5.0


@dataclass
class Server:
    """A running `retex serve`."""

    port: int
    process: subprocess.Popen[str]

    def memory(self) -> int:
        """Return the bytes of the process in memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096


@contextmanager
def serving(artifact: str, *options: str) -> Iterator[Server]:
    """Serve an artifact from a process of its own, on a free port."""
    command = [sys.executable, "-m", "retex_hf.cli", "serve", artifact, "--engine", "embedded", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if found is None:
            raise SystemExit(f"{' '.join(command)} does not serve: run it by hand to see why.")
        yield Server(int(found[1]), process)
    finally:
        process.terminate()
        process.wait(120)


@dataclass(frozen=True)
class Question:
    """A request and its right answer."""

    path: str
    body: bytes
    answer: str


@torch.no_grad()
def questions(model: RetexModel, texts: list[str], name: str, tokens: int) -> list[Question]:
    """Return a question per text to the model of this name, answered by `RetexModel` one by one."""
    preprocessor = preprocessor_of(model)
    if answer_kind(model, False) != GENERATOR:
        predictor = Predictor(model, preprocessor)
        found = []
        for text in texts:
            routed = predictor.predict([text])[0]
            answer = routed if name == "auto" else predictor.merged([text], [routed.task])[0]
            body = json.dumps({"model": name, "input": [text]}).encode()
            found.append(Question("/classify", body, f"{routed.task}: {answer.answer}"))
        return found
    return [_completion(model, preprocessor.tokenizer, text, name, tokens) for text in texts]


def _completion(model: RetexModel, tokenizer: Any, text: str, name: str, tokens: int) -> Question:
    inputs = tokenizer(text, return_tensors="pt")
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": tokens}
    if name == "merged":
        with model.disable_adapter():
            output = model.generate(**inputs, **options)
    else:
        output = model.generate(**inputs, **options)
    prompt = [] if model.config.is_encoder_decoder else inputs["input_ids"][0].tolist()
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + output[0, len(prompt) :].tolist(), skip_special_tokens=True)
    body = {"model": name, "prompt": text, "max_tokens": tokens, "temperature": 0}
    return Question("/v1/completions", json.dumps(body).encode(), whole[len(before) :])


def answer_of(body: bytes) -> str:
    """Return the answer of a response, in the form of `Question.answer`."""
    content = json.loads(body)
    if "choices" in content:
        return content["choices"][0]["text"]
    row = content["data"][0]
    return f"{row['retex']['task']}: {row['label']}"


@dataclass
class Round:
    """The outcome of some seconds of load."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0
    refused: int = 0
    lost: int = 0

    def summary(self) -> dict[str, float]:
        """Return the figures of the round."""
        cuts = statistics.quantiles(self.latencies, n=100) if len(self.latencies) > 1 else [0.0] * 99
        return {
            "requests": len(self.latencies),
            "per_second": len(self.latencies) / self.seconds,
            "median_ms": 1000 * cuts[49],
            "p99_ms": 1000 * cuts[98],
            "wrong": self.wrong,
            "refused": self.refused,
            "lost": self.lost,
        }


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Question) -> tuple[int, bytes]:
    """Send a request over an open connection and return status and body."""
    head = f"POST {question.path} HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(question.body)}\r\n\r\n".encode() + question.body)
    await writer.drain()
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def _client(port: int, asked: Iterator[Question], end: float, outcome: Round) -> None:
    """Ask one question after the other until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        question, begun = next(asked), time.perf_counter()
        try:
            status, body = await _ask(reader, writer, question)
        except (OSError, asyncio.IncompleteReadError):
            outcome.lost += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        if status == 429:
            outcome.refused += 1
        elif status != 200:
            outcome.lost += 1
        else:
            outcome.latencies.append(time.perf_counter() - begun)
            outcome.wrong += answer_of(body) != question.answer
    writer.close()


async def load(port: int, asked: list[Question], clients: int, seconds: float) -> Round:
    """Let clients ask for some seconds; requests that have begun are finished."""
    outcome, begun = Round(), time.perf_counter()
    shuffled = [random.Random(number).sample(asked, len(asked)) for number in range(clients)]
    await asyncio.gather(*(_client(port, itertools.cycle(own), begun + seconds, outcome) for own in shuffled))
    outcome.seconds = time.perf_counter() - begun
    return outcome


def compare(
    cases: dict[str, tuple[Server, list[Question]]], clients: int, seconds: float, repeats: int
) -> dict[str, Any]:
    """Measure cases in interleaved rounds; return their medians, and ratios to the last case by round."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, (server, asked) in cases.items():
            rounds[name].append(asyncio.run(load(server.port, asked, clients, seconds)).summary())
    first, *_, last = cases
    ratios = [a["per_second"] / b["per_second"] for a, b in zip(rounds[first], rounds[last], strict=True)]
    counts = ("requests", "wrong", "refused", "lost")
    summaries = {
        name: {
            key: sum(one[key] for one in of) if key in counts else statistics.median(one[key] for one in of)
            for key in of[0]
        }
        for name, of in rounds.items()
    }
    return {"clients": clients, **summaries, "ratio": statistics.median(ratios), "ratios": ratios}


def soak(server: Server, asked: list[Question], clients: int, minutes: float) -> dict[str, Any]:
    """Load a server for minutes; return the outcome and its memory over time."""

    async def run() -> tuple[Round, list[int]]:
        loading = asyncio.ensure_future(load(server.port, asked, clients, 60 * minutes))
        memory = []
        while not loading.done():
            memory.append(server.memory())
            await asyncio.wait({loading}, timeout=SAMPLE_SECONDS)
        return await loading, memory

    outcome, memory = asyncio.run(run())
    tenth = max(1, len(memory) // 10)
    return {
        "minutes": minutes, "clients": clients, **outcome.summary(),
        # The first tenth includes recovering the experts.
        "memory_mb_second_tenth": statistics.median(memory[tenth : 2 * tenth] or memory) / 1e6,
        "memory_mb_last_tenth": statistics.median(memory[-tenth:]) / 1e6,
        "memory_mb": [round(size / 1e6, 1) for size in memory],
    }  # fmt: skip


def rows_of(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of the table."""
    for result in results:
        for name, one in result.items():
            if isinstance(one, dict):
                ratio = (
                    f"{result['ratio']:.2f}"
                    if name == next(k for k, v in result.items() if isinstance(v, dict))
                    else ""
                )
                figures = [f"{one['per_second']:.1f}", f"{one['median_ms']:.1f}", f"{one['p99_ms']:.1f}"]
                counts = [f"{one[key]:.0f}" for key in ("requests", "wrong", "refused", "lost")]
                yield [str(result["clients"]), name, *figures, *counts, ratio]


def read_texts(options: argparse.Namespace) -> list[str]:
    """Return the inputs, of all tasks in turn."""
    texts = [line for path in options.inputs for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    columns = []
    for pair in options.data:
        task, _, source = pair.partition("=")
        inputs = [one for one in load_inputs(task, source) if isinstance(one, str)]
        columns.append(random.Random(0).sample(inputs, min(options.rows, len(inputs))))
    texts += [text for row in itertools.zip_longest(*columns) for text in row if text is not None]
    if not texts:
        raise SystemExit("Give inputs: --inputs FILE, or --data TASK=PATH.")
    return texts[: options.rows]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--inputs", action="append", default=[], help="text files, one input per line")
    parser.add_argument("--data", action="append", default=[], help="TASK=PATH, as for retex sign")
    parser.add_argument("--rows", type=int, default=200, help="different inputs")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each case, interleaved")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer, for models that generate")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of load with 32 clients, instead of the table")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    return parser.parse_args()


def main() -> None:
    """Run the measurements that the command line asks for."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with this process
    texts, model = read_texts(options), RetexModel.from_pretrained(options.artifact)
    asked = {name: questions(model, texts, name, options.max_tokens) for name in MODELS}
    results: dict[str, Any] = {"artifact": options.artifact, "inputs": len(texts), "threads": torch.get_num_threads()}
    with serving(options.artifact) as server:
        for name in MODELS:  # experts are recovered, and calls probed
            asyncio.run(load(server.port, asked[name], 8, 2.0))
        if options.soak:
            results["soak"] = soak(server, asked["auto"], 32, options.soak)
            print(json.dumps({key: value for key, value in results["soak"].items() if key != "memory_mb"}, indent=2))
        else:
            with serving(options.artifact, "--max-batch", "1", "--max-wait-ms", "0") as alone:
                asyncio.run(load(alone.port, asked["auto"], 8, 2.0))
                routed = {"routed": (server, asked["auto"]), "merged": (server, asked["merged"])}
                batched = {"batched": (server, asked["auto"]), "one by one": (alone, asked["auto"])}
                rest = options.seconds, options.repeats
                results["routed"] = [compare(routed, count, *rest) for count in options.clients]
                results["batching"] = [compare(batched, count, *rest) for count in options.clients if count > 1]
            heading = [
                "clients",
                "case",
                "requests/s",
                "median ms",
                "p99 ms",
                "requests",
                "wrong",
                "refused",
                "lost",
                "ratio",
            ]
            print(Table(heading, list(rows_of(results["routed"] + results["batching"])), words=[1]).text())
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
