"""Add tasks to components and remove them, without access to the other experts.

Codes are taken apart and put together again, never rounded twice: the offsets of the other tasks stay the same, bit for
bit. A new task gets directions of its own, also beside directions that other tasks share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import RetexError
from ..utils.progress import track
from .allocation import OWN, WHOLE, Directions, Kept, choose
from .codes import pack, unpack
from .components import COMPONENTS, LARGEST_INDEX, ComponentGenerator, ComponentLayout, Runs, runs_of
from .encoding import component_layout, encode_differences, missed_energy
from .growth import Growth
from .layout import Sides, matrix_sides
from .module import RecoveryModule
from .spectra import INDEX_BITS, measure, ways_of
from .storage import embedding_bytes, fitting
from .targets import squared_norm
from .weighting import task_weights

logger = logging.getLogger(__name__)

# Steps of the bisection of a price for a tolerance.
STEPS = 60
# How far a tolerance is lowered to keep it where numbers lose more than expected.
LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Vector:
    """The codes of one vector."""

    codes: Tensor
    bits: int


@dataclass(frozen=True)
class TaskVectors:
    """The columns of one task (or its rounded offset), their scales, and the rows of `S` that they are for."""

    columns: list[Vector]
    scales: Tensor
    rows: list[int]


@dataclass(frozen=True)
class TakenApart:
    """All vectors of a generator."""

    layout: ComponentLayout
    right: list[Vector]
    tasks: list[TaskVectors]

    @classmethod
    def of(cls, generator: ComponentGenerator) -> TakenApart:
        """Take a generator apart."""
        layout = generator.layout
        tasks = []
        first = 0
        for task in range(layout.num_tasks):
            count = layout.scales_of(task)
            scales = generator.scales[first : first + count].detach()
            rows = generator.rows_used(task).tolist() if layout.kind == COMPONENTS else []
            tasks.append(TaskVectors(_vectors(generator, task), scales, rows))
            first += count
        return cls(layout, _vectors(generator, None), tasks)

    def put_together(self, device: torch.device) -> ComponentGenerator:
        """Return the generator of these vectors."""
        left = tuple(runs_of([vector.bits for vector in task.columns]) for task in self.tasks)
        right = runs_of([vector.bits for vector in self.right])
        layout = replace(self.layout, left=left, right=right)
        columns = [_packed(task.columns, runs) for task, runs in zip(self.tasks, left, strict=True)]
        index = None
        if layout.kind == COMPONENTS and not layout.owned:
            index = torch.tensor([row for task in self.tasks for row in task.rows], dtype=torch.int16)
        scales = torch.cat([task.scales.cpu() for task in self.tasks])
        made = ComponentGenerator(layout, torch.cat([_packed(self.right, right), *columns]).cpu(), scales, index)
        return made.to(device)


def _vectors(generator: ComponentGenerator, task: int | None) -> list[Vector]:
    found = []
    for start, end, run, length in generator.layout.pieces_of(task):
        codes = unpack(generator.codes[start:end], run.bits, run.count * length).view(run.count, length)
        found += [Vector(one, run.bits) for one in codes]
    return found


def _packed(vectors: list[Vector], runs: Runs) -> Tensor:
    packed, first = [], 0
    for run in runs:
        packed.append(pack(torch.stack([vector.codes for vector in vectors[first : first + run.count]]), run.bits))
        first += run.count
    return torch.cat(packed) if packed else torch.zeros(0, dtype=torch.uint8)


@torch.no_grad()
def add_to_components(
    recovery: RecoveryModule,
    read: Callable[[str], tuple[Tensor, Tensor]],
    joining: Iterable[str],
    convolutions: frozenset[str],
    *,
    budget: float,
    weighting: str | None,
    tolerance: float | None = None,
    progress: bool = True,
) -> tuple[RecoveryModule, Growth]:
    """Return the recovery with one more task, the last one. `recovery` itself is not changed.

    Args:
        recovery: The recovery of the tasks so far.
        read: Function that returns a parameter of the new expert and of the merged model, in float32 or better.
        joining: Parameters that the recovery does not have yet.
        convolutions: Names of the parameters that are convolution weights.
        budget: Bytes that the new task may take.
        weighting: How errors are weighted, as in `RetexConfig`.
        tolerance: Instead of the budget: the relative error that the new task may have in each parameter.
        progress: Show a progress bar.
    """
    names = [*recovery, *joining]
    energies, shapes = {}, {}
    for name in names:
        expert, merged = read(name)
        energies[name] = [(expert - merged).double().square().sum().item()]
        shapes[name] = tuple(merged.shape)
    sides = {name: matrix_sides(shape, name in convolutions) for name, shape in shapes.items()}
    weights = task_weights(energies, weighting)
    ways = {}
    for name in track(names, title="Reading spectra", unit="parameter", progress=progress):
        expert, merged = read(name)
        found = ways_of(measure([expert - merged], sides[name], weights[name]), shapes[name], sides[name])
        if name in recovery:  # the other tasks are stored in one of the two ways already
            layout = recovery[name].layout
            way = OWN if layout.is_factored else WHOLE
            found = {way: found[way]}
            # A column beside shared directions says which one it is for.
            if isinstance(layout, ComponentLayout) and way == OWN and not layout.owned:
                found = {OWN: [replace(part, scale_bits=part.scale_bits + INDEX_BITS) for part in found[OWN]]}
        ways[name] = found
    if tolerance is None:
        embedding = embedding_bytes(recovery.num_tasks + 1) - embedding_bytes(recovery.num_tasks)
        if budget <= embedding:
            logger.warning(
                "Nothing of the new task is recovered, because its rows of the task embedding alone take %d of the %d "
                "bytes that every task was given: give tolerance=.",
                embedding,
                budget,
            )
        kept, _ = fitting(ways, shapes, sides, budget - embedding)
    else:
        kept = _within(ways, tolerance)
    generators, growth = {}, Growth()
    tasks = recovery.num_tasks
    for name in track(names, title="Adding the task", unit="parameter", progress=progress):
        if name not in recovery and kept[name].bytes == 0:
            continue
        expert, merged = read(name)
        difference = expert - merged
        new, error = _encoded(difference, kept[name], shapes[name], sides[name])
        # Numbers that are far from normal lose more than the choice counted on.
        wanted = tolerance or 0.0
        while tolerance and error > tolerance and wanted > LEAST_SHARE * tolerance:
            wanted /= 2
            chosen = _within({name: ways[name]}, wanted)[name]
            new, error = _encoded(difference, chosen, shapes[name], sides[name])
        generators[name] = _joined(recovery, name, new, tasks)
        growth.errors[name] = error
        if name not in recovery:
            growth.joined.append(name)
        elif new.layout.rank:
            growth.grown[name] = new.layout.rank
    embedding = torch.block_diag(recovery.task_embedding.detach().cpu(), torch.ones(1, 1))
    grown = RecoveryModule(embedding, generators).requires_grad_(False).train(recovery.training)
    return grown.to(recovery.task_embedding.device), growth


@torch.no_grad()
def remove_from_components(recovery: RecoveryModule, task: int) -> RecoveryModule:
    """Return the recovery without one task, without directions that no other task uses, and without parameters in which
    no other task differs from the merged model. `recovery` itself is not changed."""
    generators = {}
    for name in recovery:
        generator = recovery[name]
        assert isinstance(generator, ComponentGenerator)  # all parameters have one form
        apart = TakenApart.of(generator)
        tasks = [own for number, own in enumerate(apart.tasks) if number != task]
        if not any(own.columns for own in tasks):
            continue
        used = sorted({row for own in tasks for row in own.rows})
        place = {row: number for number, row in enumerate(used)}
        moved = [replace(own, rows=[place[row] for row in own.rows]) for own in tasks]
        right = [apart.right[row] for row in used]
        generators[name] = replace(apart, right=right, tasks=moved).put_together(generator.codes.device)
    others = torch.arange(recovery.num_tasks) != task
    embedding = recovery.task_embedding.detach()[others][:, others]
    return RecoveryModule(embedding, generators).requires_grad_(False).train(recovery.training)


def _joined(recovery: RecoveryModule, name: str, new: ComponentGenerator, tasks: int) -> ComponentGenerator:
    """Return a parameter's generator with the components of one more task."""
    added = TakenApart.of(new)
    if name not in recovery:
        nothing = TaskVectors([], new.scales.new_zeros(0), [])
        return replace(added, tasks=[nothing] * tasks + added.tasks).put_together(new.codes.device)
    generator = recovery[name]
    assert isinstance(generator, ComponentGenerator)  # all parameters have one form
    apart = TakenApart.of(generator)
    (own,) = added.tasks
    directions = len(apart.right) + len(added.right)
    if not apart.layout.owned and directions > LARGEST_INDEX:
        raise RetexError(
            f"{name!r} would have {directions} directions with one more task, and at most {LARGEST_INDEX} can be told "
            "apart beside shared ones: give a larger tolerance=, or build the model again from all experts."
        )
    own = replace(own, rows=[len(apart.right) + row for row in own.rows])
    joined = replace(apart, right=[*apart.right, *added.right], tasks=[*apart.tasks, own])
    return joined.put_together(generator.codes.device)


def _encoded(
    difference: Tensor, kept: Kept, shape: tuple[int, ...], sides: Sides | None
) -> tuple[ComponentGenerator, float]:
    """Return one task's offset in a parameter as it is kept, and its relative error."""
    layout = component_layout(kept, shape, sides)
    stored = encode_differences([difference], layout, kept, [1.0])
    generator = ComponentGenerator(layout, stored["codes"], stored["scales"])
    energy = squared_norm(difference)
    return generator, (missed_energy(generator, 0, difference) / energy) ** 0.5 if energy > 0 else 0.0


def _within(ways: Mapping[str, Mapping[str, list[Directions]]], tolerance: float) -> dict[str, Kept]:
    """Return the cheapest way to keep every parameter within its relative error; the most there is, if none is."""
    kept = {}
    for name, own in ways.items():
        total = sum(float(part.energies.sum()) for part in next(iter(own.values())))
        low, high = 1e-30, max(total, 1e-30) * 8
        best = choose(own, low)
        for _ in range(STEPS):
            price = (low * high) ** 0.5
            found = choose(own, price)
            if total - found.recovered <= tolerance**2 * total:
                best, low = found, price
            else:
                high = price
        kept[name] = best
    return kept
