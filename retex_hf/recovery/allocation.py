"""What to keep of every parameter under a budget of bytes, and at how many bits.

A parameter's offset for task t is `G_t S`. Every direction (row of `S`) that is kept costs its numbers once, and a
column of `G_t` for every task that uses it. A direction whose energy for task t is e, kept at p bits with a column at q
bits, recovers `(1 - eps_p) (1 - eps_q) e`, where `eps` is what rounding loses. The directions of a parameter may be the
singular vectors of each task's own difference, which one task uses, or those of all differences together, which any
task may use; or the parameter is not factored, and rounded as it is.

At a price per byte, every choice is independent of all others: a direction, a column or a bit is worth its price or is
not. Whatever is chosen at a price has the least error of all choices of as many bytes (Everett's theorem), so the best
choice under a budget is found by bisection of the price. All choices of one parameter (its directions) are made
together, because they exclude each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt

import torch
from torch import Tensor

from .codes import BITS, SCALE_BITS, lost_energy

# Relative precision of the price, and the most steps of its bisection.
PRECISION, STEPS = 1e-9, 64
OWN, SHARED, WHOLE = "own", "shared", "whole"


@dataclass(frozen=True)
class Offers:
    """The ways to store something of energy e, the cheapest first: each recovers a share of e for a number of bytes.

    At a price, the best one depends on `e / price` alone: it changes at the thresholds. Ways that are never the best
    are left out; the first is to keep nothing.
    """

    bits: Tensor  # (offers, 2): of the direction and of the column
    shares: Tensor
    bytes: Tensor
    thresholds: Tensor

    @classmethod
    def of(cls, points: Sequence[tuple[int, int, float, float]]) -> Offers:
        """Return the upper hull of points: bits of the direction and of the column, share, bytes."""
        hull = [(0, 0, 0.0, 0.0)]
        thresholds: list[float] = []
        while True:
            *_, share, size = hull[-1]
            steps = [((point[3] - size) / (point[2] - share), -point[2], point) for point in points if point[2] > share]
            if not steps:
                break
            threshold, _, point = min(steps)
            hull.append(point)
            thresholds.append(threshold)
        bits, shares, sizes = [point[:2] for point in hull], [point[2] for point in hull], [point[3] for point in hull]
        made = [torch.tensor(values, dtype=torch.float64) for values in (shares, sizes, thresholds)]
        return cls(torch.tensor(bits), *made)

    def best(self, energies: Tensor, price: float) -> Tensor:
        """Return which offer is the best for each energy."""
        return torch.bucketize(energies / price, self.thresholds, right=True)


@dataclass(frozen=True)
class Directions:
    """Directions that offsets may be made of: the energy (n, users) of each for every task that may use it.

    `left` is how many numbers a column has, `right` how many a direction has. A tensor that is rounded as it is, is one
    direction of no numbers; `scale_bits` are spent on a column's scales.
    """

    energies: Tensor
    left: int
    right: int
    scale_bits: int = SCALE_BITS

    @property
    def shape(self) -> Shape:
        """Return what determines the offers: numbers of a column and of a direction, bits of a scale, users."""
        return self.left, self.right, self.scale_bits, self.energies.shape[1]

    def worths(self, price: float) -> Tensor:
        """Return what each direction (n,) is worth at a price, with the best bits for it and its columns."""
        return _best(self.energies.double(), self.shape, price)[2]

    def choose(self, price: float) -> Choice:
        """Return the bits of every direction and column that are worth their price; 0 where one is not kept."""
        right, left, worth, _ = _best(self.energies.double(), self.shape, price)
        return Choice(self, right, left, worth.sum().item())


Shape = tuple[int, int, int, int]


def _best(energies: Tensor, shape: Shape, price: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the bits of directions (n,) and columns (n, users) that are worth the most at a price, the worth of each
    direction with its columns, and its bytes."""
    length, numbers, scale_bits, users = shape
    if users == 1:  # direction and column are kept together, or neither is
        offers = _pairs(length, numbers, scale_bits, BITS)
        found = offers.best(energies[:, 0], price)
        bits, size = offers.bits[found], offers.bytes[found]
        return bits[:, 0], bits[:, 1:], offers.shares[found] * energies[:, 0] - price * size, size
    worth, size = torch.zeros(2, len(energies), dtype=torch.float64)
    right, left = torch.zeros(len(energies), dtype=torch.int64), torch.zeros(energies.shape, dtype=torch.int64)
    for number in BITS:
        offers = _columns(length, number, scale_bits, BITS)
        found = offers.best(energies, price)
        own_size = offers.bytes[found].sum(1) + number * numbers / 8
        own_worth = (offers.shares[found] * energies).sum(1) - price * own_size
        better = own_worth > worth
        worth, size = torch.where(better, own_worth, worth), torch.where(better, own_size, size)
        right = torch.where(better, number, right)
        left = torch.where(better.unsqueeze(1), offers.bits[found, 1], left)
    return right, left, worth, size


@cache
def _pairs(left: int, right: int, scale_bits: int, choices: tuple[int, ...]) -> Offers:
    """Return the offers for a direction with its only column."""
    rights = choices if right else (0,)
    return Offers.of(
        [
            (p, q, (1 - lost_energy(p) if p else 1.0) * (1 - lost_energy(q)), (p * right + q * left + scale_bits) / 8)
            for p in rights
            for q in choices
        ]
    )


@cache
def _columns(left: int, right_bits: int, scale_bits: int, choices: tuple[int, ...]) -> Offers:
    """Return the offers for a column of a direction that is kept at some bits."""
    kept = 1 - lost_energy(right_bits)
    return Offers.of([(right_bits, q, kept * (1 - lost_energy(q)), (q * left + scale_bits) / 8) for q in choices])


@dataclass(frozen=True)
class Choice:
    """The bits of every direction (n,) and of every task's column (n, users), and their worth at the price."""

    directions: Directions
    right: Tensor
    left: Tensor
    worth: float

    @property
    def bytes(self) -> float:
        """Return what the choice costs."""
        scales = (self.left > 0).sum().item() * self.directions.scale_bits
        bits = self.left.sum().item() * self.directions.left + self.right.sum().item() * self.directions.right
        return (bits + scales) / 8

    @property
    def recovered(self) -> float:
        """Return the energy that the choice recovers."""
        return self.recovered_by_user.sum().item()

    @property
    def recovered_by_user(self) -> Tensor:
        """Return the energy that the choice recovers for every task that may use the directions."""
        kept = torch.zeros(max(BITS) + 1, dtype=torch.float64)
        for bits in BITS:
            kept[bits] = 1 - lost_energy(bits)
        right = kept[self.right] if self.directions.right else torch.ones(len(self.right), dtype=torch.float64)
        return (right.unsqueeze(1) * kept[self.left] * self.directions.energies.double()).sum(0)


# The ways to keep one parameter, by name: several sets of directions, all of which are used.
Ways = Mapping[str, Sequence[Directions]]


@dataclass(frozen=True)
class Kept:
    """The way chosen for one parameter, and the choice in each of its sets of directions."""

    way: str
    choices: tuple[Choice, ...]

    @property
    def bytes(self) -> float:
        """Return what the parameter costs."""
        return sum(choice.bytes for choice in self.choices)

    @property
    def recovered(self) -> float:
        """Return the energy that is recovered."""
        return sum(choice.recovered for choice in self.choices)


def choose(ways: Ways, price: float) -> Kept:
    """Return the way of keeping a parameter that is worth the most at a price."""
    kept = [Kept(way, tuple(part.choose(price) for part in parts)) for way, parts in ways.items()]
    return max(kept, key=lambda one: sum(choice.worth for choice in one.choices))


def allocate_bytes(parameters: Mapping[str, Ways], budget: float) -> dict[str, Kept]:
    """Return what to keep of every parameter for at most `budget` bytes.

    The result has the least error of all choices of as many bytes, and its bytes differ from the budget by less than
    one item.

    >>> import torch
    >>> ways = {"own": [Directions(torch.tensor([[9.0], [1e-9]]), left=8, right=8)]}
    >>> allocate_bytes({"w": ways}, budget=12)["w"].choices[0].left.tolist()
    [[5], [0]]
    """
    free = _at_budget(parameters, budget)
    # Between two prices a parameter may change its way, and its bytes by many items: fill what that leaves.
    settled = {name: {kept.way: parameters[name][kept.way]} for name, kept in free.items()}
    return _at_budget(settled, budget)


def _at_budget(parameters: Mapping[str, Ways], budget: float) -> dict[str, Kept]:
    """Return the best choice at the lowest price at which it fits."""
    all_ways = _AllWays(parameters)
    low, high = 1e-30, max(all_ways.energy, 1e-30) * 8  # no byte recovers more than all
    for _ in range(STEPS):
        price = sqrt(low * high)
        if all_ways.bytes_at(price) <= budget:
            high = price
        else:
            low = price
            all_ways.leave_out_worthless()  # at a higher price they are worth nothing either
        if high / low < 1 + PRECISION:
            break
    while True:
        found = {name: choose(ways, high) for name, ways in parameters.items()}
        if sum(kept.bytes for kept in found.values()) <= max(budget, 0.0):
            return found
        high *= 1 + 1e-6  # sums in another order may round to another side


class _AllWays:
    """The ways of all parameters, priced together: one operation for all directions of one shape."""

    def __init__(self, parameters: Mapping[str, Ways]) -> None:
        self.counts = [len(ways) for ways in parameters.values()]
        energies: dict[Shape, list[Tensor]] = {}
        places: dict[Shape, list[Tensor]] = {}
        flat = (parts for ways in parameters.values() for parts in ways.values())
        for place, parts in enumerate(flat):
            for part in parts:
                energies.setdefault(part.shape, []).append(part.energies.double())
                places.setdefault(part.shape, []).append(torch.full((len(part.energies),), place))
        self.groups = {shape: (torch.cat(energies[shape]), torch.cat(places[shape])) for shape in energies}
        self.energy = max((float(found.sum()) for found, _ in self.groups.values()), default=0.0)
        self._worthy: dict[Shape, Tensor] = {}

    def bytes_at(self, price: float) -> float:
        """Return the bytes of the best choice at a price."""
        worth, size = torch.zeros(2, sum(self.counts), dtype=torch.float64)
        for shape, (energies, places) in self.groups.items():
            *_, own_worth, own_size = _best(energies, shape, price)
            self._worthy[shape] = own_worth > 0
            worth.index_add_(0, places, own_worth)
            size.index_add_(0, places, own_size)
        total = 0.0
        for worths, sizes in zip(worth.split(self.counts), size.split(self.counts), strict=True):
            total += sizes[worths.argmax()].item() if len(worths) else 0.0
        return total

    def leave_out_worthless(self) -> None:
        """Drop the directions that were worth nothing at the last price."""
        self.groups = {
            shape: (energies[self._worthy[shape]], places[self._worthy[shape]])
            for shape, (energies, places) in self.groups.items()
        }
