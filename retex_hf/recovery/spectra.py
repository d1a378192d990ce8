"""How many directions of a parameter a budget of bytes can use.

Whole spectra need all eigenvalues of every Gram matrix, but only leading directions are ever worth their bytes. So the
first directions are read, bytes are allocated, and where directions that were not read may be worth the price that a
byte has then, more are read. Energies descend: what the last one that was read is not worth, no later one is.

What a shared direction is worth depends also on how its energy is split between tasks. Those that were not read have
no more energy than the last one; they are taken to be split in one of the ways in which the others are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

import torch

from .allocation import Directions, Kept
from .codes import BITS

# Directions that are read at the least.
FEWEST = 16
# How much lower than the price of the allocation a price may be: rounding up to whole bytes takes it back a little, and
# energies from Krylov spaces are slightly too small.
MARGIN = 0.99


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


def needs_more(parts: Sequence[Directions], available: int, price: float) -> bool:
    """Return whether directions that were not read may be worth a price; `available` is how many there are of each
    part.

    >>> import torch
    >>> part = Directions(torch.tensor([[9.0], [4.0]]), left=8, right=8)
    >>> [needs_more([part], 5, price) for price in (0.1, 10.0)], needs_more([part], 2, 0.1)
    ([True, False], False)
    """
    return any(len(part.energies) < available and _last(part).choose(MARGIN * price).worth > 0 for part in parts)


def _last(part: Directions) -> Directions:
    """Return what the next direction may be: of the energy of the last one, split like any of those that were read."""
    totals = part.energies.sum(1, keepdim=True)
    splits = part.energies / totals.clamp(min=torch.finfo(totals.dtype).tiny)
    return replace(part, energies=splits * totals[-1])
