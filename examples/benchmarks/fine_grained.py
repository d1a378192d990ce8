"""Similar tasks: the classes of one data set split into disjoint groups, with an expert for each group.

    python examples/benchmarks/fine_grained.py                     # banking77 in seven groups of eleven intents
    python examples/benchmarks/fine_grained.py --recipe examples/recipes/experiments/vision8.yaml --data gtsrb

Writes `fine_grained.json`, `.md` and `.png` into the work dir. All groups share one kind of input, so the group of a
row is as hard to identify as its class. The recipe gives the suite and the settings; its tasks are not used. Experts
are fine-tuned here, once.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from class_groups import class_groups
from experiment import RETEX, as_study, pack, parse, run, run_cells, unpack, write
from sources import suite_sources

from retex_hf.errors import ConfigError
from retex_hf.evaluation.figures import plot_report
from retex_hf.evaluation.report import Report

INDIVIDUAL = "individual"
METHODS: list[dict[str, dict[str, Any]]] = [
    {INDIVIDUAL: {}},
    {"zero_shot": {"label": "zero-shot"}},
    {"merged": {"merge": "average", "label": "average"}},
    {"merged": {"merge": {"method": "task_arithmetic", "scale": 0.3}, "label": "task arithmetic"}},
    {"merged": {"merge": "ties", "label": "TIES"}},
    {"id_emr": {"label": "ID-EMR"}},
    {"sim": {"label": "SiM"}},
    {RETEX: {"label": RETEX}},
]


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        "shipped-text.yaml",
        data={"default": "banking77", "help": "the task of the suite whose classes are dealt"},
        groups={"type": int, "default": 7, "help": "how many groups"},
        epochs={"type": int, "default": 8, "help": "of fine-tuning each expert"},
    )
    work = arguments.work_dir
    if recipe.suite not in ("text", "vision"):
        raise ConfigError(f"Groups of classes are made from the suites text and vision, not from {recipe.suite!r}.")
    tasks = class_groups(importlib.import_module(recipe.suite).load_task(arguments.data), arguments.groups)
    recipe = replace(recipe, tasks=[task.name for task in tasks], sizes=[], unseen=[])
    study = as_study(recipe, suite_sources(recipe, tasks, work, epochs=arguments.epochs), recipe.tasks)
    specs = {f"fine-grained, {spec.label}": spec for spec in study.methods(METHODS)}
    done = run_cells(
        work / "cells",
        {key: lambda spec=spec: pack(study.evaluate(spec.make(), ("known", "unknown"))) for key, spec in specs.items()},
        study.identity("fine_grained", epochs=arguments.epochs),
        built={key: [spec.name, spec.options] for key, spec in specs.items()},
        only=arguments.only,
    )
    evaluations = [unpack(cell) for cell in done.values()]
    names = [evaluation.method for evaluation in evaluations]
    report = Report(
        evaluations,
        INDIVIDUAL if INDIVIDUAL in names else None,
        recipe.seeds[0],
        reference=RETEX if RETEX in names else None,
    )
    title = f"# Fine-grained tasks: {arguments.data} in {arguments.groups} groups of classes"
    page = report.markdown().replace("# Results", title, 1)
    write(work, "fine_grained", report.summary(), page, plot_report(report.summary()))


if __name__ == "__main__":
    run(main)
