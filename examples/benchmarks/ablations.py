"""Ablations of ReTeX: one axis of design choices at a time, on the experts of a recipe.

    python examples/benchmarks/ablations.py --recipe examples/recipes/experiments/vision8.yaml --only rank

Axes (`--only` picks those whose name contains its text; all of them by default):

    merge      the base merge, by rank                  order      G_t S or S G_t, by storage
    embedding  width of the task embedding, by tasks    layers     every layer its own factors, or one per shape
    rank       one rank everywhere, or by a budget      objective  offset or affine; single tasks or mixtures of them
    inner      ReTeX-E, by storage                      adam       the paper's training beside the exact solution
    seeds      reference inputs drawn by other seeds

Every axis writes `ablation_<axis>.{json,md,png}`. Normalised accuracy is relative to the individual experts: with the
task known, and also unknown where the choice changes the model that identifies tasks. Storage is the recovery's share
of all experts' bytes. The exact solution has no random start: seeds change only the choice of reference inputs. 100
test rows per task are used unless `--rows` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from experiment import Study, lines_figure, load, markdown_table, pack, parse, run, unpack, write
from matplotlib.figure import Figure
from measuring import (
    fit_signatures,
    identification,
    individual,
    normalised_accuracy,
    recovered,
    recovery_bytes,
    routed,
    run_each,
)
from merges import MERGES, learn_merges

from retex_hf import RetexModel, TrainingConfig
from retex_hf.errors import ConfigError
from retex_hf.evaluation.run import Evaluation

ROWS = 100
RANKS = (4, 8, 16, 32, 64)
FEW_RANKS = (4, 16, 64)
OUTER_RANK = 64
SEEDS = (0, 1, 2, 3, 4)
ARITHMETIC = {"merge": {"method": "task_arithmetic", "scale": 0.3}}
SAMPLERS = {
    "offset, single tasks": {},
    "affine": {"recovery": "affine"},
    "Dirichlet(1)": {"soft_training": {"method": "dirichlet", "alpha": 1.0}},
    "uniform + softmax": {"soft_training": "uniform_softmax"},
    "Gaussian + softmax": {"soft_training": "gaussian_softmax"},
}
STORAGE = "storage"


@dataclass(frozen=True)
class Point:
    """One point of an axis: its line, its position on the line, and the model to build.

    Args:
        line: Line of the figure that it is on.
        x: Its position; on an axis by storage the position is measured, and `x` is its name.
        options: Fields of `RetexConfig` that override those of the recipe.
        tasks: Number of tasks; default: all.
        training: Fields of `TrainingConfig`, for points that are trained; default: the exact solution.
        seed: Seed of the reference inputs.
        routed: Whether to measure with the task unknown too.
    """

    line: str
    x: Any
    options: dict[str, Any]
    tasks: int | None = None
    training: dict[str, Any] | None = None
    seed: int = 0
    routed: bool = False

    @property
    def label(self) -> str:
        return f"{self.line}, {self.x}"

    @property
    def built(self) -> dict[str, Any]:
        """Return what the measurement depends on, independent of the axis."""
        return {key: getattr(self, key) for key in ("options", "tasks", "training", "seed", "routed")}


@dataclass(frozen=True)
class Axis:
    """An axis of choices: its name, the label below the figure, and its points."""

    title: str
    xlabel: str
    points: list[Point] = field(default_factory=list)
    log_x: bool = True


def with_ranks(line: str, options: dict[str, Any], ranks: Sequence[int] = RANKS, **others: Any) -> list[Point]:
    """Return a line of points of growing rank."""
    return [Point(line, rank, {**options, "rank": rank}, **others) for rank in ranks]


def merge_axis(study: Study, merges: dict[str, Any]) -> Axis:
    points = [point for name, merge in merges.items() for point in with_ranks(name, {"merge": merge}, FEW_RANKS)]
    # Identification depends only on the merged model, not on the rank.
    points = [replace(point, routed=point.x == FEW_RANKS[-1]) for point in points]
    return Axis("Base merge", "rank", points)


def embedding_axis(study: Study) -> Axis:
    total = len(study.tasks)
    counts = [count for count in (total // 2, total) if count > 1]
    points = [
        Point(f"{count} tasks", width, {"task_embedding_dim": width}, tasks=None if count == total else count)
        for count in counts
        for width in sorted({1, 2, count // 2, count - 1, count} - {0})
    ]
    return Axis("Task embedding", "width of the task embedding", points, log_x=False)


def rank_axis(study: Study, shares: Sequence[float] = (0.005, 0.01, 0.02, 0.05)) -> Axis:
    points = with_ranks("one rank everywhere", {})
    points += [Point("a budget of bytes", f"storage {share:g}", {"storage": share}) for share in shares]
    return Axis("Rank", STORAGE, points)


def inner_axis(study: Study) -> Axis:
    ranks = [rank for rank in RANKS if rank <= OUTER_RANK]
    points = with_ranks("ReTeX", {}, ranks)
    points += [
        Point(f"ReTeX-E, rank {OUTER_RANK}", f"inner {rank}", {"rank": OUTER_RANK, "inner_rank": rank})
        for rank in ranks
        if rank < OUTER_RANK
    ]
    return Axis("ReTeX-E", STORAGE, points)


def order_axis(study: Study) -> Axis:
    points = with_ranks("G_t S", {}, FEW_RANKS) + with_ranks("S G_t", {"factor_order": "shared_first"}, FEW_RANKS)
    return Axis("Order of the factors", STORAGE, points)


def layers_axis(study: Study) -> Axis:
    points = with_ranks("every layer its own", {}, FEW_RANKS)
    return Axis("Shared layers", STORAGE, points + with_ranks("one per shape", {"share_layers": True}, FEW_RANKS))


def objective_axis(study: Study) -> Axis:
    """Return the axis of objectives, on task arithmetic: the average has one optimum for mixtures and single tasks."""
    points = [
        point for name, options in SAMPLERS.items() for point in with_ranks(name, {**ARITHMETIC, **options}, (8, 32))
    ]
    return Axis("Objective, exact, on task arithmetic", "rank", points)


def adam_axis(study: Study, steps: int) -> Axis:
    rank = 16
    settings = {
        "L2": {},
        "cosine": {"objective": "cosine"},
        "cosine + L2": {"objective": "cosine_l2"},
    }
    points = [Point("exact", 0, {"rank": rank}), Point("exact", steps, {"rank": rank})]
    for name, options in settings.items():
        for count in (steps // 4, steps):
            training = {"steps": count, "warmup_steps": max(1, round(0.12 * count)), "learning_rate": 2e-3, **options}
            points.append(Point(f"Adam, {name}", count, {"rank": rank}, training=training))
    return Axis("Training instead of solving (learning rate 2e-3)", "steps", points, log_x=False)


def seeds_axis(study: Study) -> Axis:
    points = [Point("reference inputs", seed, {}, seed=seed, routed=True) for seed in SEEDS]
    return Axis("Seeds of the reference inputs", "seed", points, log_x=False)


def measure(study: Study, point: Point) -> Evaluation:
    """Build the model of a point and test it."""
    study = study if point.tasks is None else study.subset(point.tasks)
    study = study.with_seed(point.seed) if point.seed else study
    solver = {"solver": "closed_form"} if point.training is None else {
        "solver": "adam",
        "training": TrainingConfig(**point.training),
    }  # fmt: skip
    config = study.config(**point.options)
    model = RetexModel.from_experts(study.material.base, study.material.experts, config, progress=False, **solver)
    scores = {"known": recovered(model, study)}
    if point.routed:
        fit_signatures(model, study)
        scores["unknown"] = routed(model, study, scores["known"])
    errors = list(model.recovery_errors.values())
    return Evaluation(point.line, scores, recovery_bytes(model), {"relative_error": float(np.mean(errors))})


def measure_axis(study: Study, work: Path, axis: Axis) -> list[dict[str, Any]]:
    """Return one record per point of an axis; reuse results of earlier runs and other axes."""
    cells: dict[str, tuple[Any, Callable[[], Any]]] = {}
    for count in dict.fromkeys(point.tasks for point in axis.points):
        part = study if count is None else study.subset(count)
        cells[_experts(count)] = ([count], lambda part=part: pack(individual(part)))
    for point in axis.points:
        cells[point.label] = (point.built, lambda point=point: pack(measure(study, point)))
    done = run_each(work, "ablation", cells, study.identity("ablations"))
    return [as_record(point, unpack(done[point.label]), unpack(done[_experts(point.tasks)])) for point in axis.points]


def _experts(tasks: int | None) -> str:
    return f"individual, {tasks or 'all'} tasks"


def as_record(point: Point, found: Evaluation, experts: Evaluation) -> dict[str, Any]:
    """Return the table entries of a point."""
    is_routed = "unknown" in found.scores
    return {
        "line": point.line,
        "x": point.x,
        "known": normalised_accuracy(found, "known", experts),
        "unknown": normalised_accuracy(found, "unknown", experts) if is_routed else None,
        "identified": identification(found) if is_routed else None,
        "storage": found.storage_bytes / experts.storage_bytes,
        "relative_error": found.state["relative_error"],
    }


def as_markdown(axis: Axis, records: Sequence[dict[str, Any]]) -> str:
    """Format the table of an axis."""
    columns = ["", "setting" if axis.xlabel == STORAGE else axis.xlabel, "task known", "task unknown", "identified"]
    rows = [
        [r["line"], r["x"], r["known"], r["unknown"], r["identified"], f"{r['storage']:.1%}", r["relative_error"]]
        for r in records
    ]
    notes = ""
    if "seed" in axis.xlabel:
        known, unknown = (np.array([r[mode] for r in records]) for mode in ("known", "unknown"))
        spread = 1 if len(records) > 1 else 0
        notes = (
            f"\nMean and standard deviation over seeds: task known {known.mean():.4f} ± {known.std(ddof=spread):.4f}, "
            f"unknown {unknown.mean():.4f} ± {unknown.std(ddof=spread):.4f}.\n"
        )
    return f"## {axis.title}\n\n" + markdown_table([*columns, "storage", "relative error"], rows) + notes


def as_figure(axis: Axis, records: Sequence[dict[str, Any]]) -> Figure:
    """Plot normalised accuracy along the axis, one line per choice; add a second panel if every point was routed."""
    x = STORAGE if axis.xlabel == STORAGE else "x"
    modes = ["known"] + (["unknown"] if all(r["unknown"] is not None for r in records) else [])
    panels = {}
    for mode in modes:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for record in sorted(records, key=lambda r: r[x]):
            xs, ys = lines.setdefault(record["line"], ([], []))
            xs.append(record[x])
            ys.append(record[mode])
        panels[f"{axis.title}, task {mode}"] = lines
    label = "storage (share of the experts')" if x == STORAGE else axis.xlabel
    ticks = sorted({r["x"] for r in records}) if x == "x" else None
    figure = lines_figure(panels, label, "normalised accuracy", xticks=ticks, log_x=axis.log_x)
    if x == STORAGE:
        for axes in figure.axes:
            axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.2g} %")
    return figure


AXES: dict[str, Callable[[Study], Axis]] = {
    "embedding": embedding_axis,
    "rank": rank_axis,
    "inner": inner_axis,
    "order": order_axis,
    "layers": layers_axis,
    "objective": objective_axis,
    "seeds": seeds_axis,
}
NAMES = ("merge", *AXES, "adam")


def chosen_axes(study: Study, work: Path, only: str | None, steps: int, merges: Sequence[str]) -> dict[str, Axis]:
    """Return the axes whose names contain a text; learn only the merges that they need."""
    names = [name for name in NAMES if only is None or only in name]
    if not names:
        raise ConfigError(f"There is no axis with {only!r} in its name; the axes are {', '.join(NAMES)}.")
    axes = {}
    for name in names:
        if name == "merge":
            axes[name] = merge_axis(study, learn_merges(study, work, merges))
        else:
            axes[name] = adam_axis(study, steps) if name == "adam" else AXES[name](study)
    return axes


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        steps={"type": int, "default": 100, "help": "of training, on the axis adam"},
        merges={
            "nargs": "+",
            "choices": list(MERGES),
            "default": list(MERGES),
            "help": "base merges of the axis merge",
        },
    )
    recipe = recipe.with_rows(arguments.rows or ROWS)
    work, study = arguments.work_dir, load(recipe, arguments.work_dir, mirror=arguments.mirror)
    axes = chosen_axes(study, work, arguments.only, arguments.steps, arguments.merges)
    for name, axis in axes.items():
        records = measure_axis(study, work, axis)
        write(work, f"ablation_{name}", {"points": records}, as_markdown(axis, records), as_figure(axis, records))


if __name__ == "__main__":
    run(main)
