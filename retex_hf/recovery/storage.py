"""The recovery that a budget of bytes buys: measure, choose, factor and round, one parameter at a time.

The error that is minimised is relative to what it is a part of: `sum_t sum_l w_tl ||D_tl - R_tl||^2` with
`w_tl = 1 / (E_t (E_tl / E_t)^alpha)`, where `E_tl` is the energy of task t's difference in parameter l and `E_t` its
sum over all parameters. With alpha = 0 every task counts the same, whatever the size of its update; towards alpha = 1
every parameter counts the same as well. The plain sum of the paper has all weights equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..checkpoints.sources import TensorInfo
from ..config import RetexConfig
from .allocation import OWN, SHARED, WHOLE, Directions, Kept, allocate_bytes
from .closed_form import gram
from .codes import SCALE_BITS, codebook, encode
from .components import (
    COMPONENTS,
    GROUP,
    ROUNDED,
    ComponentGenerator,
    ComponentLayout,
    Runs,
    encode_components,
    runs_of,
)
from .module import TASK_EMBEDDING, RecoveryModule
from .targets import Targets
from .work_sharing import BuildContext, run_dealt

# Weight of a parameter's own energy, between none (0) and all (1).
ALPHA = 0.5
# A column of a shared direction also stores which direction it is for.
INDEX_BITS = 16


def matrix_shape(shape: tuple[int, ...], convolution: bool) -> tuple[int, int] | None:
    """Return a parameter's sides as a matrix; None for vectors. Stacks of matrices are one tall matrix."""
    sides = [size for size in ((shape[0], prod(shape[1:])) if convolution or len(shape) == 4 else shape) if size != 1]
    return None if len(sides) < 2 else (prod(sides[:-1]), sides[-1])


@dataclass(frozen=True)
class Measured:
    """The energy of every task's difference in one parameter, and of every direction: own (T, n), shared (n, T)."""

    energies: list[float]
    own: list[list[float]]
    shared: list[list[float]]


def solve_storage(
    targets: Targets, config: RetexConfig, convolutions: frozenset[str], budget: float, context: BuildContext
) -> tuple[RecoveryModule, dict[str, float]]:
    """Return the recovery of at most `budget` bytes, and the relative error it leaves in every parameter."""
    tasks = targets.num_tasks
    sides = {name: matrix_shape(tuple(targets.merged[name].shape), name in convolutions) for name in targets.names}
    numbers = {name: float(prod(targets.merged[name].shape)) for name in targets.names}
    energies = run_dealt(context, numbers, lambda name: _energies(targets, name), "Measuring")
    weights = task_weights(energies, config)
    measured = run_dealt(
        context, numbers, lambda name: _measure(targets, name, sides[name], weights[name]), "Reading spectra"
    )
    ways = {name: _ways(measured[name], tuple(targets.merged[name].shape), sides[name]) for name in targets.names}
    kept = allocate_bytes(ways, budget)
    layouts = {
        name: _layout(kept[name], tuple(targets.merged[name].shape), sides[name], tasks)
        for name in targets.names
        if kept[name].bytes > 0
    }
    wanted = {
        f"{name}.{part}": TensorInfo(*info) for name, layout in layouts.items() for part, info in layout.stored.items()
    }
    wanted[TASK_EMBEDDING] = TensorInfo((tasks, tasks), torch.float32)
    tensors = context.store.allocate("recovery", wanted)
    generators = {
        name: ComponentGenerator(layout, *(tensors.get(f"{name}.{part}") for part in ("codes", "scales", "index")))
        for name, layout in layouts.items()
    }
    recovery = RecoveryModule(tensors[TASK_EMBEDDING], generators).requires_grad_(False)
    recovery.write_embedding(None)

    def work(name: str) -> list[float]:
        stored = _encode(targets, name, layouts[name], kept[name], weights[name])
        for part, tensor in stored.items():
            generators[name].get_parameter(part).copy_(tensor)
        return _residual(targets, name, generators[name])

    found = run_dealt(
        context,
        {name: numbers[name] for name in layouts},
        work,
        "Solving",
        lambda name: list(generators[name].parameters()),
    )
    errors = {name: (missed / energy) ** 0.5 if energy > 0 else 0.0 for name, (missed, energy) in found.items()}
    return recovery, errors


def task_weights(energies: Mapping[str, Sequence[float]], config: RetexConfig) -> dict[str, list[float]]:
    """Return the weight of every task's error in every parameter."""
    if config.objective == "sum":
        return {name: [1.0] * len(own) for name, own in energies.items()}
    totals = [sum(column) for column in zip(*energies.values(), strict=True)]
    return {
        name: [
            0.0 if energy == 0 or total == 0 else 1 / (total * (energy / total) ** ALPHA)
            for energy, total in zip(own, totals, strict=True)
        ]
        for name, own in energies.items()
    }


def _energies(targets: Targets, name: str) -> list[float]:
    return [targets.difference(task, name).double().square().sum().item() for task in range(targets.num_tasks)]


def _measure(
    targets: Targets, name: str, sides: tuple[int, int] | None, weights: Sequence[float]
) -> dict[str, list[list[float]]]:
    """Return the weighted energies of a parameter's directions: of each task's own, and of all tasks' together."""
    differences = [
        targets.difference(task, name).double() * weight**0.5
        for task, weight in zip(range(targets.num_tasks), weights, strict=True)
    ]
    whole = [difference.square().sum().item() for difference in differences]
    if sides is None:
        return {"whole": [whole], "own": [], "shared": []}
    matrices = [difference.reshape(sides) for difference in differences]
    own = [torch.linalg.eigvalsh(gram([matrix])).flip(0).clamp(min=0).tolist() for matrix in matrices]
    vectors = _shared_vectors(matrices)
    shared = torch.stack([(matrix @ vectors.T).square().sum(0) for matrix in matrices], 1)
    return {"whole": [whole], "own": own, "shared": shared.tolist()}


def _shared_vectors(matrices: list[Tensor]) -> Tensor:
    """Return the right singular vectors of stacked matrices as rows, those of most energy first."""
    products = sum((matrix.T @ matrix for matrix in matrices[1:]), matrices[0].T @ matrices[0])
    _, vectors = torch.linalg.eigh(products)
    rows = vectors.flip(1).T
    return rows[: min(rows.shape[1], sum(len(matrix) for matrix in matrices))]


def _ways(
    measured: Mapping[str, list[list[float]]], shape: tuple[int, ...], sides: tuple[int, int] | None
) -> dict[str, list[Directions]]:
    groups = -(-prod(shape) // GROUP)
    energies = [torch.tensor([[energy]]) for energy in measured["whole"][0]]
    ways = {WHOLE: [Directions(energy, groups * GROUP, 0, groups * SCALE_BITS) for energy in energies]}
    if sides is not None:
        rows, columns = sides
        ways[OWN] = [Directions(torch.tensor(own).unsqueeze(1), rows, columns) for own in measured["own"]]
        ways[SHARED] = [Directions(torch.tensor(measured["shared"]), rows, columns, SCALE_BITS + INDEX_BITS)]
    return ways


def _layout(kept: Kept, shape: tuple[int, ...], sides: tuple[int, int] | None, tasks: int) -> ComponentLayout:
    if kept.way == WHOLE or sides is None:
        left = tuple(runs_of([int(choice.left[0, 0])]) if choice.left[0, 0] else () for choice in kept.choices)
        return ComponentLayout(shape, ROUNDED, left)
    rows, columns = sides
    if kept.way == OWN:
        chosen = [order(choice.right, choice.left[:, 0]) for choice in kept.choices]
        right = [int(choice.right[i]) for choice, own in zip(kept.choices, chosen, strict=True) for i in own]
        left = tuple(
            runs_of([int(choice.left[i, 0]) for i in own]) for choice, own in zip(kept.choices, chosen, strict=True)
        )
        return ComponentLayout(shape, COMPONENTS, left, runs_of(right), rows, columns)
    (choice,) = kept.choices
    right = [int(choice.right[i]) for i in order(choice.right)]
    left = tuple(runs_of([int(choice.left[i, task]) for i in order(choice.left[:, task])]) for task in range(tasks))
    return ComponentLayout(shape, COMPONENTS, left, runs_of(right), rows, columns, owned=False)


def order(*bits: Tensor) -> list[int]:
    """Return the kept vectors, those of the most bits first."""
    kept = [i for i in range(len(bits[0])) if bits[0][i] > 0]
    return sorted(kept, key=lambda i: tuple(-int(one[i]) for one in bits))


def _encode(
    targets: Targets, name: str, layout: ComponentLayout, kept: Kept, weights: Sequence[float]
) -> dict[str, Tensor]:
    tasks = range(targets.num_tasks)
    differences = [targets.difference(task, name).double() for task in tasks]
    if layout.kind == ROUNDED:
        lefts = [
            difference.reshape(1, -1) if runs else difference.new_zeros(0, difference.numel())
            for difference, runs in zip(differences, layout.left, strict=True)
        ]
        return encode_components(layout, torch.zeros(0, 0), lefts)
    matrices = [difference.reshape(layout.rows, layout.columns) for difference in differences]
    if layout.owned:
        found = [order(choice.right, choice.left[:, 0]) for choice in kept.choices]
        vectors = [_own_vectors(matrix, chosen) for matrix, chosen in zip(matrices, found, strict=True)]
        rights = torch.cat(vectors)
        used = [torch.tensor(layout.used_rows(task), dtype=torch.int64) for task in tasks]
    else:
        (choice,) = kept.choices
        chosen = order(choice.right)
        weighted = [matrix * weight**0.5 for matrix, weight in zip(matrices, weights, strict=True)]
        rights = _shared_vectors(weighted)[chosen]
        place = {i: row for row, i in enumerate(chosen)}
        used = [torch.tensor([place[i] for i in order(choice.left[:, task])], dtype=torch.int64) for task in tasks]
    codes, rounded = _round_rows(rights, layout.right)
    lefts = [_columns(matrix, rounded[rows]) for matrix, rows in zip(matrices, used, strict=True)]
    return encode_components(layout, codes, lefts, None if layout.owned else used)


def _own_vectors(matrix: Tensor, chosen: Sequence[int]) -> Tensor:
    """Return the chosen right singular vectors of a matrix as rows."""
    if not chosen:
        return matrix.new_zeros(0, matrix.shape[1])
    return _shared_vectors([matrix])[list(chosen)]


def _round_rows(rows: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return the codes of rows, and their values without scales."""
    codes, values, first = [], [], 0
    for run in runs:
        found, _ = encode(rows[first : first + run.count], run.bits)
        codes.append(found)
        values.append(codebook(run.bits)[found.long()].double())
        first += run.count
    nothing = torch.zeros(0, rows.shape[1])
    return torch.cat(codes) if codes else nothing.int(), torch.cat(values) if values else nothing.double()


def _columns(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return the columns of `G_t` that are best for rounded rows of `S`, as rows (k, a)."""
    return torch.linalg.lstsq(rows.T, matrix.T).solution if len(rows) else matrix.new_zeros(0, matrix.shape[0])


def _residual(targets: Targets, name: str, generator: ComponentGenerator) -> list[float]:
    missed, energy = 0.0, 0.0
    for task, embedding in enumerate(torch.eye(targets.num_tasks)):
        difference = targets.difference(task, name).double()
        missed += (difference - generator(embedding)).square().sum().item()
        energy += difference.square().sum().item()
    return [missed, energy]
