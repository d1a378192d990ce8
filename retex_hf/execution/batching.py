"""Take a batch of keyword arguments apart by rows, and put the outputs of the parts together again, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..errors import InputError

# Inputs whose leading axis (or length, of a list) is not the batch.
NOT_ROWS = frozenset(
    {"cache_position", "head_mask", "decoder_head_mask", "cross_attn_head_mask", "logits_to_keep",
     "logits_processor", "stopping_criteria"}
)  # fmt: skip
# Arguments that carry the state of one generation, or answer one call: they cannot serve several groups.
INSEPARABLE = (
    "past_key_values", "cache_params", "streamer", "prefix_allowed_tokens_fn", "assistant_model", "return_loss",
    "synced_gpus",
)  # fmt: skip
# The text side of a dual encoder: its rows are class prompts, not partners of the images.
TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "text"})
# Outputs that have the images along their second axis.
COLUMN_FIELDS = frozenset({"logits_per_text", "text_logits"})
CACHE_FIELDS = frozenset({"past_key_values", "cache_params", "mems", "past_buckets_states"})


def count_rows(kwargs: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Number of rows of a batch: the leading axis of the first of `names` that is given, else of the first tensor."""
    candidates = [kwargs[name] for name in names if isinstance(kwargs.get(name), (Tensor, list))]
    candidates += [value for value in kwargs.values() if isinstance(value, Tensor) and value.ndim > 0]
    if isinstance(kwargs.get("encoder_outputs"), (tuple, Mapping)):
        candidates.append(kwargs["encoder_outputs"][0])
    if not candidates:
        raise InputError(f"No input says how many rows the batch has; expected one of {names}.")
    return len(candidates[0])


def numbers_per_row(kwargs: Mapping[str, Any], rows: int) -> int:
    """Numbers per row of the largest input: the work of a call grows with it."""
    inputs = [value for value in kwargs.values() if isinstance(value, Tensor) and value.ndim and len(value) == rows]
    return max((value.numel() // rows for value in inputs), default=1)


@dataclass(frozen=True)
class Splitter:
    """Which arguments of one call follow the rows; `whole` names those that every group gets as they are."""

    rows: int
    whole: frozenset[str]

    def take(self, kwargs: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        """The arguments for a group of rows."""
        return {name: self._take(name, value, rows) for name, value in kwargs.items()}

    def check(self, kwargs: Mapping[str, Any], groups: int) -> None:
        """Refuse to split a batch whose arguments disagree on the number of rows, or serve one expert only.

        What one expert can run needs no splitting: then its own `forward` judges the arguments.
        """
        if groups == 1:
            return
        for name in INSEPARABLE:
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise InputError(
                    f"{name!r} cannot serve the {groups} experts this batch needs: call once per task with task=."
                )
        for name, value in kwargs.items():
            follows = isinstance(value, Tensor) and value.ndim > 0 and name not in self.whole
            if follows and value.shape[0] not in (self.rows, 1):
                raise InputError(f"{name!r} has {value.shape[0]} rows, but the batch has {self.rows}.")

    def _take(self, name: str, value: Any, rows: Tensor) -> Any:
        if name in self.whole or value is None:
            return value
        if isinstance(value, Tensor):
            follows = value.ndim > 0 and value.shape[0] == self.rows
            return value[rows.to(value.device)] if follows else value
        if isinstance(value, Mapping):
            parts = {key: self._take(name, part, rows) for key, part in value.items()}
            return type(value)(**parts) if isinstance(value, ModelOutput) else parts
        if isinstance(value, (list, tuple)) and name == "encoder_outputs":
            return type(value)(self._take(name, part, rows) for part in value)
        if isinstance(value, (list, tuple)) and len(value) == self.rows and not isinstance(value[0], (int, float)):
            return type(value)(value[row] for row in rows.tolist())
        return value


@dataclass
class Joiner:
    """Puts the outputs of groups back in row order.

    Every field that follows the rows (one or several entries per row) is scattered to its rows; shorter ones are padded
    on the right. A field that does not follow the rows is kept where all groups agree, and otherwise gets a leading row
    axis. Losses are averaged by `loss_weights`. Caches belong to one expert and are dropped.

    `texts_apart` says that the texts of this call are class prompts that every group had whole.
    """

    rows: int
    groups: list[Tensor]
    loss_weights: list[float]
    sum_losses: bool = False
    pad_token_id: int = 0
    num_beams: int = 1
    texts_apart: bool = False
    tuple_fields: tuple[str, ...] = field(default_factory=tuple)

    def join(self, outputs: list[Any], name: str = "") -> Any:
        """Combine one field (or the whole output) of all groups."""
        present = [output for output in outputs if output is not None]
        if not present or name in CACHE_FIELDS:
            return None
        first = present[0]
        if isinstance(first, Tensor):
            return self._join_tensors(self._complete(outputs, name), name)
        if isinstance(first, Mapping):
            fields = {key: self.join([output.get(key) for output in outputs], self._field(name, key)) for key in first}
            return type(first)(**fields) if isinstance(first, ModelOutput) else fields
        if self._is_list_of_rows(outputs):
            entries = {
                int(row): entry
                for g, output in zip(self.groups, outputs, strict=True)
                for row, entry in zip(g, output, strict=True)
            }
            return [entries[row] for row in range(self.rows)]
        if isinstance(first, (list, tuple)):
            longest = list(zip_longest(*(output or () for output in outputs)))
            names = self.tuple_fields if not name and self.tuple_fields else [name] * len(longest)
            return type(first)(self.join(list(parts), part) for parts, part in zip(longest, names, strict=False))
        if all(output == first for output in outputs):
            return first
        raise InputError(f"The outputs {name!r} of several experts cannot be combined: call once per task with task=.")

    def _is_list_of_rows(self, outputs: list[Any]) -> bool:
        """A list with one entry per row (Whisper's segments); lists of tensors have one per layer or step."""
        return all(
            isinstance(output, list) and len(output) == len(group) and not isinstance(output[0], Tensor)
            for output, group in zip(outputs, self.groups, strict=True)
        )

    def _field(self, parent: str, key: str) -> str:
        # Everything below `text_model_output` belongs to the texts.
        return parent if parent.startswith("text") else key

    def _complete(self, tensors: list[Tensor | None], name: str) -> list[Tensor]:
        """Stand-ins for groups that had finished generating: they emit padding with certainty."""
        known, rows = next((t, len(g)) for t, g in zip(tensors, self.groups, strict=True) if t is not None)
        completed = []
        for tensor, group in zip(tensors, self.groups, strict=True):
            if tensor is None:
                shape = (len(known) * len(group) // rows, *known.shape[1:])
                tensor = known.new_full(shape, self._fill(name))
                if name in ("scores", "logits"):
                    tensor[..., self.pad_token_id] = 0
            completed.append(tensor)
        return completed

    def _fill(self, name: str) -> float:
        if name in ("scores", "logits"):
            return float("-inf")
        return {"sequences": self.pad_token_id, "": self.pad_token_id, "beam_indices": -1}.get(name, 0)

    def _join_tensors(self, tensors: list[Tensor], name: str) -> Tensor:
        if name.endswith("loss") and tensors[0].ndim == 0:
            return self._join_losses(tensors)
        if self.texts_apart and name in COLUMN_FIELDS:
            return self._scatter([tensor.transpose(0, 1) for tensor in tensors], 1, name).transpose(0, 1)
        if name == "beam_indices":
            tensors = [self._rebase(tensor, group) for tensor, group in zip(tensors, self.groups, strict=True)]
        per_row = self._entries_per_row(tensors)
        if per_row and not (self.texts_apart and name.startswith("text")):
            return self._scatter(tensors, per_row, name)
        if all(tensor.shape == tensors[0].shape and torch.equal(tensor, tensors[0]) for tensor in tensors):
            return tensors[0]
        repeated = [tensor.expand(len(g), *tensor.shape) for tensor, g in zip(tensors, self.groups, strict=True)]
        return self._scatter(repeated, 1, name)

    def _join_losses(self, losses: list[Tensor]) -> Tensor:
        if self.sum_losses:
            return torch.stack(losses).sum()
        # The mean over no labels is NaN; such a group has nothing to say, unless all are like that.
        counted = [(weight, loss) for weight, loss in zip(self.loss_weights, losses, strict=True) if weight]
        if not counted:
            return losses[0]
        return sum(weight * loss for weight, loss in counted) / sum(weight for weight, _ in counted)

    def _entries_per_row(self, tensors: list[Tensor]) -> int | None:
        """How many entries of the leading axis belong to a row, if that is the same whole number in all groups."""
        counts = {
            len(tensor) // len(group) if tensor.ndim and len(tensor) % len(group) == 0 else None
            for tensor, group in zip(tensors, self.groups, strict=True)
        }
        return counts.pop() if len(counts) == 1 else None

    def _scatter(self, tensors: list[Tensor], per_row: int, name: str) -> Tensor:
        trailing = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        joined = tensors[0].new_full((self.rows * per_row, *trailing), self._fill(name))
        by_row = joined.view(self.rows, per_row, *trailing)
        for tensor, group in zip(tensors, self.groups, strict=True):
            index = (group.to(tensor.device), slice(None), *(slice(size) for size in tensor.shape[1:]))
            by_row[index] = tensor.reshape(len(group), per_row, *tensor.shape[1:]).to(joined.dtype)
        return joined

    def _rebase(self, indices: Tensor, group: Tensor) -> Tensor:
        """Beam indices count the beams of a group; make them count the beams of the batch. -1 marks the end."""
        rows = group.to(indices.device)[indices.clamp(min=0) // self.num_beams]
        return torch.where(indices < 0, indices, rows * self.num_beams + indices % self.num_beams)
