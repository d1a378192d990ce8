"""How many directions of a parameter a budget of bytes can use.

Whole spectra need all eigenvalues of every Gram matrix, but only leading directions are ever worth their bytes. So the
first directions are read, bytes are allocated, and where directions that were not read may be worth the price that a
byte has then, and change the choice, more are read. Energies descend: what the last one that was read is not worth, no
later one is.

What a shared direction is worth depends also on how its energy is split between tasks. Those that were not read have
no more energy than the last one; they are taken to be split in one of the ways in which the others are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import TypedDict

import torch
from torch import Tensor

from . import krylov
from .allocation import OWN, SHARED, WHOLE, Directions, Kept, Ways
from .closed_form import factor, gram
from .codes import BITS, SCALE_BITS
from .components import GROUP, LARGEST_INDEX
from .eigen import eigenvalues
from .layout import Sides
from .targets import squared_norm

# Directions that are read at the least.
FEWEST = 16
# How much lower than the price of the allocation a price may be: rounding up to whole bytes takes it back a little, and
# energies from Krylov spaces are slightly too small.
MARGIN = 0.99
# A column of a shared direction also stores which direction it is for.
INDEX_BITS = 16


class Measured(TypedDict):
    """Weighted energies of one parameter: of every task's difference (T), of the directions of each task's own
    difference (T, n), and of directions that all share, for every task (n, T); what the shared ones miss, and the least
    that as many could."""

    whole: list[float]
    own: list[list[float]]
    shared: list[list[float]]
    missed: list[float]


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
        most = most_directions(sides, len(matrices))
        rank = most if count is None else min(count, most)
        if not is_read_from_products(matrices, rank):
            rank = max(rank, most // 4)  # an eigenvector more costs little beside the Gram matrix
        factors, _, *measured["missed"] = factor(weighted(matrices, weights), rank)
        measured["shared"] = torch.stack([part.double().square().sum(0) for part in factors], 1).tolist()
    return measured


def _spectrum(matrix: Tensor, count: int | None) -> Tensor:
    """Return the energies of at least the first `count` directions of a matrix; all by default."""
    if count is not None and is_read_from_products([matrix], count):
        (left,), *_ = factor([matrix], count)
        return left.double().square().sum(0)
    return eigenvalues(gram([matrix]))


def is_read_from_products(matrices: list[Tensor], count: int) -> bool:
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


def _matrices(differences: list[Tensor], sides: Sides) -> list[Tensor]:
    return [difference.reshape(sides[0] * sides[1], sides[2]) for difference in differences]


def weighted(matrices: list[Tensor], weights: Sequence[float]) -> list[Tensor]:
    return [matrix * weight**0.5 for matrix, weight in zip(matrices, weights, strict=True)]


def most_directions(sides: Sides, tasks: int) -> int:
    """Return how many directions so many tasks' differences have."""
    batch, rows, columns = sides
    return min(columns, batch * rows * tasks, LARGEST_INDEX)


def first_count(rows: int, columns: int, tasks: int, budget: float) -> int:
    """Return how many directions of every task a parameter's share of the budget buys at the fewest bits.

    >>> first_count(rows=5632, columns=2048, tasks=4, budget=920_000)
    120
    """
    return max(FEWEST, ceil(budget / tasks / (min(BITS) * (rows + columns) / 8)))


def byte_price(kept: Iterable[Kept]) -> float | None:
    """Return the price of a byte at which an allocation was made; None if it bought nothing.

    What is chosen is worth what it recovers less what it costs, which is its bytes at that price.
    """
    choices = [choice for one in kept for choice in one.choices]
    size = sum(choice.bytes for choice in choices)
    return sum(choice.recovered - choice.worth for choice in choices) / size if size > 0 else None


def unread_ways(ways: Ways, available: Mapping[str, int], price: float) -> list[str]:
    """Return the ways of a parameter of which more must be read, because it may be worth a price and change the choice.

    `available` is how many directions every part of a way has. A way that is worth less than another one, even with all
    that it may still gain, is not read on.

    >>> import torch
    >>> part = Directions(torch.tensor([[9.0], [4.0]]), left=8, right=8)
    >>> ways = {WHOLE: [Directions(torch.tensor([[17.0]]), 6400, 0)], OWN: [part]}
    >>> [unread_ways(ways, {OWN: 5}, price) for price in (0.1, 10.0)], unread_ways(ways, {OWN: 2}, 0.1)
    ([['own'], []], [])
    """
    price = MARGIN * price
    worth = {way: sum(part.choose(price).worth for part in parts) for way, parts in ways.items()}
    energies = [float(part.energies.sum()) for part in ways[WHOLE]]
    found = []
    for way in available:
        totals = [sum(energies)] if way == SHARED else energies
        parts = zip(ways.get(way, ()), totals, strict=False)
        gain = sum(_most_gain(part, available[way], total, price) for part, total in parts)
        if gain > 0 and worth[way] + gain >= max(worth.values()):
            found.append(way)
    return found


def _most_gain(part: Directions, available: int, energy: float, price: float) -> float:
    """Return the most that directions which were not read may be worth: each has no more energy than the last one, and
    all together no more than what is left of the whole."""
    if len(part.energies) >= available:
        return 0.0
    last, left = float(part.energies[-1].sum()), energy - float(part.energies.sum())
    count = available - len(part.energies)
    if last > 0:
        count = min(count, ceil(max(left, 0.0) / last))
    return count * _last(part).worths(price).max().item()


def _last(part: Directions) -> Directions:
    """Return what the next direction may be: of the energy of the last one, split like any of those that were read."""
    totals = part.energies.sum(1, keepdim=True)
    splits = part.energies / totals.clamp(min=torch.finfo(totals.dtype).tiny)
    return replace(part, energies=splits * totals[-1])
