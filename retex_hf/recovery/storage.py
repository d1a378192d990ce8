"""The recovery that a budget of bytes buys: measure, choose, factor and round, one parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count as counting
from math import prod
from typing import TypedDict

import torch
from torch import Tensor

from ..checkpoints.sources import TensorInfo
from ..config import RetexConfig
from . import krylov
from .allocation import OWN, SHARED, WHOLE, Choice, Directions, Kept, Ways, allocate_bytes
from .closed_form import factor, gram, right_vectors
from .codes import SCALE_BITS, codebook, encode
from .components import (
    COMPONENTS,
    GROUP,
    LARGEST_INDEX,
    ROUNDED,
    ComponentGenerator,
    ComponentLayout,
    Runs,
    encode_components,
    runs_of,
)
from .eigen import eigenvalues
from .module import TASK_EMBEDDING, RecoveryModule
from .solver import state_distance
from .spectra import FEWEST, byte_price, first_count, needs_more
from .targets import Targets, squared_norm
from .weighting import task_weights
from .work_sharing import BuildContext, run_dealt

# A column of a shared direction also stores which direction it is for.
INDEX_BITS = 16
# Rounded rows whose part outside the span of others is below this share of their length count as dependent.
DEPENDENT = 1e-3

Sides = tuple[int, int, int]
"""A parameter as a stack of matrices: how many, their rows and their columns."""


class Measured(TypedDict):
    """Weighted energies of one parameter: of every task's difference (T), of the directions of each task's own
    difference (T, n), and of directions that all share, for every task (n, T); what the shared ones miss, and the least
    that as many could."""

    whole: list[float]
    own: list[list[float]]
    shared: list[list[float]]
    missed: list[float]


def solve_storage(
    targets: Targets, config: RetexConfig, convolutions: frozenset[str], budget: float, context: BuildContext
) -> tuple[RecoveryModule, dict[str, float]]:
    """Return the recovery of at most `budget` bytes, and the relative error it leaves in every parameter."""
    shapes = {name: tuple(targets.merged[name].shape) for name in targets.names}
    sides = {name: matrix_sides(shape, name in convolutions) for name, shape in shapes.items()}
    numbers = {name: float(prod(shape)) for name, shape in shapes.items()}
    weights = task_weights({name: targets.energies[name] for name in targets.names}, config.weighting)
    embedding = targets.num_tasks**2 * 4
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
    found = run_dealt(context, costs, work, "Solving", lambda name: list(generators[name].parameters()))
    return recovery, {name: (missed / energy) ** 0.5 if energy > 0 else 0.0 for name, (missed, energy) in found.items()}


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
        read = run_dealt(context, {name: numbers[name] for name in unread}, work, title)
        measured |= {name: _joined(measured.get(name), found, unread[name]) for name, found in read.items()}
        ways = {name: ways_of(measured[name], shape, sides[name]) for name, shape in shapes.items()}
        kept, layouts = fitting(ways, shapes, sides, budget)
        price = byte_price(kept.values())
        found = {name: [] if price is None else _unread(ways[name], sides[name], tasks, price) for name in shapes}
        unread = {name: parts for name, parts in found.items() if parts}
        if not unread:
            break
        counts.update({name: 2 * counts[name] for name in unread})
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
    """Return the ways of a parameter that have directions which were not read and may be worth a price."""
    if sides is None:
        return []
    available = {OWN: _most_directions(sides, 1), SHARED: _most_directions(sides, tasks)}
    return [way for way, most in available.items() if way in ways and needs_more(ways[way], most, price)]


def _most_directions(sides: Sides, tasks: int) -> int:
    """Return how many directions so many tasks' differences have."""
    batch, rows, columns = sides
    return min(columns, batch * rows * tasks, LARGEST_INDEX)


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


def matrix_sides(shape: tuple[int, ...], convolution: bool) -> Sides | None:
    """Return a parameter as a stack of matrices, as `plan_layout` sees it; None for vectors.

    >>> matrix_sides((768, 3, 16, 16), convolution=True), matrix_sides((8, 64, 32), False), matrix_sides((1, 9), False)
    ((1, 768, 768), (8, 64, 32), None)
    """
    seen = (shape[0], prod(shape[1:])) if convolution or len(shape) == 4 else shape
    axes = [size for size in seen if size != 1]
    return None if len(axes) < 2 else (prod(axes[:-2]), axes[-2], axes[-1])


def measure(
    differences: list[Tensor],
    sides: Sides | None,
    weights: Sequence[float],
    count: int | None = None,
    parts: Sequence[str] = (OWN, SHARED),
) -> Measured:
    """Return the weighted energies of a parameter's directions: of each task's own, of all tasks' together, or of both.

    At least the first `count` are measured; all by default.
    """
    whole = [squared_norm(difference) * weight for difference, weight in zip(differences, weights, strict=True)]
    measured: Measured = {"whole": whole, "own": [], "shared": [], "missed": [0.0, 0.0]}
    if sides is None:
        return measured
    matrices = _matrices(differences, sides)
    if OWN in parts:
        spectra = [_spectrum(matrix, count) for matrix in matrices]
        measured["own"] = [(spectrum * weight).tolist() for spectrum, weight in zip(spectra, weights, strict=True)]
    if SHARED in parts and len(matrices) > 1:
        most = _most_directions(sides, len(matrices))
        rank = most if count is None else min(count, most)
        if not _is_read_from_products(matrices, rank):
            rank = max(rank, most // 4)  # an eigenvector more costs little beside the Gram matrix
        factors, _, *measured["missed"] = factor(_weighted(matrices, weights), rank)
        measured["shared"] = torch.stack([part.double().square().sum(0) for part in factors], 1).tolist()
    return measured


def _spectrum(matrix: Tensor, count: int | None) -> Tensor:
    """Return the energies of at least the first `count` directions of a matrix; all by default."""
    if count is not None and _is_read_from_products([matrix], count):
        (left,), *_ = factor([matrix], count)
        return left.double().square().sum(0)
    return eigenvalues(gram([matrix]))


def _is_read_from_products(matrices: list[Tensor], count: int) -> bool:
    rows, columns = matrices[0].shape
    return krylov.pays(len(matrices) * rows, columns, count)


def ways_of(measured: Measured, shape: tuple[int, ...], sides: Sides | None) -> dict[str, list[Directions]]:
    """Return the ways to keep a parameter: as it is, by directions of each task's own, or by directions that all
    share."""
    groups = -(-prod(shape) // GROUP)
    whole = [torch.tensor([[energy]]) for energy in measured["whole"]]
    ways = {WHOLE: [Directions(energy, groups * GROUP, 0, groups * SCALE_BITS) for energy in whole]}
    if sides is None:
        return ways
    rows, columns = sides[0] * sides[1], sides[2]
    ways[OWN] = [Directions(torch.tensor(own).unsqueeze(1), rows, columns) for own in measured["own"]]
    if measured["shared"]:
        ways[SHARED] = [Directions(torch.tensor(measured["shared"]), rows, columns, SCALE_BITS + INDEX_BITS)]
    return ways


def component_layout(kept: Kept, shape: tuple[int, ...], sides: Sides | None) -> ComponentLayout:
    """Return how the choice for one parameter is stored."""
    if kept.way == WHOLE or sides is None:
        bits = [int(choice.left[0, 0]) for choice in kept.choices]
        return ComponentLayout(shape, ROUNDED, tuple(runs_of([one]) if one else () for one in bits))
    batch, rows, columns = sides[0], sides[0] * sides[1], sides[2]
    if kept.way == OWN:
        rights = [int(choice.right[i]) for choice in kept.choices for i in _own_order(choice)]
        left = tuple(runs_of([int(choice.left[i, 0]) for i in _own_order(choice)]) for choice in kept.choices)
        return ComponentLayout(shape, COMPONENTS, left, runs_of(rights), rows, columns, batch=batch)
    (choice,) = kept.choices
    columns_of = [choice.left[:, task] for task in range(choice.left.shape[1])]
    left = tuple(runs_of([int(bits[i]) for i in _order(bits)]) for bits in columns_of)
    right = runs_of([int(choice.right[i]) for i in _order(choice.right)])
    return ComponentLayout(shape, COMPONENTS, left, right, rows, columns, owned=False, batch=batch)


def encode_differences(
    differences: list[Tensor], layout: ComponentLayout, kept: Kept, weights: Sequence[float]
) -> dict[str, Tensor]:
    """Return the stored tensors of all tasks' differences in one parameter."""
    if layout.kind == ROUNDED:
        rows = [difference.reshape(1, -1) for difference in differences]
        return encode_components(layout, None, [row[: len(own)] for row, own in zip(rows, layout.left, strict=True)])
    matrices = [difference.reshape(layout.rows, layout.columns) for difference in differences]
    tasks = range(len(matrices))
    if layout.owned:
        chosen = [_own_order(choice) for choice in kept.choices]
        read = [len(choice.right) for choice in kept.choices]
        found = [_chosen_rows([m], [1.0], own, n) for m, own, n in zip(matrices, chosen, read, strict=True)]
        directions = torch.cat(found)
        used = [torch.tensor(layout.used_rows(task), dtype=torch.int64) for task in tasks]
    else:
        (choice,) = kept.choices
        order = _order(choice.right)
        directions = _chosen_rows(matrices, weights, order, len(choice.right))
        place = {i: row for row, i in enumerate(order)}
        used = [torch.tensor([place[i] for i in _order(choice.left[:, task])], dtype=torch.int64) for task in tasks]
    codes, rounded = _round_rows(directions, layout.right)
    lefts = [_columns(matrix, rounded[rows.to(rounded.device)]) for matrix, rows in zip(matrices, used, strict=True)]
    return encode_components(layout, codes, lefts, None if layout.owned else used)


def missed_energy(generator: ComponentGenerator, task: int, difference: Tensor) -> float:
    """Return the energy of a task's difference that its components do not recover."""
    one_hot = torch.zeros(generator.layout.num_tasks)
    one_hot[task] = 1
    return squared_norm(difference - generator(one_hot).to(difference.device))


def _matrices(differences: list[Tensor], sides: Sides) -> list[Tensor]:
    return [difference.reshape(sides[0] * sides[1], sides[2]) for difference in differences]


def _weighted(matrices: list[Tensor], weights: Sequence[float]) -> list[Tensor]:
    return [matrix * weight**0.5 for matrix, weight in zip(matrices, weights, strict=True)]


def _chosen_rows(matrices: list[Tensor], weights: Sequence[float], chosen: Sequence[int], read: int) -> Tensor:
    """Return some of the right singular vectors of stacked and weighted matrices as rows; `read` were measured."""
    if not chosen:
        return matrices[0].new_zeros(0, matrices[0].shape[1]).double()
    # A Krylov space for as many directions is the same again, and so are they.
    rank = read if _is_read_from_products(matrices, read) else max(chosen) + 1
    return right_vectors(_weighted(matrices, weights), rank)[list(chosen)]


def _order(bits: Tensor) -> list[int]:
    """Return the kept vectors, those of the most bits first."""
    numbers = bits.tolist()
    return sorted((i for i, number in enumerate(numbers) if number > 0), key=lambda i: -numbers[i])


def _own_order(choice: Choice) -> list[int]:
    """Return the kept directions of one task, those of the most bits first."""
    right, left = choice.right.tolist(), choice.left[:, 0].tolist()
    return sorted((i for i, number in enumerate(right) if number > 0), key=lambda i: (-right[i], -left[i]))


def _round_rows(rows: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return the codes of rows, and their values without scales."""
    codes, values, first = [], [], 0
    for run in runs:
        found, _ = encode(rows[first : first + run.count], run.bits)
        codes.append(found)
        values.append(codebook(run.bits).to(found.device)[found.long()].double())
        first += run.count
    nothing = rows.new_zeros(0, rows.shape[1])
    return torch.cat(codes) if codes else nothing.int(), torch.cat(values) if values else nothing


def _columns(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return the columns of `G_t` that are best for rounded rows of `S`, as rows (k, a): a least-squares problem."""
    if not len(rows):
        return matrix.new_zeros(0, matrix.shape[0])
    products, inner = matrix.to(torch.float64) @ rows.T, rows @ rows.T
    lower, failed = torch.linalg.cholesky_ex(inner)
    diagonal = lower.diagonal()
    if not failed and diagonal.min() > DEPENDENT * diagonal.max():
        return torch.cholesky_solve(products.T, lower)
    # At two bits, short rows may coincide.
    return torch.linalg.lstsq(inner, products.T, driver="gelsd" if rows.device.type == "cpu" else None).solution
