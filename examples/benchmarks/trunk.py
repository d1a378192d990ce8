"""What a shared trunk costs in accuracy: for every depth, without a trunk, with one as it is, and with an aligned one.

    python examples/benchmarks/trunk.py --work-dir retex-text --rows 100   # --references 64 256 --depths 2 4

At every depth the features that identify a task are those of the same layer, so the three models take rows for the same
tasks. Accuracy is relative to the experts, task unknown. *Lost* is the estimate that `fit_signatures` makes on held-out
references: the share of right answers that the trunk loses, by the expert's own probabilities. The last line is what
`shared_trunk="auto"` takes. Time is measured by routing_cost.py. Writes `trunk.json` and `trunk.md` into the work dir.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from experiment import Study, load, markdown_table, parse, run, write
from tqdm.auto import tqdm

from retex_hf import RetexModel
from retex_hf.baselines.retex import Retex
from retex_hf.baselines.static import Individual
from retex_hf.evaluation.metrics import normalised
from retex_hf.model.shared_trunk import mean_cost
from retex_hf.routing import Alignment, feature_blocks

COLUMNS = ["layers", "references", "trunk", "accuracy", "identified", "lost (estimate)"]


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        references={"type": int, "nargs": "+", "default": [64, 256], "help": "numbers of references per task"},
        storage={"default": "2%", "help": "budget of the recovery"},
        depths={"type": int, "nargs": "*", "help": "numbers of layers to share; default: all"},
        tasks={"nargs": "+", "metavar": "TASK", "help": "default: those of the recipe"},
        fixed={"action": "store_true", "help": "leave out what auto takes, which fits trunks of several depths"},
    )
    if arguments.tasks:
        recipe = replace(recipe, tasks=arguments.tasks, sizes=[])
    study = load(recipe, arguments.work_dir, mirror=arguments.mirror)
    experts = accuracies(study, Individual(), "known")
    config = study.config(storage=arguments.storage)
    model = RetexModel.from_experts(study.material.base, study.material.experts, config, progress=False)
    rows = []
    for count in arguments.references:
        found = lines(study, model, experts, count, arguments.depths, arguments.fixed)
        for row in tqdm(found, desc=f"{count} references", unit="model"):
            tqdm.write(str(row))
            rows.append(row)
    results = {"recipe": recipe.to_dict(), "storage": arguments.storage, "rows": rows}
    write(arguments.work_dir, "trunk", results, markdown_table(COLUMNS, [list(row.values()) for row in rows]), None)


def lines(
    study: Study, model: RetexModel, experts: dict[str, float], count: int, depths: list[int] | None, fixed: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table for a number of references."""
    references = {task: study.material.references(task, count) for task in study.tasks}
    blocks = feature_blocks(model.get_base_model())
    indices = range(len(blocks) - 1) if depths is None else [number - 1 for number in depths]
    for depth in (*indices, *([] if fixed else ["auto"])):
        options = {"feature_layer": depth, "shared_trunk": "auto" if depth == "auto" else True}
        model.retex_config = replace(model.retex_config, num_reference=count, **options)
        model.fit_signatures(references, progress=False)
        for form, each in forms(model):
            trunk = model.retex_config.trunk
            layer = model.signatures.feature_layer if trunk is None else trunk["junction"]
            evaluation = study.evaluate(Retex(model=each), ["unknown"])
            scores = evaluation.scores["unknown"]
            found = {task: score.accuracy for task, score in scores.items()}
            identified = [float(score.identified.mean()) for score in scores.values()]
            yield {
                "layers": f"{blocks.index(layer) + 1} of {len(blocks)}" + (", auto" if depth == "auto" else ""),
                "references": count,
                "trunk": form,
                "accuracy": float(normalised([found[task] for task in experts], list(experts.values()))),
                "identified": sum(identified) / len(identified),
                "lost (estimate)": mean_cost(trunk["cost"]) if form == "aligned" and trunk is not None else None,
            }


def forms(model: RetexModel) -> Iterator[tuple[str, RetexModel]]:
    """Yield a model without its trunk, with the trunk as it is, and aligned."""
    parts = model.parts()
    yield "none", RetexModel(replace(parts, config=replace(parts.config, trunk=None)))
    alignment = parts.signatures.alignment
    if alignment is not None:
        nothing = Alignment(*(torch.zeros_like(part) for part in alignment.tensors.values()))
        yield "as it is", RetexModel(replace(parts, signatures=replace(parts.signatures, alignment=nothing)))
        yield "aligned", model


def accuracies(study: Study, method: Any, mode: str) -> dict[str, float]:
    """Return the accuracy of a method on each task."""
    return {task: score.accuracy for task, score in study.evaluate(method, [mode]).scores[mode].items()}


if __name__ == "__main__":
    run(main)
