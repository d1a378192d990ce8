"""What a budget of bytes buys: the choice is compared with all others, one by one."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from retex_hf.recovery import allocation
from retex_hf.recovery.allocation import Directions, allocate_bytes
from retex_hf.recovery.codes import lost_energy

SOME_BITS = (2, 4)


def draw(seed: int, parameters: int = 2) -> dict[str, dict[str, list[Directions]]]:
    """Parameters with two directions of each of two tasks' own, two shared ones, or the tensor itself."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number in range(parameters):
        rows, columns = (int(torch.randint(4, 12, (), generator=generator)) for _ in range(2))
        own = [torch.rand(2, 1, generator=generator).square().sort(0, descending=True).values for _ in range(2)]
        shared = torch.rand(2, 2, generator=generator)
        found[f"p{number}"] = {
            "own": [Directions(energies, rows, columns) for energies in own],
            "shared": [Directions(shared * sum(float(e.sum()) for e in own) / shared.sum(), rows, columns, 32)],
            "whole": [Directions(energies.sum().view(1, 1), rows * columns, 0, 16) for energies in own],
        }
    return found


def all_choices(directions: Directions) -> list[tuple[float, float]]:
    """The bytes and the recovered energy of every choice of bits."""
    rights = (0, *SOME_BITS) if directions.right else (None,)
    rows, users = directions.energies.shape
    one = []
    for row in range(rows):
        options = []
        for p in rights:
            for columns in product((0, *SOME_BITS), repeat=users):
                if (p == 0) != (not any(columns)) and p is not None:
                    continue
                bits = sum(q * directions.left + directions.scale_bits * (q > 0) for q in columns)
                bits += (p or 0) * directions.right
                kept = 1 - (lost_energy(p) if p else 0.0)
                energy = sum(
                    kept * (1 - lost_energy(q)) * float(directions.energies[row, user])
                    for user, q in enumerate(columns)
                    if q
                )
                options.append((bits / 8, energy))
        one.append(options)
    return [(sum(b for b, _ in chosen), sum(e for _, e in chosen)) for chosen in product(*one)]


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other dominates."""
    best, kept = -1.0, []
    for size, energy in sorted(points, key=lambda point: (point[0], -point[1])):
        if energy > best + 1e-15:
            kept.append((size, energy))
            best = energy
    return kept


def joined(groups: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    total = [(0.0, 0.0)]
    for points in groups:
        total = front([(a + b, e + f) for a, e in total for b, f in points])
    return total


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_of_as_many_bytes_recovers_more(seed, monkeypatch):
    monkeypatch.setattr(allocation, "BITS", SOME_BITS)
    parameters = draw(seed)
    everything = joined(
        [
            front([point for parts in ways.values() for point in joined([front(all_choices(part)) for part in parts])])
            for ways in parameters.values()
        ]
    )
    largest = everything[-1][0]
    for share in (0.05, 0.2, 0.5, 0.9, 1.0):
        budget = share * largest
        kept = allocate_bytes(parameters, budget)
        size, energy = sum(one.bytes for one in kept.values()), sum(one.recovered for one in kept.values())
        assert size <= budget + 1e-9
        best = max(e for b, e in everything if b <= size + 1e-9)
        assert energy >= best - 1e-9, "another choice of as many bytes recovers more"


def test_a_larger_budget_never_recovers_less():
    parameters = draw(5, parameters=4)
    energies = [
        sum(one.recovered for one in allocate_bytes(parameters, budget).values()) for budget in range(0, 400, 10)
    ]
    assert all(b >= a - 1e-9 for a, b in pairwise(energies))


def test_nothing_is_kept_for_nothing():
    assert all(one.bytes == 0 for one in allocate_bytes(draw(1), 0.0).values())


def test_a_direction_that_one_task_uses_is_paid_for_once():
    shared = Directions(torch.tensor([[4.0, 0.0]]), left=10, right=10)
    choice = shared.choose(price=1e-3)
    assert choice.right[0] > 0 and choice.left[0, 0] > 0 and choice.left[0, 1] == 0
    bits = int(choice.right[0]) * 10 + int(choice.left[0, 0]) * 10 + 16
    assert choice.bytes == bits / 8
