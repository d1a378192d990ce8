"""Variance over seeds: ReTeX under several seeds of its reference inputs, and of the order of fine-tuning.

    python examples/benchmarks/seeds.py --recipe examples/recipes/experiments/shipped-text.yaml
    python examples/benchmarks/seeds.py --recipe examples/recipes/experiments/text8.yaml --retrain

Writes `seeds.json`, `.md` and `.png` into the work dir. The solver has no seed: it finds the optimum. Seeds choose the
reference inputs of a task, and with `--retrain` also the order in which experts see their training inputs (a set of
experts per seed, under `<work>/seed-<seed>`; those of seed 0 are the suite's own). Seeds are the recipe's, or 0 to 4
where it names only one.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import Task, split_validation
from experiment import Study, lines_figure, load, markdown_table, parse, run, run_cells, write
from matplotlib.figure import Figure
from measuring import fit_signatures, identification, individual, normalised_accuracy, recovered, routed
from sources import suite_sources

from retex_hf import RetexModel
from retex_hf.errors import ConfigError
from retex_hf.evaluation.run import Evaluation

SEEDS = [0, 1, 2, 3, 4]
COLUMNS = {"known": "task known", "unknown": "task unknown", "identified": "task identified"}
Figures = dict[str, float]


def reordered(task: Task, seed: int) -> Task:
    """Return a task with its training rows in another order; the rows held out for validation stay the same."""
    numbers = list(range(len(task.train_inputs)))
    places = split_validation(replace(task, train_inputs=numbers, train_labels=numbers))[0].train_inputs
    shuffled = list(places)
    random.Random(seed).shuffle(shuffled)
    for place, row in zip(places, shuffled, strict=True):
        numbers[place] = row
    return replace(
        task,
        train_inputs=[task.train_inputs[row] for row in numbers],
        train_labels=[task.train_labels[row] for row in numbers],
    )


def retrained(study: Study, work: Path, seed: int) -> Study:
    """Return the study under a seed, with experts trained in the row order of that seed; train those that are missing.

    Seed 0 is that of the suite's own experts. Experts that a recipe names stay the same.
    """
    study = study.with_seed(seed)
    if seed == 0 or study.recipe.suite is None:
        return study
    suite = importlib.import_module(study.recipe.suite)
    tasks = [reordered(suite.load_task(name), seed) for name in study.tasks]
    experts = suite_sources(study.recipe, tasks, work / f"seed-{seed}", work / "base").experts
    return replace(study, material=replace(study.material, experts=experts, shared={}))


def measure(study: Study, seeds: Sequence[int]) -> dict[str, Figures]:
    """Return the figures of ReTeX under each seed of the reference inputs, with the same experts."""
    experts = individual(study)
    material = study.material
    model = RetexModel.from_experts(material.base, material.experts, study.config(), progress=False)
    known = recovered(model, study)
    found = {}
    for seed in seeds:
        fit_signatures(model, study.with_seed(seed))
        scores = {"known": known, "unknown": routed(model, study, known)}
        evaluation = Evaluation("ReTeX", scores, 0, seed=seed)
        found[str(seed)] = {
            "known": normalised_accuracy(evaluation, "known", experts),
            "unknown": normalised_accuracy(evaluation, "unknown", experts),
            "identified": identification(evaluation),
        }
    study.release()
    return found


def table(results: Mapping[int, Mapping[str, Figures]]) -> str:
    """Format one line per seed, and the mean and sample standard deviation of each column below."""
    pairs = [(size, key) for key in COLUMNS for size in results]
    columns = ["seed", *(f"{COLUMNS[key]}, {size} tasks" for size, key in pairs)]
    seeds = list(next(iter(results.values())))
    rows = [[seed, *(results[size][seed][key] for size, key in pairs)] for seed in seeds]
    spread = [f"{mean(values):.3f} ± {stdev(values):.3f}" for values in list(zip(*rows, strict=True))[1:]]
    return markdown_table(columns, [*rows, ["mean", *spread]])


def figure(results: Mapping[int, Mapping[str, Figures]]) -> Figure:
    """Plot one point per seed and number of tasks."""
    panels = {
        title: {
            f"seed {seed}": (list(results), [results[size][seed][key] for size in results])
            for seed in next(iter(results.values()))
        }
        for key, title in COLUMNS.items()
    }
    return lines_figure(panels, "tasks", "normalised accuracy, share of rows identified", xticks=list(results))


def main() -> None:
    retrain = {"action": "store_true", "help": "also fine-tune experts in the order of each seed"}
    recipe, arguments = parse(__doc__, "shipped-text.yaml", retrain=retrain)
    work, seeds = arguments.work_dir, recipe.seeds if len(recipe.seeds) > 1 else SEEDS
    if arguments.retrain and recipe.suite is None:
        raise ConfigError("Only experts of a local suite can be fine-tuned again.")
    study = load(recipe, work, mirror=arguments.mirror)
    results: dict[int, dict[str, Figures]] = {}
    for size in study.sizes:
        part = study.subset(size)
        together = [[seed] for seed in seeds] if arguments.retrain else [seeds]
        cells = {
            f"seeds {group} on {size} tasks": lambda group=group, part=part: measure(
                retrained(part, work, group[0]) if arguments.retrain else part, group
            )
            for group in together
        }
        identity = part.identity("seeds", retrain=arguments.retrain)
        done = run_cells(work / "cells", cells, identity, only=arguments.only)
        results[size] = {seed: figures for cell in done.values() for seed, figures in cell.items()}
    chance = "reference inputs and order of fine-tuning" if arguments.retrain else "reference inputs"
    page = f"# Seeds: {chance}\n\nAccuracy is relative to the individual experts.\n\n{table(results)}"
    values = {"recipe": recipe.to_dict(), "retrain": arguments.retrain, "sizes": results}
    write(work, "seeds", values, page, figure(results))


if __name__ == "__main__":
    run(main)
