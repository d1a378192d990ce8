"""Rank allocation by budget: spend a number of stored values where it recovers the most energy, across all parameters.

Every parameter offers a list of options (stored numbers, energy recovered), from nothing to the whole difference. On
the upper concave hull of these options the energy per number only falls, so taking hull segments in order of that slope
is the exact optimum of every budget it meets exactly; the rest of the budget then goes to the best steps that still
fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from .layout import MATRIX, Layout, at_rank


@dataclass(frozen=True)
class Spectrum:
    """The energy in a parameter's differences: `values[q]` is the energy that rank q + 1 adds to rank q.

    A parameter that is not factored (a vector) has one value, its whole energy. Batches of matrices share one rank, so
    their values are summed.
    """

    layout: Layout
    values: Tensor

    @cached_property
    def recovered(self) -> list[float]:
        """Return the energy recovered at rank 0, 1, 2, ..."""
        return [0.0, *self.values.cumsum(0).tolist()]

    def energy(self, layout: Layout) -> float:
        """Return the energy that a layout of this parameter recovers."""
        return self.recovered[min(layout.rank, len(self.values))] if layout.kind == MATRIX else self.recovered[-1]


@dataclass(frozen=True)
class Option:
    """One way to store a parameter; `layout` None stores nothing."""

    numbers: int
    energy: float
    layout: Layout | None


def allocate(spectra: Mapping[str, Spectrum], num_tasks: int, budget: int) -> dict[str, Layout]:
    """Return layouts of the parameters that are worth storing, within a budget of stored numbers.

    Never worse than the best uniform rank that fits the same budget: that one is computed too, and is returned if
    rounding at the end of the budget favours it.
    """
    options = {name: concave_options(spectrum, num_tasks) for name, spectrum in spectra.items()}
    chosen = _greedy(options, budget)
    uniform = _best_uniform(spectra, num_tasks, budget)
    if uniform is not None and _energy(spectra, uniform) > _energy(spectra, chosen):
        return uniform
    return chosen


def concave_options(spectrum: Spectrum, num_tasks: int) -> list[Option]:
    """Return the options of a parameter on the upper concave hull, by growing cost: no mixture of cheaper and dearer
    ones beats them."""
    layout = spectrum.layout
    whole = layout.whole()
    options = [Option(0, 0.0, None)]
    if layout.kind == MATRIX:
        step = layout.with_rank(1).stored_numbers(num_tasks)
        affordable = min(len(spectrum.values), (whole.stored_numbers(num_tasks) - 1) // step)
        options += [Option(q * step, spectrum.recovered[q], layout.with_rank(q)) for q in range(1, affordable + 1)]
    # A vector is stored whole or not at all, and needs no shared scalar.
    options.append(Option(whole.stored_numbers(num_tasks), spectrum.recovered[-1], whole))
    hull: list[Option] = []
    for option in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(cheap: Option, dear: Option) -> float:
    return (dear.energy - cheap.energy) / (dear.numbers - cheap.numbers)


def _greedy(options: Mapping[str, list[Option]], budget: int) -> dict[str, Layout]:
    steps = [
        (_slope(cheap, dear), name, index)
        for name, hull in options.items()
        for index, (cheap, dear) in enumerate(pairwise(hull), start=1)
        if dear.energy > cheap.energy
    ]
    steps.sort(key=lambda step: (-step[0], step[2]))
    position = dict.fromkeys(options, 0)
    left = budget
    for _, name, index in steps:
        hull = options[name]
        if position[name] != index - 1:
            continue  # an earlier step of this parameter did not fit
        price = hull[index].numbers - hull[index - 1].numbers
        if price <= left:
            left -= price
            position[name] = index
    picked = {name: options[name][index].layout for name, index in position.items()}
    return {name: layout for name, layout in picked.items() if layout is not None}


def _best_uniform(spectra: Mapping[str, Spectrum], num_tasks: int, budget: int) -> dict[str, Layout] | None:
    best, best_energy = None, -1.0
    matrices = [spectrum.layout for spectrum in spectra.values() if spectrum.layout.kind == MATRIX]
    largest = max((min(layout.rows, layout.columns) for layout in matrices), default=1)
    for rank in range(1, largest + 1):
        layouts = {name: at_rank(spectrum.layout, rank, num_tasks) for name, spectrum in spectra.items()}
        if sum(layout.stored_numbers(num_tasks) for layout in layouts.values()) > budget:
            continue
        energy = _energy(spectra, layouts)
        if energy > best_energy:
            best, best_energy = layouts, energy
    return best


def _energy(spectra: Mapping[str, Spectrum], layouts: Mapping[str, Layout]) -> float:
    return sum(spectra[name].energy(layout) for name, layout in layouts.items())
