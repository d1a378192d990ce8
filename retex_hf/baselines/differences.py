"""Differences of experts from a reference model, and their storage as rounded tensors or factors.

Numbers are rounded as ReTeX rounds them (`retex_hf.recovery.codes`): the same codebooks, a scale per column of the left
factor and none for the right one, left factors fitted to the rounded right ones, tensors that are not factored in
groups of 64 with a scale each. So systems that store differences are compared by what they keep, not by how well they
round. Without a number of bits, numbers are stored in bfloat16 (16 bits), which has the range of float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import take_inventory
from ..config import matches
from ..evaluation.method import Material
from ..merging.expert_weights import ExpertWeights, Weights
from ..recovery.closed_form import right_vectors
from ..recovery.codes import SCALE_BITS, codebook, decode, encode, lost_energy, packed_bytes
from ..recovery.components import GROUP
from ..recovery.encoding import best_columns
from ..recovery.layout import Sides, matrix_sides
from ..recovery.targets import squared_norm
from ..recovery.weighting import task_weights
from .merges import source_body
from .weights import expert_weights

Reference = str | dict[str, Any]
"""The model that differences are taken from: `"pretrained"`, or a merge."""

FLOAT_DTYPE = torch.bfloat16
FLOAT_BYTES = FLOAT_DTYPE.itemsize
SCALE_BYTES = SCALE_BITS // 8


@dataclass(frozen=True)
class Whole:
    """A tensor stored as it is, at some bits per number; None: bfloat16."""

    bits: int | None

    def lost(self, energy: float, spectrum: Tensor | None) -> float:
        """Return the energy that storage is expected to lose, of a tensor of this energy."""
        return energy * rounding_loss(self.bits)

    def bytes(self, numbers: int) -> int:
        """Return the bytes of a tensor of so many numbers.

        >>> Whole(4).bytes(100), Whole(None).bytes(100)
        (68, 200)
        """
        if self.bits is None:
            return FLOAT_BYTES * numbers
        groups = -(-numbers // GROUP)
        return packed_bytes(groups * GROUP, self.bits) + SCALE_BYTES * groups

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor as it is after storage."""
        if self.bits is None:
            return tensor.to(FLOAT_DTYPE).float()
        flat = tensor.flatten()
        groups = torch.nn.functional.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
        rounded = decode(*encode(groups, self.bits), self.bits)
        return rounded.flatten()[: len(flat)].view(tensor.shape)


@dataclass(frozen=True)
class Factors:
    """Matrices stored as products: the first components at the bits of the first run `(count, bits)`, and so on."""

    runs: tuple[tuple[int, int | None], ...]

    @property
    def rank(self) -> int:
        """Return how many components there are."""
        return sum(count for count, _ in self.runs)

    def lost(self, energy: float, spectrum: Tensor | None) -> float:
        """Return the energy that storage is expected to lose, of matrices with these energies (batch, k) of directions.

        As in ReTeX's allocation (`retex_hf.recovery.allocation`): rounding loses a share of a direction, and another
        one of its column.
        """
        assert spectrum is not None  # only matrices are factored
        parts = spectrum[:, : self.rank].sum(0).split([count for count, _ in self.runs])
        kept = [
            (1 - rounding_loss(bits)) ** 2 * part.sum().item() for part, (_, bits) in zip(parts, self.runs, strict=True)
        ]
        return energy - sum(kept)

    def bytes(self, sides: Sides) -> int:
        """Return the bytes of the factors of a stack of matrices.

        >>> Factors(((2, 4),)).bytes((1, 8, 16)), Factors(((2, None),)).bytes((1, 8, 16))
        (28, 96)
        """
        batch, rows, columns = sides
        return batch * sum(_run_bytes(count, bits, rows, columns) for count, bits in self.runs)

    def stored(self, matrix: Tensor, directions: Tensor) -> Tensor:
        """Return the approximation of a matrix (a, b) by its first right singular vectors (k, b), after storage."""
        rounded = torch.cat([_unscaled(part, bits) for part, bits in self._split(directions[: self.rank])])
        lefts = best_columns(matrix, rounded).float()
        columns = torch.cat([_with_scale(part, bits) for part, bits in self._split(lefts)])
        return columns.T @ rounded.float()

    def _split(self, rows: Tensor) -> list[tuple[Tensor, int | None]]:
        counts = [count for count, _ in self.runs]
        return list(zip(rows.split(counts), (bits for _, bits in self.runs), strict=True))


def rounding_loss(bits: int | None) -> float:
    """Return the share of a vector's energy that rounding loses; bfloat16 loses next to nothing."""
    return 0.0 if bits is None else lost_energy(bits)


def _run_bytes(count: int, bits: int | None, rows: int, columns: int) -> int:
    if bits is None:
        return FLOAT_BYTES * count * (rows + columns)
    return packed_bytes(count * rows, bits) + packed_bytes(count * columns, bits) + SCALE_BYTES * count


def _unscaled(rows: Tensor, bits: int | None) -> Tensor:
    """Return rounded directions without scales, which their columns carry."""
    if bits is None:
        return rows.to(FLOAT_DTYPE).double()
    return codebook(bits)[encode(rows, bits)[0].long()].double()


def _with_scale(rows: Tensor, bits: int | None) -> Tensor:
    return rows.to(FLOAT_DTYPE).float() if bits is None else decode(*encode(rows, bits), bits)


Form = Whole | Factors


class Differences:
    """The differences `W_t - W_ref` of all experts, and their singular vectors, which are computed once.

    Tensors are matrices or vectors as ReTeX sees them (`matrix_sides`): convolutions have a row per output channel,
    stacked experts of an MoE layer are a matrix each. Tensors that match `exclude`, and those in which no expert
    differs, are left at the reference's value.
    """

    def __init__(self, weights: ExpertWeights, reference: Weights, exclude: Sequence[str] = ()) -> None:
        self.weights, self.reference = weights, reference
        convolutions = take_inventory(weights.model).convolutions
        self.sides: dict[str, Sides | None] = {}
        for name, base in weights.base.items():
            moved = any(bool((base + vector != reference[name]).any()) for vector in weights.vectors[name])
            if moved and not matches(name, exclude):
                self.sides[name] = matrix_sides(tuple(base.shape), name in convolutions)
        self._directions: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    @property
    def matrices(self) -> dict[str, Sides]:
        """Return the tensors that are matrices, or stacks of them."""
        return {name: sides for name, sides in self.sides.items() if sides is not None}

    @property
    def vectors(self) -> list[str]:
        """Return the tensors that are vectors: biases, norms."""
        return [name for name, sides in self.sides.items() if sides is None]

    def numbers(self, name: str) -> int:
        """Return how many numbers a tensor has."""
        return prod(self.weights.base[name].shape)

    def of(self, task: str, name: str) -> Tensor:
        """Return `W_t - W_ref` of one tensor."""
        own = self.weights.vectors[name][self.weights.tasks.index(task)]
        return self.weights.base[name] + own - self.reference[name]

    def directions(self, task: str, name: str) -> tuple[Tensor, Tensor]:
        """Return all right singular vectors of a task's difference as rows (batch, k, b), the strongest first, and the
        energy of each (batch, k)."""
        if (task, name) not in self._directions:
            sides = self.matrices[name]
            stack = self.of(task, name).reshape(sides)
            rows = torch.stack([right_vectors([matrix], min(sides[1:])) for matrix in stack]).float()
            self._directions[task, name] = rows, (stack @ rows.mT).square().sum(1)
        return self._directions[task, name]

    @cached_property
    def energies(self) -> dict[str, list[float]]:
        """Return the energy of every task's difference in every tensor."""
        return {name: [squared_norm(self.of(task, name)) for task in self.weights.tasks] for name in self.sides}

    @cached_property
    def importance(self) -> dict[str, list[float]]:
        """Return the weight of every task's error in every tensor, as ReTeX counts it around the average."""
        vectors = {name: self.weights.vectors[name] for name in self.sides}
        centred = {name: [squared_norm(own - sum(all_) / len(all_)) for own in all_] for name, all_ in vectors.items()}
        return task_weights(centred, "tasks")

    def expected_error(self, forms: Mapping[str, Form]) -> float:
        """Return the error that forms leave: the sum over tasks and tensors that ReTeX makes as small as it can."""
        error = 0.0
        for name, weights in self.importance.items():
            form = forms.get(name)
            for task, weight, energy in zip(self.weights.tasks, weights, self.energies[name], strict=True):
                spectrum = self.directions(task, name)[1] if isinstance(form, Factors) else None
                error += weight * (energy if form is None else form.lost(energy, spectrum))
        return error

    def stored(self, task: str, name: str, form: Form) -> Tensor:
        """Return a task's difference as it is after storage."""
        difference = self.of(task, name)
        if isinstance(form, Whole):
            return form.stored(difference)
        pairs = zip(difference.reshape(self.matrices[name]), self.directions(task, name)[0], strict=True)
        return torch.stack([form.stored(matrix, rows) for matrix, rows in pairs]).view(difference.shape)

    def bytes(self, forms: Mapping[str, Form]) -> int:
        """Return the bytes of one task's differences in these forms."""
        return sum(
            form.bytes(self.numbers(name)) if isinstance(form, Whole) else form.bytes(self.matrices[name])
            for name, form in forms.items()
        )


def differences_from(material: Material, reference: Reference, exclude: Sequence[str]) -> Differences:
    """Return the differences from a reference; those last asked for are kept, with their singular vectors.

    Systems with the same reference should therefore be fitted one after another.
    """
    key = json.dumps([reference, list(exclude)], sort_keys=True)
    held = material.shared.get("differences")
    if held is None or held[0] != key:
        material.shared.pop("differences", None)  # free its memory first
        weights = expert_weights(material)
        held = key, Differences(weights, source_body(weights, reference), exclude)
        material.shared["differences"] = held
    return held[1]
