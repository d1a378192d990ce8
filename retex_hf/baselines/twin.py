"""Twin-Merging: a shared expert plus low-rank task parts, mixed by a trained router."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..evaluation.method import Material
from ..recovery.closed_form import solve_matrices
from .dynamic import Dynamic, Mixtures, bytes_of, task_arithmetic
from .gate import GateTraining, TaskGate


class TwinMerging(Dynamic):
    """`theta(x) = theta* + sum_t softmax(router(x))_t v_t` for each row (Lu et al., 2024).

    `theta*` is task arithmetic, `v_t` the truncated SVD of `theta_t - theta*` (vectors are kept whole), and the router
    a network on the mean of `theta*`'s last hidden state. The router is trained on training inputs and their tasks,
    without labels.

    The authors pick the router's epoch by test accuracy and answer under the head of the true task. Here the epoch is
    picked on validation inputs, and where the task is unknown the head is that of the router's first choice.

    Args:
        scale: Factor of the task vectors in `theta*`.
        rank_ratio: Share of the singular values of a matrix that are kept.
        rows_per_task: Training inputs of the router.
        validation_rows: Validation inputs per task, to pick the epoch by.
        epochs: Passes over the training inputs.
        learning_rate: Learning rate of Adam.
        batch_size: Rows of a step.
        dropout: Dropout of the router.
        progress: Show progress bars.
        options: See `Dynamic`.
    """

    name = "Twin-Merging"

    def __init__(
        self,
        *,
        scale: float = 0.3,
        rank_ratio: float = 0.1,
        rows_per_task: int = 1000,
        validation_rows: int = 256,
        epochs: int = 10,
        learning_rate: float = 5e-4,
        batch_size: int = 64,
        dropout: float = 0.5,
        progress: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not 0 < rank_ratio <= 1:
            raise ConfigError(f"TwinMerging: rank_ratio must be in (0, 1], not {rank_ratio!r}.")
        self.scale, self.rank_ratio, self.dropout = scale, rank_ratio, dropout
        self.rows_per_task, self.validation_rows = rows_per_task, validation_rows
        self._training = GateTraining(epochs, learning_rate, batch_size, progress)

    def prepare(self, material: Material) -> Mixtures:
        weights = self.weights
        shared = task_arithmetic(weights, self.scale)
        corners, self._exclusive_numbers = {}, {}
        for name, base in weights.base.items():
            corners[name] = torch.empty_like(weights.vectors[name])
            self._exclusive_numbers[name] = 0
            for corner, vector in zip(corners[name], weights.vectors[name], strict=True):
                exclusive, numbers = truncated(base + vector - shared[name], self.rank_ratio)
                torch.add(shared[name], exclusive, out=corner)
                self._exclusive_numbers[name] += numbers
        self.gate = TaskGate(weights, shared, lambda width: router(width, len(weights.tasks), self.dropout))
        counts = {task: self.rows_per_task for task in weights.tasks}
        self.validation_accuracy = self.gate.fit(material, counts, self.validation_rows, self._training)
        return Mixtures(weights, corners, {})

    def route(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.gate(inputs)

    def storage_bytes(self) -> int:
        """Return the bytes of the shared expert, the factors of the task parts, and the router."""
        exclusive = bytes_of(self.weights, self._exclusive_numbers)
        return self.weights.body_bytes() + exclusive + 4 * self.gate.numbers()

    def state(self) -> dict[str, Any]:
        return {"router_validation_accuracy": self.validation_accuracy}


def router(width: int, tasks: int, dropout: float = 0.5) -> nn.Sequential:
    """Make the router: two blocks of twice the width of the features, then one score per task."""
    layers: list[nn.Module] = []
    for inputs in (width, 2 * width):
        layers += [nn.Linear(inputs, 2 * width), nn.BatchNorm1d(2 * width), nn.LeakyReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(2 * width, tasks))


def truncated(difference: Tensor, ratio: float) -> tuple[Tensor, int]:
    """Return the best approximation by a share of the singular values, and how many numbers its factors hold.

    Convolutions are matrices with a row per output channel. Vectors are kept whole, and so are matrices that factors
    would not make smaller.
    """
    matrix = difference.squeeze()
    if matrix.ndim < 2:
        return difference, difference.numel()
    matrix = matrix.flatten(1)
    rank = ceil(ratio * min(matrix.shape))
    numbers = rank * sum(matrix.shape)
    if numbers >= matrix.numel():
        return difference, difference.numel()
    (left,), right, _ = solve_matrices([matrix], rank)
    return (left @ right).view(difference.shape), numbers
