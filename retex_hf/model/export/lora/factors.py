"""Tensors of an adapter: the factors of a task's offsets, and tensors stored whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....checkpoints import take_inventory
from ....recovery import ComponentGenerator, RecoveryModule
from .plan import Plan

# Directions of a whole difference weaker than this, relative to the strongest, are rounding.
NEGLIGIBLE = 1e-6


@dataclass
class Offsets:
    """The differences between one task and the merged model."""

    model: nn.Module
    recovery: RecoveryModule
    heads: Mapping[str, Tensor]
    embedding: Tensor

    def __post_init__(self) -> None:
        self.merged = self.model.state_dict()
        ties = take_inventory(self.model).aliases
        self.leaders = {alias: name for name, aliases in ties.items() for alias in aliases}

    def is_changed(self, name: str) -> bool:
        """Return whether a parameter differs: of a budget of bytes, a task may have got nothing there."""
        generator = self.recovery[name]
        if not isinstance(generator, ComponentGenerator):
            return True
        return any(generator.layout.left[task] for task in self.embedding.nonzero().flatten().tolist())

    def is_changed_by_any(self, name: str) -> bool:
        """Return whether a parameter differs in any task: adapters of all tasks must treat every module alike."""
        generator = self.recovery[name]
        return not isinstance(generator, ComponentGenerator) or any(generator.layout.left)

    def offset(self, alias: str) -> Tensor:
        """Return the difference from the merged tensor, on the CPU, because factoring needs float64."""
        return self.recovery.offset(self.leaders.get(alias, alias), self.embedding).cpu()

    def value(self, alias: str) -> Tensor:
        """Return the task's own tensor."""
        name = self.leaders.get(alias, alias)
        if name in self.heads:
            return self.heads[name]
        merged = self.merged[alias]
        if name not in self.recovery:
            return merged
        return self.recovery.recover(name, merged, self.embedding).to(merged.dtype)

    def factors(self, alias: str, stacked: bool = False) -> tuple[Tensor, Tensor]:
        """Return the offset of a parameter as a batch of products `left @ right`, a batch of one unless `stacked`.

        An unchanged parameter has zero factors of rank 1.
        """
        name = self.leaders[alias]
        shape = tuple(self.merged[alias].shape)
        rows, columns = shape[1:] if stacked else (shape[0], prod(shape[1:]))
        layout = self.recovery[name].layout if name in self.recovery else None
        if layout is None or not self.is_changed(name):
            return torch.zeros(1, rows, 1), torch.zeros(1, 1, columns)
        if layout.is_factored and (layout.matrix_rows, layout.columns) == (rows, columns):
            return self._stored_factors(name)
        return factor(self.offset(name).reshape(-1, rows, columns), self.merged[alias])

    def _stored_factors(self, name: str) -> tuple[Tensor, Tensor]:
        left, right = self.recovery[name].factors(self.embedding)
        return left.cpu(), right.cpu()

    def _energy(self, name: str) -> float:
        """Return the squared norm of an offset, computed from its factors if it has any."""
        if not self.recovery[name].layout.is_factored:
            return self.offset(name).double().square().sum().item()
        left, right = (part.double() for part in self._stored_factors(name))
        return ((left.mT @ left) * (right @ right.mT)).sum().item()

    def biases(self, plan: Plan) -> set[str]:
        names = {f"{module}.bias" for module in plan.lora} if plan.with_bias else set()
        return {name for name in names if name in self.leaders and self.leaders[name] in self.recovery}

    def relative_size(self, name: str) -> float:
        merged = self.merged[name].cpu().float()
        if name in self.heads:
            head = self.heads[name].cpu().float()
            difference = head - merged if head.shape == merged.shape else head
        else:
            difference = self.offset(name)
        return (difference.norm() / merged.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()

    def share(self, names: set[str]) -> float:
        """Return the share of some parameters in the whole difference, without heads, which are stored whole."""
        energies = {name: self._energy(name) for name in self.recovery} if names else {}
        total = sum(energies.values())
        return (sum(energies[name] for name in names if name in energies) / total) ** 0.5 if total else 0.0

    def other_width(self, heads: Mapping[str, Tensor]) -> int | None:
        """Return the number of outputs of the task's head if it differs from the merged model's, else None."""
        widths = [head.shape[0] for name, head in heads.items() if head.shape != self.merged[name].shape]
        return widths[-1] if widths else None


def factor(stack: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factor matrices (n, a, b) into products of the least rank that reproduces them up to rounding.

    Rounding is that of float32, and of the `weight` that the matrices are differences of.

    >>> import torch
    >>> from retex_hf.model.export.lora.factors import factor
    >>> matrix = torch.ones(1, 3, 4)
    >>> [tuple(part.shape) for part in factor(matrix, matrix)]
    [(1, 3, 1), (1, 1, 4)]
    """
    tall = stack.shape[1] > stack.shape[2]
    wide = (stack.mT if tall else stack).double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT)
    rounding = torch.finfo(torch.float32).eps * weight.float().square().mean().sqrt().item() / 2
    rounding *= sum(size**0.5 for size in stack.shape[1:])  # the norm of a random matrix of rounding errors
    least = (NEGLIGIBLE**2 * values[:, -1:]).clamp(min=rounding**2)
    rank = max(1, int((values > least).sum(1).max()))
    left = vectors[:, :, -rank:]
    right = (left.mT @ wide).float()
    left = left.float()
    return (right.mT, left.mT) if tall else (left, right)


def lora_tensors(offsets: Offsets, plan: Plan, uniform: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return factors and biases under peft's names, and the ranks of the modules; one rank for all if `uniform`."""
    factors = {name: [part[0] for part in offsets.factors(f"{name}.weight")] for name in sorted(plan.lora)}
    if uniform and factors:
        rank = max(right.shape[0] for _, right in factors.values())
        factors = {name: _padded(left, right, rank) for name, (left, right) in factors.items()}
    tensors: dict[str, Tensor] = {}
    carried = offsets.biases(plan)
    for name, (left, right) in factors.items():
        module = offsets.model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            tensors[f"{name}.lora_embedding_A"], tensors[f"{name}.lora_embedding_B"] = left.T, right.T
            continue
        a, b = (left.T, right.T) if isinstance(module, Conv1D) else (right, left)
        shape = offsets.merged[f"{name}.weight"].shape
        if len(shape) > 2:  # a convolution, followed by one of width 1
            a, b = a.unflatten(1, shape[1:]), b.reshape(*b.shape, *[1] * (len(shape) - 2))
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
        if plan.with_bias:
            bias = f"{name}.bias"
            tensors[f"{name}.lora_B.bias"] = offsets.offset(bias) if bias in carried else torch.zeros(b.shape[0])
    return tensors, {name: right.shape[0] for name, (_, right) in factors.items()}


def stack_tensors(offsets: Offsets, plan: Plan) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return factors of stacked parameters under peft's names and in its layout, and their ranks."""
    tensors, ranks = {}, {}
    for name in sorted(plan.stacks):
        left, right = offsets.factors(name, stacked=True)
        ranks[name] = right.shape[1]
        module, _, attribute = name.rpartition(".")
        owner = offsets.model.get_submodule(module)
        if getattr(owner, "is_transposed", False):
            left, right = right.mT, left.mT
        # peft nests the wrappers of a module's parameters, the first innermost.
        wrapped = [parameter for parameter in owner._parameters if f"{module}.{parameter}" in plan.stacks]
        module += ".base_layer" * (len(wrapped) - 1 - wrapped.index(attribute))
        tensors[f"{module}.lora_A.weight"] = right.flatten(0, 1)
        # The columns of B are ordered by rank first and by expert second.
        tensors[f"{module}.lora_B.weight"] = left.permute(1, 2, 0).flatten(1)
    return tensors, ranks


def saved_tensors(offsets: Offsets, plan: Plan) -> dict[str, Tensor]:
    names = [f"{module}.{name}" for module in plan.saved for name in offsets.model.get_submodule(module).state_dict()]
    return {name: offsets.value(name) for name in sorted(names)}


def _padded(left: Tensor, right: Tensor, rank: int) -> list[Tensor]:
    missing = rank - right.shape[0]
    return [
        torch.cat([left, left.new_zeros(left.shape[0], missing)], 1),
        torch.cat([right, right.new_zeros(missing, right.shape[1])]),
    ]
