"""Odd numbers and odd inputs: the cases of examples/trust, and the shapes and numbers that a solver may be given."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from trust import odd_inputs
from trust.oddities import Case, Subject, Wrong

from retex_hf.recovery import RecoveryModule, plan_layout, solve
from retex_hf.recovery.allocation import allocate_bytes
from retex_hf.recovery.closed_form import solve_affine
from retex_hf.recovery.quantize import decode, encode
from retex_hf.recovery.spectra import measure, ways_of


@pytest.mark.parametrize(("case", "family"), odd_inputs.one_family_each(odd_inputs.CASES), ids=lambda one: str(
    one.name if isinstance(one, Case) else one
))  # fmt: skip
def test_an_odd_thing_gives_what_it_must(case: Case, family: str):
    assert odd_inputs.attempt(case, Subject(family)) is None


def test_what_goes_wrong_is_counted_and_told(monkeypatch, tmp_path: Path):
    def wrong(_: Subject) -> None:
        raise Wrong("seven is not eight")

    def crash(_: Subject) -> None:
        raise ZeroDivisionError("0/0")

    def warn(_: Subject) -> None:
        torch.tensor([1.0]).std().item()  # of one number, which torch warns of

    runs = {"fine": lambda _: None, "wrong": wrong, "crash": crash, "warn": warn}
    cases = [Case(name, "right", run, ("bert",)) for name, run in runs.items()]
    monkeypatch.setattr(odd_inputs, "CASES", cases)
    (tally,) = odd_inputs.run(tmp_path, progress=False)
    assert tally.outcomes == {"right": 1, "wrong": 3}
    assert [problem.split(" (")[0] for problem in tally.problems] == [f"odd inputs: {n}" for n in list(runs)[1:]]
    assert "seven is not eight" in tally.problems[0] and "ZeroDivisionError" in tally.problems[1]


def recovered(differences: list[torch.Tensor], rank: int | str) -> tuple[list[torch.Tensor], float]:
    """The offsets of every task, and their relative error as the solver knows it."""
    solution = solve(differences, plan_layout(tuple(differences[0].shape), rank, len(differences)))
    recovery = RecoveryModule.from_solutions({"weight": solution}, len(differences))
    offsets = [recovery.offset("weight", recovery.embed(task)) for task in torch.eye(len(differences))]
    share = math.sqrt(solution.residual / solution.energy) if solution.energy else 0.0
    return offsets, share


@pytest.mark.parametrize("rank", [1, 3, 100, "full"])
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (1, 7), (7, 1), (1, 1), (0,), (0, 5), (5, 0), (3, 0, 5), (0, 3, 3, 3), (1, 1, 7)], ids=str
)
def test_shapes_without_a_rank_are_recovered_exactly(shape, rank):
    differences = [torch.randn(shape) for _ in range(3)]
    offsets, error = recovered(differences, rank)
    assert error == 0
    for offset, difference in zip(offsets, differences, strict=True):
        assert offset.shape == difference.shape
        assert torch.equal(offset, difference)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30, 1e37])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(6, 5, 2), (2, 40, 1), (60, 9, 3), (300, 280, 20)])
def test_the_solver_knows_no_scale(rows, columns, rank, scale):
    differences = [torch.randn(rows, columns) * scale for _ in range(2)]
    offsets, error = recovered(differences, rank)
    missed = sum((o.double() - d.double()).square().sum() for o, d in zip(offsets, differences, strict=True))
    energy = sum(d.double().square().sum() for d in differences)
    assert 0 < error < 1
    # Below 1e-38 float32 has fewer and fewer digits.
    assert (missed / energy).sqrt().item() == pytest.approx(error, rel=1e-5 if scale > 1e-38 else 1e-2)


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(("rows", "columns"), [(6, 5), (2, 40), (300, 280)])
def test_differences_of_zero_and_of_low_rank_have_no_error(rows, columns, tasks):
    offsets, error = recovered([torch.zeros(rows, columns)] * tasks, 1)
    assert error == 0
    assert all(torch.equal(offset, torch.zeros(rows, columns)) for offset in offsets)
    outer = [torch.outer(torch.randn(rows), torch.ones(columns)) for _ in range(tasks)]
    offsets, error = recovered(outer, min(rows, columns) - 1)
    assert error < 1e-6
    for offset, difference in zip(offsets, outer, strict=True):
        torch.testing.assert_close(offset, difference, rtol=1e-5, atol=1e-5)


def test_a_budget_spends_nothing_on_what_has_no_energy():
    ways, sides = {}, (1, 12, 10)
    for name, scale in (("zero", 0.0), ("tiny", 1e-15), ("large", 1e10)):
        differences = [scale * torch.randn(12, 10) for _ in range(3)]
        ways[name] = ways_of(measure(differences, sides, [1.0] * 3), (12, 10), sides)
    assert {name for name, kept in allocate_bytes(ways, 10_000).items() if kept.bytes} == {"tiny", "large"}
    assert {name for name, kept in allocate_bytes(ways, 100).items() if kept.bytes} == {"large"}
    assert allocate_bytes({"zero": ways["zero"]}, 10_000)["zero"].bytes == 0


@pytest.mark.parametrize("scale", [1e-12, 2e-5, 1.0, 1e12])
def test_differences_of_one_number_are_solved(scale):
    differences = [torch.zeros(32, 128) for _ in range(3)]
    for difference, factor in zip(differences, (1.0, -1.4, -1.4), strict=True):
        difference[14, 7] = factor * scale
    offsets, error = recovered(differences, 2)
    assert error < 1e-6
    for offset, difference in zip(offsets, differences, strict=True):
        torch.testing.assert_close(offset, difference, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_gammas_are_numbers_at_any_scale(scale):
    experts = [[scale * torch.randn(6, 5) for _ in range(3)]]
    solution = solve_affine(experts, [scale * torch.randn(6, 5)], plan_layout((6, 5), 2, 3))
    assert solution.scales.isfinite().all() and solution.generated.isfinite().all()
    assert 0 <= solution.residual <= solution.energy


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 1e-30, 1.0, 1e30])
def test_int8_rows_of_any_size_come_back_as_near_as_a_code_is_wide(largest):
    values = largest * torch.linspace(-1, 1, 64).repeat(2, 1)
    values[1] = 0
    found = decode(*encode(values, "int8", row=64))
    assert torch.equal(found[1], torch.zeros(64))
    # The scale is a bfloat16, whose smallest step is 2^-133: rows that are smaller than that are lost.
    assert (found[0] - values[0]).abs().max() <= max(largest / 127, 127 * 2.0**-133)
