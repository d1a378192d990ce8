"""The recovery that a budget of bytes buys: read spectra, allocate bytes, then factor and round each parameter."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import count as counting
from math import prod

import torch

from ..checkpoints.sources import TensorInfo
from ..config import RetexConfig
from . import krylov
from .allocation import OWN, SHARED, Kept, Ways, allocate_bytes
from .components import ComponentGenerator, ComponentLayout
from .encoding import component_layout, encode_differences, missed_energy
from .layout import Sides, matrix_sides
from .module import TASK_EMBEDDING, RecoveryModule
from .solver import state_distance
from .spectra import FEWEST, Measured, byte_price, first_count, measure, most_directions, unread_ways, ways_of
from .targets import Targets
from .weighting import task_weights
from .work_sharing import BuildContext, run_dealt

logger = logging.getLogger(__name__)


def solve_storage(
    targets: Targets, config: RetexConfig, convolutions: frozenset[str], budget: float, context: BuildContext
) -> tuple[RecoveryModule, dict[str, float]]:
    """Return the recovery of at most `budget` bytes, and the relative error it leaves in every parameter."""
    shapes = {name: tuple(targets.merged[name].shape) for name in targets.names}
    sides = {name: matrix_sides(shape, name in convolutions) for name, shape in shapes.items()}
    numbers = {name: float(prod(shape)) for name, shape in shapes.items()}
    weights = task_weights({name: targets.energies[name] for name in targets.names}, config.weighting)
    embedding = embedding_bytes(targets.num_tasks)
    if budget <= embedding and targets.names:
        logger.warning(
            "RetexConfig.storage: nothing is recovered, because the embedding of %d tasks alone takes the %d bytes.",
            targets.num_tasks,
            budget,
        )
    kept, layouts = _allocated(targets, shapes, sides, weights, budget - embedding, context)
    wanted = {
        f"{name}.{part}": TensorInfo(*info) for name, layout in layouts.items() for part, info in layout.stored.items()
    }
    wanted[TASK_EMBEDDING] = TensorInfo((targets.num_tasks, targets.num_tasks), torch.float32)
    tensors = context.store.allocate("recovery", wanted)
    generators = {
        name: ComponentGenerator(
            layout, tensors[f"{name}.codes"], tensors[f"{name}.scales"], tensors.get(f"{name}.index")
        )
        for name, layout in layouts.items()
    }
    recovery = RecoveryModule(tensors[TASK_EMBEDDING], generators).requires_grad_(False)
    recovery.write_embedding(None)

    def work(name: str) -> list[float]:
        generator, differences = generators[name], targets.differences(name)
        stored = encode_differences(differences, generator.layout, kept[name], weights[name])
        for part, tensor in stored.items():
            generator.get_parameter(part).copy_(tensor)
        missed = sum(missed_energy(generator, task, difference) for task, difference in enumerate(differences))
        return [missed, sum(targets.energies[name])]

    costs = {name: numbers[name] for name in layouts}
    found = run_dealt(
        context, costs, work, "Solving", lambda name: list(generators[name].parameters()), context.at_once
    )
    return recovery, {name: (missed / energy) ** 0.5 if energy > 0 else 0.0 for name, (missed, energy) in found.items()}


def embedding_bytes(tasks: int) -> int:
    """Return the bytes of the embedding of so many tasks, which a budget includes."""
    return 4 * tasks**2


def _allocated(
    targets: Targets,
    shapes: Mapping[str, tuple[int, ...]],
    sides: Mapping[str, Sides | None],
    weights: Mapping[str, Sequence[float]],
    budget: float,
    context: BuildContext,
) -> tuple[dict[str, Kept], dict[str, ComponentLayout]]:
    """Return what to keep of every parameter and how it is stored, from as much of every spectrum as that takes."""
    tasks = targets.num_tasks
    numbers = {name: float(prod(shape)) for name, shape in shapes.items()}
    total = sum(numbers.values())
    counts = {
        name: 0 if found is None else first_count(found[0] * found[1], found[2], tasks, budget * numbers[name] / total)
        for name, found in sides.items()
    }

    def work(name: str) -> Measured:
        return measure(targets.differences(name), sides[name], weights[name], counts[name], unread[name])

    measured: dict[str, Measured] = {}
    unread: dict[str, list[str]] = {name: [OWN, SHARED] for name in shapes}
    for number in counting(1):
        title = "Reading spectra" if number == 1 else f"Reading spectra, pass {number}"
        read = run_dealt(context, {name: numbers[name] for name in unread}, work, title, at_once=context.at_once)
        measured |= {name: _joined(measured.get(name), found, unread[name]) for name, found in read.items()}
        ways = {name: ways_of(measured[name], shape, sides[name]) for name, shape in shapes.items()}
        kept, layouts = fitting(ways, shapes, sides, budget)
        price = byte_price(kept.values())
        found = {name: [] if price is None else _unread(ways[name], sides[name], tasks, price) for name in shapes}
        unread = {name: parts for name, parts in found.items() if parts}
        if not unread:
            break
        # More than asked for may have been read.
        counts.update({name: 2 * max(counts[name], len(measured[name]["shared"])) for name in unread})
    stacks = [(batch * rows * tasks, columns) for batch, rows, columns in filter(None, sides.values())]
    if any(krylov.pays(rows, columns, FEWEST) for rows, columns in stacks):
        state_distance(context, "The directions", [found["missed"] for found in measured.values()])
    return kept, layouts


def _joined(before: Measured | None, found: Measured, parts: Sequence[str]) -> Measured:
    """Return a measurement, with some of its parts read again."""
    if before is None:
        return found
    own = found["own"] if OWN in parts else before["own"]
    if SHARED not in parts:
        return {**before, "own": own}
    return {**found, "own": own}


def _unread(ways: Ways, sides: Sides | None, tasks: int, price: float) -> list[str]:
    """Return the ways of a parameter of which more must be read."""
    if sides is None:
        return []
    return unread_ways(ways, {OWN: most_directions(sides, 1), SHARED: most_directions(sides, tasks)}, price)


def fitting(
    ways: Mapping[str, Ways],
    shapes: Mapping[str, tuple[int, ...]],
    sides: Mapping[str, Sides | None],
    budget: float,
) -> tuple[dict[str, Kept], dict[str, ComponentLayout]]:
    """Return what to keep of every parameter and how it is stored, in at most `budget` bytes."""
    allowed, step = budget, 0.0
    while True:
        kept = allocate_bytes(ways, allowed)
        layouts = {
            name: component_layout(found, shapes[name], sides[name]) for name, found in kept.items() if found.bytes > 0
        }
        # Vectors are stored in whole bytes, which the allocation does not know.
        excess = sum(layout.bytes for layout in layouts.values()) - budget
        if excess <= 0 or not layouts:
            return kept, layouts
        # Doubled, because every round is an allocation, and a few bytes are all that it may waste.
        step = max(excess, 2 * step)
        allowed -= step
