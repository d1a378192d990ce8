"""Round the differences of one parameter and store them, as an allocation says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .allocation import OWN, WHOLE, Choice, Kept
from .closed_form import right_vectors
from .codes import codebook, encode
from .components import COMPONENTS, ROUNDED, ComponentGenerator, ComponentLayout, Runs, encode_components, runs_of
from .layout import Sides
from .spectra import is_read_from_products, weighted
from .targets import squared_norm

# Rounded rows whose part outside the span of others is below this share of their length count as dependent.
DEPENDENT = 1e-3


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
    lefts = [
        best_columns(matrix, rounded[rows.to(rounded.device)]) for matrix, rows in zip(matrices, used, strict=True)
    ]
    return encode_components(layout, codes, lefts, None if layout.owned else used)


def missed_energy(generator: ComponentGenerator, task: int, difference: Tensor) -> float:
    """Return the energy of a task's difference that its components do not recover."""
    one_hot = torch.zeros(generator.layout.num_tasks)
    one_hot[task] = 1
    return squared_norm(difference - generator(one_hot).to(difference.device))


def _chosen_rows(matrices: list[Tensor], weights: Sequence[float], chosen: Sequence[int], read: int) -> Tensor:
    """Return some of the right singular vectors of stacked and weighted matrices as rows; `read` were measured."""
    if not chosen:
        return matrices[0].new_zeros(0, matrices[0].shape[1]).double()
    # A Krylov space for as many directions is the same again, and so are they.
    rank = read if is_read_from_products(matrices, read) else max(chosen) + 1
    return right_vectors(weighted(matrices, weights), rank)[list(chosen)]


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


def best_columns(matrix: Tensor, rows: Tensor) -> Tensor:
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
