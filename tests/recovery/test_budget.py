"""Rank by budget: within it, optimal on the hull, and never worse than a uniform rank of the same storage."""

from __future__ import annotations

import itertools

import pytest
import torch

from retex_hf.recovery import Spectrum, allocate, plan_layout
from retex_hf.recovery.budget import concave_options
from retex_hf.recovery.layout import at_rank

TASKS = 3


def random_spectra(seed: int) -> dict[str, Spectrum]:
    """Matrices, batches of matrices and vectors of random sizes, with spectra that decay fast, slowly or not at all."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    spectra = {}
    for index in range(integer(1, 12)):
        rows, columns = integer(2, 40), integer(2, 40)
        shape = [(rows,), (rows, columns), (rows, columns), (integer(2, 5), rows, columns)][integer(0, 4)]
        layout = plan_layout(shape, 1, TASKS)
        size = 1 if layout.kind != "matrix" else min(TASKS * layout.rows, layout.columns)
        decay = torch.rand((), generator=generator) * 2
        values = torch.rand(size, generator=generator).sort(descending=True).values
        values = values * torch.arange(1, size + 1).pow(-decay) * 10 ** integer(-3, 3)
        spectra[f"p{index}"] = Spectrum(layout, values.sort(descending=True).values.double())
    return spectra


def energy(spectra, layouts) -> float:
    return sum(
        (spectra[n].values[: layout.rank] if layout.kind == "matrix" else spectra[n].values).sum().item()
        for n, layout in layouts.items()
    )


def numbers(layouts) -> int:
    return sum(layout.stored_numbers(TASKS) for layout in layouts.values())


@pytest.mark.parametrize("seed", range(60))
def test_never_worse_than_any_uniform_rank_of_the_same_storage(seed):
    spectra = random_spectra(seed)
    for rank in (1, 2, 3, 5, 8, 13, 21, 34):
        uniform = {name: at_rank(spectrum.layout, rank, TASKS) for name, spectrum in spectra.items()}
        chosen = allocate(spectra, TASKS, numbers(uniform))
        assert numbers(chosen) <= numbers(uniform)
        assert energy(spectra, chosen) >= energy(spectra, uniform) * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_options_are_concave_and_end_with_everything(seed):
    for spectrum in random_spectra(seed).values():
        hull = concave_options(spectrum, TASKS)
        slopes = [(b.energy - a.energy) / (b.numbers - a.numbers) for a, b in itertools.pairwise(hull)]
        assert slopes == sorted(slopes, reverse=True)
        assert hull[0].layout is None and hull[0].numbers == 0
        assert hull[-1].energy == pytest.approx(spectrum.values.sum().item())


@pytest.mark.parametrize("seed", range(20))
def test_budgets_met_exactly_are_solved_exactly(seed):
    """Against all combinations of options, on instances small enough to try them all."""
    generator = torch.Generator().manual_seed(seed)
    spectra = {}
    for index, shape in enumerate([(4, 5), (6, 3), (7,)]):
        layout = plan_layout(shape, 1, TASKS)
        size = 1 if layout.kind != "matrix" else min(TASKS * layout.rows, layout.columns)
        spectra[f"p{index}"] = Spectrum(
            layout, torch.rand(size, generator=generator).sort(descending=True).values.double()
        )
    options = {name: concave_options(spectrum, TASKS) for name, spectrum in spectra.items()}
    for picked in itertools.product(*options.values()):
        budget = sum(option.numbers for option in picked)
        chosen = allocate(spectra, TASKS, budget)
        if numbers(chosen) == budget:
            assert energy(spectra, chosen) >= sum(option.energy for option in picked) - 1e-9


def test_nothing_fits_into_nothing():
    assert allocate(random_spectra(0), TASKS, 0) == {}
