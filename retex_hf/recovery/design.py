"""The distribution of task weights and the task embedding in the least-squares problem of a parameter.

The generator is affine in the embedding: with generator rows `H_j` the offset of task t is `sum_j basis[t, j] H_j S`.
Soft training draws mixtures `w` of tasks; the expected loss depends on `w` only through `M = E[w w^T]`. Both together:
minimise `|| M^{1/2} (basis H S - D) ||^2`. With a QR decomposition `M^{1/2} basis = Q R` that is `|| (R H) S - Q^T
M^{1/2} D ||^2 + const`: the basic problem, with other differences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .targets import squared_norm


@dataclass
class Design:
    """Weights and embedding of the tasks; by default `basis` None means one generator row per task, `moments` None
    means M = I."""

    num_tasks: int
    basis: Tensor | None = None
    moments: Tensor | None = None
    _mixture: Tensor = field(init=False, repr=False)
    _triangle: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        basis = torch.eye(self.num_tasks) if self.basis is None else self.basis
        root = torch.eye(self.num_tasks, dtype=torch.float64) if self.moments is None else _root(self.moments.double())
        orthonormal, self._triangle = torch.linalg.qr(root @ basis.double())
        self._mixture = orthonormal.T @ root
        self._root = root

    @property
    def is_plain(self) -> bool:
        return self.basis is None and self.moments is None

    def project(self, differences: list[Tensor]) -> tuple[list[Tensor], float, float]:
        """Return the differences to factor, the energy of all (mixed) differences, and the energy that no factors can
        reach."""
        if self.is_plain:
            return differences, sum(squared_norm(difference) for difference in differences), 0.0
        targets = [_combine(weights, differences) for weights in self._mixture]
        energy = sum(_combine(weights, differences).square().sum().item() for weights in self._root)
        inside = sum(target.square().sum().item() for target in targets)
        return targets, energy, 0.0 if len(targets) == self.num_tasks else max(energy - inside, 0.0)

    def unproject(self, generated: Tensor) -> Tensor:
        """Return the generator rows `H` from the factors of the projected differences."""
        if self.is_plain:
            return generated
        triangle = self._triangle.to(generated.device)
        return torch.linalg.solve_triangular(triangle, generated.double(), upper=True).float()


def dirichlet_moments(num_tasks: int, alpha: float) -> Tensor:
    """Return `E[w w^T]` of a symmetric Dirichlet(alpha)."""
    ones = torch.ones(num_tasks, num_tasks, dtype=torch.float64)
    identity = torch.eye(num_tasks, dtype=torch.float64)
    return (identity + alpha * ones) / (num_tasks * (num_tasks * alpha + 1))


def sampled_moments(weights: Tensor) -> Tensor:
    """Return `E[w w^T]` from samples (n, T) of mixing weights, for distributions without a closed form."""
    weights = weights.double()
    return weights.T @ weights / len(weights)


def narrow_basis(kernel: Tensor, dimension: int) -> Tensor:
    """Return the best [constant, embedding] basis (T, dimension + 1) for tasks whose factors have the Gram matrix
    `kernel`.

    The constant is the generator's bias, which carries the mean; the embedding consists of the top eigenvectors of the
    centred rest.
    """
    tasks = len(kernel)
    centring = torch.eye(tasks, dtype=torch.float64) - 1 / tasks
    centred = centring @ kernel.double() @ centring
    # The constant is an eigenvector of value 0; a negative value keeps it from being chosen among other zeros.
    _, vectors = torch.linalg.eigh(centred - (1 + centred.trace()) / tasks)
    embedding = vectors.flip(1)[:, :dimension]
    constant = torch.full((tasks, 1), tasks**-0.5, dtype=torch.float64)
    return torch.cat([constant, embedding], dim=1)


def _combine(weights: Tensor, tensors: list[Tensor]) -> Tensor:
    return sum(weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True))


def _root(moments: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(moments)
    return vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
