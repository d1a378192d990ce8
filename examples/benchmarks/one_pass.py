"""What a row costs in one pass over the static merged model, by rank and number of tasks.

    python examples/benchmarks/one_pass.py                # --repeats 7 --threads 2

The tasks of the rows are named, so that nothing is identified. *One pass* adds each row's own factors to the merged
weights of all rows; *group by group* runs every task's rows on its recovered expert, which is cached. Weights are
random, in real shapes: time does not depend on them. All variants alternate in one process; the table has the median of
the ratios to the static pass of the same round, and their quartiles. Run it on an idle machine. Writes `--out`, and
beside it `.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import quiet
from experiment import markdown_table
from routing_cost import CACHE, SHAPES, Shape, call, ratio, rounds, timing_parser
from synthetic import retex_model, task_names

RANKS, TASKS = (16, 32, 64), (4, 8, 16)
MODELS = ("MiniLM-L6", "T5-small")
COLUMNS = ["model", "rank", "tasks", "one pass over static", "group by group over static"]


def measure(shape: Shape, rank: int, repeats: int) -> dict[str, list[float]]:
    """Return the ratios of one pass and of groups to the static merged model, round by round."""
    torch.manual_seed(0)
    model = shape.make().eval().requires_grad_(False)
    tasks = task_names(shape.tasks)
    retex = retex_model(model, tasks, rank, recovered=shape.recovered)
    retex.expert_cache = CACHE
    batch = shape.batch()
    named = [tasks[row % shape.tasks] for row in range(shape.rows)]

    def run(execution: str) -> Any:
        retex.execution = execution
        return call(retex, shape.call, {**batch, "task": named})

    calls: dict[str, Callable[[], Any]] = {"static": lambda: call(retex.get_base_model(), shape.call, batch)}
    calls |= {name: lambda name=name: run(name) for name in ("mixed", "grouped")}
    times = rounds(calls, repeats)
    static = times.pop("static")
    return {name: [own / one for own, one in zip(found, static, strict=True)] for name, found in times.items()}


def main() -> None:
    arguments = timing_parser(__doc__, Path("one_pass.json")).parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    chosen = {name: shape for name, shape in SHAPES.items() if name.startswith(MODELS) and arguments.only in name}
    plan = [(name, rank, tasks) for name in chosen for rank in RANKS for tasks in TASKS]
    found: list[dict[str, Any]] = []
    for name, rank, tasks in tqdm(plan, unit="cell"):
        shape = replace(chosen[name], tasks=tasks)
        ratios = measure(shape, rank, arguments.repeats)
        found.append({"model": name.split(",")[0], "rank": rank, "tasks": tasks, "rows": shape.rows, **ratios})
        results = {"threads": arguments.threads, "repeats": arguments.repeats, "cells": found}
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        arguments.out.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    print("\n" + markdown(found))


def markdown(cells: list[dict[str, Any]]) -> str:
    """Format the medians of the ratios, with their quartiles."""
    rows = [
        [*(one[key] for key in ("model", "rank", "tasks")), ratio(one["mixed"]), ratio(one["grouped"])] for one in cells
    ]
    return markdown_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
