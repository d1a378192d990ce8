"""One LoRA per task on the base, by truncated SVD of its task vector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import take_inventory
from ..errors import ConfigError
from ..evaluation.method import Material
from ..merging.expert_weights import Weights
from ..recovery import plan_layout
from ..recovery.eigen import top_eigenpairs
from ..recovery.layout import VECTOR
from .bodies import Identified, TaskBodies

Factors = tuple[Tensor, Tensor]


def truncate(matrix: Tensor, rank: int) -> Factors:
    """Return the best rank-r approximation `B A` of a matrix (a, b), as `B` (a, r) and `A` (r, b).

    >>> import torch
    >>> from retex_hf.baselines.lora import truncate
    >>> left, right = truncate(torch.diag(torch.tensor([3.0, 2.0, 1.0])), rank=2)
    >>> (left @ right).round(decimals=4).diagonal()
    tensor([3., 2., 0.])
    """
    tall = len(matrix) > matrix.shape[1]
    wide = (matrix.T if tall else matrix).double()
    vectors = top_eigenpairs(wide @ wide.T, rank)[1]
    left, right = vectors.float(), (vectors.T @ wide).float()
    return (right.T, left.T) if tall else (left, right)


class LoRA(TaskBodies):
    """`W_t = W_0 + B_t A_t`, the best approximation of each task vector at a rank. Must be given the task.

    It has the form of a LoRA, but it is a truncated SVD of a finished expert: nothing is trained at that rank.

    Convolutions are matrices with one row per output channel, stacked experts of an MoE layer one matrix each. A matrix
    whose factors would take no fewer numbers than the matrix is stored whole, and is then exact.

    Args:
        rank: Rank of every matrix.
        keep_vectors: Store the differences of biases, norms and other 1-D tensors too. A LoRA file cannot hold them,
            but they are few, and every other method here keeps them: without them, the comparison would measure
            vectors, not ranks. False leaves them at the base's value.
    """

    name = "LoRA (SVD)"

    def __init__(self, rank: int = 16, *, keep_vectors: bool = True) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"{type(self).__name__}: rank must be a positive integer, not {rank!r}.")
        self.rank, self.keep_vectors = rank, keep_vectors

    def fit(self, material: Material) -> None:
        super().fit(material)
        convolutions = take_inventory(self.weights.model).convolutions
        self.factors: dict[str, list[list[Factors]]] = {}
        self.whole: list[str] = []
        for name, vectors in self.weights.vectors.items():
            layout = plan_layout(tuple(vectors.shape[1:]), 1, 1, name in convolutions)
            if layout.kind == VECTOR:
                if self.keep_vectors:
                    self.whole.append(name)
                continue
            rows, columns = layout.rows, layout.columns
            if not rows or self.rank * (rows + columns) >= rows * columns:
                self.whole.append(name)
                continue
            stacked = vectors.reshape(len(vectors), *layout.stacked_shape)
            self.factors[name] = [[truncate(matrix, self.rank) for matrix in task] for task in stacked]

    def body(self, task: str) -> Weights:
        index, body = self.weights.tasks.index(task), dict(self.weights.base)
        for name in self.whole:
            body[name] = body[name] + self.weights.vectors[name][index]
        for name, factors in self.factors.items():
            offset = torch.stack([left @ right for left, right in factors[index]])
            body[name] = body[name] + offset.view(body[name].shape)
        return body

    def storage_bytes(self) -> int:
        """Return the bytes of the base, and of every task's factors and whole differences, in the model's dtypes."""
        numbers = {name: self.weights.vectors[name].numel() for name in self.whole}
        numbers |= {name: sum(factor.numel() for factor in _flat(tasks)) for name, tasks in self.factors.items()}
        own = sum(count * self.weights.element_size(name) for name, count in numbers.items())
        return self.weights.body_bytes() + own

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rank": self.rank, "keep_vectors": self.keep_vectors}


class IdLoRA(Identified, LoRA):
    """The truncated SVD of each task vector, with the task chosen by our identifier."""

    name = "ID-LoRA (SVD)"


def _flat(tasks: list[list[Factors]]) -> Iterator[Tensor]:
    return (factor for matrices in tasks for pair in matrices for factor in pair)
