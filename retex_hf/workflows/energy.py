"""Energy of the offsets that an artifact stores, per number of directions: the paper's rho_q."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..recovery import Generator, RecoveryModule
from ..recovery.eigen import eigenvalues
from .analysis import average_ratios

# Evenly spaced over the model: more layers take longer and hardly change the mean.
MOST_LAYERS = 16


@torch.no_grad()
def recovered_energy(recovery: RecoveryModule, tasks: Sequence[str]) -> dict[str, Tensor]:
    """Return rho_q of each task's recovered differences, averaged over square matrices; empty where there are none.

    The experts are not read, so the result leaves out the recovery error.

    >>> import torch
    >>> from retex_hf.workflows.energy import recovered_energy
    >>> from retex_hf.recovery import RecoveryModule, plan_layout, solve
    >>> differences = [torch.diag(torch.tensor([2.0, 1.0, 0.0])), torch.zeros(3, 3)]
    >>> solution = solve(differences, plan_layout((3, 3), rank="full", num_tasks=2))
    >>> recovery = RecoveryModule.from_solutions({"weight": solution}, num_tasks=2)
    >>> {task: ratios.tolist() for task, ratios in recovered_energy(recovery, ["a", "b"]).items()}
    {'a': [0.8, 1.0, 1.0]}
    """
    square = [name for name in recovery if _is_square(recovery[name].layout.shape)]
    ratios: dict[str, list[Tensor]] = {task: [] for task in tasks}
    for name in _spaced(square, MOST_LAYERS):
        for task, one_hot in zip(tasks, torch.eye(len(tasks), device=recovery.task_embedding.device), strict=True):
            energy = _direction_energies(recovery[name], recovery.embed(one_hot))
            if energy.sum() > 0:
                ratios[task].append(energy.cumsum(0) / energy.sum())
    return {task: average_ratios(found) for task, found in ratios.items() if found}


def _direction_energies(generator: Generator, embedding: Tensor) -> Tensor:
    """Return the squared singular values of one offset, in descending order."""
    if not generator.layout.is_factored:
        return _squared_singular_values(generator(embedding))
    left, right = (factor[0] for factor in generator.factors(embedding))
    # L S = L R^T Q^T with orthonormal Q: an (a, r) matrix has the singular values of the (a, b) one.
    return _squared_singular_values(left @ torch.linalg.qr(right.T).R.T)


def _squared_singular_values(matrix: Tensor) -> Tensor:
    matrix = matrix.double().cpu()
    gram = matrix.T @ matrix if matrix.shape[1] <= matrix.shape[0] else matrix @ matrix.T
    return eigenvalues(gram)


def _is_square(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] > 1


def _spaced(names: Sequence[str], most: int) -> list[str]:
    if len(names) <= most:
        return list(names)
    return [names[round(place * (len(names) - 1) / (most - 1))] for place in range(most)]
