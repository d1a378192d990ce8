"""The exact solution for all parameters: layouts, variants and passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.sources import TensorInfo
from ..config import RetexConfig
from ..errors import ConfigError
from ..utils.progress import remark
from . import krylov
from .closed_form import Solution, solve, solve_affine, solve_shared, solve_weighted
from .design import Design, dirichlet_moments, narrow_basis, sampled_moments
from .layout import MATRIX, SHARED_FIRST, WHOLE, Layout, plan_layout
from .module import RecoveryModule, recovery_tensors
from .samplers import sample_weights
from .targets import Targets
from .weighting import task_weights
from .work_sharing import BuildContext, run_dealt

NARROW_PASSES = 10
NARROW_TOLERANCE = 1e-4
MOMENT_SAMPLES = 1_000_000
KERNEL_CHUNK = 1 << 20


def plan_layouts(targets: Targets, config: RetexConfig, convolutions: frozenset[str]) -> dict[str, Layout]:
    """Return the layout of every parameter by the rank rule."""
    shapes = {name: tuple(targets.merged[name].shape) for name in targets.names}
    return ruled_layouts(shapes, config, targets.num_tasks, convolutions)


def ruled_layouts(
    shapes: Mapping[str, tuple[int, ...]], config: RetexConfig, num_tasks: int, convolutions: frozenset[str]
) -> dict[str, Layout]:
    """Return the layouts that the rank rule gives to parameters of these shapes."""
    assert config.rank is not None  # a budget of storage has other layouts
    return {
        name: plan_layout(
            shape,
            config.rank,
            num_tasks,
            name in convolutions,
            order=config.factor_order,
            inner_rank=config.inner_rank,
        )
        for name, shape in shapes.items()
    }


def solve_all(
    targets: Targets,
    layouts: Mapping[str, Layout],
    config: RetexConfig,
    context: BuildContext,
    dtype: str = "float32",
) -> tuple[RecoveryModule, dict[str, float]]:
    """Return the recovery module at its optimum, and the relative error it leaves in every parameter.

    Solutions are written to the tensors of the context's store as they are found, stored as `dtype`; no other copy is
    kept.
    """
    tasks = targets.num_tasks
    moments = soft_moments(config, tasks)
    units = group_layouts(layouts, config.share_layers)
    costs = {unit: len(unit) * _cost(layout, tasks) for unit, layout in units.items()}
    dimension, basis = config.task_embedding_dim or tasks, None
    affine = config.recovery == "affine"
    if dimension < tasks:
        if affine:
            raise ConfigError(
                "The closed form has no affine recovery with task_embedding_dim below the number of tasks; "
                'train it with solver="adam".'
            )
        basis = _narrow_basis(targets, units, config, dimension, moments, costs, context)
    wanted = recovery_tensors(units, tasks, dimension, bias=basis is not None, affine=affine, dtype=dtype)
    infos = {name: TensorInfo(*description) for name, description in wanted.items()}
    recovery = RecoveryModule.from_tensors(units, context.store.allocate("recovery", infos))
    recovery.write_embedding(basis)
    design = Design(tasks, basis, moments)
    weights = None
    if config.weighting == "tasks":
        weights = task_weights({name: targets.energies[name] for name in targets.names}, config.weighting)

    def work(unit: tuple[str, ...]) -> list[float]:
        layout = units[unit]
        if layout.kind == WHOLE and design.is_plain and not affine and len(unit) == 1 and dimension == tasks:
            return _write_whole(targets, unit[0], recovery, dtype)
        solution = _solve_unit(targets, unit, layout, config, design, weights)
        recovery.write(unit, solution, basis, dtype)
        return [solution.residual, solution.energy, solution.loss, solution.least]

    found = run_dealt(context, costs, work, "Solving", recovery.tensors_of, context.at_once)
    alternating = basis is not None or affine  # need not lead to the least possible
    if not alternating and any(_is_by_products(layout, tasks) for layout in units.values()):
        state_distance(context, "The factors", found.values())
    if moments is not None or dtype != "float32":
        # The solver's residual is that of mixtures under soft training, and ignores the rounding of narrow storage.
        return recovery, relative_errors(targets, recovery)
    return recovery, {name: (r / energy) ** 0.5 for unit, (r, energy, *_) in found.items() for name in unit}


def state_distance(context: BuildContext, what: str, found: Iterable[Sequence[float]]) -> None:
    """Say how far an error may be from the least possible, where it was not computed by exact decompositions alone.

    The last two numbers of every row are a loss and a lower bound on it.
    """
    rows = list(found)
    loss, least = sum(row[-2] for row in rows), sum(row[-1] for row in rows)
    if context.progress and context.is_main_process and least > 0:
        ratio = math.ceil(loss / least * 1e4) / 1e4
        remark(f"{what} miss at most {ratio:.4f} times the least possible energy.", in_logs=True)


def _write_whole(targets: Targets, name: str, recovery: RecoveryModule, dtype: str) -> list[float]:
    """Write differences that are stored whole, one task at a time: `solve` would hold them all in memory."""
    energy = 0.0
    for task in range(targets.num_tasks):
        difference = targets.difference(task, name)
        recovery.write_whole(name, task, difference, dtype)
        energy += difference.double().square().sum().item()
    return [0.0, energy, 0.0, 0.0]


def _narrow_basis(
    targets: Targets,
    units: Mapping[tuple[str, ...], Layout],
    config: RetexConfig,
    dimension: int,
    moments: Tensor | None,
    costs: Mapping[tuple[str, ...], float],
    context: BuildContext,
) -> Tensor:
    """Return the basis of a task embedding narrower than the number of tasks: alternate between it and the factors.

    The embedding is common to all parameters, so it is chosen from the Gram matrix of all tasks' factors, summed over
    parameters. Both half-steps are closed forms, so the loss falls until nothing changes. Only the losses and Gram
    matrices of the solutions are kept.
    """
    basis, best = None, None
    nothing = torch.zeros(targets.num_tasks, targets.num_tasks, dtype=torch.float64)
    for number in range(NARROW_PASSES + 1):
        design = Design(targets.num_tasks, basis, moments)

        def work(unit: tuple[str, ...], design: Design = design) -> tuple[float, list[list[float]]]:
            solution = _solve_unit(targets, unit, units[unit], config, design)
            kernels = (_kernel(targets, name, solution) for name in unit)
            return solution.residual, sum(kernels, start=torch.zeros((), dtype=torch.float64)).tolist()

        found = run_dealt(context, costs, work, f"Solving, pass {number + 1}", at_once=context.at_once)
        if basis is not None:
            loss = sum(residual for residual, _ in found.values())
            if best is not None and loss >= best[0] * (1 - NARROW_TOLERANCE):
                break
            best = (loss, basis)
        kernels = [torch.tensor(kernel, dtype=torch.float64) for _, kernel in found.values()]
        basis = narrow_basis(sum(kernels, start=nothing), dimension)
    assert best is not None  # from the second pass on
    return best[1]


def _kernel(targets: Targets, name: str, solution: Solution) -> Tensor:
    """Return the Gram matrix over tasks of the free factors `D_t S^T`."""
    layout = solution.layout
    differences = targets.differences(name)
    if layout.kind != MATRIX:
        rows = [difference.flatten() for difference in differences]
    else:
        assert solution.shared is not None  # every matrix has one
        shared, rank = solution.shared.double(), layout.solved_rank
        reversed_order = layout.order == SHARED_FIRST
        shared = shared[..., :rank].mT if reversed_order else shared[:, :rank].mT
        rows = []
        while differences:  # only one at a time is in float64, and it is freed afterwards
            stack = differences.pop(0).reshape(layout.stacked_shape).double()
            rows.append((shared @ stack if reversed_order else stack @ shared).flatten())
    kernel = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    for start in range(0, len(rows[0]), KERNEL_CHUNK):
        chunk = torch.stack([row[start : start + KERNEL_CHUNK].double() for row in rows])
        kernel += chunk @ chunk.T
    return kernel


def _solve_unit(
    targets: Targets,
    unit: tuple[str, ...],
    layout: Layout,
    config: RetexConfig,
    design: Design,
    weights: Mapping[str, Sequence[float]] | None = None,
) -> Solution:
    if weights is not None:
        return solve_weighted(targets.differences(unit[0]), layout, weights[unit[0]])
    if config.recovery == "affine":
        experts = [targets.all_experts(name) for name in unit]
        merged = [targets.merged_beside(layer[0], name) for layer, name in zip(experts, unit, strict=True)]
        return solve_affine(experts, merged, layout, design)
    if len(unit) > 1:
        return solve_shared((targets.differences(name) for name in unit), layout, design)
    return solve(targets.differences(unit[0]), layout, design)


def soft_moments(config: RetexConfig, num_tasks: int) -> Tensor | None:
    """Return `E[w w^T]` of the mixtures that soft training draws; None for single tasks."""
    if config.soft_training is None:
        return None
    method = config.soft_training
    options: dict[str, Any] = method if isinstance(method, dict) else {"method": method}
    if options["method"] == "dirichlet":
        return dirichlet_moments(num_tasks, options.get("alpha", 1.0))
    generator = torch.Generator().manual_seed(0)
    moments = sampled_moments(sample_weights(config.soft_training, MOMENT_SAMPLES, num_tasks, generator))
    # The distribution is symmetric in the tasks, so the true moments have one value on the diagonal and one off it.
    diagonal = moments.diagonal().mean()
    other = (1 / num_tasks - diagonal) / max(num_tasks - 1, 1)
    return torch.eye(num_tasks, dtype=torch.float64) * (diagonal - other) + other


def group_layouts(layouts: Mapping[str, Layout], share_layers: bool) -> dict[tuple[str, ...], Layout]:
    """Return the groups that are solved together, with their layouts: single parameters, or all of one layout."""
    if not share_layers:
        return {(name,): layout for name, layout in layouts.items()}
    groups: dict[Layout, list[str]] = {}
    for name, layout in layouts.items():
        groups.setdefault(layout, []).append(name)
    return {tuple(names): layout for layout, names in groups.items()}


def _is_by_products(layout: Layout, num_tasks: int) -> bool:
    """Return whether a parameter is solved by products with blocks of vectors, if they can be certified."""
    rows, columns = (layout.columns, layout.rows) if layout.order == SHARED_FIRST else (layout.rows, layout.columns)
    return layout.kind == MATRIX and krylov.pays(num_tasks * rows, columns, layout.rank)


def _cost(layout: Layout, num_tasks: int) -> float:
    """Return the approximate cost of a solve in float64 multiplications: half a Gram matrix, float32 factors,
    eigenvectors; or float32 products with blocks of vectors."""
    if layout.kind != MATRIX:
        return num_tasks * math.prod(layout.shape)
    rows, columns = (layout.columns, layout.rows) if layout.order == SHARED_FIRST else (layout.rows, layout.columns)
    if _is_by_products(layout, num_tasks):
        products = krylov.FIRST_BLOCKS * (layout.rank + krylov.OVERSAMPLING)
        return layout.batch * num_tasks * rows * columns * 1.0 * products
    side = min(columns, num_tasks * rows)
    return layout.batch * (num_tasks * rows * columns * (side + layout.rank) / 2 + side**2 * (2.0 * side + layout.rank))


@torch.no_grad()
def relative_errors(targets: Targets, recovery: RecoveryModule) -> dict[str, float]:
    """Return, per parameter, the norm of what recovery misses over the norm of the differences, all tasks together."""
    errors = {}
    embeddings = recovery.task_embedding.cpu()
    for name in recovery:
        missed, energy = 0.0, 0.0
        for task in range(targets.num_tasks):
            expert = targets.expert(task, name)
            merged = targets.merged_beside(expert, name)
            missed += (recovery.recover(name, merged, embeddings[task]) - expert).double().square().sum().item()
            energy += (expert - merged).double().square().sum().item()
        errors[name] = (missed / energy) ** 0.5 if energy > 0 else 0.0
    return errors
