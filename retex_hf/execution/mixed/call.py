"""One call on a mixed batch: which rows belong to which task.

Operations read the call from a context variable, so that one copy of the model serves many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import RetexError
from ...recovery.module import one_hot_row

Made = TypeVar("Made")


class MixedUnsupported(RetexError):
    """Raised where a model uses a recovered parameter in a way that has no row-by-row form."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one task, or of one mixture of tasks given by its weights (T,) and their embedding.

    Rows that are not `recovered` run on the merged parameters with the task's head.
    """

    task_id: int
    start: int
    stop: int
    weights: Tensor
    embedding: Tensor
    recovered: bool = True


# Key of a row-by-row decision: the name of a parameter or, for a value computed from parameters, a hash of the
# computation.
Origin = str | int


@dataclass(frozen=True)
class Certificate:
    """The result of probing a kind of call.

    It lists the parameters (and values computed from them) that are applied to rows, those that are applied to tensors
    without rows (position ids, relative positions), the outputs that have one value per task instead of rows, and the
    torch functions that the model calls, which leave rows in their places (`row_order`).
    """

    rows: frozenset[Origin]
    row_free: frozenset[Origin]
    per_task: frozenset[str] = frozenset()
    functions: frozenset[Any] = frozenset()


@dataclass
class MixedCall:
    """The rows of a batch, sorted by task.

    `certificate` says which tensors have rows. A probe (`is_probe`) collects in `log` the leading sizes that each
    parameter meets, in `computed` the same for values computed from parameters, and in `per_task` the outputs that have
    one value per task; `single` is the log of a call on one row to compare with. `repeats` is set for `generate`, which
    uses every parameter many times. `watched` counts the calls of the model's own code that are under way.
    """

    segments: list[Segment]
    certificate: Certificate | None = None
    is_probe: bool = False
    log: list[tuple[str, int, int]] = field(default_factory=list)
    single: list[tuple[str, int, int]] | None = None
    computed: list[tuple[int, int, bool]] = field(default_factory=list)
    per_task: set[str] = field(default_factory=set)
    repeats: bool = False
    watched: int = 0
    cache: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.segments[-1].stop

    @property
    def device(self) -> torch.device:
        """Return the device of the factors."""
        return self.segments[0].embedding.device

    def kept(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return a value made earlier in this call, or make it.

        Values are kept only where a call repeats; otherwise small tensors between large ones would fragment memory.
        """
        if key in self.cache:
            return self.cache[key]
        made = make()
        if self.repeats:
            self.cache[key] = made
        return made

    @property
    def one_hot_rows(self) -> list[int] | None:
        """Return the generator row of every segment, or None if a segment does not have one of its own."""
        if "one-hot" not in self.cache:
            rows = [one_hot_row(segment.embedding) if segment.recovered else None for segment in self.segments]
            self.cache["one-hot"] = None if None in rows else rows
        return self.cache["one-hot"]

    def entries_per_row(self, origin: Origin, value: Tensor) -> int | None:
        """Return how many entries along a tensor's leading axis belong to a row; None for a tensor without rows."""
        return self.entries_of_size(origin, value.shape[0] if value.ndim else 0, value.numel())

    def entries_of_size(self, origin: Origin, size: int, numbers: int) -> int | None:
        if self.is_probe:
            if not isinstance(origin, str):
                self.computed.append((origin, size, True))
            else:
                self.log.append((origin, size, numbers))
                if self.single is not None:
                    return self._compare(self.single, origin, size)
        if size == 0 or (size == 1 and self.rows > 1):
            return None
        certificate = self.certificate if len(self.segments) > 1 else None
        if certificate is None or (self.is_probe and not isinstance(origin, str)):
            return None if size % self.rows else size // self.rows
        if origin in certificate.row_free:
            return None
        if origin not in certificate.rows or size % self.rows:
            name = repr(origin) if isinstance(origin, str) else "a value computed from parameters"
            raise MixedUnsupported(
                f"{name} meets {size} entries in a batch of {self.rows} rows, which it did not do in a probe."
            )
        return size // self.rows

    def without_rows(self, origin: int, size: int) -> None:
        """Assume that a tensor combined with a computed value has no rows; the probe checks this afterwards."""
        if self.is_probe:
            self.computed.append((origin, size, False))

    def _compare(self, single: list[tuple[str, int, int]], name: str, size: int) -> int | None:
        position = len(self.log) - 1
        expected = single[position] if position < len(single) else ("nothing", 0, 0)
        if expected[0] == name and size == expected[1] * self.rows:
            return expected[1] or None
        if expected[0] == name and size == expected[1]:
            return None
        raise MixedUnsupported(
            f"{name!r} meets {size} entries for {self.rows} rows, but {expected[1]} (of {expected[0]!r}) for one: the "
            "rows of this model cannot be told apart there."
        )

    def sizes(self, per_row: int) -> list[int]:
        """Return each segment's number of entries along an axis with `per_row` entries per row."""
        key = ("sizes", per_row)
        if key not in self.cache:
            self.cache[key] = [(segment.stop - segment.start) * per_row for segment in self.segments]
        return self.cache[key]

    def slices(self, per_row: int) -> list[slice]:
        """Return each segment's slice along an axis with `per_row` entries per row."""
        return [slice(segment.start * per_row, segment.stop * per_row) for segment in self.segments]

    def padding(self, per_row: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the position of each entry once all segments are padded to the longest, and the entry at each
        position: where there is none, the first one of all, whose result nobody reads."""
        key = ("padding", per_row, device)
        if key not in self.cache:
            sizes = self.sizes(per_row)
            slots = torch.cat([torch.arange(size) + number * max(sizes) for number, size in enumerate(sizes)])
            entries = torch.zeros(len(sizes) * max(sizes), dtype=torch.long)
            entries[slots] = torch.arange(len(slots))
            self.cache[key] = slots.to(device), entries.to(device)
        return self.cache[key]

    def index(self, size: int, device: torch.device) -> Tensor:
        """Return the segment of each of `size` entries along the leading axis."""
        key = ("index", size, device)
        if key not in self.cache:
            lengths = torch.tensor([part.stop - part.start for part in self.slices(self._per_row(size))])
            self.cache[key] = torch.arange(len(self.segments)).repeat_interleave(lengths).to(device)
        return self.cache[key]

    def _per_row(self, size: int) -> int:
        if size % self.rows:
            raise MixedUnsupported(f"A tensor of {size} entries meets a recovered one in a batch of {self.rows} rows.")
        return size // self.rows


_current: ContextVar[MixedCall | None] = ContextVar("retex_mixed_call", default=None)


def current_call() -> MixedCall:
    call = _current.get()
    if call is None:
        raise MixedUnsupported("A recovered parameter was used outside a call of the model.")
    return call


def is_running() -> bool:
    return _current.get() is not None


@contextmanager
def unwatched() -> Iterator[None]:
    """Run code that is not the model's own, and may select rows."""
    call = _current.get()
    if call is None:
        yield
        return
    before, call.watched = call.watched, 0
    try:
        yield
    finally:
        call.watched = before


def within(call: MixedCall, run: Callable[[], Any]) -> Any:
    """Run a function while `call` is the current call.

    It runs in its own context, so nothing needs to be restored afterwards, even after an exception.
    """
    context = copy_context()
    context.run(_current.set, call)
    return context.run(run)
