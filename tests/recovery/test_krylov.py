"""Directions from Krylov spaces: what they miss is what is said, and never more than certified."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from families import TEXT
from helpers import make_experts
from second_device import DEVICE, to_cpu, to_second
from torch import Tensor
from transformers import BertConfig, BertModel

from retex_hf import RetexConfig, RetexModel
from retex_hf.recovery import Layout, closed_form, krylov, solve
from retex_hf.recovery.certificate import FAILURE, LanczosTest, chi_squared_quantile, largest_sum
from retex_hf.recovery.krylov import TOLERANCE, leading_vectors, pays

# Singular values by their number.
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "slow": lambda i: i**-0.25,
    "medium": lambda i: i**-0.5,
    "fast": lambda i: 1 / i,
    "steep": lambda i: i**-3,
    "geometric": lambda i: 0.97**i,
    "over noise": lambda i: (1 / i + 0.01).where(i > 1, 1.01),
    "step at 16": lambda i: torch.where(i <= 16, 1.0, 0.1).double(),
    "low rank over a faint floor": lambda i: torch.where(i <= 10, 1 / i, 1e-5),
}
SHAPES = [(900, 600), (400, 1500), (3000, 300)]
decays = pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS.keys())


def with_spectrum(shape: tuple[int, int], decay: Callable[[Tensor], Tensor], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A float32 matrix, and its squared singular values (those of the rounded one)."""
    generator = torch.Generator().manual_seed(seed)
    side = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(length, side, generator=generator, dtype=torch.float64)).Q for length in shape
    )
    matrix = ((left * decay(torch.arange(1, side + 1, dtype=torch.float64))) @ right.T).float()
    return matrix, torch.linalg.svdvals(matrix.double()).square()


def missed(matrices: list[Tensor], rows: Tensor) -> float:
    return sum((matrix.double() - matrix.double() @ rows.T @ rows).square().sum().item() for matrix in matrices)


@decays
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 16])
def test_no_more_is_missed_than_certified(shape, decay, rank):
    matrix, energies = with_spectrum(shape, decay)
    optimum = energies[rank:].sum().item()
    found = leading_vectors([matrix], rank)
    assert found is not None
    torch.testing.assert_close(found.rows @ found.rows.T, torch.eye(rank).double(), rtol=0, atol=1e-10)
    assert found.energy == pytest.approx(energies.sum().item(), rel=1e-9)
    assert found.discarded == pytest.approx(missed([matrix], found.rows), rel=2e-3, abs=1e-13 * found.energy)
    torch.testing.assert_close(found.factors[0].double(), matrix.double() @ found.rows.T, rtol=0, atol=1e-6)
    # The bound is below the optimum, and near enough to it.
    assert found.least <= optimum * (1 + 1e-9)
    assert missed([matrix], found.rows) <= (1 + 2 * TOLERANCE) * optimum
    assert found.discarded <= (1 + TOLERANCE) * found.least


@pytest.mark.parametrize("seed", range(12))
def test_the_certificate_holds_for_every_seed(seed):
    matrix, energies = with_spectrum((500, 400), DECAYS["slow"], seed)
    for rank in (4, 16):
        found = leading_vectors([matrix], rank, tolerance=0.1, seed=seed)
        assert found.least <= energies[rank:].sum().item() <= found.discarded * (1 + 1e-6)
        assert found.discarded <= 1.01 * energies[rank:].sum().item()


def test_on_spectra_like_those_of_fine_tuning_the_certificate_is_tight():
    """Directions of decaying weight over noise, as wide as the models for which this is used."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(600, 1600, generator=generator)
    weights = torch.arange(1, 601) ** -0.5
    parts = [torch.randn(800, 600, generator=generator) * weights @ directions for _ in range(3)]
    matrices = [part / part.std() + 0.4 * torch.randn(800, 1600, generator=generator) for part in parts]
    assert pays(3 * 800, 1600, 48)
    found = leading_vectors(matrices, 48)
    optimum = torch.linalg.svdvals(torch.cat(matrices).double()).square()[48:].sum().item()
    assert found.least <= optimum
    assert found.discarded <= 1.001 * optimum
    assert found.discarded <= 1.005 * found.least


def test_a_stack_is_one_matrix():
    parts = [with_spectrum((200, 500), DECAYS["medium"], seed)[0] for seed in range(3)]
    apart, together = leading_vectors(parts, 8), leading_vectors([torch.cat(parts)], 8)
    torch.testing.assert_close(torch.cat(apart.factors), together.factors[0], rtol=0, atol=1e-4)
    assert apart.discarded == pytest.approx(together.discarded, rel=1e-6)


def test_the_result_depends_on_the_arguments_alone():
    matrix, _ = with_spectrum((300, 400), DECAYS["medium"])
    first = leading_vectors([matrix], 6)
    torch.randn(17)
    again = leading_vectors([matrix.clone()], 6)
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.factors[0], again.factors[0])
    assert (first.discarded, first.least) == (again.discarded, again.least)


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_scale_does_not_matter(scale):
    matrix, energies = with_spectrum((300, 400), DECAYS["medium"])
    found = leading_vectors([scale * matrix], 6)
    assert found.discarded / scale**2 == pytest.approx(energies[6:].sum().item(), rel=TOLERANCE)
    assert found.least / scale**2 <= energies[6:].sum().item()


def test_some_vectors_may_be_judged_beside_others():
    matrix, energies = with_spectrum((500, 400), DECAYS["medium"])
    found = leading_vectors([matrix], 12, kept=3)
    assert found.rows.shape == (12, 400)
    assert energies[3:].sum().item() == pytest.approx(found.discarded, rel=TOLERANCE)
    assert found.least <= energies[3:].sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_of_low_rank_is_found_whole(dtype):
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((500, 4), (4, 300)))
    found = leading_vectors([left @ right], 6)
    assert found.discarded <= 1e-12 * found.energy
    assert missed([left @ right], found.rows) <= 1e-12 * found.energy


def test_of_nothing_there_is_nothing():
    found = leading_vectors([torch.zeros(500, 300)] * 2, 4)
    assert (found.energy, found.discarded, found.least) == (0.0, 0.0, 0.0)
    torch.testing.assert_close(found.rows @ found.rows.T, torch.eye(4).double())
    assert len(found.factors) == 2
    assert not any(factor.any() for factor in found.factors)


@pytest.mark.parametrize("rank", [40, 99, 100])
def test_a_rank_near_the_side_is_left_to_others(rank):
    assert leading_vectors([torch.randn(100, 200)], rank) is None


def test_what_cannot_be_certified_is_not_returned():
    assert leading_vectors([torch.randn(1500, 1500)], 16, tolerance=1e-4) is None


def test_small_directions_beside_large_ones_are_found_in_float64():
    """What is left out is 1e-10 of the energy: float32 products would not tell."""
    matrix, _ = with_spectrum((600, 400), lambda i: torch.where(i <= 3, 1.0, 1e-5 * i**-0.5))
    optimum = torch.linalg.svdvals(matrix.double()).square()[8:].sum().item()
    found = leading_vectors([matrix], 8)
    assert optimum < 1e-8 * found.energy
    assert found.least <= optimum <= missed([matrix], found.rows) * (1 + 1e-6)
    assert missed([matrix], found.rows) <= (1 + TOLERANCE) * optimum


# ---- the bounds ------------------------------------------------------------------------------------------------------


def random_gram(decay: Callable[[Tensor], Tensor], side: int = 200, seed: int = 0) -> Tensor:
    matrix, _ = with_spectrum((side, side), decay, seed)
    return matrix.double().T @ matrix.double()


@decays
@pytest.mark.parametrize("width", [20, 60])
def test_no_sum_of_eigenvalues_exceeds_its_bound(decay, width):
    gram = random_gram(decay)
    for power in range(4):
        start = torch.randn(200, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
        basis = torch.linalg.qr(torch.linalg.matrix_power(gram, power) @ start).Q
        values, rotation = torch.linalg.eigh(basis.T @ gram @ basis)
        basis, values = basis @ rotation.flip(1), values.flip(0)
        outside = torch.eye(200).double() - basis @ basis.T
        coupling = outside @ gram @ basis
        rho = torch.linalg.eigvalsh(outside @ gram @ outside)[-1].item()
        for count in (1, 8, width):
            most = largest_sum(values, coupling.T @ coupling, rho, count)
            assert most >= torch.linalg.eigvalsh(gram)[-count:].sum() * (1 - 1e-12)
    # A space that the matrix maps to itself is not coupled, and the bound is the sum.
    values = torch.linalg.eigvalsh(gram)
    nothing = torch.zeros(width, width, dtype=torch.float64)
    most = largest_sum(values.flip(0)[:width], nothing, values[-width - 1].item(), 8)
    assert most <= values[-8:].sum() + 1e-3 * values[-1]


@decays
@pytest.mark.parametrize("seed", range(4))
def test_no_eigenvalue_outside_exceeds_its_bound(decay, seed):
    gram = random_gram(decay, seed=seed)
    basis = torch.linalg.qr(gram @ torch.randn(200, 12, dtype=torch.float64)).Q
    outside = torch.eye(200).double() - basis @ basis.T
    rest = outside @ gram @ outside
    largest, trace = torch.linalg.eigvalsh(rest)[-1].item(), rest.trace().item()
    test = LanczosTest(lambda block: gram @ block, basis, torch.Generator().manual_seed(seed))
    bounds = []
    for _ in range(6):
        test.step(4)
        assert test.found() <= largest + 1e-12 * gram.trace()
        bounds.append(test.bound(2 * trace))
        assert bounds[-1] >= largest * (1 - 1e-9)
    assert all(later <= 1.02 * earlier for earlier, later in pairwise(bounds))
    assert bounds[-1] <= 1.1 * largest


def test_the_bound_is_not_broken_by_a_rest_of_few_directions():
    """Lanczos steps end early; rounding is all that follows."""
    values = torch.zeros(300, dtype=torch.float64)
    values[:8] = torch.arange(8, 0, -1)
    basis = torch.eye(300, dtype=torch.float64)[:, :5]
    for dtype in (torch.float32, torch.float64):
        diagonal = values.to(dtype).unsqueeze(1)
        test = LanczosTest(lambda block, d=diagonal: d * block, basis.to(dtype), torch.Generator().manual_seed(0))
        test.step(12)
        assert 3 * (1 - 1e-6) <= test.bound(40.0) <= 3.2


@pytest.mark.parametrize("degrees", [1, 2, 8, 16])
@pytest.mark.parametrize("probability", [0.1, 1e-3, FAILURE])
def test_the_quantile_is_not_too_high(degrees, probability):
    value = torch.tensor(chi_squared_quantile(degrees, probability), dtype=torch.float64)
    below = torch.special.gammainc(torch.tensor(degrees / 2, dtype=torch.float64), value / 2).item()
    assert 0 < below <= probability * (1 + 1e-9)
    assert probability > FAILURE or below > 0.5 * probability


# ---- in the solver ---------------------------------------------------------------------------------------------------


@pytest.fixture
def always(monkeypatch) -> list[bool]:
    """Use Krylov spaces for small matrices too; whether each was certified."""
    used, original = [], krylov.leading_vectors

    def spy(*arguments):
        found = original(*arguments)
        used.append(found is not None)
        return found

    monkeypatch.setattr(krylov, "SIDES_PER_BLOCK", 5)
    monkeypatch.setattr(krylov, "leading_vectors", spy)
    return used


@pytest.mark.parametrize(
    "options", [{}, {"order": "shared_first"}, {"inner_rank": 3}, {"batch": 2}], ids=["plain", "reversed", "E", "batch"]
)
def test_the_solver_says_how_far_it_may_be_from_the_optimum(always, options):
    batch = options.get("batch", 1)
    shape = (batch, 150, 200) if batch > 1 else (150, 200)
    layout = Layout(shape, "matrix", **{"batch": 1, "rows": 150, "columns": 200, "rank": 6, **options})
    differences = [
        torch.stack([with_spectrum((150, 200), DECAYS["medium"], 10 * task + one)[0] for one in range(batch)])
        for task in range(3)
    ]
    solution = solve([difference.view(shape) for difference in differences], layout)
    assert always == [True] * batch
    inner = None if solution.inner is None else solution.inner
    offsets = [layout.offset(row, solution.shared, inner).view(batch, 150, 200) for row in solution.generated]
    error = sum((o - d).double().square().sum().item() for o, d in zip(offsets, differences, strict=True))
    assert error == pytest.approx(solution.residual, rel=1e-5)
    optimum = 0.0
    for one in range(batch):
        matrices = [d[one].double() if layout.order == "generated_first" else d[one].double().T for d in differences]
        optimum += torch.linalg.svdvals(torch.cat(matrices)).square()[layout.solved_rank :].sum().item()
    assert solution.least <= optimum <= solution.residual <= (1 + TOLERANCE) * solution.least


def test_the_gram_matrix_takes_over_where_there_is_no_certificate(always, monkeypatch):
    monkeypatch.setattr(krylov, "MOST_BLOCKS", 0)
    differences = [with_spectrum((150, 200), DECAYS["medium"], task)[0] for task in range(2)]
    solution = solve(differences, Layout((150, 200), "matrix", 1, 150, 200, 6))
    assert always == [False]
    optimum = torch.linalg.svdvals(torch.cat(differences).double()).square()[6:].sum().item()
    assert solution.residual == pytest.approx(optimum, rel=1e-6)
    assert solution.least <= optimum


def test_signs_do_not_depend_on_the_draw(always):
    differences = [with_spectrum((150, 200), DECAYS["fast"], task)[0] for task in range(2)]
    rows = closed_form.right_vectors(differences, 3)
    assert always == [True]
    exact = torch.linalg.svd(torch.cat(differences).double()).Vh[:3]
    exact = exact * exact.gather(1, exact.abs().argmax(1, keepdim=True)).sign()
    torch.testing.assert_close(rows, exact, rtol=0, atol=1e-4)


def test_another_device_computes_the_same():
    matrices = [with_spectrum((300, 400), DECAYS["medium"], task)[0] for task in range(2)]
    here, there = leading_vectors(matrices, 5), leading_vectors(to_second(matrices), 5)
    assert there.rows.device == there.factors[0].device == DEVICE
    torch.testing.assert_close(to_cpu(there.rows), here.rows, rtol=0, atol=1e-6)
    assert there.discarded == pytest.approx(here.discarded, rel=1e-6)


def test_only_small_ranks_of_large_matrices_pay():
    assert pays(22528, 2048, 64)
    assert pays(8192, 5632, 64)
    assert not pays(8192, 2048, 256)
    assert not pays(1024, 2048, 64)


def test_a_build_that_is_not_exact_states_the_distance(capsys, monkeypatch):
    base = BertModel(BertConfig(**TEXT)).eval()
    experts, text = make_experts(base), r"The factors miss at most (1\.\d{4}) times the least possible energy\."
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), device="cpu")
    assert "times the least" not in capsys.readouterr().err
    monkeypatch.setattr(krylov, "SIDES_PER_BLOCK", 0)
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), device="cpu")
    (stated,) = re.findall(text, capsys.readouterr().err)
    assert 1 <= float(stated) <= 1 + TOLERANCE
