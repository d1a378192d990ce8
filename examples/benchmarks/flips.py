"""Prediction-flip rates: the share of an expert's predictions that flip when its weights are moved.

    python examples/benchmarks/flips.py --recipe examples/recipes/experiments/text8.yaml

The prediction-flip rate of a task is the share of validation rows (64, or `--rows`) whose prediction differs from the
expert's own. Weights are moved away from the expert in three ways, all measured in one unit, the distance from the
expert to the merged model:

    random    a random direction, in every parameter as long as the difference it replaces (two directions)
    merged    the straight line to the merged model (the average)
    rank      the residual of recovery at a rank

and over a plane of two random directions (the paper's landscape). Labels are not used. A task whose predictions flip
early needs a close recovery. Writes `flips.{json,md,png}` and `flips_landscape.png`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from experiment import Study, lines_figure, load, markdown_table, parse, run, write
from matplotlib.figure import Figure
from measuring import batches, run_each

from retex_hf import RetexModel
from retex_hf.artifact.plots import DPI
from retex_hf.baselines.weights import expert_weights
from retex_hf.data.readout import Answer
from retex_hf.merging.expert_weights import ExpertWeights, Weights

ROWS = 64
DISTANCES = (0.1, 0.25, 0.5, 1.0)
RANKS = (4, 16, 64)
# Random directions are nearly harmless: predictions flip only much further away than the merged model.
RANDOM_DISTANCES = (1.0, 4.0, 8.0, 16.0)
PLANE = (-16.0, -8.0, 0.0, 8.0, 16.0)
DIRECTIONS = 2


def move(body: Weights, steps: Sequence[tuple[float, Weights]]) -> Weights:
    """Return a body plus some directions, each times a number; tensors that a direction does not have stay."""
    moved = dict(body)
    for factor, direction in steps:
        for name, tensor in direction.items():
            moved[name] = moved[name] + factor * tensor
    return moved


def random_direction(difference: Weights, learned: Sequence[str], seed: int) -> Weights:
    """Return noise that is as long as the difference in every parameter.

    Buffers are not moved: a variance moved at random could become negative.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = {}
    for name in learned:
        noise = torch.randn(difference[name].shape, generator=generator)
        direction[name] = noise * (difference[name].norm() / noise.norm())
    return direction


def distance(body: Weights, expert: Weights, merged: Weights) -> float:
    """Return the distance of a body from the expert, relative to that of the merged model."""
    moved = sum((body[name] - expert[name]).square().sum() for name in expert)
    return (moved / sum((merged[name] - expert[name]).square().sum() for name in expert)).sqrt().item()


def flip_rate(found: Sequence[Answer], own: Sequence[Answer]) -> float:
    """Return the share of predictions that differ.

    >>> flip_rate([1, 2, 3, 3], [1, 2, 3, 4])
    0.25
    """
    return sum(one != other for one, other in zip(found, own, strict=True)) / len(own)


class Expert:
    """An expert, its predictions on validation rows, and the merged model it is compared with."""

    def __init__(self, study: Study, task: str, rows: int) -> None:
        self.study, self.task = study, task
        self.weights: ExpertWeights = expert_weights(study.material)
        data = study.material.validation[task]
        chosen = random.Random(study.material.seed).sample(range(len(data)), min(rows, len(data)))
        self.inputs = [data.inputs[row] for row in chosen]
        self.body = self.weights.expert_body(task)
        self.merged = self.weights.body(torch.full((len(study.tasks),), 1 / len(study.tasks)))
        self.difference = {name: self.merged[name] - tensor for name, tensor in self.body.items()}
        parameters = {name for name, _ in self.weights.model.named_parameters(remove_duplicate=False)}
        self.learned = [name for name in self.body if name in parameters and self.difference[name].any()]
        self.own = self.predict(self.body)

    @torch.inference_mode()
    def predict(self, body: Weights) -> list[Answer]:
        """Return the predictions of a body under the task's head, in the order of the rows."""
        material, module = self.study.material, self.weights.module(body, self.task)
        found: dict[int, Answer] = {}
        for rows, inputs in batches(self.inputs, material.collate, self.study.recipe.batch_size):
            answers = material.readout.answers(material.readout.call(module, inputs), [self.task] * len(rows))
            found.update(zip(rows, answers, strict=True))
        return [found[row] for row in range(len(self.inputs))]

    def flips(self, body: Weights) -> float:
        return flip_rate(self.predict(body), self.own)

    def at_random(self, distances: Sequence[float]) -> list[list[float]]:
        """Return pairs (distance, flip rate averaged over directions)."""
        directions = [random_direction(self.difference, self.learned, seed) for seed in range(DIRECTIONS)]
        points = []
        for size in distances:
            moved = [move(self.body, [(size, direction)]) for direction in directions]
            reached = [distance(body, self.body, self.merged) for body in moved]
            points.append([sum(v) / len(v) for v in (reached, [self.flips(body) for body in moved])])
        return points

    def towards_merged(self, distances: Sequence[float]) -> list[list[float]]:
        """Return pairs (distance, flip rate) on the straight line."""
        return [[size, self.flips(move(self.body, [(size, self.difference)]))] for size in distances]

    def plane(self, ticks: Sequence[float]) -> list[list[float]]:
        """Return flip rates over a plane of two random directions; rows are steps along the second."""
        first, second = (random_direction(self.difference, self.learned, 100 + seed) for seed in range(2))
        return [[self.flips(move(self.body, [(x, first), (y, second)])) for x in ticks] for y in ticks]


def around(study: Study, task: str, rows: int) -> dict[str, Any]:
    """Return all results of one task that need no recovery."""
    expert = Expert(study, task, rows)
    return {
        "random": expert.at_random(RANDOM_DISTANCES),
        "merged": expert.towards_merged(DISTANCES),
        "plane": expert.plane(PLANE),
    }


def at_rank(study: Study, rank: int, rows: int) -> dict[str, list[float]]:
    """Return pairs (distance, flip rate) of every task as recovered at a rank."""
    material = study.material
    config = study.config(rank=rank, merge="average")
    model = RetexModel.from_experts(material.base, material.experts, config, progress=False)
    found = {}
    for task in study.tasks:
        expert, recovered = Expert(study, task, rows), model.recover(task)
        body = {name: recovered[name].float() for name in expert.body}
        found[task] = [distance(body, expert.body, expert.merged), expert.flips(body)]
    return found


def as_markdown(tasks: Sequence[str], lines: Mapping[str, Mapping[str, list[list[float]]]]) -> str:
    """Format flip rates of every task, the most easily flipped first, with distances of recovery beside its rates."""
    ranks = [f"rank {rank}" for rank in RANKS]
    columns = [
        "task",
        *(f"random {size:g}" for size in RANDOM_DISTANCES),
        *(f"merged {size:g}" for size in DISTANCES),
        *ranks,
    ]
    order = sorted(tasks, key=lambda task: -sum(rate for _, rate in lines["merged"][task]))
    rows = []
    for task in order:
        recovery = [f"{rate:.3f} (at {reached:.2f})" for reached, rate in lines["rank"][task]]
        rates = [rate for kind in ("random", "merged") for _, rate in lines[kind][task]]
        rows.append([task, *rates, *recovery])
    return (
        "## Prediction flips around each expert\n\nShare of validation rows; distances are relative to that of the "
        "merged model.\n\n" + markdown_table(columns, rows)
    )


def landscape_figure(planes: Mapping[str, list[list[float]]]) -> Figure:
    """Plot the flip rate over two random directions, one panel per task, all on one scale."""
    columns = min(4, len(planes))
    rows = -(-len(planes) // columns)
    figure = Figure(figsize=(2.6 * columns + 1, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    highest = max(max(max(line) for line in plane) for plane in planes.values()) or 1.0
    for axes, (task, plane) in zip(grid, planes.items(), strict=False):
        drawn = axes.contourf(PLANE, PLANE, plane, levels=[highest * step / 12 for step in range(13)], cmap="viridis")
        axes.plot(0, 0, "+", color="white")
        axes.set_title(task, fontsize=9)
    for axes in grid[len(planes) :]:
        axes.remove()
    figure.colorbar(drawn, ax=grid[: len(planes)].tolist(), label="prediction-flip rate")
    figure.supxlabel("first random direction", fontsize=9)
    figure.supylabel("second random direction", fontsize=9)
    return figure


def main() -> None:
    recipe, arguments = parse(__doc__)
    rows = arguments.rows or ROWS
    work, study = arguments.work_dir, load(recipe, arguments.work_dir, mirror=arguments.mirror)
    cells: dict[str, tuple[Any, Callable[[], Any]]] = {}
    settings = [DISTANCES, RANDOM_DISTANCES, PLANE, DIRECTIONS]
    for task in study.tasks:
        cells[task] = (["around", task, *settings], lambda task=task: around(study, task, rows))
    for rank in RANKS:
        cells[f"rank {rank}"] = (["rank", rank], lambda rank=rank: at_rank(study, rank, rows))
    if arguments.only is not None:
        cells = {label: cell for label, cell in cells.items() if arguments.only in label}
    done = run_each(work, "flips", cells, study.identity("flips", flip_rows=rows))
    if arguments.only is not None:
        print(f"Finished {', '.join(done)}; run without --only for the tables.")
        return
    lines = {kind: {task: done[task][kind] for task in study.tasks} for kind in ("random", "merged")}
    lines["rank"] = {task: [done[f"rank {rank}"][task] for rank in RANKS] for task in study.tasks}
    panels = {
        title: {task: tuple(zip(*points, strict=True)) for task, points in lines[kind].items()}
        for kind, title in (("random", "random directions"), ("merged", "to the merged model"), ("rank", "recovered"))
    }
    figure = lines_figure(panels, "distance from the expert (merged model = 1)", "prediction-flip rate")
    write(work, "flips", done, as_markdown(study.tasks, lines), figure)
    landscape_figure({task: done[task]["plane"] for task in study.tasks}).savefig(work / "flips_landscape.png", dpi=DPI)


if __name__ == "__main__":
    run(main)
