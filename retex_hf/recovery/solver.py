"""The exact path over all parameters: which layouts, which variant, how many passes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from ..config import RetexConfig
from ..errors import ConfigError
from .budget import Spectrum, allocate
from .closed_form import Solution, solve, solve_affine, solve_shared, spectrum
from .design import Design, dirichlet_moments, narrow_basis, sampled_moments
from .module import RecoveryModule
from .processes import run_dealt
from .samplers import sample_weights
from .shapes import MATRIX, SHARED_FIRST, Layout, plan_layout
from .targets import Targets

NARROW_PASSES = 10
NARROW_TOLERANCE = 1e-4
MOMENT_SAMPLES = 1_000_000


def plan_layouts(
    targets: Targets,
    config: RetexConfig,
    convolutions: frozenset[str],
    accelerator: Accelerator | None = None,
    progress: bool = True,
) -> dict[str, Layout]:
    """The layout of every parameter: by the rank rule, or by a budget over all of them."""
    shapes = {name: tuple(targets.merged[name].shape) for name in targets.names}

    def plan(name: str, rank: int | str) -> Layout:
        return plan_layout(
            shapes[name],
            rank,
            targets.num_tasks,
            name in convolutions,
            order=config.factor_order,
            inner_rank=config.inner_rank,
        )

    if config.rank_budget is None:
        return {name: plan(name, config.rank) for name in targets.names}

    # Rank 1 shows the kind of a parameter; where even that costs as much as the whole, it is not factored at all.
    layouts = {name: plan(name, 1) for name in targets.names}
    design = Design(targets.num_tasks, moments=soft_moments(config, targets.num_tasks))
    values = run_dealt(
        {name: _cost(layout, targets.num_tasks) for name, layout in layouts.items()},
        lambda name: spectrum(targets.differences(name), layouts[name], design),
        accelerator,
        "Reading spectra",
        progress,
    )
    spectra = {name: Spectrum(layouts[name], values[name]) for name in targets.names}
    storage = targets.num_tasks * targets.expert_numbers
    return allocate(spectra, targets.num_tasks, math.floor(config.rank_budget * storage + 1e-6))


def solve_all(
    targets: Targets,
    layouts: Mapping[str, Layout],
    config: RetexConfig,
    accelerator: Accelerator | None = None,
    progress: bool = True,
) -> tuple[RecoveryModule, dict[str, float]]:
    """The recovery module at its optimum, and the relative error it leaves in every parameter."""
    tasks = targets.num_tasks
    moments = soft_moments(config, tasks)
    units = _units(layouts, config.share_layers)
    costs = {unit: len(unit) * _cost(layouts[unit[0]], tasks) for unit in units}
    dimension = config.task_embedding_dim or tasks
    if dimension >= tasks:
        design = Design(tasks, moments=moments)
        found = run_dealt(
            costs,
            lambda unit: _solve_unit(targets, unit, layouts[unit[0]], config, design),
            accelerator,
            "Solving",
            progress,
        )
        recovery = RecoveryModule.from_solutions(_by_name(found), tasks, dimension)
        return recovery, _errors(targets, recovery, found, moments)
    if config.recovery == "affine":
        raise ConfigError(
            "The closed form has no affine recovery with task_embedding_dim below the number of tasks; "
            'train it with solver="adam".'
        )
    found, basis = _alternate(targets, layouts, config, costs, moments, dimension, accelerator, progress)
    recovery = RecoveryModule.from_solutions(_by_name(found), tasks, dimension, basis)
    return recovery, _errors(targets, recovery, found, moments)


def _errors(
    targets: Targets,
    recovery: RecoveryModule,
    found: Mapping[tuple[str, ...], Solution],
    moments: Tensor | None,
) -> dict[str, float]:
    """What the solver knows already, except under soft training, where its residual is that of mixtures."""
    if moments is not None:
        return relative_errors(targets, recovery)
    return {name: (s.residual / s.energy) ** 0.5 for unit, s in found.items() for name in unit}


def _alternate(
    targets: Targets,
    layouts: Mapping[str, Layout],
    config: RetexConfig,
    costs: Mapping[tuple[str, ...], float],
    moments: Tensor | None,
    dimension: int,
    accelerator: Accelerator | None,
    progress: bool,
) -> tuple[dict[tuple[str, ...], Solution], Tensor]:
    """A task embedding narrower than the number of tasks: alternate between it and the factors.

    The embedding is common to all parameters, so it is chosen from the Gram matrix of all tasks' factors, summed over
    parameters. Both half-steps are closed forms, so the loss falls until nothing changes.
    """
    basis, best = None, None
    for number in range(NARROW_PASSES + 1):
        design = Design(targets.num_tasks, basis, moments)

        def work(unit: tuple[str, ...], design: Design = design) -> tuple[Solution, Tensor]:
            solution = _solve_unit(targets, unit, layouts[unit[0]], config, design)
            return solution, sum(_kernel(targets.differences(name), solution) for name in unit)

        found = run_dealt(costs, work, accelerator, f"Solving, pass {number + 1}", progress)
        if basis is not None:
            loss = sum(solution.residual for solution, _ in found.values())
            if best is not None and loss >= best[0] * (1 - NARROW_TOLERANCE):
                break
            best = (loss, {unit: solution for unit, (solution, _) in found.items()}, basis)
        basis = narrow_basis(sum(kernel for _, kernel in found.values()), dimension)
    return best[1], best[2]


def _kernel(differences: list[Tensor], solution: Solution) -> Tensor:
    """Gram matrix over tasks of the free factors `D_t S^T`."""
    layout = solution.layout
    if layout.kind != MATRIX:
        factors = torch.stack([difference.double().flatten() for difference in differences])
    else:
        stacks = torch.stack([difference.double().reshape(layout.stacked_shape) for difference in differences])
        shared, rank = solution.shared.double(), layout.solved_rank
        reversed_order = layout.order == SHARED_FIRST
        factors = shared[..., :rank].mT @ stacks if reversed_order else stacks @ shared[:, :rank].mT
        factors = factors.flatten(1)
    return factors @ factors.T


def _solve_unit(
    targets: Targets, unit: tuple[str, ...], layout: Layout, config: RetexConfig, design: Design
) -> Solution:
    if config.recovery == "affine":
        experts = [targets.all_experts(name) for name in unit]
        return solve_affine(experts, [targets.merged[name] for name in unit], layout, design)
    if len(unit) > 1:
        return solve_shared([targets.differences(name) for name in unit], layout, design)
    return solve(targets.differences(unit[0]), layout, design)


def soft_moments(config: RetexConfig, num_tasks: int) -> Tensor | None:
    """`E[w w^T]` of the mixtures that soft training draws; None for single tasks."""
    if config.soft_training is None:
        return None
    options = config.soft_training if isinstance(config.soft_training, dict) else {"method": config.soft_training}
    if options["method"] == "dirichlet":
        return dirichlet_moments(num_tasks, options.get("alpha", 1.0))
    generator = torch.Generator().manual_seed(0)
    moments = sampled_moments(sample_weights(config.soft_training, MOMENT_SAMPLES, num_tasks, generator))
    # All tasks are drawn alike, so the true moments have one value on the diagonal and one off it.
    diagonal = moments.diagonal().mean()
    other = (1 / num_tasks - diagonal) / max(num_tasks - 1, 1)
    return torch.eye(num_tasks, dtype=torch.float64) * (diagonal - other) + other


def _units(layouts: Mapping[str, Layout], share_layers: bool) -> list[tuple[str, ...]]:
    """What is solved together: single parameters, or all of one layout."""
    if not share_layers:
        return [(name,) for name in layouts]
    groups: dict[Layout, list[str]] = {}
    for name, layout in layouts.items():
        groups.setdefault(layout, []).append(name)
    return [tuple(names) for names in groups.values()]


def _by_name(found: Mapping[tuple[str, ...], Solution]) -> dict[str, Solution]:
    return {name: solution for unit, solution in found.items() for name in unit}


def _cost(layout: Layout, num_tasks: int) -> float:
    """Multiplications of a solve, roughly: Gram matrix, eigenvectors, factors."""
    if layout.kind != MATRIX:
        return num_tasks * math.prod(layout.shape)
    rows, columns = (layout.columns, layout.rows) if layout.order == SHARED_FIRST else (layout.rows, layout.columns)
    side = min(columns, num_tasks * rows)
    return layout.batch * (num_tasks * rows * columns * (side + layout.rank) + 10.0 * side**3)


@torch.no_grad()
def relative_errors(targets: Targets, recovery: RecoveryModule) -> dict[str, float]:
    """Per parameter, the norm of what recovery misses over the norm of the differences, all tasks together."""
    errors = {}
    embeddings = recovery.task_embedding.cpu()
    for name in recovery:
        merged = targets.merged[name]
        missed, energy = 0.0, 0.0
        for task in range(targets.num_tasks):
            expert = targets.expert(task, name)
            missed += (recovery.recover(name, merged, embeddings[task]) - expert).double().square().sum().item()
            energy += (expert - merged.to(expert.dtype)).double().square().sum().item()
        errors[name] = (missed / energy) ** 0.5 if energy > 0 else 0.0
    return errors
