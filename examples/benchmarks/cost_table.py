"""Time and memory of every system, relative to one static merged model.

    python examples/benchmarks/cost_table.py --recipe examples/recipes/experiments/shipped-text.yaml
    python examples/benchmarks/cost_table.py --recipe examples/recipes/experiments/vision8.yaml --threads 2 --repeats 9

Writes `cost_table.json`, `.md` and `.png` into the work dir. Every system alternates with the static model on the same
mixed batches. The cost of a router does not depend on its training, so routers are hardly trained here; static merges
all cost the same, so there is one of them. Figures depend on the machine; each system is a cell, stored when it is
finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiment import RETEX, MethodSpec, Study, load, markdown_table, parse, run, run_cells, write
from matplotlib.figure import Figure

from retex_hf.artifact.plots import COLOURS
from retex_hf.baselines import expert_weights
from retex_hf.baselines.merges import source_body
from retex_hf.evaluation.cost import StaticModel, measure_cost
from retex_hf.evaluation.run import MODES

METHODS: list[dict[str, dict[str, Any]]] = [
    {"individual": {}},
    {"merged": {"merge": "average", "label": "average"}},
    {"emr": {"label": "EMR"}},
    {"id_emr": {"label": "ID-EMR"}},
    {"id_lora": {"label": "ID-LoRA (SVD)"}},
    {"twin_merging": {"epochs": 1, "label": "Twin-Merging"}},
    {"dawin": {"label": "DaWin"}},
    {"wemoe": {"steps": 1, "label": "WEMoE"}},
    {"mow": {"epochs": 1, "static_steps": 1, "label": "MoW"}},
    {"sim": {"label": "SiM"}},
    {RETEX: {"label": RETEX}},
]


def measure(spec: MethodSpec, study: Study, batches: int, repeats: int) -> list[dict[str, Any]]:
    """Return the costs of one method in the modes it has, after those of the static model that ran beside it."""
    weights = expert_weights(study.material)
    static = StaticModel(weights.module(source_body(weights, "average"), study.tasks[0]), study.material.readout)
    method = spec.make()
    method.fit(study.material)
    return measure_cost(
        [method],
        study.tests,
        study.material.collate,
        static,
        batch_size=study.recipe.batch_size,
        batches=batches,
        repeats=repeats,
        seed=study.material.seed,
        progress=False,
    ).as_dict()["costs"]


def table(costs: Sequence[dict[str, Any]], batch_size: int, threads: int) -> str:
    """Format a table with one line per system and mode."""
    columns = ["system", "mode", "ms per batch", "latency", "held (MB)", "added (MB)", "memory"]
    rows = [
        [
            cost["method"],
            MODES[cost["mode"]],
            f"{cost['milliseconds']:.1f}",
            f"{cost['latency_ratio']:.2f}x",
            f"{cost['held_bytes'] / 1e6:.1f}",
            f"{cost['added_bytes'] / 1e6:.1f}",
            f"{cost['memory_ratio']:.2f}x",
        ]
        for cost in costs
    ]
    return (
        f"# Costs\n\nBatches of {batch_size} rows of all tasks, {threads} threads. Latency and memory relative to one "
        "static merged model that answered the same batches in turn. Held: tensors kept to answer; added: peak on top "
        f"of them while answering.\n\n{markdown_table(columns, rows)}"
    )


def figure(costs: Sequence[dict[str, Any]]) -> Figure:
    """Plot bars of latency and memory relative to the static model, task known and unknown side by side."""
    names = list(dict.fromkeys(cost["method"] for cost in costs))
    drawn = Figure(figsize=(10, 0.6 + 0.36 * len(names)), layout="constrained")
    panels = {"latency": "latency_ratio", "memory": "memory_ratio"}
    for axes, (title, key) in zip(drawn.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for place, mode in enumerate(("known", "unknown")):
            bars = {names.index(cost["method"]): cost[key] for cost in costs if cost["mode"] == mode}
            heights = [row + 0.4 * place - 0.2 for row in bars]
            axes.barh(heights, list(bars.values()), 0.4, color=COLOURS[place], label=MODES[mode])
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel(f"{title}, relative to the static model")
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return drawn


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        "shipped-text.yaml",
        batches={"type": int, "default": 4, "help": "how many batches"},
        repeats={"type": int, "default": 5, "help": "how often each batch is timed"},
    )
    work, settings = arguments.work_dir, (arguments.batches, arguments.repeats)
    study = load(recipe, work, mirror=arguments.mirror)
    specs = {f"cost of {spec.label}": spec for spec in study.methods(METHODS)}
    done = run_cells(
        work / "cells",
        {key: lambda spec=spec: measure(spec, study, *settings) for key, spec in specs.items()},
        study.identity("cost_table", settings=settings, threads=arguments.threads),
        built={key: [spec.name, spec.options] for key, spec in specs.items()},
        only=arguments.only,
    )
    costs = [cost for _, *own in done.values() for cost in own]
    results = {"recipe": recipe.to_dict(), "threads": arguments.threads, "costs": costs}
    write(work, "cost_table", results, table(costs, recipe.batch_size, arguments.threads), figure(costs))


if __name__ == "__main__":
    run(main)
