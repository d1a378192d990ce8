"""The recovery module as the paper parameterises it: one task embedding, one linear generator and one shared factor
per parameter tensor (per shape, with shared layers), and for the affine variant one scale per task and tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from .closed_form import Solution
from .shapes import Layout


class OffsetGenerator(nn.Module):
    """Predicts the offset of one parameter from a task embedding: `reshape(e @ weight + bias) @ shared`.

    `weight` is kept as (d_emb, numbers of G_t), the transpose of `nn.Linear`, so that one task's factor is one
    contiguous row. `inner` is ReTeX-E's second shared factor. The closed form needs no bias while the embedding is as
    wide as there are tasks (`bias=None`).
    """

    def __init__(
        self, layout: Layout, weight: Tensor, bias: Tensor | None, shared: Tensor | None, inner: Tensor | None = None
    ) -> None:
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.shared = None if shared is None else nn.Parameter(shared)
        self.inner = None if inner is None else nn.Parameter(inner)

    @classmethod
    def initialised(cls, layout: Layout, embedding_dim: int) -> OffsetGenerator:
        """The starting point of training: `nn.Linear`'s own initialisation, and offsets of zero."""
        linear = nn.Linear(embedding_dim, torch.Size(layout.generated_shape).numel())
        if layout.shared_shape is None:  # no shared factor to be zero, so the generator is
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        shared = None if layout.shared_shape is None else torch.zeros(layout.shared_shape)
        inner = None
        if layout.inner_shape is not None:
            inner = nn.init.normal_(torch.empty(layout.inner_shape), std=layout.inner_rank**-0.5)
        return cls(layout, linear.weight.detach().T.contiguous(), linear.bias.detach(), shared, inner)

    def generated(self, embedding: Tensor) -> Tensor:
        """The generated factor for an embedding."""
        return _combine_rows(embedding, self.weight, self.bias).view(self.layout.generated_shape)

    def forward(self, embedding: Tensor) -> Tensor:
        return self.layout.offset(_combine_rows(embedding, self.weight, self.bias), self.shared, self.inner)


class ScaleGenerator(nn.Module):
    """Predicts the affine variant's gamma of one parameter from a task embedding: `e @ weight + bias`."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)

    def forward(self, embedding: Tensor) -> Tensor:
        return embedding @ self.weight + self.bias


class RecoveryModule(nn.Module):
    """Offsets of every recovered parameter for every task, or any mixture of tasks.

    `generators` maps parameter names to their generators; several names may map to one generator (shared layers).
    `scales` maps names to scale generators, for the affine variant.

    >>> import torch
    >>> from retex_hf.recovery import RecoveryModule, plan_layout, solve
    >>> differences = [torch.ones(4, 3), -torch.ones(4, 3)]
    >>> solution = solve(differences, plan_layout((4, 3), rank="full", num_tasks=2))
    >>> recovery = RecoveryModule.from_solutions({"layer.weight": solution}, num_tasks=2)
    >>> recovery.offset("layer.weight", recovery.embed(torch.tensor([0.0, 1.0])))[0].tolist()
    [-1.0, -1.0, -1.0]
    """

    def __init__(
        self,
        task_embedding: Tensor,
        generators: Mapping[str, OffsetGenerator],
        scales: Mapping[str, ScaleGenerator] | None = None,
    ) -> None:
        super().__init__()
        self.task_embedding = nn.Parameter(task_embedding)
        self._keys: dict[str, str] = {}
        self.generators = nn.ModuleDict()
        keys: dict[int, str] = {}
        for name, generator in generators.items():
            # nn.ModuleDict does not take names with dots. A shared generator goes by the first of its names.
            key = keys.setdefault(id(generator), name.replace(".", "/"))
            self._keys[name] = key
            self.generators[key] = generator
        self.scales = nn.ModuleDict({name.replace(".", "/"): scale for name, scale in (scales or {}).items()})

    @classmethod
    def from_solutions(
        cls,
        solutions: Mapping[str, Solution],
        num_tasks: int,
        embedding_dim: int | None = None,
        basis: Tensor | None = None,
    ) -> RecoveryModule:
        """The module at the closed-form optimum.

        One-hot embeddings and generator row t = `vec(G_t)`; or, for a narrow embedding, the `basis` the solutions were
        found with, whose first column is the bias. Names that map to one solution share its generator.
        """
        embedding_dim = embedding_dim or num_tasks
        embedding = torch.eye(num_tasks, embedding_dim) if basis is None else basis[:, 1:].float()
        made: dict[int, OffsetGenerator] = {}
        generators, scales = {}, {}
        layers: dict[int, int] = {}
        for name, solution in solutions.items():
            if id(solution) not in made:
                weight, bias = _generator_rows(solution.generated, embedding_dim, basis)
                made[id(solution)] = OffsetGenerator(solution.layout, weight, bias, solution.shared, solution.inner)
            generators[name] = made[id(solution)]
            if solution.scales is not None:
                layer = layers.get(id(solution), 0)
                layers[id(solution)] = layer + 1
                weight = torch.zeros(embedding_dim)
                weight[:num_tasks] = solution.scales[layer] - 1
                scales[name] = ScaleGenerator(weight, torch.ones(()))
        return cls(embedding, generators, scales)

    @classmethod
    def initialised(
        cls,
        layouts: Mapping[str, Layout],
        num_tasks: int,
        embedding_dim: int | None = None,
        *,
        shared_layers: bool = False,
        affine: bool = False,
    ) -> RecoveryModule:
        """The starting point of training, as in the paper; gammas start at 1."""
        embedding_dim = embedding_dim or num_tasks
        made: dict[Layout, OffsetGenerator] = {}
        generators = {}
        for name, layout in layouts.items():
            if not shared_layers or layout not in made:
                made[layout] = OffsetGenerator.initialised(layout, embedding_dim)
            generators[name] = made[layout]
        scales = {name: ScaleGenerator(torch.zeros(embedding_dim), torch.ones(())) for name in layouts if affine}
        return cls(nn.Embedding(num_tasks, embedding_dim).weight.detach(), generators, scales)

    @property
    def num_tasks(self) -> int:
        return self.task_embedding.shape[0]

    def __iter__(self) -> Iterator[str]:
        """Names of the recovered parameters."""
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> OffsetGenerator:
        return self.generators[self._keys[name]]

    def generator_name(self, name: str) -> str:
        """The name a parameter's generator is stored under: its own, or that of the first layer that shares it."""
        return self._keys[name].replace("/", ".")

    def scale(self, name: str) -> ScaleGenerator | None:
        """The affine variant's scale generator of a parameter."""
        return self.scales._modules.get(name.replace(".", "/"))

    def embed(self, weights: Tensor) -> Tensor:
        """The embedding of a mixture of tasks (one-hot for a single task)."""
        return weights @ self.task_embedding

    def offset(self, name: str, embedding: Tensor) -> Tensor:
        """The low-rank offset of one parameter, float32."""
        return self[name](embedding)

    def recover(self, name: str, merged: Tensor, embedding: Tensor) -> Tensor:
        """A recovered parameter: `merged + offset`, or `gamma * merged + offset`, in float32 or better."""
        merged = merged.to(torch.promote_types(merged.dtype, torch.float32))
        scale = self.scale(name)
        return (merged if scale is None else scale(embedding) * merged) + self.offset(name, embedding)

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


def _generator_rows(generated: Tensor, embedding_dim: int, basis: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A generator's weight (d_emb, numbers) and bias from the solver's rows."""
    if basis is not None:
        return generated[1:].contiguous(), generated[0] * basis[0, 0].float()
    if embedding_dim == len(generated):
        return generated, None
    return torch.cat([generated, generated.new_zeros(embedding_dim - len(generated), generated.shape[1])]), None


def _combine_rows(embedding: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (embedding.requires_grad or weight.requires_grad):
        combined = embedding @ weight
    else:
        # The closed form's embeddings are one-hot: read the rows that count, not the tasks that do not.
        rows = embedding.nonzero().flatten().tolist()
        one_hot = len(rows) == 1 and embedding[rows[0]] == 1
        combined = weight[rows[0]] if one_hot else embedding[rows] @ weight[rows]
    return combined if bias is None else combined + bias
