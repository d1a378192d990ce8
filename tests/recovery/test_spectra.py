"""Parts of spectra are enough: the choice is that of whole ones."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from retex_hf import RetexConfig
from retex_hf.recovery import BuildContext, encoding, krylov, spectra, storage
from retex_hf.recovery.allocation import Directions, Kept, allocate_bytes
from retex_hf.recovery.spectra import byte_price, measure, unread_ways
from retex_hf.recovery.storage import solve_storage
from retex_hf.recovery.targets import Targets, squared_norm

TASKS = ["a", "b", "c"]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole_ways(seed: int) -> dict[str, dict[str, list[Directions]]]:
    """Parameters of several sizes with random decays, in ways of their own directions, shared ones, and rounded."""
    generator, ways = drawn(seed), {}
    for number in range(6):
        side = 40 + 20 * number
        decay = 0.3 + 1.5 * torch.rand(1, generator=generator)
        index = torch.arange(1, side + 1).double()
        own = [(torch.rand(1, generator=generator) * index**-decay).unsqueeze(1) for _ in TASKS]
        total = sum(own).flatten() * (0.6 + 0.5 * torch.rand(1, generator=generator))
        split = torch.distributions.Dirichlet(torch.full((side, 3), 0.5).double())
        torch.manual_seed(seed + number)
        whole = [torch.tensor([[float(part.sum())]]) for part in own]
        ways[f"p{number}"] = {
            "whole": [Directions(energy, side * 2 * side, 0, 64) for energy in whole],
            "own": [Directions(part, side, 2 * side) for part in own],
            "shared": [Directions(total.unsqueeze(1) * split.sample(), side, 2 * side, 32)],
        }
    return ways


def first(part: Directions, count: int) -> Directions:
    return Directions(part.energies[:count], part.left, part.right, part.scale_bits)


def partial_choice(ways: dict, budget: float) -> tuple[dict, dict[str, int]]:
    """The choice from first directions, doubled where more may be worth their price."""
    counts = dict.fromkeys(ways, spectra.FEWEST)
    while True:
        read = {
            name: {way: [first(part, counts[name]) for part in parts] for way, parts in own.items()}
            for name, own in ways.items()
        }
        kept = allocate_bytes(read, budget)
        price = byte_price(kept.values())
        available = {name: {way: len(own[way][0].energies) for way in ("own", "shared")} for name, own in ways.items()}
        unread = [name for name in ways if price is not None and unread_ways(read[name], available[name], price)]
        if not unread:
            return kept, counts
        counts |= {name: 2 * counts[name] for name in unread}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [0, 300, 3_000, 10_000, 40_000])
def test_the_choice_from_first_directions_is_that_from_all(seed, budget):
    ways = whole_ways(seed)
    expected = allocate_bytes(ways, budget)
    found, counts = partial_choice(ways, budget)
    for name, kept in found.items():
        assert kept.way == expected[name].way
        for ours, theirs in zip(kept.choices, expected[name].choices, strict=True):
            count = len(ours.right)
            assert torch.equal(ours.right, theirs.right[:count])
            assert torch.equal(ours.left, theirs.left[:count])
            assert not theirs.right[count:].any()
    if budget <= 3_000:
        assert min(counts.values()) < 40  # not everything was read


def test_the_price_is_that_of_the_allocation():
    part = Directions(torch.rand(50, 3, generator=drawn(0)).double(), 30, 40, 32)
    for price in (1e-4, 1e-3, 1e-2):
        choice = part.choose(price)
        assert choice.bytes > 0
        assert byte_price([Kept("shared", (choice,))]) == pytest.approx(price, rel=1e-9)
    assert byte_price([Kept("shared", (part.choose(1e9),))]) is None


def test_another_split_of_the_last_energy_may_be_worth_more():
    """The last direction serves three tasks a little; alone for one of them, its energy is worth a direction."""
    energies = torch.tensor([[9.0, 0, 0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]).double()
    part, price = Directions(energies, 40, 10, 32), 0.06
    assert part.choose(price).right[-1] == 0

    def unread(part: Directions, available: int) -> list[str]:
        whole = [Directions(torch.full((1, 1), 30.0), 10_000, 0) for _ in TASKS]
        return unread_ways({"whole": whole, "shared": [part]}, {"shared": available}, price)

    assert unread(part, 10) == ["shared"]
    assert not unread(Directions(energies[1:], 40, 10, 32), 10)
    assert not unread(part, 3)


def test_a_way_that_cannot_catch_up_is_not_read_on():
    """Of two ways whose last directions are worth their price, the one far behind is left alone while little of the
    energy is left for it, and read on where enough is."""
    own = [Directions(torch.tensor([[8.0], [4.0], [2.0]]).double(), 10, 10)] * 2
    shared = [Directions(torch.tensor([[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]]).double(), 10, 10, 32)]
    for energy, expected in ((15.0, ["own"]), (60.0, ["own", "shared"])):
        whole = [Directions(torch.tensor([[energy]]), 10_000, 0)] * 2
        ways = {"whole": whole, "own": own, "shared": shared}
        assert unread_ways(ways, {"own": 40, "shared": 40}, 0.02) == expected


# ---- real differences ------------------------------------------------------------------------------------------------


class Experts:
    tasks = TASKS

    def __init__(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.tensors = tensors

    def read_expert(self, task: str, name: str) -> Tensor:
        return self.tensors[task][name]


def make_targets() -> Targets:
    generator = drawn(0)
    shapes = {"wide": (150, 260), "tall": (300, 160), "square": (200, 200), "bias": (60,), "small": (12, 20)}
    tensors: dict[str, dict[str, Tensor]] = {task: {} for task in TASKS}
    for name, shape in shapes.items():
        for task in TASKS:
            noise = torch.randn(shape, generator=generator)
            if len(shape) == 2:
                weights = torch.arange(1, min(shape) + 1) ** -0.7
                left = torch.randn(shape[0], min(shape), generator=generator) * weights
                noise = left @ torch.randn(min(shape), shape[1], generator=generator) + 0.2 * noise
            tensors[task][name] = noise
    merged = {name: sum(tensors[task][name] for task in TASKS) / 3 for name in shapes}
    energies = {name: [squared_norm(tensors[task][name] - merged[name]) for task in TASKS] for name in shapes}
    return Targets(Experts(tensors), merged, list(shapes), energies)


def solve_within(targets: Targets, budget: float) -> tuple[float, dict[str, Tensor]]:
    """The energy that is missed, relative to each task's, and the stored tensors."""
    recovery, _ = solve_storage(targets, RetexConfig(storage=0.1), frozenset(), budget, BuildContext(progress=False))
    missed = 0.0
    for number in range(len(TASKS)):
        one_hot = torch.eye(3)[number]
        for name in targets.names:
            difference = targets.difference(number, name)
            offset = recovery[name](one_hot) if name in recovery else torch.zeros_like(difference)
            missed += squared_norm(difference - offset) / sum(targets.energies[n][number] for n in targets.names)
    return missed, dict(recovery.state_dict())


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """How many directions each measurement was asked for."""
    counts: list[int] = []

    def spy(differences, sides, weights, count, parts):
        counts.append(count)
        return measure(differences, sides, weights, count, parts)

    monkeypatch.setattr(storage, "measure", spy)
    return counts


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_budgets_are_spent_as_well_as_with_whole_spectra(monkeypatch, reads, share):
    targets = make_targets()
    budget = share * 4 * 3 * sum(prod(tensor.shape) for tensor in targets.merged.values())
    monkeypatch.setattr(storage, "first_count", lambda *_: 10_000)
    expected, _ = solve_within(targets, budget)
    assert set(reads) == {0, 10_000}
    reads.clear()
    monkeypatch.setattr(storage, "first_count", lambda *_: 4)
    monkeypatch.setattr(krylov, "SIDES_PER_BLOCK", 5)
    found, stored = solve_within(targets, budget)
    assert max(reads) > 4  # more was needed, and read
    assert max(reads) < 200 or share == 0.2
    assert found == pytest.approx(expected, rel=2e-3)
    _, again = solve_within(targets, budget)
    assert all(torch.equal(tensor, again[name]) for name, tensor in stored.items())


def test_what_is_measured_is_what_is_stored(monkeypatch):
    """A Krylov space for as many directions gives the same directions again."""
    monkeypatch.setattr(krylov, "SIDES_PER_BLOCK", 5)
    targets = make_targets()
    matrices, weights = targets.differences("square"), [1.0, 2.0, 0.5]
    measured = measure(matrices, (1, 200, 200), weights, 12)
    assert len(measured["shared"]) == len(measured["own"][0]) == 12
    loss, least = measured["missed"]
    stack = torch.cat([matrix * weight**0.5 for matrix, weight in zip(matrices, weights, strict=True)])
    energies = torch.linalg.svdvals(stack.double()).square()
    assert least <= energies[12:].sum().item() <= loss * (1 + 1e-6) <= 1.01 * least
    rows = encoding._chosen_rows(matrices, weights, [0, 3, 11], 12)
    again = torch.stack([(matrix.double() @ rows.T).square().sum(0) for matrix in matrices], 1)
    expected = torch.tensor(measured["shared"]).double()[[0, 3, 11]] / torch.tensor(weights)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-6)
    whole = measure(matrices, (1, 200, 200), weights)
    assert len(whole["shared"]) == 200
    torch.testing.assert_close(torch.tensor(measured["own"]), torch.tensor(whole["own"])[:, :12], rtol=0.01, atol=0)


def test_a_budget_states_the_distance_too(capsys, monkeypatch):
    monkeypatch.setattr(krylov, "SIDES_PER_BLOCK", 5)
    solve_storage(make_targets(), RetexConfig(storage=0.1), frozenset(), 4e3, BuildContext())
    assert "The directions miss at most 1.00" in capsys.readouterr().err


def test_the_first_count_follows_the_budget():
    counts = [spectra.first_count(2048, 2048, 4, budget) for budget in (0, 4e5, 8e5, 8e6)]
    assert counts[0] == spectra.FEWEST
    assert counts[2] == pytest.approx(2 * counts[1], abs=1)
    assert counts[3] == pytest.approx(10 * counts[2], abs=10)
