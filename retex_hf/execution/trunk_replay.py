"""Reuse of a shared trunk: the feature pass records the trunk's outputs, and experts continue from them.

The first layers are merged for every task, and the output of the last of them, the junction, is aligned with the
expert of a row. In the copies of the model that run experts, these blocks return what the feature pass recorded, and a
decoder's put the keys and values into the cache that they put there then. Outside such a call, and in later steps of
`generate`, they run as usual, and the junction's output is aligned as it comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..routing.alignment import Alignment, align_entries, with_first_tensor
from ..routing.features import Entry, FilledCache, hidden_and_positions
from ..routing.pooling import Layout
from ..routing.trunk_tensors import answers
from ..rows import Along, Proof, Reading, take
from ..utils.records import is_record, rebuilt, record_fields
from .expert_cache import copy_with
from .mixed.call import MixedUnsupported, current_call, unwatched

# Layers of a cache whose whole state are keys and values of the rows.
PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
# Outputs from inside the blocks, which a record of the blocks' outputs cannot provide.
INNER_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class SharedTrunk:
    """The `blocks` that are merged for every task, their `parameters`, and what aligns the last block's output: `axis`
    is that of its features, counted from the end. The blocks may fill a cache (`cached`), and experts can continue from
    what was recorded of them (`replayed`)."""

    blocks: list[str]
    parameters: list[str]
    axis: int
    alignment: Alignment
    cached: bool = False
    replayed: bool = True

    @property
    def junction(self) -> str:
        """Return the block at which experts begin."""
        return self.blocks[-1]

    def align(self, output: Any, weights: Tensor) -> Any:
        """Return the junction's output, aligned with the mixture (T,) of tasks that all of its rows have."""

        def align(hidden: Tensor) -> Tensor:
            moved = hidden.movedim(self.axis, -1)
            return self.alignment(moved, weights.expand(len(moved), -1)).movedim(-1, self.axis)

        return with_first_tensor(output, align)

    def align_segments(self, output: Any) -> Any:
        """Return the junction's output, aligned with the task of each row of the running mixed batch."""
        call = current_call()
        weights = torch.stack([segment.weights * segment.recovered for segment in call.segments])

        def align(hidden: Tensor) -> Tensor:
            if len(hidden) % call.rows or self.axis == -hidden.ndim:
                raise MixedUnsupported(f"{self.junction!r} gives {len(hidden)} entries for {call.rows} rows.")
            moved = hidden.movedim(self.axis, -1)
            index = call.index(len(moved), weights.device)
            return self.alignment(moved, weights[index]).movedim(-1, self.axis)

        return with_first_tensor(output, align)


@dataclass(frozen=True)
class _Aligned:
    """How the output of a block is aligned when its rows are taken, by weights (rows, T): not before, so that groups
    that run at the same time align their rows at the same time."""

    block: str
    layout: Layout
    alignment: Alignment
    weights: Tensor

    def __call__(self, output: Any, rows: Tensor | None) -> Any:
        weights = self.weights if rows is None else self.weights[rows.to(self.weights.device)]
        assert isinstance(self.layout.rows, Along)
        weights = weights.repeat_interleave(self.layout.rows.per_row, 0)
        return align_entries(output, self.layout, self.alignment, weights)


@dataclass(frozen=True)
class TrunkRecord:
    """The outputs of each trunk block for a batch of `rows`, and the position of the rows in them."""

    outputs: Mapping[str, Any]
    rows: int
    proof: Proof
    reading: Reading
    cache: FilledCache | None = None
    alignment: _Aligned | None = None

    def aligned(self, block: str, layout: Layout, alignment: Alignment, weights: Tensor) -> TrunkRecord:
        """Return the record with a block's output aligned, by weights (rows, T)."""
        if isinstance(layout.rows, Along):
            return replace(self, alignment=_Aligned(block, layout, alignment, weights))
        owner = layout.rows.owner(self.reading).to(weights.device)
        output = align_entries(self.outputs[block], layout, alignment, weights[owner])
        return replace(self, outputs={**self.outputs, block: output})

    def of(self, block: str, rows: Tensor | None) -> Any:
        """Return a block's output for some rows; for all in order, if rows is None."""
        output = self.outputs[block] if rows is None else self._take(self.outputs[block], block, rows)
        return output if self.alignment is None or self.alignment.block != block else self.alignment(output, rows)

    def _take(self, value: Any, path: str, rows: Tensor) -> Any:
        if isinstance(value, Tensor):
            return take(value, self.proof.places[path], self.reading, torch.arange(self.rows), rows)
        if isinstance(value, Mapping) or is_record(value):
            parts = {key: self._take(part, f"{path}.{key}", rows) for key, part in record_fields(value).items()}
            return rebuilt(value, parts)
        if isinstance(value, (list, tuple)):
            return type(value)(self._take(part, f"{path}.{index}", rows) for index, part in enumerate(value))
        return value

    def serves(self, kwargs: Mapping[str, Any], model: nn.Module) -> bool:
        """Return whether a call of the merged model's experts can use the record: not if it needs outputs from inside
        the blocks, or gradients."""
        if any(kwargs.get(name) for name in INNER_OUTPUTS):
            return False
        values = (*kwargs.values(), *model.parameters()) if torch.is_grad_enabled() else ()
        return not any(isinstance(value, Tensor) and value.requires_grad for value in values)


@dataclass
class _Replayed:
    """The record that blocks return, and its rows (None: all, in order). With `runs` they run instead, because this
    pass is not the one that was recorded."""

    record: TrunkRecord
    rows: Tensor | None
    runs: bool = False


_replayed: ContextVar[_Replayed | None] = ContextVar("retex_trunk", default=None)


def replaying(record: TrunkRecord | None, rows: Tensor | None, run: Callable[[], Any]) -> Any:
    """Run a function while the trunk's blocks return a record, of `rows` or of all rows in order.

    It runs in its own context, so nothing needs to be restored afterwards, even after an exception.
    """
    context = copy_context()
    context.run(_replayed.set, None if record is None else _Replayed(record, rows))
    return context.run(run)


def _cache_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Cache | None:
    """Return the cache that a block is called with."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


def _is_same_start(recorded: list[Tensor], current: list[Tensor], rows: Tensor) -> bool:
    """Return whether a decoder's first block is called with what it was called with when the trunk was recorded: not in
    the later steps of `generate`, nor if that counts positions in another way."""
    own = [part if len(part) == 1 else part[rows.to(part.device)] for part in recorded]
    if len(own) != len(current) or own[0].shape != current[0].shape:  # beams repeat the hidden states of one row, too
        return False
    # `generate` counts positions row by row, where a forward pass may count them once for all rows.
    return all(
        one.shape[1:] == other.shape[1:]
        and len(one) in (1, len(other))
        and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(own, current, strict=True)
    )


def _fill(cache: Cache, filled: Mapping[int, CacheLayerMixin], rows: Tensor | None) -> bool:
    """Put the keys and values of a recorded block into an empty cache; return whether it is one that takes them."""
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    while len(cache.layers) <= max(filled, default=-1):
        if cache.layer_class_to_replicate is None:
            return False
        cache.layers.append(cache.layer_class_to_replicate())
    for index, own in filled.items():
        given = cache.layers[index]
        if type(own) not in PLAIN_LAYERS or type(given) is not type(own) or given.get_seq_length() > 0:
            return False
        if getattr(given, "record_past", False):  # by assisted generation, which takes back tokens: more than is kept
            return False
    for index, own in filled.items():
        cache.layers[index] = copy(own)
        if rows is not None:
            cache.layers[index].reorder_cache(rows.long())  # type: ignore[arg-type]  # any int64 tensor will do
    return True


class _Replay:
    """A block's `forward` that returns the record, or runs and lets `align` change the output. It refers to the block
    weakly, so as not to keep an expert alive."""

    def __init__(self, block: nn.Module, name: str, align: Callable[[Any], Any] | None) -> None:
        self._block, self.name, self._align = weakref.ref(block), name, align

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = _replayed.get()
        if current is not None and self.name in current.record.outputs:
            with unwatched():
                recorded = self._recorded(current, args, kwargs)
            if recorded is not None:
                return recorded
        block = self._block()
        assert block is not None  # it is being called
        output = type(block).forward(block, *args, **kwargs)
        if self._align is None:
            return output
        with unwatched():
            return self._align(output)

    def _recorded(self, current: _Replayed, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any | None:
        """Return the recorded output, or None where the block has to run."""
        record, rows = current.record, current.rows
        if record.cache is not None:
            cache = _cache_of(args, kwargs)
            if self.name == next(iter(record.cache.layers)):
                everything = torch.arange(record.rows) if rows is None else rows
                current.runs = not _is_same_start(record.cache.start, hidden_and_positions(args, kwargs), everything)
            if not current.runs and cache is not None:
                current.runs = not _fill(cache, record.cache.layers[self.name], rows)
            if current.runs:
                return None
        return record.of(self.name, rows)


def install_replay(model: nn.Module, blocks: list[str], align: Callable[[Any], Any] | None = None) -> None:
    """Make blocks of a copy of the model return records; where the last of them runs, `align` its output."""
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _Replay(block, name, align if name == blocks[-1] else None)


@torch.no_grad()
def replays_cache(model: nn.Module, blocks: list[str], record: TrunkRecord, inputs: Mapping[str, Any]) -> bool:
    """Return whether a model that replays a record fills a cache with it, and gives the outputs that it gives
    otherwise."""
    assert record.cache is not None  # of blocks that fill one
    prober = copy_with(model, {}).eval()
    install_replay(prober, blocks)
    entry = Entry(prober)

    def run(record: TrunkRecord | None) -> tuple[Tensor, DynamicCache]:
        cache = DynamicCache(config=getattr(model, "config", None))
        kwargs = {**inputs, "use_cache": True, "past_key_values": cache}
        return answers(replaying(record, None, lambda: entry(**kwargs))), cache

    (expected, full), (found, filled) = run(None), run(record)
    pairs = [(index, layer) for layers in record.cache.layers.values() for index, layer in layers.items()]
    if not full.layers or not all(type(layer) in PLAIN_LAYERS for layer in full.layers):
        return False
    if not all(_keys_and_values(filled.layers[i])[0] is _keys_and_values(layer)[0] for i, layer in pairs):
        return False  # some blocks have run
    wanted = [expected, *(part for layer in full.layers for part in _keys_and_values(layer))]
    got = [found, *(part for layer in filled.layers for part in _keys_and_values(layer))]
    return len(wanted) == len(got) and all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(wanted, got, strict=True)
    )


def _keys_and_values(layer: Any) -> list[Tensor]:
    """Return the state of a layer of a cache that was filled; of others, nothing."""
    return [part for part in (getattr(layer, "keys", None), getattr(layer, "values", None)) if part is not None]
