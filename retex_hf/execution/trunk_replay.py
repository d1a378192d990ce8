"""A shared trunk: where the layers up to the feature layer are the same for every task, what they computed to identify
a row is where the row's expert goes on.

The blocks of the trunk are replaced, in the copies of the model that run experts, by ones that give back what the
feature pass has recorded. Outside such a call they run as always.
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

# What must come from inside the blocks, and so cannot come from a record of their outputs.
INNER_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class TrunkRecord:
    """What each block of the trunk gave for a batch of `rows`, and where the rows are in that."""

    outputs: Mapping[str, Any]
    rows: int
    proof: Proof
    reading: Reading

    def of(self, block: str, rows: Tensor) -> Any:
        """What a block gave for some rows."""
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
        """Whether a call can use the record: not if it asks for what happens inside blocks, or for gradients."""
        asked = any(kwargs.get(name) for name in INNER_OUTPUTS)
        learns = any(isinstance(value, Tensor) and value.requires_grad for value in kwargs.values())
        return not asked and not (learns and torch.is_grad_enabled())


_replayed: ContextVar[tuple[TrunkRecord, Tensor | None] | None] = ContextVar("retex_trunk", default=None)


def replaying(record: TrunkRecord | None, rows: Tensor | None, run: Callable[[], Any]) -> Any:
    """Run something while the trunk's blocks give back a record: of these rows, or of all in their order. It has a
    context of its own, so that nothing must be put back afterwards, whatever happens."""
    context = copy_context()
    context.run(_replayed.set, None if record is None else (record, rows))
    return context.run(run)


class _Replay:
    """The `forward` of a block that knows the record. It must not keep the block, and with it an expert, alive."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self._block, self.name = weakref.ref(block), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = _replayed.get()
        if current is None or self.name not in current[0].outputs:
            block = self._block()
            return type(block).forward(block, *args, **kwargs)
        record, rows = current
        output = record.outputs[self.name]
        return output if rows is None else record.of(self.name, rows)


def install_replay(model: nn.Module, blocks: list[str]) -> None:
    """Make blocks of a copy of the model give back records."""
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _Replay(block, name)
