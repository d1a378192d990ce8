"""Prove, on the merged model, how a kind of call is split and joined, before experts get parts of a batch.

Run some rows alone and together with others. If a row's outputs are the same both times, the split gave it the right
inputs. The axis of an output that grows with the number of rows is its row axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, RetexError, first_line
from ..utils.records import is_record, record_fields
from .ownership import Reading, entries_of

DEPENDS = "differs between a row alone and the same row in a batch"
# Relative to the largest number in a field: rounding differs with the other rows of a batch.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
ROUGH = 5e-2
# Number of rows to try: more than two, because some models treat the first rows differently from later ones.
TRIED = 4
PLAIN = (bool, int, float, complex, str, bytes, set, frozenset)


@dataclass(frozen=True)
class Along:
    """Mark a field of an output as having `per_row` entries of each row along an axis."""

    axis: int
    per_row: int


@dataclass(frozen=True)
class AlongItems:
    """Mark a field of an output as having, along its first axis, `each` entries for every `merged` entries of an input.

    The entries of that input (`name`) belong to rows: for example images, or groups of four patches.
    """

    name: str
    each: int
    merged: int

    def owner(self, reading: Reading) -> Tensor:
        """Return the row that each entry belongs to."""
        owner = reading[self.name].owner
        assert owner is not None
        return owner.reshape(-1, self.merged)[:, 0].repeat_interleave(self.each)


@dataclass(frozen=True)
class Shared:
    """Mark a field of an output, with `ndim` axes, as independent of the rows."""

    ndim: int


@dataclass(frozen=True)
class Entries:
    """Mark a list in an output as having one tensor for every row, or for every entry of an input (`name`)."""

    name: str | None

    def owner(self, reading: Reading, rows: int) -> Tensor:
        """Return the row that each tensor belongs to."""
        owner = None if self.name is None else reading[self.name].owner
        return torch.arange(rows) if owner is None else owner


Place = Along | AlongItems | Shared


@dataclass(frozen=True)
class Proof:
    """Record how to split a kind of call (`reading` names one of `readings`), and where the rows are in its outputs.

    `places` maps the path of a tensor to its row axis, `lists` does so for lists with tensors of each row. `refused`
    maps the path of every other field to the reason why it cannot be joined. `draws` tells whether such a call draws
    random numbers.
    """

    reading: str
    places: Mapping[str, Place] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, Entries] = field(default_factory=dict)
    draws: bool = False

    @property
    def worth(self) -> tuple[bool, int]:
        """Return a sort key: prefer proofs that assign some output to rows, then those that refuse fewer fields."""
        useful = any(not isinstance(place, Shared) for place in self.places.values()) or bool(self.lists)
        return useful, -len(self.refused)


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of an output, by path."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping) or is_record(output):
        for key, value in record_fields(output).items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from leaves(value, f"{path}.{index}" if path else str(index))


def plain_values(output: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers, strings and sets of an output, by path. Skip lists, which may have an entry per row."""
    if isinstance(output, Mapping) or is_record(output):
        for key, value in record_fields(output).items():
            yield from plain_values(value, f"{path}.{key}" if path else str(key))
    elif isinstance(output, tuple):
        for index, value in enumerate(output):
            yield from plain_values(value, f"{path}.{index}" if path else str(index))
    elif isinstance(output, PLAIN):
        yield path, output


def lists_of(output: Any, path: str = "") -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield all lists of tensors in an output, by path."""
    if isinstance(output, Mapping) or is_record(output):
        for key, value in record_fields(output).items():
            yield from lists_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(output, (list, tuple)) and output and all(isinstance(value, Tensor) for value in output):
        yield path, output
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from lists_of(value, f"{path}.{index}" if path else str(index))


def prove(
    call: Callable[[Mapping[str, Any]], Any],
    split: Callable[[Reading, Tensor], dict[str, Any]],
    given: Mapping[str, Reading],
    rows: int,
    parts: list[Tensor] | None = None,
) -> Proof:
    """Find the reading under which rows have the same outputs alone and together; refuse the batch if there is none.

    Args:
        call: Runs the model on a part of the batch.
        split: Takes the given rows out of the batch, by a reading.
        given: The possible readings, the likeliest first.
        rows: Number of rows of the batch. A single row is compared with two copies of itself.
        parts: The rows of each group. By default the first rows are tried one by one, which is enough where every row
            has one entry in every input.
    """
    # Rows of the batch that run together; `alone` holds positions among them.
    together = torch.arange(max(2, min(rows, TRIED))) % rows if parts is None else torch.arange(rows)
    alone = list(torch.arange(min(rows, TRIED)).split(1)) if parts is None else parts
    best: Proof | None = None
    problem = ""
    for name, reading in given.items():
        outputs: list[Any] = []
        try:
            for part in (together, *(together[some] for some in alone)):
                outputs.append(call(split(reading, part)))
        except RetexError:
            raise
        except Exception as error:  # a wrong reading gives rows foreign inputs, on which a model may raise anything
            if len(given) == 1 and not outputs:
                if len(together) < rows:
                    call(split(reading, torch.arange(rows)))
                    raise InputError(_apart(error)) from error
                raise  # the batch itself is invalid: the model's own error explains it best
            problem = _apart(error)
            continue
        found = _compare(name, reading, outputs[0], outputs[1:], together, alone)
        if best is None or found.worth > best.worth:
            best = found
        if best is found and not found.refused:
            break
    if best is None:
        raise InputError(problem)
    return best


def _apart(error: Exception) -> str:
    reason = f"{type(error).__name__}: {first_line(error)}"
    return f"The rows of this batch cannot be separated ({reason}): call once per task with task=."


def take(tensor: Tensor, place: Place, reading: Reading, batch: Tensor, positions: Tensor) -> Tensor:
    """Return the entries of some rows in a field: those at `positions` of the `batch` that produced the field."""
    if isinstance(place, Shared):
        return tensor
    if isinstance(place, AlongItems):
        owner = place.owner(reading)
        counts = torch.stack([(owner == row).sum() for row in batch])
        index = entries_of(torch.arange(len(batch)).repeat_interleave(counts), positions)
        return tensor[index.to(tensor.device)]
    by_row = tensor.unflatten(place.axis, (len(batch), place.per_row))
    return by_row.index_select(place.axis, positions.to(tensor.device)).flatten(place.axis, place.axis + 1)


def _compare(
    name: str, reading: Reading, together_gives: Any, alone_give: list[Any], together: Tensor, alone: list[Tensor]
) -> Proof:
    lists = _compare_lists(
        reading, dict(lists_of(together_gives)), [dict(lists_of(gives)) for gives in alone_give], together, alone
    )
    parts = [dict(leaves(gives)) for gives in alone_give]
    places: dict[str, Place] = {}
    refused: dict[str, str] = {}
    for path, tensor in leaves(together_gives):
        if path.rpartition(".")[0] in lists:
            continue
        if tensor.layout != torch.strided:
            refused[path] = "is sparse"
            continue
        others = [part.get(path) for part in parts]

        def fits(place: Along | AlongItems, tensor: Tensor = tensor, others: list[Tensor | None] = others) -> bool:
            taken = (take(tensor, place, reading, together, some) for some in alone)
            axis = place.axis if isinstance(place, Along) else 0
            return all(_same_entries(one, other, axis) for one, other in zip(taken, others, strict=True))

        found = next(filter(fits, _candidates(reading, tensor, len(together))), None)
        if found is not None:
            places[path] = found
        elif tensor.ndim == 0 and not (tensor.is_floating_point() or tensor.is_complex()):
            # A count or an `any` over the rows may be equal by chance.
            refused[path] = "is one integer for all rows"
        elif all(other is not None and tensor.shape == other.shape and _equal(tensor, other) for other in others):
            places[path] = Shared(tensor.ndim)
        elif any(other is None or other.ndim != tensor.ndim for other in others):
            refused[path] = "has another structure when there are fewer rows"
        else:
            refused[path] = DEPENDS
    values = [dict(plain_values(gives)) for gives in alone_give]
    for path, value in plain_values(together_gives):
        if any(part.get(path) != value for part in values):
            refused[path] = DEPENDS
    return Proof(name, places, refused, lists)


def _same_entries(taken: Tensor, other: Tensor | None, axis: int) -> bool:
    """Return whether rows have the same entries together with others (`taken`) and alone (None: no such field)."""
    if other is None:
        return taken.shape[axis] == 0
    return other.ndim == taken.ndim and other.shape[axis] == taken.shape[axis] and _equal(taken, other)


def _compare_lists(
    reading: Reading,
    whole: Mapping[str, Sequence[Tensor]],
    parts: list[dict[str, Sequence[Tensor]]],
    together: Tensor,
    alone: list[Tensor],
) -> dict[str, Entries]:
    """Return the lists that grow with the number of rows and hold the same tensors for a row both times."""
    found: dict[str, Entries] = {}
    names = [None, *(name for name, owned in reading.items() if owned.owner is not None)]
    for path, tensors in whole.items():
        for place in map(Entries, names):
            owner = place.owner(reading, int(together.max()) + 1)
            counts = torch.stack([(owner == row).sum() for row in together])
            positions = torch.arange(len(together)).repeat_interleave(counts)
            if len(tensors) != len(positions):
                continue
            indices = [entries_of(positions, some).tolist() for some in alone]
            fewer = [part.get(path, ()) for part in parts]
            if any(
                len(index) != len(few) or len(few) == len(tensors) for index, few in zip(indices, fewer, strict=True)
            ):
                continue
            pairs = zip(chain.from_iterable(indices), chain.from_iterable(fewer), strict=True)
            if all(tensors[i].ndim == other.ndim and _equal(tensors[i], other) for i, other in pairs):
                found[path] = place
                break
    return found


def _candidates(reading: Reading, tensor: Tensor, rows: int) -> Iterator[Along | AlongItems]:
    for axis, size in enumerate(tensor.shape):
        if size and size % rows == 0:
            yield Along(axis, size // rows)
    for name, owned in reading.items():
        if owned.owner is None or not tensor.ndim or not len(tensor) or not len(owned.owner):
            continue
        ratio = Fraction(len(tensor), len(owned.owner))
        if len(owned.owner) % ratio.denominator == 0:
            yield AlongItems(name, ratio.numerator, ratio.denominator)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, in the part that both have if their sizes differ."""
    common = tuple(slice(min(sizes)) for sizes in zip(first.shape, second.shape, strict=True))
    first, second = first[common], second[common]
    if first.is_complex() and second.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    if not first.is_floating_point():
        return torch.equal(first, second)
    tolerance = TOLERANCE.get(first.dtype, ROUGH)
    first, second = first.cpu().double(), second.cpu().double()  # not every device supports float64
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return False
    first, second = first[finite], second[finite]
    if not first.numel():
        return True
    largest = max(float(first.abs().max()), 1e-6)
    return float((first - second).abs().max()) <= tolerance * largest
