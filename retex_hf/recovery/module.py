"""The recovery module as the paper parameterises it: one task embedding, one linear generator and one shared factor
per parameter tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from .closed_form import Solution
from .shapes import Layout


class OffsetGenerator(nn.Module):
    """Predicts the offset of one parameter from a task embedding: `reshape(e @ weight + bias) @ shared`.

    `weight` is kept as (d_emb, numbers of G_t), the transpose of `nn.Linear`, so that one task's factor is one
    contiguous row. The closed form needs no bias (`bias=None`).
    """

    def __init__(self, layout: Layout, weight: Tensor, bias: Tensor | None, shared: Tensor | None) -> None:
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.shared = None if shared is None else nn.Parameter(shared)

    @classmethod
    def initialised(cls, layout: Layout, embedding_dim: int) -> OffsetGenerator:
        """The starting point of training: `nn.Linear`'s own initialisation, shared factor zero."""
        linear = nn.Linear(embedding_dim, torch.Size(layout.generated_shape).numel())
        shared = None if layout.shared_shape is None else torch.zeros(layout.shared_shape)
        return cls(layout, linear.weight.detach().T.contiguous(), linear.bias.detach(), shared)

    def generated(self, embedding: Tensor) -> Tensor:
        """`G` for an embedding."""
        return self._combine(embedding).view(self.layout.generated_shape)

    def forward(self, embedding: Tensor) -> Tensor:
        return self.layout.offset(self._combine(embedding), self.shared)

    def _combine(self, embedding: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (embedding.requires_grad or self.weight.requires_grad):
            combined = embedding @ self.weight
        else:
            # The closed form's embeddings are one-hot: read the rows that count, not the tasks that do not.
            rows = embedding.nonzero().flatten().tolist()
            if len(rows) == 1 and embedding[rows[0]] == 1:
                combined = self.weight[rows[0]]
            else:
                combined = embedding[rows] @ self.weight[rows]
        return combined if self.bias is None else combined + self.bias


class RecoveryModule(nn.Module):
    """Offsets of every recovered parameter for every task, or any mixture of tasks.

    >>> import torch
    >>> from retex_hf.recovery import RecoveryModule, plan_layout, solve
    >>> differences = [torch.ones(4, 3), -torch.ones(4, 3)]
    >>> solution = solve(differences, plan_layout((4, 3), rank="full", num_tasks=2))
    >>> recovery = RecoveryModule.from_solutions({"layer.weight": solution}, num_tasks=2)
    >>> recovery.offset("layer.weight", recovery.embed(torch.tensor([0.0, 1.0])))[0]
    tensor([-1., -1., -1.], grad_fn=<SelectBackward0>)
    """

    def __init__(self, task_embedding: Tensor, generators: Mapping[str, OffsetGenerator]) -> None:
        super().__init__()
        self.task_embedding = nn.Parameter(task_embedding)
        # nn.ModuleDict does not take names with dots.
        self.generators = nn.ModuleDict({_escape(name): generator for name, generator in generators.items()})

    @classmethod
    def from_solutions(
        cls, solutions: Mapping[str, Solution], num_tasks: int, embedding_dim: int | None = None
    ) -> RecoveryModule:
        """The module at the closed-form optimum: one-hot embeddings, generator row t = `vec(G_t)`."""
        embedding_dim = embedding_dim or num_tasks
        generators = {}
        for name, solution in solutions.items():
            weight = solution.generated
            if embedding_dim > num_tasks:
                weight = torch.cat([weight, weight.new_zeros(embedding_dim - num_tasks, weight.shape[1])])
            generators[name] = OffsetGenerator(solution.layout, weight, None, solution.shared)
        return cls(torch.eye(num_tasks, embedding_dim), generators)

    @classmethod
    def initialised(
        cls, layouts: Mapping[str, Layout], num_tasks: int, embedding_dim: int | None = None
    ) -> RecoveryModule:
        """The starting point of training, as in the paper."""
        embedding_dim = embedding_dim or num_tasks
        generators = {name: OffsetGenerator.initialised(layout, embedding_dim) for name, layout in layouts.items()}
        return cls(nn.Embedding(num_tasks, embedding_dim).weight.detach(), generators)

    @property
    def num_tasks(self) -> int:
        return self.task_embedding.shape[0]

    def __iter__(self) -> Iterator[str]:
        """Names of the recovered parameters."""
        return (_unescape(key) for key in self.generators)

    def __len__(self) -> int:
        return len(self.generators)

    def __contains__(self, name: str) -> bool:
        return _escape(name) in self.generators

    def __getitem__(self, name: str) -> OffsetGenerator:
        return self.generators[_escape(name)]

    def embed(self, weights: Tensor) -> Tensor:
        """The embedding of a mixture of tasks (one-hot for a single task)."""
        return weights @ self.task_embedding

    def offset(self, name: str, embedding: Tensor) -> Tensor:
        """The offset of one parameter, float32."""
        return self[name](embedding)

    def forward(self, weights: Tensor) -> dict[str, Tensor]:
        """All offsets of a mixture of tasks."""
        embedding = self.embed(weights)
        return {name: self.offset(name, embedding) for name in self}

    def stored_numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _apply(self, fn, recurse: bool = True):
        # `model.half()` casts the model, not the recovery: offsets are computed in float32 and cast at the end.
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


def _escape(name: str) -> str:
    return name.replace(".", "/")


def _unescape(key: str) -> str:
    return key.replace("/", ".")
