"""The main tables: every system of the paper on the same experts, for growing numbers of tasks.

    python examples/benchmarks/main_table.py --recipe examples/recipes/experiments/shipped-text.yaml
    python examples/benchmarks/main_table.py --recipe examples/recipes/experiments/text8.yaml --only "8 tasks"

Writes `main_table.json`, `.md` and `.png` into the work dir. A cell is one method on one number of tasks, stored when
it is finished: an interrupted run resumes, a changed recipe is computed anew. A recipe without `methods` compares those
below.

Merges and methods run with their authors' settings where the recipe's `settings` do not say otherwise.

The first of the recipe's seeds is that of all draws. Every further one, on all tasks only, draws other references and
trains other experts (`<work>/seed-<seed>`); figures are then means over seeds, with their standard deviation.
`--methods` names the methods to run, and `--again` those that further seeds run, where others would take hours.
`--join` adds what an earlier run, on other machines or other days, has found on the same rows.

The three modes are kept apart. Systems that store a part per task answer the same under oracle routing as with the task
known, so oracle routing is run only for those that mix by a router, and shown only on the largest number of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bytes_table import as_hex, from_hex
from common import read_json
from experiment import (
    CALIBRATION,
    RETEX,
    MethodSpec,
    Study,
    lines_figure,
    load,
    markdown_table,
    pack,
    parse,
    run,
    run_cells,
    unpack,
    write,
)
from matplotlib.figure import Figure
from merges import MERGES, ROWS, learned, merges_of
from recipes import Recipe
from seeds import retrained

from retex_hf import merge_methods
from retex_hf.baselines import BASELINES, expert_weights
from retex_hf.baselines.merges import source_body
from retex_hf.config import DEFAULT_STORAGE
from retex_hf.errors import ConfigError
from retex_hf.evaluation import Method
from retex_hf.evaluation.report import Report
from retex_hf.evaluation.run import Evaluation

INDIVIDUAL = "individual"
MIXING = ("twin_merging", "dawin", "wemoe", "mow")
# The library's default. All tensors are stored, as by every other system, also those that a recipe excludes.
BUDGET: dict[str, Any] = {"storage": DEFAULT_STORAGE, "exclude": []}


def methods(recipe: Recipe) -> list[dict[str, dict[str, Any]]]:
    """Return all systems of the paper as entries of a recipe's `methods`, with the recipe's settings."""
    merges = merges_of(recipe)
    entries: list[dict[str, dict[str, Any]]] = [
        {INDIVIDUAL: {"label": INDIVIDUAL}},
        {"zero_shot": {"label": "zero-shot"}},
        *({"merged": {"merge": merge, "label": name}} for name, merge in merges.items()),
        {"merged": {"merge": trimmed(recipe), "label": "AdaMerging++"}},
        *(
            {"merged": {"merge": merge, "head": "identifier", "label": f"{name}, identified head"}}
            for name, merge in merges.items()
        ),
        {"emr": {"label": "EMR"}},
        {"id_emr": {"label": "ID-EMR"}},
        {"id_lora": {"label": "ID-LoRA (SVD)"}},
        {"twin_merging": {"remember": True, "label": "Twin-Merging"}},
        {"dawin": {"remember": True, "label": "DaWin"}},
        {"wemoe": {"remember": True, "label": "WEMoE"}},
        {"mow": {"remember": True, "label": "MoW"}},
        {"sim": {"label": "SiM"}},
        {RETEX: {**BUDGET, "label": RETEX}},
        {RETEX: {**BUDGET, "num_reference": 256, "label": f"{RETEX}, 256 references"}},
        {RETEX: {"label": f"{RETEX}, one rank"}},
        *(
            {RETEX: {**BUDGET, "merge": merge, "label": f"{RETEX} on {name}"}}
            for name, merge in merges.items()
            if name != "average"
        ),
    ]
    labels = [options["label"] for entry in entries for options in entry.values()]
    unknown = [name for name in recipe.settings if name not in labels]
    if unknown:
        raise ConfigError(f"The recipe has settings of {unknown[0]!r}, which is none of {labels}.")
    own = {label: options for label, options in recipe.settings.items() if label not in MERGES}
    return [
        {name: {**options, **own.get(options["label"], {})} for name, options in entry.items()} for entry in entries
    ]


def trimmed(recipe: Recipe) -> dict[str, Any]:
    """Return AdaMerging++, which is AdaMerging on trimmed task vectors, with the recipe's settings of AdaMerging."""
    return {**merges_of(recipe)["AdaMerging"], "trim": True}


def make(spec: MethodSpec, study: Study, work: Path) -> Method:
    """Make a method of the table; learn once what several methods share."""
    options = dict(spec.options)
    merge = options.get("merge")
    if isinstance(merge, str) and merge in merge_methods():
        merge = {"method": merge}
    if isinstance(merge, dict):
        options["merge"] = learned(study, work, merge, options.pop(CALIBRATION, ROWS))
    if spec.name == "mow" and "static" not in options:
        options["static"] = source_body(expert_weights(study.material), learned(study, work, trimmed(study.recipe)))
    return MethodSpec(spec.name, spec.label, options).make()


def run_size(study: Study, specs: Sequence[MethodSpec], work: Path, whole: bool, only: str | None) -> list[Evaluation]:
    """Return the evaluations of all methods on the study's tasks that are finished or that `only` asks for."""
    cells, built = {}, {}
    for spec in specs:
        modes = ("known", "unknown", "oracle") if whole and spec.name in MIXING else ("known", "unknown")
        key = f"{len(study.tasks)} tasks, {spec.label}"
        built[key] = {"method": spec.name, "options": spec.options, "modes": modes}
        if spec.name == "mow":
            built[key]["static"] = trimmed(study.recipe)
        cells[key] = lambda spec=spec, modes=modes: pack(study.evaluate(make(spec, study, work), modes))
    identity = study.identity("main_table")
    del identity["recipe"]["settings"]  # in the options of the cells that they change, so that others are kept
    done = run_cells(work / "cells", cells, identity, built=built, only=only)
    study.release()
    routers = {key for key, spec in zip(cells, specs, strict=True) if routes(spec)} if whole else set()
    return [with_oracle(unpack(cell)) if key in routers else unpack(cell) for key, cell in done.items()]


def routes(spec: MethodSpec) -> bool:
    """Return whether a system chooses among parts that belong to one task each."""
    return spec.name == RETEX or (BASELINES[spec.name].routes and spec.name not in MIXING)


def with_oracle(evaluation: Evaluation) -> Evaluation:
    """Add oracle routing to an evaluation: for such a system, it equals the task-known mode."""
    return replace(evaluation, scores={**evaluation.scores, "oracle": evaluation.scores["known"]})


def growth(reports: Mapping[int, Report], mode: str, figure: str) -> dict[str, dict[int, float]]:
    """Return `{method: {number of tasks: mean}}` of one mode; `figure` is accuracy, normalised or identification."""
    found: dict[str, dict[int, float]] = {}
    for size, report in reports.items():
        for name, method in report.summary()["methods"].items():
            values = method["modes"].get(mode, {}).get(figure)
            if values is not None:
                found.setdefault(name, {})[size] = values.get("mean", values)["value"]
    return found


def growth_table(reports: Mapping[int, Report]) -> str:
    """Format accuracy relative to the individual experts by number of tasks, known and unknown separately."""
    figure = "accuracy" if next(iter(reports.values())).individual is None else "normalised"
    known, unknown = (growth(reports, mode, figure) for mode in ("known", "unknown"))
    identified = growth(reports, "unknown", "identification")
    columns = ["method"]
    columns += [f"{title}, {size} tasks" for title in ("known", "unknown", "identified") for size in reports]
    names = list(dict.fromkeys(name for report in reports.values() for name in report.methods))
    rows = [
        [name, *(of.get(name, {}).get(size) for of in (known, unknown, identified) for size in reports)]
        for name in names
    ]
    return markdown_table(columns, rows)


def comparisons(report: Report) -> str:
    """Compare ReTeX, task unknown, with every method that has this mode: differences paired by rows."""
    lines = []
    for name in report.methods:
        if name == RETEX or "unknown" not in report.summary()["methods"][name]["modes"]:
            continue
        found = report.difference(RETEX, name, "unknown")
        value, low, high = (100 * number for number in (found.value, found.low, found.high))
        lines.append(f"- {RETEX} minus {name}: {value:+.1f} [{low:+.1f}, {high:+.1f}]")
    return "\n".join(lines) + "\n" if lines else ""


def markdown(reports: Mapping[int, Report], recipe: str) -> str:
    """Format the whole page: growth, comparisons, and the full report on all tasks."""
    last = reports[max(reports)]
    experts = "relative to the individual experts" if last.individual else "accuracy"
    parts = [f"# Main table: {recipe}", f"Means over tasks, {experts}.", growth_table(reports)]
    if RETEX in last.methods and comparisons(last):
        where = f"on {max(reports)} tasks, task unknown"
        parts += [f"Mean accuracy {where}, in points; 95 % intervals, paired bootstrap:", comparisons(last)]
    parts += [f"# On {max(reports)} tasks", last.markdown().removeprefix("# Results").strip()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def figure(reports: Mapping[int, Report]) -> Figure:
    """Plot accuracy against the number of tasks, one line per method, task known and unknown separately."""
    kind = "accuracy" if next(iter(reports.values())).individual is None else "normalised"
    panels = {
        title: {name: (list(values), list(values.values())) for name, values in growth(reports, mode, kind).items()}
        for title, mode in (("task known", "known"), ("task unknown", "unknown"))
    }
    return lines_figure(panels, "tasks", f"{kind} accuracy" if kind != "accuracy" else kind, xticks=list(reports))


def chosen_seeds(recipe: Recipe, given: Sequence[int] | None) -> list[int]:
    """Return the recipe's seeds, or those of them that are given."""
    odd = [seed for seed in given or [] if seed not in recipe.seeds]
    if odd:
        raise ConfigError(f"The recipe has no seed {odd[0]}; its seeds are {recipe.seeds}.")
    return [seed for seed in recipe.seeds if given is None or seed in given]


def as_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as plain values with a bit per row, as result files keep it."""
    scores = {
        mode: {
            kind: as_hex({task: getattr(score, kind) for task, score in found.items()})
            for kind in ("correct", "identified")
            if all(getattr(score, kind) is not None for score in found.values())
        }
        for mode, found in evaluation.scores.items()
    }
    return {**evaluation.as_dict(), "scores": scores}


def from_record(values: Mapping[str, Any]) -> Evaluation:
    """Invert `as_record`."""
    scores = {}
    for mode, found in values["scores"].items():
        kinds = {kind: from_hex(rows) for kind, rows in found.items()}
        scores[mode] = {task: {kind: rows[task] for kind, rows in kinds.items()} for task in kinds["correct"]}
    return Evaluation.from_dict({**values, "scores": scores})


def joined(
    own: Sequence[Evaluation], others: Sequence[Mapping[str, Any]], size: int, labels: Sequence[str]
) -> list[Evaluation]:
    """Return own evaluations, and those of other result files that are not among them, in the order of the methods."""
    found = {(run.method, run.seed): run for run in own}
    for results in others:
        for values in results["sizes"].get(str(size), {}).get("evaluations", []):
            if values["method"] in labels:
                found.setdefault((values["method"], values["seed"]), from_record(values))
    return sorted(found.values(), key=lambda run: (labels.index(run.method), run.seed))


def named(specs: Sequence[MethodSpec], labels: Sequence[str] | None) -> list[MethodSpec]:
    """Return the methods of some labels; all if none are given."""
    odd = [label for label in labels or [] if label not in {spec.label for spec in specs}]
    if odd:
        raise ConfigError(f"There is no method called {odd[0]!r}; there are {[spec.label for spec in specs]}.")
    return [spec for spec in specs if labels is None or spec.label in labels]


def main() -> None:
    seeds = {"type": int, "nargs": "+", "help": "some of the recipe's seeds"}
    some = {"nargs": "+", "metavar": "METHOD", "help": "methods to run; default: all"}
    again = {"nargs": "+", "metavar": "METHOD", "help": "methods to run under all seeds but the first; default: all"}
    join = {"type": Path, "nargs": "+", "default": [], "help": "result files whose rows to add to the table"}
    recipe, arguments = parse(__doc__, "shipped-text.yaml", seeds=seeds, methods=some, again=again, join=join)
    work = arguments.work_dir
    study = load(recipe, work, mirror=arguments.mirror)
    specs = named(study.methods(methods(recipe)), arguments.methods)
    repeated, labels = named(specs, arguments.again), [spec.label for spec in specs]
    others = [read_json(file) for file in arguments.join]
    reports, records = {}, {}
    for size in study.sizes:
        whole, evaluations = size == max(study.sizes), []
        for seed in chosen_seeds(recipe, arguments.seeds) if whole else recipe.seeds[:1]:
            part, first = study.subset(size), seed == recipe.seeds[0]
            part = part if first else retrained(part, work, seed)
            evaluations += run_size(part, specs if first else repeated, work, whole, arguments.only)
        evaluations = joined(evaluations, others, size, labels)
        if evaluations:
            records[size] = [as_record(evaluation) for evaluation in evaluations]
            names = [evaluation.method for evaluation in evaluations]
            reports[size] = Report(evaluations, INDIVIDUAL if INDIVIDUAL in names else None, recipe.seeds[0])
    if not reports:
        raise ConfigError(f"No method of the recipe is called anything with {arguments.only!r} in it.")
    results = {
        **({"joined": [results["command"] for results in others]} if others else {}),
        "recipe": recipe.to_dict(),
        "sizes": {str(size): {**report.summary(), "evaluations": records[size]} for size, report in reports.items()},
    }
    write(work, "main_table", results, markdown(reports, arguments.recipe.stem), figure(reports))


if __name__ == "__main__":
    run(main)
