"""Offsets made of components at a few bits each: the form that a budget of bytes gives a recovery.

The form is the paper's, `G_t S`, with a sparse `G`: a task has columns for the rows of `S` that it uses, and none for
the others. Rows of `S` are one task's own, or any task may use them. Every row and every column has its own number of
bits. A tensor that is not factored is stored as it is, task by task, at some number of bits.

All codes of a parameter are one tensor of bytes, all scales another. The layout says which bytes are whose: first the
rows of `S`, then the columns of task 0, 1, ...; within each, runs of equal bits, the most bits first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .codes import BITS, SCALE_DTYPE, decode, encode, pack, packed_bytes, unpack

COMPONENTS, ROUNDED = "components", "rounded"
# Numbers that share a scale in a tensor that is not factored.
GROUP = 64
INDEX_DTYPE = torch.int16
LARGEST_INDEX = 2**15
# The limit of any size in a description, which may be untrusted.
MOST = 2**31


@dataclass(frozen=True)
class Run:
    """Vectors that follow one another in storage, at the same number of bits."""

    count: int
    bits: int


Runs = tuple[Run, ...]


def runs_of(bits: Sequence[int]) -> Runs:
    """Return vectors of these bits as runs.

    >>> runs_of([4, 4, 2])
    (Run(count=2, bits=4), Run(count=1, bits=2))
    """
    runs: list[Run] = []
    for number in bits:
        if runs and runs[-1].bits == number:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(Run(1, number))
    return tuple(runs)


def count_of(runs: Runs) -> int:
    """Return how many vectors the runs have."""
    return sum(run.count for run in runs)


@dataclass(frozen=True)
class ComponentLayout:
    """The storage layout of one parameter's offsets.

    - `components`: the parameter is a matrix of `rows` times `columns`, or a stack of `batch` matrices on top of one
      another. `right` are the runs of the rows of `S`; `left`
      those of every task's columns of `G_t`. If `owned`, each task uses rows of its own, which follow one another in
      the order of the tasks; otherwise an index says which rows a column is for.
    - `rounded`: every task's offset as it is, in groups of 64 numbers with a scale each; `left` has at most one run of
      one vector per task, and a task without one has no offset.
    """

    shape: tuple[int, ...]
    kind: str
    left: tuple[Runs, ...]
    right: Runs = ()
    rows: int = 0
    columns: int = 0
    owned: bool = True
    batch: int = 1

    @property
    def matrix_rows(self) -> int:
        """Return how many rows each matrix of the parameter has."""
        return self.rows // self.batch

    @property
    def is_factored(self) -> bool:
        """Return whether offsets are products of two matrices."""
        return self.kind == COMPONENTS

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain values: a run is `[count, bits]`."""
        left = [[[run.count, run.bits] for run in runs] for runs in self.left]
        values: dict[str, Any] = {"shape": list(self.shape), "kind": self.kind, "left": left}
        if self.kind == COMPONENTS:
            values["right"] = [[run.count, run.bits] for run in self.right]
            values |= {"rows": self.rows, "columns": self.columns, "owned": self.owned, "batch": self.batch}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ComponentLayout:
        """Invert `to_json`; raise a TypeError, ValueError or KeyError for values that it never returns."""

        def runs(found: Any) -> Runs:
            made = tuple(Run(count, bits) for count, bits in found)
            if not all(type(run.count) is int and 0 < run.count < MOST and run.bits in BITS for run in made):
                raise ValueError
            return made

        fields = {**values, "shape": tuple(values["shape"]), "left": tuple(map(runs, values["left"]))}
        layout = cls(**{**fields, "right": runs(fields.get("right", ()))})
        layout.check()
        return layout

    def check(self) -> None:
        """Raise a ValueError for a layout that no parameter can have."""
        sizes = (*self.shape, self.rows, self.columns, self.batch)
        whole = all(type(size) is int and 0 <= size < MOST for size in sizes) and type(self.owned) is bool
        if not whole or self.kind not in (COMPONENTS, ROUNDED):
            raise ValueError
        if self.kind == ROUNDED:
            vectors = all(count_of(runs) <= 1 for runs in self.left)
            if not vectors or (self.rows, self.columns, self.batch, self.owned, self.right) != (0, 0, 1, True, ()):
                raise ValueError
        elif (
            self.rows * self.columns != prod(self.shape)
            or not self.columns
            or not self.batch
            or self.rows % self.batch
            or (self.owned and self.rank != sum(map(count_of, self.left)))
            or (not self.owned and (self.rank > LARGEST_INDEX or any(count_of(runs) > self.rank for runs in self.left)))
        ):
            raise ValueError

    @property
    def rank(self) -> int:
        """Return how many rows `S` has."""
        return count_of(self.right)

    @property
    def solved_rank(self) -> int:
        """Return how many rows of `S` a task uses, on average."""
        return -(-sum(map(count_of, self.left)) // max(self.num_tasks, 1))

    @property
    def num_tasks(self) -> int:
        return len(self.left)

    def task_rank(self, task: int) -> int:
        """Return how many components a task has."""
        return count_of(self.left[task])

    @property
    def stored(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of every tensor that the offsets are stored as."""
        pieces = list(self._pieces())
        size = pieces[-1][1] if pieces else 0
        scales = sum(self.scales_of(task) for task in range(self.num_tasks))
        stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((size,), torch.uint8),
            "scales": ((scales,), SCALE_DTYPE),
        }
        if self.kind == COMPONENTS and not self.owned:
            stored["index"] = ((scales,), INDEX_DTYPE)
        return stored

    @property
    def bytes(self) -> int:
        """Return the bytes of all stored tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.stored.values())

    def scales_of(self, task: int) -> int:
        """Return how many scales a task's columns have."""
        return count_of(self.left[task]) * (1 if self.kind == COMPONENTS else -(-prod(self.shape) // GROUP))

    @property
    def length(self) -> int:
        """Return how many numbers a task's vector has: a column of `G_t`, or the whole offset."""
        return self.rows if self.kind == COMPONENTS else -(-prod(self.shape) // GROUP) * GROUP

    def _pieces(self) -> Iterator[tuple[int, int, Run, int]]:
        """Yield where each run is: its start and end in bytes, the run, and the numbers of each of its vectors."""
        start = 0
        vectors = [(run, self.columns) for run in self.right]
        vectors += [(run, self.length) for runs in self.left for run in runs]
        for run, length in vectors:
            end = start + packed_bytes(run.count * length, run.bits)
            yield start, end, run, length
            start = end

    def pieces_of(self, task: int | None) -> list[tuple[int, int, Run, int]]:
        """Return where the runs of a task's columns are, or with None those of the rows of `S`."""
        pieces = list(self._pieces())
        counts = [len(self.right), *(len(runs) for runs in self.left)]
        ends = list(accumulate(counts))
        number = 0 if task is None else task + 1
        return pieces[ends[number] - counts[number] : ends[number]]

    def used_rows(self, task: int) -> range:
        """Return the rows of `S` that are a task's own, if they are owned."""
        first = sum(count_of(runs) for runs in self.left[:task])
        return range(first, first + count_of(self.left[task]))


class ComponentGenerator(nn.Module):
    """Offsets of one parameter from components at a few bits each. An embedding is the weights of the tasks.

    The parameters cannot be trained; `task_factors` and all others return float32.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    index: nn.Parameter | None

    def __init__(self, layout: ComponentLayout, codes: Tensor, scales: Tensor, index: Tensor | None = None) -> None:
        super().__init__()
        self.layout = layout
        for name, tensor in (("codes", codes), ("scales", scales), ("index", index)):
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def right(self, rows: Tensor | range | None = None) -> Tensor:
        """Return rows of `S` (k, b), of which none has a scale: columns carry it. Of a range, nothing else is read."""
        layout = self.layout
        wanted = rows if isinstance(rows, range) else range(layout.rank)
        parts, first = [torch.zeros(0, layout.columns, device=self.codes.device)], 0
        for start, end, run, length in layout.pieces_of(None):
            own = range(max(wanted.start, first) - first, min(wanted.stop, first + run.count) - first)
            first += run.count
            if own:
                codes = unpack(self.codes[start:end], run.bits, run.count * length).view(run.count, length)
                parts.append(decode(codes[own.start : own.stop], self.scales.new_ones(len(own)), run.bits))
        found = torch.cat(parts)
        return found[rows] if isinstance(rows, Tensor) else found

    def left(self, task: int) -> Tensor:
        """Return a task's columns of `G_t` as rows (k, a); or its rounded offset as one row."""
        layout = self.layout
        first = sum(layout.scales_of(other) for other in range(task))
        scales = self.scales[first : first + layout.scales_of(task)]
        parts = []
        for start, end, run, length in layout.pieces_of(task):
            codes = unpack(self.codes[start:end], run.bits, run.count * length)
            groups = len(scales) if layout.kind == ROUNDED else run.count
            own, scales = scales[:groups], scales[groups:]
            parts.append(decode(codes.view(groups, -1), own, run.bits).view(run.count, length))
        return torch.cat(parts) if parts else torch.zeros(0, layout.length, device=self.codes.device)

    def rows_used(self, task: int) -> Tensor:
        """Return the rows of `S` that a task's columns are for."""
        layout = self.layout
        if self.index is None:
            return torch.tensor(layout.used_rows(task), device=self.codes.device, dtype=torch.int64)
        first = sum(layout.scales_of(other) for other in range(task))
        return self.index[first : first + layout.scales_of(task)].long()

    def task_factors(self, task: int) -> tuple[Tensor, Tensor]:
        """Return the factors (a, k) and (k, b) of one task's offset."""
        return self.left(task).T, self.right(
            self.layout.used_rows(task) if self.index is None else self.rows_used(task)
        )

    def factors(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors (batch, a, k) and (batch, k, b) of a mixture's offset."""
        left, right = self.mixed_factors(embedding)
        batch = self.layout.batch
        return left.view(batch, self.layout.matrix_rows, left.shape[1]), right.expand(batch, *right.shape)

    def joint_factors(self, embeddings: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor]:
        """Return a `G` (a, k) for every embedding (None: none), and the rows (k, b) of `S` that any of them uses."""
        tasks = sorted({task for one in embeddings if one is not None for task in one.nonzero().flatten().tolist()})
        used = {task: self.rows_used(task) for task in tasks}
        if not tasks:
            nothing = torch.zeros(self.layout.rows, 0, device=self.codes.device)
            return [nothing] * len(embeddings), nothing.new_zeros(0, self.layout.columns)
        rows, places = torch.unique(torch.cat(list(used.values())), return_inverse=True)
        columns = dict(zip(tasks, places.split([len(used[task]) for task in tasks]), strict=True))
        lefts = {task: self.left(task) for task in tasks}
        found = []
        for one in embeddings:
            whole = torch.zeros(len(rows), self.layout.rows, device=self.codes.device)
            if one is not None:
                for task in one.nonzero().flatten().tolist():
                    whole.index_add_(0, columns[task], one[task] * lefts[task])
            found.append(whole.T)
        return found, self.right(rows)

    def mixed_factors(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors (a, k) and (k, b) of a mixture's offset; of a stack, matrices are on top of one
        another."""
        found = [(embedding[task], *self.task_factors(task)) for task in embedding.nonzero().flatten().tolist()]
        if not found:
            return self.codes.new_zeros(self.layout.rows, 0).float(), self.codes.new_zeros(
                0, self.layout.columns
            ).float()
        return torch.cat([weight * left for weight, left, _ in found], 1), torch.cat([right for *_, right in found])

    def forward(self, embedding: Tensor) -> Tensor:
        """Return the offset of a mixture of tasks, in the parameter's own shape."""
        layout = self.layout
        if layout.kind == COMPONENTS:
            left, right = self.mixed_factors(embedding)
            return (left @ right).view(layout.shape)
        total = torch.zeros(layout.length, device=self.codes.device)
        for task in embedding.nonzero().flatten().tolist():
            for row in self.left(task):
                total = total + embedding[task] * row
        return total[: prod(layout.shape)].view(layout.shape)

    def added_to(self, base: Tensor, embedding: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `base + offset`, in the dtype and on the device of `base`; write it into `out` if given."""
        layout = self.layout
        if layout.kind != COMPONENTS:
            return torch.add(base, self(embedding).to(base.device, base.dtype), out=out)
        left, right = (factor.to(base.device, base.dtype) for factor in self.mixed_factors(embedding))
        matrix = base.reshape(layout.rows, layout.columns)
        out = None if out is None else out.view(layout.rows, layout.columns)
        return torch.addmm(matrix, left, right, out=out).view(layout.shape)


def encode_components(
    layout: ComponentLayout, right: Tensor | None, lefts: Sequence[Tensor], index: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the stored tensors of rows of `S` (without scales: unit codes) and tasks' columns, in the layout's order.

    `right` holds codes already; `lefts` numbers, which are rounded here.
    """
    codes: list[Tensor] = []
    scales: list[Tensor] = []
    first = 0
    directions = torch.zeros(0, layout.columns) if right is None else right
    for _, _, run, _ in layout.pieces_of(None):
        codes.append(pack(directions[first : first + run.count], run.bits))
        first += run.count
    for task, left in enumerate(lefts):
        first = 0
        for _, _, run, length in layout.pieces_of(task):
            part = left[first : first + run.count]
            if layout.kind == ROUNDED:
                part = nn.functional.pad(part, (0, length - part.shape[1])).view(-1, GROUP)
            found, scale = encode(part, run.bits)
            codes.append(pack(found, run.bits))
            scales.append(scale)
            first += run.count
    stored = {
        "codes": torch.cat(codes) if codes else torch.zeros(0, dtype=torch.uint8),
        "scales": torch.cat(scales) if scales else torch.zeros(0, dtype=SCALE_DTYPE),
    }
    if index is not None:
        stored["index"] = torch.cat(list(index)).to(INDEX_DTYPE)
    return stored
