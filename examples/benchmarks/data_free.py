"""Task identification without data: ReTeX's scores of weights, and MASS, SpectR and Arrow; beside 64 references.

    python examples/benchmarks/data_free.py --recipe examples/recipes/experiments/text8.yaml --work-dir retex-text

Shares of test rows identified as their own task. MASS, SpectR and Arrow read the pre-trained model and the experts'
updates whole (see retex_hf/baselines/spectral.py), ReTeX the merged model and its own recovery. "pool" are the same
references without their tasks. Writes `data_free.{json,md}`; `--tasks` takes some of the recipe's tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from experiment import Study, load, markdown_table, parse, run, write
from measuring import batches, run_each
from torch import Tensor

from retex_hf import RetexModel
from retex_hf.baselines import make

ROWS, REFERENCES = 100, 64
SCORES, POOL, SIGNATURES = "ReTeX, weights", "ReTeX, weights, centred on a pool", f"ReTeX, {REFERENCES} references"
RIVALS = {"MASS": "mass", "SpectR": "spectr", "Arrow": "arrow"}
Choose = Callable[[Mapping[str, Tensor]], list[str]]


@torch.inference_mode()
def shares(choose: Choose, study: Study) -> dict[str, float]:
    """Return the share of every task's rows that are identified."""
    found = {}
    for test in study.tests:
        named: list[str] = []
        for _, inputs in batches(test.inputs, study.material.collate, study.recipe.batch_size):
            named += choose(inputs)
        found[test.name] = named.count(test.name) / len(named)
    return found


def of_retex(study: Study, label: str) -> dict[str, float]:
    """Build ReTeX and identify tasks by weights, by weights and a pool, or by references."""
    material = study.material
    kind = "inputs" if label == SIGNATURES else "weights"
    model = RetexModel.from_experts(material.base, material.experts, study.config(signatures=kind), progress=False)
    references = {task: material.references(task, REFERENCES) for task in study.tasks}
    if label == SIGNATURES:
        model.fit_signatures(references, progress=False)
    elif label == POOL:
        model.fit_signatures([batch for some in references.values() for batch in some])
    return shares(lambda inputs: model.identify(**inputs).tasks, study)


def of_rival(study: Study, name: str) -> dict[str, float]:
    """Fit a router and identify tasks by it."""
    method = make(name)
    method.fit(study.material)
    return shares(method.choose, study)


def markdown(results: Mapping[str, Any]) -> str:
    """Format the table."""
    tasks: Sequence[str] = results["tasks"]
    rows = [
        [label, float(np.mean(list(found.values()))), *(found[task] for task in tasks)]
        for label, found in results["identified"].items()
    ]
    table = markdown_table(["identified by", "mean", *tasks], rows)
    return f"# Identification without data: {results['suite']}\n\n{table}"


def main() -> None:
    recipe, arguments = parse(__doc__, tasks={"nargs": "+", "metavar": "TASK", "help": "default: those of the recipe"})
    if arguments.tasks:
        recipe = replace(recipe, tasks=arguments.tasks, sizes=[])
    rows = arguments.rows or ROWS
    study = load(recipe.with_rows(rows), arguments.work_dir, mirror=arguments.mirror)
    cells = {label: (label, lambda label=label: of_retex(study, label)) for label in (SCORES, POOL, SIGNATURES)}
    cells |= {label: (label, lambda name=name: of_rival(study, name)) for label, name in RIVALS.items()}
    found = run_each(arguments.work_dir, "data_free", cells, study.identity("data_free"))
    results = {
        "suite": arguments.recipe.stem,
        "tasks": study.tasks,
        "rows": arguments.rows or ROWS,
        "identified": found,
    }
    write(arguments.work_dir, "data_free", results, markdown(results), None)


if __name__ == "__main__":
    run(main)
