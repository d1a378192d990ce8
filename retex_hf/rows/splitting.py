"""Split a batch of keyword arguments by rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from ..errors import InputError
from .ownership import Reading, grid_of

# Inputs whose leading axis (or length, for a list) is not the batch.
NOT_ROWS = frozenset(
    {"cache_position", "head_mask", "decoder_head_mask", "cross_attn_head_mask", "logits_to_keep",
     "logits_processor", "stopping_criteria"}
)  # fmt: skip
# The text side of a dual encoder: its rows are class prompts, not matched to the images.
TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "text"})


def count_rows(kwargs: Mapping[str, Any], names: tuple[str, ...], named: int | None = None) -> int:
    """Return the number of rows of a batch: the leading axis of the first of `names` that is given, else of the first
    tensor. For packed images, return their number. A list has an entry per row, unless it holds tensors with one entry
    for each of the `named` tasks."""
    grid = grid_of(kwargs)
    if grid is not None:
        return len(kwargs[grid])
    candidates = [kwargs[name] for name in names if isinstance(kwargs.get(name), (Tensor, list))]
    candidates += [value for value in kwargs.values() if isinstance(value, Tensor) and value.ndim > 0]
    if isinstance(kwargs.get("encoder_outputs"), (tuple, Mapping)):
        candidates.append(kwargs["encoder_outputs"][0])
    if not candidates:
        for name in (name for name in names if kwargs.get(name) is not None):
            raise InputError(f"{name!r} must be a tensor, not a {type(kwargs[name]).__name__}.")
        raise InputError(f"No input says how many rows the batch has; expected one of {list(dict.fromkeys(names))}.")
    first = candidates[0]
    each = [isinstance(x, Tensor) and x.ndim > 0 and len(x) == named for x in first] if isinstance(first, list) else []
    if named is not None and each and all(each):
        return named
    return len(first)


def numbers_per_row(kwargs: Mapping[str, Any], rows: int) -> int:
    """Return the numbers per row of the largest input: the work of a call grows with it."""
    inputs = [value for value in kwargs.values() if isinstance(value, Tensor) and value.ndim and len(value) == rows]
    return max((value.numel() // rows for value in inputs), default=1)


@dataclass(frozen=True)
class Splitter:
    """The split of one call's arguments by rows; `whole` names those that every group gets unchanged, `reading` tells
    which entries of the tensors belong to which row."""

    rows: int
    whole: frozenset[str]
    reading: Reading = field(default_factory=dict)

    def take(self, kwargs: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        """Return the arguments for a group of rows; omit those of which it has no entries (rows without images)."""
        had = {name: value for name, value in kwargs.items() if not self._is_empty(name, rows)}
        return {name: self._take(name, value, rows) for name, value in had.items()}

    def _is_list_of_inputs(self, value: list | tuple) -> bool:
        """Return whether a list holds several inputs, each of all rows, rather than one entry per row."""
        each = [isinstance(part, Tensor) and part.ndim > 0 and len(part) == self.rows for part in value]
        return bool(value) and all(each) and len(value) != self.rows

    def _is_empty(self, name: str, rows: Tensor) -> bool:
        return name in self.reading and self.reading[name].is_empty(rows)

    def _take(self, name: str, value: Any, rows: Tensor) -> Any:
        if name in self.whole or value is None:
            return value
        if isinstance(value, Tensor) and name in self.reading:
            return self.reading[name].take(value, rows)
        if isinstance(value, Tensor):
            follows = value.ndim > 0 and value.shape[0] == self.rows  # for tensors nested within an argument
            return value[rows.to(value.device)] if follows else value
        if isinstance(value, Mapping):
            parts = {key: self._take(name, part, rows) for key, part in value.items()}
            return type(value)(**parts) if isinstance(value, ModelOutput) else parts
        if isinstance(value, (list, tuple)) and name == "encoder_outputs":
            return type(value)(self._take(name, part, rows) for part in value)
        if isinstance(value, (list, tuple)) and self._is_list_of_inputs(value):
            return type(value)(self._take(name, part, rows) for part in value)
        if isinstance(value, (list, tuple)) and len(value) == self.rows and not isinstance(value[0], (int, float)):
            return type(value)(value[row] for row in rows.tolist())
        return value
