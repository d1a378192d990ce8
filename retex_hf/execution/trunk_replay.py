"""Reuse of a shared trunk: the feature pass records the trunk's outputs, and experts continue from them.

The layers up to the feature layer are the same for every task. In the copies of the model that run experts, these
blocks return what the feature pass recorded. Outside such a call they run as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..rows import Proof, Reading, take
from ..utils.records import is_record, rebuilt, record_fields

# Outputs from inside the blocks, which a record of the blocks' outputs cannot provide.
INNER_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class TrunkRecord:
    """The outputs of each trunk block for a batch of `rows`, and the position of the rows in them."""

    outputs: Mapping[str, Any]
    rows: int
    proof: Proof
    reading: Reading

    def of(self, block: str, rows: Tensor) -> Any:
        """Return a block's output for some rows."""
        return self._take(self.outputs[block], block, rows)

    def _take(self, value: Any, path: str, rows: Tensor) -> Any:
        if isinstance(value, Tensor):
            return take(value, self.proof.places[path], self.reading, torch.arange(self.rows), rows)
        if isinstance(value, Mapping) or is_record(value):
            parts = {key: self._take(part, f"{path}.{key}", rows) for key, part in record_fields(value).items()}
            return rebuilt(value, parts)
        if isinstance(value, (list, tuple)):
            return type(value)(self._take(part, f"{path}.{index}", rows) for index, part in enumerate(value))
        return value

    def serves(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call can use the record: not if it needs outputs from inside the blocks, or gradients."""
        asked = any(kwargs.get(name) for name in INNER_OUTPUTS)
        learns = any(isinstance(value, Tensor) and value.requires_grad for value in kwargs.values())
        return not asked and not (learns and torch.is_grad_enabled())


_replayed: ContextVar[tuple[TrunkRecord, Tensor | None] | None] = ContextVar("retex_trunk", default=None)


def replaying(record: TrunkRecord | None, rows: Tensor | None, run: Callable[[], Any]) -> Any:
    """Run a function while the trunk's blocks return a record, of `rows` or of all rows in order.

    It runs in its own context, so nothing needs to be restored afterwards, even after an exception.
    """
    context = copy_context()
    context.run(_replayed.set, None if record is None else (record, rows))
    return context.run(run)


class _Replay:
    """A block's `forward` that returns the record. It refers to the block weakly, so as not to keep an expert alive."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self._block, self.name = weakref.ref(block), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = _replayed.get()
        if current is None or self.name not in current[0].outputs:
            block = self._block()
            assert block is not None  # it is being called
            return type(block).forward(block, *args, **kwargs)
        record, rows = current
        output = record.outputs[self.name]
        return output if rows is None else record.of(self.name, rows)


def install_replay(model: nn.Module, blocks: list[str]) -> None:
    """Make blocks of a copy of the model return records."""
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _Replay(block, name)
