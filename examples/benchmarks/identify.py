"""Task identification by layer and source of the features, number of references, and dimension of the subspace.

    python examples/benchmarks/identify.py --recipe examples/recipes/experiments/vision8.yaml

Tables (`--only` picks those whose name contains its text; all of them by default):

    layers      every block of every source: the pre-trained model and the five merges
    references  4 to 256 reference inputs per task, several draws of them
    subspace    dimension k of a task's subspace, of 64 reference inputs
    methods     the paper's rule, nearest mean, logistic regression, weights alone; confusion between tasks

Each writes `identify_<table>.{json,md,png}`. Features of all blocks are computed once per source and stored. All tables
but the first use one source (`--source`) and the block that the library picks by held-out reference inputs, without
test data. Identification is the mean over tasks of the share of test rows identified as their own task. Normalised
accuracy is that of ReTeX with the task unknown: a row counts if task and answer are right (a lower bound for models
that generate text). 100 test rows per task are used unless `--rows` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import cell_name
from experiment import Study, lines_figure, load, markdown_table, pack, parse, run, run_cells, unpack, write
from identifiers import Identify, by_mean, by_regression, by_residual, confusion, identified
from matplotlib.figure import Figure
from measuring import gather, identified_rows, individual, normalised_accuracy, recovered
from merges import MERGES, learn_merges
from torch import Tensor
from tqdm.auto import tqdm

from retex_hf import RetexModel
from retex_hf.baselines.merges import PRETRAINED, source_body
from retex_hf.baselines.weights import expert_weights
from retex_hf.errors import ConfigError
from retex_hf.evaluation.run import Evaluation, TaskScore
from retex_hf.routing import FeatureExtractor, feature_blocks, held_out_accuracy, shallowest_good

ROWS = 100
REFERENCES, RANK = 64, 0.1
COUNTS = (4, 8, 16, 32, 64, 128, 256)
DIMENSIONS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
DRAWS = 3
SOURCES = (PRETRAINED, *MERGES)
TABLES = ("layers", "references", "subspace", "methods")
RESIDUAL, MEAN, REGRESSION = "residual to the subspace", "nearest mean", "logistic regression"

Features = dict[str, list[Tensor]]
"""`{block: [features (rows, d) of each task]}`."""


def stored_features(study: Study, work: Path, source: str, merge: Any, pool: int) -> tuple[Features, Features]:
    """Return features of a pool of references and of the test rows, at every block of one source; computed once."""
    name = cell_name(f"features {source}", study.identity("identify", source=merge, pool=pool))
    file = (work / "cells" / name).with_suffix(".npz")
    if not file.exists():
        arrays = compute_features(study, merge, pool)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        with partial.open("wb") as stream:
            np.savez(stream, **arrays)
        partial.rename(file)
    with np.load(file) as arrays:
        blocks = list(dict.fromkeys(name.split("/")[2] for name in arrays))
        parts = [
            {block: [torch.from_numpy(arrays[f"{part}/{task}/{block}"]) for task in study.tasks] for block in blocks}
            for part in ("pool", "test")
        ]
    return parts[0], parts[1]


def compute_features(study: Study, merge: Any, pool: int) -> dict[str, np.ndarray]:
    """Compute `{part/task/block: features}`."""
    material, weights = study.material, expert_weights(study.material)
    # Features are read below the heads, so any head will do.
    model = weights.module(source_body(weights, merge), study.tasks[0])
    blocks = feature_blocks(model)
    extract = FeatureExtractor(model, blocks, study.config().feature_pooling)

    def joined(inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(list(extract(inputs).values()), 1)

    sample = extract(material.collate(material.sample(study.tasks[0], 1)))
    widths = [sample[block].shape[1] for block in blocks]
    arrays = {}
    for test in tqdm(study.tests, desc="features", unit="task", leave=False):
        for part, inputs in (("pool", material.sample(test.name, pool)), ("test", test.inputs)):
            features = gather(joined, inputs, material.collate, study.recipe.batch_size)
            for block, columns in zip(blocks, features.split(widths, 1), strict=True):
                arrays[f"{part}/{test.name}/{block}"] = columns.numpy()
    return arrays


def first(pool: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the first references of every task; a pool is in random order already."""
    return [features[:count] for features in pool]


def drawn(pool: Sequence[Tensor], count: int, draw: int) -> list[Tensor]:
    """Return the references of one draw: the first ones, or others at random."""
    if draw == 0:
        return first(pool, count)
    generator = torch.Generator().manual_seed(draw)
    return [features[torch.randperm(len(features), generator=generator)[:count]] for features in pool]


def chosen_block(pool: Features) -> str:
    """Return the shallowest block that identifies held-out references well; `feature_layer="auto"` judges perturbed
    ones too."""
    accuracies = [held_out_accuracy(first(features, REFERENCES), RANK) for features in pool.values()]
    return list(pool)[shallowest_good(accuracies)]


def unknown_accuracy(identify: Identify, test: Sequence[Tensor], known: Evaluation, experts: Evaluation) -> float:
    """Return the normalised accuracy of ReTeX with rows routed by a rule."""
    scores = {}
    for number, (task, score) in enumerate(known.scores["known"].items()):
        hit = (identify(test[number]) == number).numpy()
        scores[task] = TaskScore(score.correct & hit, hit)
    return normalised_accuracy(Evaluation("", {"unknown": scores}, 0), "unknown", experts)


def layers_table(features: Mapping[str, tuple[Features, Features]]) -> dict[str, dict[str, float]]:
    """Return `{source: {block: identification}}` of the paper's rule."""
    return {
        source: {
            block: identified(by_residual(first(pool[block], REFERENCES), RANK), test[block]) for block in pool
        }
        for source, (pool, test) in features.items()
    }  # fmt: skip


def references_table(
    pool: Sequence[Tensor], test: Sequence[Tensor], known: Evaluation, experts: Evaluation
) -> list[dict[str, Any]]:
    """Evaluate every rule by the number of references: mean and standard deviation over draws."""
    records = []
    for count in COUNTS:
        if count > min(map(len, pool)):
            break
        draws = [drawn(pool, count, draw) for draw in range(DRAWS)]
        fitted = [by_residual(references, RANK) for references in draws]
        for rule, identifiers in (
            (RESIDUAL, fitted),
            (MEAN, [by_mean(references) for references in draws]),
            (REGRESSION, [by_regression(references) for references in draws]),
        ):
            found = np.array([identified(identify, test) for identify in identifiers])
            normal = [unknown_accuracy(identify, test, known, experts) for identify in identifiers]
            records.append(
                {
                    "rule": rule,
                    "references": count,
                    "identified": float(found.mean()),
                    "deviation": float(found.std(ddof=1)),
                    "normalised": float(np.mean(normal)),
                }
            )
    return records


def subspace_table(
    pool: Sequence[Tensor], test: Sequence[Tensor], known: Evaluation, experts: Evaluation
) -> list[dict[str, Any]]:
    """Evaluate the paper's rule by the dimension of a task's subspace."""
    references = first(pool, REFERENCES)
    records = []
    for dimension in DIMENSIONS:
        if dimension >= min(min(len(features), features.shape[1]) for features in references):
            break
        identify = by_residual(references, dimension)
        records.append(
            {
                "dimension": dimension,
                "identified": identified(identify, test),
                "normalised": unknown_accuracy(identify, test, known, experts),
            }
        )
    return records


def by_weights(study: Study, merge: Any) -> dict[str, dict[str, list[bool]]]:
    """Identify rows without reference inputs, plainly and centred on a pool of unlabelled inputs of all tasks."""
    material = study.material
    config = study.config(merge=merge, signatures="weights", feature_source="merged", shared_trunk=False)
    model = RetexModel.from_experts(material.base, material.experts, config, progress=False)
    found = {}
    for name in ("weights alone", "weights, centred on a pool"):
        if name != "weights alone":
            model.fit_signatures([batch for task in study.tasks for batch in material.references(task, REFERENCES)])
        found[name] = {
            test.name: identified_rows(model, test, material.collate, study.recipe.batch_size).tolist()
            for test in study.tests
        }
    return found


def methods_table(
    pool: Sequence[Tensor],
    test: Sequence[Tensor],
    weights: Mapping[str, Mapping[str, list[bool]]],
    known: Evaluation,
    experts: Evaluation,
) -> list[dict[str, Any]]:
    """Compare all rules, among them logistic regression on all references as an upper reference."""
    references, most = first(pool, REFERENCES), min(map(len, pool))
    rules: dict[str, Identify] = {
        f"{RESIDUAL}, {REFERENCES} references": by_residual(references, RANK),
        f"{MEAN}, {REFERENCES} references": by_mean(references),
        f"{REGRESSION}, {REFERENCES} references": by_regression(references),
        f"{REGRESSION}, {most} references": by_regression(first(pool, most)),
    }
    records = []
    for rule, identify in rules.items():
        normal = unknown_accuracy(identify, test, known, experts)
        records.append({"rule": rule, "identified": identified(identify, test), "normalised": normal})
    for rule, rows in weights.items():
        scores = {
            task: TaskScore(known.scores["known"][task].correct & np.array(hit), np.array(hit))
            for task, hit in rows.items()
        }
        normal = normalised_accuracy(Evaluation("", {"unknown": scores}, 0), "unknown", experts)
        share = float(np.mean([np.mean(hit) for hit in rows.values()]))
        records.append({"rule": rule, "identified": share, "normalised": normal})
    return records


def confusion_figure(shares: Tensor, tasks: Sequence[str]) -> Figure:
    """Plot the confusion between tasks."""
    size = 2.5 + 0.5 * len(tasks)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares.numpy(), vmin=0, vmax=1, cmap="Blues")
    axes.set_xticks(range(len(tasks)), tasks, rotation=90, fontsize=8)
    axes.set_yticks(range(len(tasks)), tasks, fontsize=8)
    axes.set(xlabel="taken for", ylabel="task", title="Task identification")
    for row, line in enumerate(shares.tolist()):
        for column, share in enumerate(line):
            if share >= 0.005:
                colour = "white" if share > 0.5 else "black"
                axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, label="share of the task's rows")
    return figure


def write_layers(work: Path, found: dict[str, dict[str, float]]) -> None:
    blocks = list(next(iter(found.values())))
    rows = [[block, *(values[block] for values in found.values())] for block in blocks]
    lines = {source: (range(len(blocks)), list(values.values())) for source, values in found.items()}
    figure = lines_figure(
        {"Task identification by layer and source": lines}, "block", "identified", xticks=range(len(blocks))
    )
    title = f"## Identification by layer and source ({REFERENCES} references, k = {RANK:g})\n\n"
    write(work, "identify_layers", found, title + markdown_table(["block", *found], rows), figure)


def write_references(work: Path, records: list[dict[str, Any]], block: str) -> None:
    rows = [
        [r["references"], r["rule"], f"{r['identified']:.3f} ± {r['deviation']:.3f}", r["normalised"]] for r in records
    ]
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {"identified": {}, "normalised": {}}
    for record in records:
        for name, lines in panels.items():
            xs, ys = lines.setdefault(record["rule"], ([], []))
            xs.append(record["references"])
            ys.append(record[name])
    titles = {"identified": "identification", "normalised": "normalised accuracy, task unknown"}
    figure = lines_figure(
        {titles[name]: lines for name, lines in panels.items()},
        "reference inputs per task",
        "share",
        xticks=sorted({r["references"] for r in records}),
        log_x=True,
    )
    title = f"## Identification by number of reference inputs (`{block}`, k = {RANK:g}, {DRAWS} draws)\n\n"
    table = markdown_table(["reference inputs", "rule", "identified", "normalised, task unknown"], rows)
    write(work, "identify_references", {"block": block, "points": records}, title + table, figure)


def write_subspace(work: Path, records: list[dict[str, Any]], block: str) -> None:
    xs = [r["dimension"] for r in records]
    lines = {name: (xs, [r[name] for r in records]) for name in ("identified", "normalised")}
    figure = lines_figure({"Dimension of a task's subspace": lines}, "k", "share", xticks=xs, log_x=True)
    title = f"## Identification by dimension of the subspace (`{block}`, {REFERENCES} references)\n\n"
    table = markdown_table(
        ["k", "identified", "normalised, task unknown"],
        [[r["dimension"], r["identified"], r["normalised"]] for r in records],
    )
    write(work, "identify_subspace", {"block": block, "points": records}, title + table, figure)


def write_methods(work: Path, records: list[dict[str, Any]], shares: Tensor, tasks: Sequence[str], block: str) -> None:
    title = f"## Ways to identify a task (`{block}`)\n\n"
    table = markdown_table(
        ["rule", "identified", "normalised, task unknown"],
        [[r["rule"], r["identified"], r["normalised"]] for r in records],
    )
    results = {"block": block, "rules": records, "tasks": list(tasks), "confusion": shares.tolist()}
    write(work, "identify_methods", results, title + table, confusion_figure(shares, tasks))


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        sources={"nargs": "+", "choices": SOURCES, "default": list(SOURCES), "help": "sources of the table layers"},
        source={"choices": SOURCES, "default": "average", "help": "source of the other tables"},
    )
    study = load(recipe.with_rows(arguments.rows or ROWS), arguments.work_dir, mirror=arguments.mirror)
    work, tables = arguments.work_dir, [t for t in TABLES if arguments.only is None or arguments.only in t]
    if not tables:
        raise ConfigError(f"There is no table with {arguments.only!r} in its name; the tables are {', '.join(TABLES)}.")
    wanted = {arguments.source, *(arguments.sources if "layers" in tables else ())}
    merges = {PRETRAINED: PRETRAINED, **learn_merges(study, work, [name for name in MERGES if name in wanted])}
    features = {
        source: stored_features(study, work, source, merges[source], pool_size(source, arguments.source, tables))
        for source in tqdm([source for source in SOURCES if source in wanted], desc="sources", unit="source")
    }
    if "layers" in tables:
        write_layers(work, layers_table({source: features[source] for source in arguments.sources}))
    if tables == ["layers"]:
        return
    pool, test = features[arguments.source]
    block = chosen_block(pool)
    cells: dict[str, Callable[[], Any]] = {
        "individual": lambda: pack(individual(study)),
        "recovered": lambda: pack(known_evaluation(study, recovery_merge(merges, arguments.source))),
    }
    if "methods" in tables:
        cells["weights"] = lambda: by_weights(study, recovery_merge(merges, arguments.source))
    done = run_cells(work / "cells", cells, study.identity("identify", source=merges[arguments.source]))
    known, experts = unpack(done["recovered"]), unpack(done["individual"])
    measured = (pool[block], test[block], known, experts)
    if "references" in tables:
        write_references(work, references_table(*measured), block)
    if "subspace" in tables:
        write_subspace(work, subspace_table(*measured), block)
    if "methods" in tables:
        rule = by_residual(first(pool[block], REFERENCES), RANK)
        shares = confusion([rule(rows) for rows in test[block]], len(study.tasks))
        records = methods_table(pool[block], test[block], done["weights"], known, experts)
        write_methods(work, records, shares, study.tasks, block)


def pool_size(source: str, main_source: str, tables: Sequence[str]) -> int:
    """Return how many references a source needs: many only for the one on which their number is studied."""
    return REFERENCES if source != main_source or list(tables) == ["layers"] else max(COUNTS)


def recovery_merge(merges: Mapping[str, Any], source: str) -> Any:
    """Return the merge for ReTeX: the one that features come from, or the average for pre-trained features."""
    return MERGES["average"] if source == PRETRAINED else merges[source]


def known_evaluation(study: Study, merge: Any) -> Evaluation:
    """Evaluate ReTeX of the recipe on a merge, with the task known."""
    material = study.material
    model = RetexModel.from_experts(material.base, material.experts, study.config(merge=merge), progress=False)
    return Evaluation("ReTeX", {"known": recovered(model, study)}, 0)


if __name__ == "__main__":
    run(main)
