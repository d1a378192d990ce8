"""Measure an endpoint: requests per second and latency of concurrent clients with inputs of mixed tasks.

Every figure is a ratio within one run: routed requests against the merged model alone on the same server, and dynamic
batching against one request at a time, in interleaved rounds. Each answer is compared with that of `RetexModel` for the
input alone. The clients run on the same machine and take their share of its cores.

    python examples/serving/load.py my-retex --data snips=examples/data/text/snips --data ... --output load.json
    python examples/serving/load.py my-llm --inputs prompts.txt --max-tokens 16 --clients 1 8 32 128 --seconds 20
    python examples/serving/load.py my-llm --inputs prompts.txt --vllm my-vllm-env     # vLLM, see docs/serve-vllm.md
    python examples/serving/load.py my-retex --inputs texts.txt --soak 10      # ten minutes, with the server's memory

`--output` keeps what the file has of other forms, so that table and soak are one file; a Markdown file beside it has
the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from clients import Question, Round, load, questions
from servers import Server, embedded, vllm

from retex_hf import RetexModel
from retex_hf.data.datasets import load_inputs
from retex_hf.utils.tables import Table

MODELS = ("auto", "merged")
COUNTS = ("requests", "wrong", "refused", "lost")
SAMPLE_SECONDS, SOAK_CLIENTS = 5.0, 32
MEGABYTE = 1e6


def compare(
    cases: dict[str, tuple[Server, list[Question]]], clients: int, seconds: float, repeats: int
) -> dict[str, Any]:
    """Measure two cases in interleaved rounds; return their medians, and the ratios of the rounds."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, (server, asked) in cases.items():
            rounds[name].append(asyncio.run(load(server.port, asked, clients, seconds)).summary())
    summaries = {
        name: {
            key: sum(one[key] for one in of) if key in COUNTS else statistics.median(one[key] for one in of)
            for key in of[0]
        }
        for name, of in rounds.items()
    }
    ratios = [one["per_second"] / other["per_second"] for one, other in zip(*rounds.values(), strict=True)]
    found = {"clients": clients, "cases": summaries, "ratio": statistics.median(ratios), "ratios": ratios}
    print(" ".join(cells(found)), flush=True)
    return found


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
        "memory_mb_second_tenth": statistics.median(memory[tenth : 2 * tenth] or memory) / MEGABYTE,
        "memory_mb_last_tenth": statistics.median(memory[-tenth:]) / MEGABYTE,
        "memory_mb": [round(size / MEGABYTE, 1) for size in memory],
    }  # fmt: skip


# ---- tables ----------------------------------------------------------------------------------------------------------


def cells(found: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    first, second = found["cases"].values()
    figures = [f"{first['per_second']:.1f}", f"{first['median_ms']:.0f}", f"{first['p99_ms']:.0f}"]
    ratio = f"{found['ratio']:.2f} ({min(found['ratios']):.2f} to {max(found['ratios']):.2f})"
    counts = [f"{first[key] + second[key]:.0f}" for key in COUNTS]
    return [str(found["clients"]), *figures, f"{second['per_second']:.1f}", ratio, *counts]


def table(found: list[dict[str, Any]]) -> Table:
    """Return the table of a comparison."""
    first, second = found[0]["cases"]
    header = ["clients", f"{first}: requests/s", "median ms", "p99 ms", f"{second}: requests/s", "ratio", *COUNTS]
    return Table(header, [cells(one) for one in found])


def soak_line(found: dict[str, Any]) -> str:
    """Return what became of a soak."""
    counts = ", ".join(f"{found[key]:,} {key}" for key in COUNTS)
    early, late = (found[f"memory_mb_{tenth}_tenth"] for tenth in ("second", "last"))
    memory = f"memory {early:.0f} MB in the second tenth, {late:.0f} MB in the last"
    return f"{found['minutes']:g} minutes, {found['clients']} clients: {counts}; {memory}."


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of the results."""
    parts = [table(results[name]).markdown() for name in ("routed", "batching") if results.get(name)]
    parts += [soak_line(results["soak"])] if "soak" in results else []
    return "\n\n".join(parts) + "\n"


# ---- the command -----------------------------------------------------------------------------------------------------


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
    parser.add_argument(
        "--vllm", type=Path, help="an environment of vllm_env.sh: measure vLLM instead of `retex serve`"
    )
    parser.add_argument("--port", type=int, default=8332, help="of vLLM")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    return parser.parse_args()


def measure(options: argparse.Namespace, asked: dict[str, list[Question]]) -> dict[str, Any]:
    """Start what is measured, and measure it."""
    with ExitStack() as stack:

        def start(*settings: str) -> Server:
            if options.vllm is None:
                server = stack.enter_context(embedded(options.artifact, *settings))
            else:
                log = Path(options.artifact).with_suffix(".load.log")
                server = stack.enter_context(vllm(options.vllm, Path(options.artifact), log, options.port))
            for name in MODELS:  # experts are recovered, and calls probed
                asyncio.run(load(server.port, asked[name], 8, 2.0))
            return server

        server, rest = start(), (options.seconds, options.repeats)
        if options.soak:
            return {"soak": soak(server, asked["auto"], SOAK_CLIENTS, options.soak)}
        routed = {"routed": (server, asked["auto"]), "merged": (server, asked["merged"])}
        found = {"routed": [compare(routed, count, *rest) for count in options.clients]}
        if options.vllm is None:
            alone = start("--max-batch", "1", "--max-wait-ms", "0")
            batched = {"batched": (server, asked["auto"]), "one by one": (alone, asked["auto"])}
            found["batching"] = [compare(batched, count, *rest) for count in options.clients if count > 1]
        return found


def main() -> None:
    """Run the measurements that the command line asks for."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with this process
    texts, model = read_texts(options), RetexModel.from_pretrained(options.artifact)
    asked = {name: questions(model, texts, name, options.max_tokens) for name in MODELS}
    results = {
        "artifact": Path(options.artifact).name,
        "engine": "embedded" if options.vllm is None else "vllm",
        "inputs": len(texts),
        "max_tokens": options.max_tokens,
        "threads": torch.get_num_threads(),
        **measure(options, asked),
    }
    print(markdown(results))
    if options.output is not None:
        before = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {}
        options.output.write_text(json.dumps({**before, **results}, indent=2) + "\n", "utf-8")
        options.output.with_suffix(".md").write_text(markdown({**before, **results}), "utf-8")


if __name__ == "__main__":
    main()
