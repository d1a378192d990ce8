"""The weighted objective: weights by definition, its optimum against an independent SVD, and what it reports."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from helpers import TASKS, build_from, make_experts, perturb

from retex_hf.recovery.closed_form import solve_weighted
from retex_hf.recovery.layout import plan_layout
from retex_hf.recovery.weighting import ALPHA, task_weights


def test_weights_are_those_of_the_definition():
    energies = {"small": [1.0, 4.0], "large": [3.0, 12.0], "same": [0.0, 9.0]}
    weights = task_weights(energies, "tasks")
    for name, own in energies.items():
        for task, energy in enumerate(own):
            total = sum(values[task] for values in energies.values())
            expected = 0.0 if energy == 0 else 1 / (total ** (1 - ALPHA) * energy**ALPHA)
            assert weights[name][task] == pytest.approx(expected)
    assert task_weights(energies, "plain") == {name: [1.0, 1.0] for name in energies}


def test_scaling_a_task_does_not_change_its_weighted_energy():
    energies = {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    scaled = {"a": [1.0, 1e6], "b": [2.0, 2e6]}
    before, after = task_weights(energies, "tasks"), task_weights(scaled, "tasks")
    for name in energies:
        assert after[name][1] * scaled[name][1] == pytest.approx(before[name][1] * energies[name][1])


@pytest.mark.parametrize("order", ["generated_first", "shared_first"])
@pytest.mark.parametrize("shape", [(20, 14), (6, 30), (3, 8, 10)])
def test_the_optimum_is_the_svd_of_the_scaled_stack(shape, order):
    generator = torch.Generator().manual_seed(0)
    differences = [scale * torch.randn(shape, generator=generator) for scale in (1.0, 10.0, 0.1)]
    weights = [2.0, 0.03, 70.0]
    layout = plan_layout(shape, 3, 3, False, order=order)
    solution = solve_weighted([difference.clone() for difference in differences], layout, weights)
    stacks = [d.double().reshape(layout.stacked_shape) for d in differences]
    stacks = [stack.mT for stack in stacks] if order == "shared_first" else stacks
    expected = residual = energy = 0.0
    generated = solution.generated.double().view(3, *layout.generated_shape)
    shared = solution.shared.double()
    for index in range(layout.batch):
        scaled = torch.cat([w**0.5 * stack[index] for w, stack in zip(weights, stacks, strict=True)])
        expected += torch.linalg.svdvals(scaled)[3:].square().sum().item()
    weighted = 0.0
    for task, stack in enumerate(stacks):
        offset = shared @ generated[task] if order == "shared_first" else generated[task] @ shared
        offset = offset.mT if order == "shared_first" else offset
        missed = (stack - offset).square().sum().item()
        weighted += weights[task] * missed
        residual += missed
        energy += stack.square().sum().item()
    assert weighted == pytest.approx(expected, rel=1e-4)
    assert solution.residual == pytest.approx(residual, rel=1e-3)
    assert solution.energy == pytest.approx(energy, rel=1e-5)


def test_a_task_without_a_difference_has_none_recovered():
    differences = [torch.randn(6, 8), torch.zeros(6, 8)]
    solution = solve_weighted(differences, plan_layout((6, 8), 2, 2), [1.0, 0.0])
    assert solution.generated[1].abs().max() == 0


def test_differences_of_low_rank_are_found_exactly():
    left, right = torch.randn(2, 12, 2), torch.randn(2, 9)
    differences = [1e3 * left[0] @ right, 1e-3 * left[1] @ right]
    wanted = [difference.clone() for difference in differences]
    solution = solve_weighted(differences, plan_layout((12, 9), 2, 2), [1e-6, 1e6])
    assert (solution.residual / solution.energy) ** 0.5 < 1e-6
    for generated, difference in zip(solution.generated.view(2, 12, 2), wanted, strict=True):
        torch.testing.assert_close(generated @ solution.shared[0], difference, rtol=1e-4, atol=1e-4 * difference.norm())


def test_small_updates_are_recovered_as_well_as_large_ones():
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    experts["blue"] = perturb(base, seed=3, scale=3.0)
    spread = {}
    for weighting in ("plain", "tasks"):
        model, _ = build_from(base, experts, rank=4, weighting=weighting)
        assert model.retex_config.weighting == weighting
        merged, errors = model.get_base_model().state_dict(), []
        for task in TASKS:
            recovered, target = model.recover(task), experts[task].state_dict()
            missed = sum((recovered[n] - target[n]).square().sum().item() for n in model.recovery)
            errors.append((missed / sum((merged[n] - target[n]).square().sum().item() for n in model.recovery)) ** 0.5)
        spread[weighting] = max(errors) - min(errors)
    assert spread["tasks"] < spread["plain"]
