"""Leading eigenpairs leave out the least energy, to the tolerance, and float32 is caught where it would not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retex_hf.recovery import eigen
from retex_hf.recovery.eigen import TOLERANCE, top_eigenpairs

SIDE, RANK = 300, 80
INDEX = torch.arange(1, SIDE + 1, dtype=torch.float64)


def stepped(*parts: tuple[int, float]) -> Tensor:
    """Eigenvalues in groups of equal ones; the last group fills up."""
    values = torch.cat([torch.full((count,), value, dtype=torch.float64) for count, value in parts])
    return torch.cat([values, torch.full((SIDE - len(values),), parts[-1][1], dtype=torch.float64)])


# Spectra, and whether float32 can be certified for them.
SPECTRA = {
    "flat": (torch.ones(SIDE, dtype=torch.float64), True),
    "slow decay": (INDEX**-0.3, True),
    "decay": (1 / INDEX, True),
    "geometric": (0.97**INDEX, True),
    "a cluster at the cut": (stepped((RANK - 10, 5.0), (30, 1.0), (1, 0.1)), True),
    "a near-cluster at the cut": (1 + 1e-6 * (SIDE - INDEX), True),
    "the cut at a step": (stepped((RANK, 1.0), (1, 0.5)), True),
    "a few huge values": (stepped((3, 1e3), (1, 1.0)), True),
    "steep": (INDEX**-4, False),
    "very steep": (0.8**INDEX, False),
    "exact low rank": (stepped((RANK // 2, 2.0), (1, 0.0)), False),
    "exact rank": (stepped((RANK, 2.0), (1, 0.0)), False),
    "low rank over a faint floor": (stepped((RANK // 2, 1.0), (RANK, 1e-8), (1, 1e-9)), False),
}
cases = pytest.mark.parametrize(("spectrum", "certified"), SPECTRA.values(), ids=SPECTRA.keys())


def make_matrix(spectrum: Tensor) -> Tensor:
    rotation = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64))[0]
    matrix = (rotation * spectrum) @ rotation.T
    return (matrix + matrix.T) / 2


def left_out(matrix: Tensor, vectors: Tensor) -> float:
    return (matrix.trace() - (vectors * (matrix @ vectors)).sum()).item()


@pytest.fixture
def float32_attempts(monkeypatch) -> list[bool]:
    """Whether each attempt in float32 was accepted."""
    attempts, original = [], eigen._in_float32

    def spy(*arguments):
        found = original(*arguments)
        attempts.append(found is not None)
        return found

    monkeypatch.setattr(eigen, "_in_float32", spy)
    return attempts


@cases
@pytest.mark.parametrize("scale", [1.0, 1e-60, 1e60])
def test_leaves_out_the_optimum(spectrum, certified, scale, float32_attempts):
    matrix = scale * make_matrix(spectrum)
    values, vectors, discarded = top_eigenpairs(matrix, RANK)
    optimum, total = scale * spectrum[RANK:].sum().item(), matrix.trace().item()
    assert float32_attempts == [certified]
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(RANK, dtype=torch.float64), rtol=0, atol=1e-12)
    # Far below the tolerance, because the error is of second order; the rest is float64 rounding.
    assert left_out(matrix, vectors) <= optimum * (1 + 1e-6) + 1e-13 * total
    assert discarded == pytest.approx(left_out(matrix, vectors), rel=1e-9, abs=1e-13 * total)
    torch.testing.assert_close(values, scale * spectrum[:RANK], rtol=1e-4, atol=1e-13 * total)
    assert (values.diff() <= 0).all()


def test_a_matrix_on_which_float32_is_wrong_is_solved_in_float64(float32_attempts):
    """Directions next to the cut are far below what float32 can tell beside the largest eigenvalue."""
    spectrum = torch.cat([torch.ones(1), torch.full((79,), 2e-8), torch.full((220,), 1e-8)]).double()
    matrix = make_matrix(spectrum)
    naive = torch.linalg.eigh(matrix.float())[1][:, -RANK:].double()
    optimum = spectrum[RANK:].sum().item()
    assert left_out(matrix, torch.linalg.qr(naive)[0]) > (1 + 10 * TOLERANCE) * optimum
    _, vectors, discarded = top_eigenpairs(matrix, RANK)
    assert float32_attempts == [False]
    assert left_out(matrix, vectors) == pytest.approx(optimum, rel=1e-6)
    assert discarded == pytest.approx(optimum, rel=1e-6)


def wrong_vectors(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The right values, but one of the top vectors is one of the bottom."""
    vectors = vectors.clone()
    vectors[:, [-3, 0]] = vectors[:, [0, -3]]
    return values, vectors


def lost_pair(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The third pair from the top is not there, and the smallest is there twice."""
    order = [0, *range(len(values) - 3), len(values) - 2, len(values) - 1]
    return values[order], vectors[:, order]


def found_twice(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value stands twice, with vectors that are right, at the cost of the smallest."""
    return torch.cat([values[1:], values[-1:]]), vectors


@pytest.mark.parametrize("spoil", [wrong_vectors, lost_pair, found_twice])
def test_a_decomposition_that_went_wrong_is_not_accepted(monkeypatch, float32_attempts, spoil):
    eigh = torch.linalg.eigh
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda matrix: spoil(*eigh(matrix)) if matrix.dtype == torch.float32 else eigh(matrix)
    )
    spectrum = 1 / INDEX
    _, _, discarded = top_eigenpairs(make_matrix(spectrum), RANK)
    assert float32_attempts == [False]
    assert discarded == pytest.approx(spectrum[RANK:].sum().item(), rel=1e-9)


@cases
def test_the_bound_is_below_the_optimum(spectrum, certified):
    matrix = make_matrix(spectrum)
    estimates = torch.linalg.eigvalsh(matrix.float()).flip(0).double()
    for kept in (1, RANK, SIDE - 1):
        bound = eigen._least_discarded(estimates, kept, matrix.trace(), torch.linalg.matrix_norm(matrix))
        assert bound <= spectrum[kept:].sum()


def test_judged_by_what_is_kept(float32_attempts):
    """All pairs but the kept ones lie where float32 sees nothing; nor does anyone ask for them."""
    spectrum = stepped((20, 3.0), (60, 1.0), (1, 1e-9))
    matrix = make_matrix(spectrum)
    values, _, discarded = top_eigenpairs(matrix, RANK, kept=20)
    assert float32_attempts == [True]
    assert len(values) == RANK
    assert discarded == pytest.approx(spectrum[20:].sum().item(), rel=1e-6)
    top_eigenpairs(matrix, RANK)
    assert float32_attempts == [True, False]


@pytest.mark.parametrize("side", [1, 2, 7, SIDE])
def test_zero_matrices_and_tiny_ones(side):
    values, vectors, discarded = top_eigenpairs(torch.zeros(side, side, dtype=torch.float64), 1)
    assert (values.item(), discarded) == (0.0, 0.0)
    torch.testing.assert_close(vectors.norm(), torch.ones((), dtype=torch.float64))


def test_all_pairs(float32_attempts):
    matrix = make_matrix(1 / INDEX)
    values, vectors, discarded = top_eigenpairs(matrix, SIDE)
    assert discarded <= 1e-12
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix, rtol=0, atol=1e-12)


def test_the_number_of_threads_shows_only_in_rounding():
    matrix = make_matrix(INDEX**-0.5)
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(top_eigenpairs(matrix, RANK))
    finally:
        torch.set_num_threads(1)
    (values, vectors, discarded), (other_values, other_vectors, other_discarded) = found
    assert other_discarded == pytest.approx(discarded, rel=1e-9)
    torch.testing.assert_close(other_values, values, rtol=1e-9, atol=0)
    torch.testing.assert_close(other_vectors @ other_vectors.T, vectors @ vectors.T, rtol=0, atol=1e-4)
