"""The recovery module as the paper parameterises it: one task embedding, one linear generator and one shared factor per
parameter tensor (per shape, with shared layers), and for the affine variant one scale per task and tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from .closed_form import Solution
from .components import ComponentGenerator
from .layout import GENERATED_FIRST, Layout
from .quantize import SCALE, decode, encode_parts, stored_parts

PARTS = ("weight", "bias", "shared", "inner")
TASK_EMBEDDING = "task_embedding"


class OffsetGenerator(nn.Module):
    """Predicts the offset of one parameter from a task embedding: `reshape(e @ weight + bias) @ shared`.

    `weight` is stored as (d_emb, numbers of G_t), the transpose of `nn.Linear`, so that one task's factor is one
    contiguous row. `inner` is ReTeX-E's second shared factor. The closed form needs no bias while the embedding is as
    wide as the number of tasks (`bias=None`).

    The tensors may be stored narrower than float32 (`stored_as`), for int8 with a `scale` per row: `generated` and
    `factor` return float32 values in every case.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    shared: nn.Parameter | None
    inner: nn.Parameter | None

    def __init__(
        self,
        layout: Layout,
        weight: Tensor,
        bias: Tensor | None,
        shared: Tensor | None,
        inner: Tensor | None = None,
        **scales: Tensor,
    ) -> None:
        super().__init__()
        self.layout = layout
        parts = {"weight": weight, "bias": bias, "shared": shared, "inner": inner, **scales}
        trainable = weight.dtype == torch.float32  # torch has no gradients of integers
        for part, tensor in parts.items():
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=trainable)
            self.register_parameter(part, parameter)

    @classmethod
    def of_parts(cls, layout: Layout, parts: Mapping[str, Tensor]) -> OffsetGenerator:
        """Create a generator from its stored tensors by name."""
        scales = {part: tensor for part, tensor in parts.items() if part not in PARTS}
        return cls(layout, parts["weight"], parts.get("bias"), parts.get("shared"), parts.get("inner"), **scales)

    @classmethod
    def initialised(cls, layout: Layout, embedding_dim: int) -> OffsetGenerator:
        """Create the starting point of training: `nn.Linear`'s own initialisation, and offsets of zero."""
        linear = nn.Linear(embedding_dim, torch.Size(layout.generated_shape).numel())
        if layout.shared_shape is None:  # without a shared factor, zero the generator instead
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        shared = None if layout.shared_shape is None else torch.zeros(layout.shared_shape)
        inner = None
        if layout.inner_shape is not None:
            inner = nn.init.normal_(torch.empty(layout.inner_shape), std=layout.solved_rank**-0.5)
        return cls(layout, linear.weight.detach().T.contiguous(), linear.bias.detach(), shared, inner)

    def stored_as(self, dtype: str) -> OffsetGenerator:
        """Return the same generator with its tensors stored as a `RetexConfig.recovery_dtype`."""
        parts = {part: tensor.detach() for part in PARTS if (tensor := self.factor(part)) is not None}
        return OffsetGenerator.of_parts(self.layout, encode_parts(self.layout, parts, dtype))

    def factor(self, part: str) -> Tensor | None:
        """Return the float32 values of `"shared"` (S), `"inner"` (B), `"weight"` or `"bias"`; None where there is
        none."""
        stored = self._parameters[part]
        return None if stored is None else decode(stored, self._parameters.get(part + SCALE))

    def generated(self, embedding: Tensor) -> Tensor:
        """Return the generated factor for an embedding."""
        combined = _combine_rows(embedding, self.weight, self._parameters.get("weight" + SCALE))
        return self._with_bias(combined).view(self.layout.generated_shape)

    def generated_row(self, row: int) -> Tensor:
        """Return the generated factor for the embedding that is 1 at `row` and 0 elsewhere."""
        scale = self._parameters.get("weight" + SCALE)
        taken = decode(self.weight[row], None if scale is None else scale[row])
        return self._with_bias(taken).view(self.layout.generated_shape)

    def _with_bias(self, combined: Tensor) -> Tensor:
        bias = self.factor("bias")
        return combined if bias is None else combined + bias

    def forward(self, embedding: Tensor) -> Tensor:
        return self.layout.offset(self.generated(embedding), self.factor("shared"), self.factor("inner"))

    def factors(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors (batch, a, k) and (batch, k, b) of a matrix's offset, at the rank of the generated one:
        ReTeX-E's inner factor is multiplied into the shared one."""
        generated, shared, inner = self.generated(embedding), self.factor("shared"), self.factor("inner")
        assert shared is not None  # every matrix has one
        if self.layout.order == GENERATED_FIRST:
            return generated, shared if inner is None else inner @ shared
        return shared if inner is None else shared @ inner, generated

    def added_to(self, base: Tensor, embedding: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `base + offset`, in the dtype and on the device of `base`; write it into `out` if given."""
        generated = self.generated(embedding).to(base.device, base.dtype)
        factors = (self.factor("shared"), self.factor("inner"))
        shared, inner = (None if factor is None else factor.to(base.device, base.dtype) for factor in factors)
        return self.layout.added(base, generated, shared, inner, out)


# Either form of one parameter's offsets: the paper's, or components at a few bits each.
Generator: TypeAlias = OffsetGenerator | ComponentGenerator


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
        generators: Mapping[str, Generator],
        scales: Mapping[str, ScaleGenerator] | None = None,
    ) -> None:
        super().__init__()
        self.task_embedding = nn.Parameter(task_embedding)
        self._keys: dict[str, str] = {}
        self.generators = nn.ModuleDict()
        keys: dict[int, str] = {}
        for name, generator in generators.items():
            # nn.ModuleDict does not allow dots in names. A shared generator is stored under the first of its names.
            key = keys.setdefault(id(generator), name.replace(".", "/"))
            self._keys[name] = key
            self.generators[key] = generator
        self.scales = nn.ModuleDict({name.replace(".", "/"): scale for name, scale in (scales or {}).items()})
        if any(parameter.dtype != torch.float32 for parameter in self.parameters()):
            self.requires_grad_(False)  # narrower storage cannot be trained

    @classmethod
    def from_solutions(
        cls,
        solutions: Mapping[str, Solution],
        num_tasks: int,
        embedding_dim: int | None = None,
        basis: Tensor | None = None,
    ) -> RecoveryModule:
        """Create the module at the closed-form optimum.

        Embeddings are one-hot and generator row t is `vec(G_t)`; or, for a narrow embedding, they come from the `basis`
        that the solutions were found with, whose first column is the bias. Names that map to one solution share its
        generator.
        """
        groups: dict[int, list[str]] = {}
        for name, solution in solutions.items():
            groups.setdefault(id(solution), []).append(name)
        units = {tuple(names): solutions[names[0]].layout for names in groups.values()}
        affine = any(solution.scales is not None for solution in solutions.values())
        embedding_dim = embedding_dim or num_tasks
        wanted = recovery_tensors(units, num_tasks, embedding_dim, bias=basis is not None, affine=affine)
        recovery = cls.from_tensors(units, {name: torch.empty(s, dtype=dtype) for name, (s, dtype) in wanted.items()})
        recovery.write_embedding(basis)
        for unit in units:
            recovery.write(unit, solutions[unit[0]], basis)
        return recovery

    @classmethod
    def from_tensors(cls, units: Mapping[tuple[str, ...], Layout], tensors: Mapping[str, Tensor]) -> RecoveryModule:
        """Create the module around tensors named as by `recovery_tensors`, without copying them."""
        generators, scales = {}, {}
        for unit, layout in units.items():
            parts = {part: f"{unit[0]}.{part}" for part in (*PARTS, *(part + SCALE for part in PARTS))}
            stored = {part: tensors[name] for part, name in parts.items() if name in tensors}
            generator = OffsetGenerator.of_parts(layout, stored)
            for name in unit:
                generators[name] = generator
                if f"{name}.scale.weight" in tensors:
                    scales[name] = ScaleGenerator(tensors[f"{name}.scale.weight"], tensors[f"{name}.scale.bias"])
        return cls(tensors[TASK_EMBEDDING], generators, scales)

    @torch.no_grad()
    def write_embedding(self, basis: Tensor | None) -> None:
        """Write the embeddings of the closed form: one-hot, or those of a narrow `basis`."""
        embedding = torch.eye(*self.task_embedding.shape) if basis is None else basis[:, 1:]
        self.task_embedding.copy_(embedding)

    @torch.no_grad()
    def write(
        self, names: Sequence[str], solution: Solution, basis: Tensor | None = None, dtype: str = "float32"
    ) -> None:
        """Write a solution for the parameters that share it; `dtype` is how the factors are stored."""
        generator, embedding_dim = self.paper_form(names[0]), self.task_embedding.shape[1]
        weight, bias = _generator_rows(solution.generated, embedding_dim, basis)
        factors = zip(PARTS, (weight, bias, solution.shared, solution.inner), strict=True)
        parts = {part: tensor for part, tensor in factors if tensor is not None}
        for part, tensor in encode_parts(generator.layout, parts, dtype).items():
            generator.get_parameter(part).copy_(tensor)
        if solution.scales is not None:
            for name, scales in zip(names, solution.scales, strict=True):
                scale = self.scale(name)
                assert scale is not None  # the module is of the affine variant, as the solution is
                scale.weight.zero_()
                scale.weight[: len(scales)] = scales - 1
                scale.bias.fill_(1)

    @torch.no_grad()
    def write_whole(self, name: str, task: int, difference: Tensor, dtype: str = "float32") -> None:
        """Write one task's difference, for a parameter that is not factored."""
        generator = self.paper_form(name)
        row = {"weight": difference.reshape(1, -1).float()}
        for part, tensor in encode_parts(generator.layout, row, dtype).items():
            generator.get_parameter(part)[task] = tensor[0]

    def tensors_of(self, names: Sequence[str]) -> list[Tensor]:
        """Return all tensors that belong to parameters which share a generator."""
        scales = [scale for name in names if (scale := self.scale(name)) is not None]
        return [parameter for module in (self[names[0]], *scales) for parameter in module.parameters()]

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
        """Create the starting point of training, as in the paper; gammas start at 1."""
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

    def without(self, names: Iterable[str]) -> RecoveryModule:
        """Return the same recovery, with the given parameters left at their merged value."""
        kept = [name for name in self if name not in set(names)]
        scales = {name: scale for name in kept if (scale := self.scale(name)) is not None}
        return RecoveryModule(self.task_embedding.detach(), {name: self[name] for name in kept}, scales)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the recovered parameters."""
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> Generator:
        return cast(Generator, self.generators[self._keys[name]])

    def paper_form(self, name: str) -> OffsetGenerator:
        """Return the generator of a parameter whose offsets have the paper's form."""
        generator = self[name]
        assert not isinstance(generator, ComponentGenerator)  # components are neither trained nor stored otherwise
        return generator

    def generator_name(self, name: str) -> str:
        """Return the name a parameter's generator is stored under: its own, or that of the first layer that shares
        it."""
        return self._keys[name].replace("/", ".")

    def scale(self, name: str) -> ScaleGenerator | None:
        """Return the affine variant's scale generator of a parameter."""
        return cast("ScaleGenerator | None", self.scales._modules.get(name.replace(".", "/")))

    def embed(self, weights: Tensor) -> Tensor:
        """Return the embedding of a mixture of tasks (one-hot for a single task)."""
        return weights @ self.task_embedding

    def offset(self, name: str, embedding: Tensor) -> Tensor:
        """Return the low-rank offset of one parameter in float32."""
        return self[name](embedding)

    def recover(self, name: str, merged: Tensor, embedding: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a recovered parameter: `merged + offset`, or `gamma * merged + offset`, in float32 or better, on the
        device of `merged`; write it into `out` (of that dtype) if given."""
        merged = merged.to(torch.promote_types(merged.dtype, torch.float32))
        scale = self.scale(name)
        if scale is not None:
            merged = scale(embedding).to(merged.device) * merged
        return self[name].added_to(merged, embedding, out)

    def forward(self, weights: Tensor) -> dict[str, Tensor]:
        """Return all offsets of a mixture of tasks."""
        embedding = self.embed(weights)
        return {name: self.offset(name, embedding) for name in self}

    def stored_as(self, dtype: str) -> RecoveryModule:
        """Return the same module with its factors stored as a `RetexConfig.recovery_dtype`; narrower ones cannot be
        trained."""
        if dtype == "float32":
            return self
        stored: dict[str, OffsetGenerator] = {}
        for name, key in self._keys.items():
            if key not in stored:
                stored[key] = self.paper_form(name).stored_as(dtype)
        generators = {name: stored[key] for name, key in self._keys.items()}
        scales = {name: scale for name in self if (scale := self.scale(name)) is not None}
        return RecoveryModule(self.task_embedding.detach(), generators, scales)

    def stored_numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.half()` casts the model, not the recovery: offsets are computed in float32 and cast at the end.
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


def recovery_tensors(
    units: Mapping[tuple[str, ...], Layout],
    num_tasks: int,
    embedding_dim: int,
    *,
    bias: bool,
    affine: bool,
    dtype: str = "float32",
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every tensor of a recovery module, by its stored name.

    `units` maps the parameters that share a generator to its layout; the generator is stored under the first name.
    """
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        TASK_EMBEDDING: ((num_tasks, embedding_dim), torch.float32)
    }
    for unit, layout in units.items():
        parts = stored_parts(layout, embedding_dim, bias, dtype)
        wanted |= {f"{unit[0]}.{part}": description for part, description in parts.items()}
        for name in unit if affine else ():
            wanted[f"{name}.scale.weight"] = ((embedding_dim,), torch.float32)
            wanted[f"{name}.scale.bias"] = ((), torch.float32)
    return wanted


def _generator_rows(generated: Tensor, embedding_dim: int, basis: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a generator's weight (d_emb, numbers) and bias from the solver's rows."""
    if basis is not None:
        return generated[1:].contiguous(), generated[0] * basis[0, 0].float()
    if embedding_dim == len(generated):
        return generated, None
    return torch.cat([generated, generated.new_zeros(embedding_dim - len(generated), generated.shape[1])]), None


def one_hot_row(embedding: Tensor) -> int | None:
    """Return the index at which an embedding is 1, if it is 0 elsewhere; else None."""
    rows = embedding.nonzero().flatten().tolist()
    return rows[0] if len(rows) == 1 and embedding[rows[0]] == 1 else None


def _combine_rows(embedding: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (embedding.requires_grad or weight.requires_grad):
        return embedding @ decode(weight, scale)
    # The closed form's embeddings are one-hot: read only the rows with a nonzero weight.
    row = one_hot_row(embedding)
    if row is not None:
        return decode(weight[row], None if scale is None else scale[row])
    rows = embedding.nonzero().flatten().tolist()
    return embedding[rows] @ decode(weight[rows], None if scale is None else scale[rows])
