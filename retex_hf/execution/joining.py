"""Join the outputs of the parts of a batch, field by field."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..rows import Along, AlongItems, Entries, Place, Proof, Reading, Shared, entries_of
from ..utils.records import is_record, rebuilt, record_fields
from .row_callbacks import CALLED_WITH_ROWS, RowCallback

logger = logging.getLogger(__name__)

# Arguments that hold the state of one generation or of one call: several groups cannot share them.
INSEPARABLE = (
    "past_key_values", "cache_params", "streamer", "prefix_allowed_tokens_fn", "assistant_model", "return_loss",
    "synced_gpus",
)  # fmt: skip
# Settings of `generate` for assisted decoding, which works on one row only, as `assistant_model` does.
ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
# Classes of transformers among them that hold state per row.
OF_ROWS = frozenset(
    {"PrefixConstrainedLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor",
     "EncoderNoRepeatNGramLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"}
)  # fmt: skip
# Secondary outputs that models return without being asked: they may be dropped.
BY_PRODUCTS = frozenset({"image_hidden_states", "video_hidden_states", "audio_hidden_states", "loss"})
CACHE_FIELDS = frozenset({"past_key_values", "cache_params", "mems", "past_buckets_states", "rope_deltas"})


def check_separable(kwargs: Mapping[str, Any], groups: int, option: Callable[[str], Any] | None = None) -> None:
    """Refuse arguments that serve one expert only.

    Args:
        kwargs: The arguments of the call.
        groups: Number of experts that the call needs.
        option: Looks up a setting that the call leaves to a configuration; given for `generate`.
    """
    given = {name: kwargs.get(name) for name in INSEPARABLE}
    if option is not None:  # an explicit None in the call overrides the configuration
        given |= {name: kwargs[name] if name in kwargs else option(name) for name in ASSISTED}
    for name, value in given.items():
        if value is not None and value is not False:
            raise InputError(
                f"{name!r} cannot serve the {groups} experts this batch needs: call once per task with task=."
            )
    for name in CALLED_WITH_ROWS:
        for entry in kwargs.get(name) or ():
            kind = type(entry)
            if isinstance(entry, RowCallback):
                continue
            if not kind.__module__.startswith("transformers.") or kind.__name__ in OF_ROWS:
                raise InputError(
                    f"{name!r} holds a {kind.__name__}, which may tell rows apart by their places in the batch, and "
                    f"cannot serve the {groups} experts this batch needs: call once per task with task=."
                )


class CannotJoin(InputError):
    """Raised when a field of the outputs of several experts cannot be joined."""


@dataclass
class Joiner:
    """Put the outputs of groups back in row order.

    Every field with a row axis (one or several entries per row) is scattered to its rows; shorter ones are padded on
    the right. A field without a row axis is kept where all groups agree, and otherwise gets a leading row axis. Losses
    are averaged by `loss_weights`. Caches belong to one expert and are dropped.

    `proof` and the `reading` of the inputs give the row axis of a field. Without a proof (for `generate`, whose outputs
    are known) it is the first axis. `unnamed_heads`: experts have heads of their own, and no name tells which output
    comes from the head.
    """

    rows: int
    groups: list[Tensor]
    loss_weights: list[float]
    sum_losses: bool = False
    pad_token_id: int = 0
    num_beams: int = 1
    proof: Proof | None = None
    reading: Reading = field(default_factory=dict)
    unnamed_heads: bool = False

    def join(self, outputs: list[Any], name: str = "", path: str = "") -> Any:
        """Combine one field (or the whole output) of all groups; `path` leads to it."""
        present = [output for output in outputs if output is not None]
        if not present or name in CACHE_FIELDS:
            return None
        first = present[0]
        if self.proof is not None and path in self.proof.lists:
            return self._join_lists([output or () for output in outputs], self.proof.lists[path], type(first), name)
        if isinstance(first, Tensor) and isinstance(self._known(path), AlongItems):
            nothing = first.new_zeros((0, *first.shape[1:]))  # stands for groups without images
            return self._join_tensors([nothing if output is None else output for output in outputs], name, path)
        if isinstance(first, Tensor):
            return self._join_tensors(self._complete(outputs, name), name, path)
        if isinstance(first, Mapping):
            keys = dict.fromkeys(chain.from_iterable(present))  # a group without images has no field for them
            values = {key: [output.get(key) if output else None for output in outputs] for key in keys}
            fields = {key: self._join_field(given, key, _below(path, key)) for key, given in values.items()}
            return rebuilt(first, fields)
        if is_record(first):
            records = [{} if output is None else record_fields(output) for output in outputs]
            fields = {
                key: self.join([r.get(key) for r in records], key, _below(path, key)) for key in record_fields(first)
            }
            return rebuilt(first, fields)
        if self._is_list_of_rows(outputs):
            entries = {
                int(row): entry
                for g, output in zip(self.groups, outputs, strict=True)
                for row, entry in zip(g, output, strict=True)
            }
            return [entries[row] for row in range(self.rows)]
        if isinstance(first, (list, tuple)):
            longest = enumerate(zip_longest(*(output or () for output in outputs)))
            return type(first)(self.join(list(parts), name, _below(path, index)) for index, parts in longest)
        if self.proof is not None and path in self.proof.refused:
            raise self._unproven(path)
        if isinstance(first, np.ndarray):
            # The proof covers tensors only, and arrays may be equal by chance.
            what = f"The output {path!r}" if path else "The output"
            raise CannotJoin(
                f"{what} is a numpy array, and those of several experts cannot be put together: return a tensor, or "
                "call once per task with task=."
            )
        if all(_is_equal(output, first) for output in outputs):
            return first
        raise CannotJoin(f"The outputs {name!r} of several experts cannot be combined: call once per task with task=.")

    def _join_field(self, outputs: list[Any], name: str, path: str) -> Any:
        """Join a field; drop a secondary output that cannot be joined, with a warning."""
        try:
            return self.join(outputs, name, path)
        except CannotJoin as error:
            if name not in BY_PRODUCTS:
                raise
            logger.warning("%s It is left out.", error)
            return None

    def _join_lists(self, lists: list[Any], place: Entries, kind: type, name: str) -> Any:
        """Put lists with one entry per row, or per image of a row, back into order."""
        owner = place.owner(self.reading, self.rows)
        taken = [entries_of(owner, group).tolist() for group in self.groups]
        if [len(entries) for entries in lists] != [len(indices) for indices in taken]:
            raise CannotJoin(
                f"The output {name!r} does not follow the rows as it did in the probe: call once per task with task=."
            )
        entries = dict(zip(chain.from_iterable(taken), chain.from_iterable(lists), strict=True))
        return kind(entries[index] for index in range(len(owner)))

    def _is_list_of_rows(self, outputs: list[Any]) -> bool:
        """Return whether outputs are lists with one entry per row (Whisper's segments).

        Lists of tensors or arrays have one entry per layer or step instead.
        """
        return all(
            isinstance(output, list) and len(output) == len(group) and not isinstance(output[0], (Tensor, np.ndarray))
            for output, group in zip(outputs, self.groups, strict=True)
        )

    def _complete(self, tensors: list[Tensor | None], name: str) -> list[Tensor]:
        """Replace missing tensors of groups that had finished generating: give padding a probability of 1."""
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

    def _join_tensors(self, tensors: list[Tensor], name: str, path: str) -> Tensor:
        if name.endswith("loss") and tensors[0].ndim == 0:
            return self._join_losses(tensors)
        if name == "beam_indices":
            tensors = [self._rebase(tensor, group) for tensor, group in zip(tensors, self.groups, strict=True)]
        place = self._place(tensors, path)
        if isinstance(place, Shared) and tensors[0].ndim > place.ndim:  # one pass adds a row axis to shared values
            place = Along(0, 1)
        if isinstance(place, AlongItems):
            return self._scatter_items(tensors, place, name)
        if isinstance(place, Along):
            moved = [tensor.movedim(place.axis, 0) for tensor in tensors]
            return self._scatter(moved, place.per_row, name).movedim(0, place.axis)
        if all(tensor.shape == tensors[0].shape and torch.equal(tensor, tensors[0]) for tensor in tensors):
            return tensors[0]
        repeated = [tensor.expand(len(g), *tensor.shape) for tensor, g in zip(tensors, self.groups, strict=True)]
        return self._scatter(repeated, 1, name)

    def _join_losses(self, losses: list[Tensor]) -> Tensor:
        if self.sum_losses:
            return torch.stack(losses).sum()
        # The mean over no labels is NaN: leave such groups out, unless all are like that.
        counted = [(weight, loss) for weight, loss in zip(self.loss_weights, losses, strict=True) if weight]
        if not counted:
            return losses[0]
        total = sum((weight * loss for weight, loss in counted), losses[0].new_zeros(()))
        return total / sum(weight for weight, _ in counted)

    def _known(self, path: str) -> Place | None:
        return None if self.proof is None else self.proof.places.get(path)

    def _place(self, tensors: list[Tensor], path: str) -> Place:
        """Return where the rows are in a field; refuse one whose size contradicts the proof."""
        if self.proof is None:
            per_row = self._entries_per_row(tensors)
            return Along(0, per_row) if per_row else Shared(tensors[0].ndim)
        if path not in self.proof.places:
            raise self._unproven(path)
        place = self.proof.places[path]
        if isinstance(place, Along):
            for tensor, group in zip(tensors, self.groups, strict=True):
                if tensor.shape[place.axis] != place.per_row * len(group):
                    raise CannotJoin(
                        f"The output {path!r} has {tensor.shape[place.axis]} entries for {len(group)} rows, but "
                        f"had {place.per_row} per row in the probe: call once per task with task=."
                    )
        return place

    def _unproven(self, path: str) -> CannotJoin:
        assert self.proof is not None
        reason = self.proof.refused.get(path, "was missing in the probe of this call")
        return CannotJoin(
            f"The output {path!r} {reason}, so those of several experts cannot be put together: "
            "call once per task with task=."
        )

    def _scatter_items(self, tensors: list[Tensor], place: AlongItems, name: str) -> Tensor:
        """Put what belongs to the entries of an input back into the order of these entries."""
        owner = place.owner(self.reading)
        taken = torch.cat([entries_of(owner, group) for group in self.groups])
        if [len(tensor) for tensor in tensors] != [len(entries_of(owner, group)) for group in self.groups]:
            raise CannotJoin(
                f"The output {name!r} does not follow the entries of {place.name!r} as it did in the probe: call "
                "once per task with task=."
            )
        trailing = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        padded = [_padded(tensor, trailing, self._fill(name)) for tensor in tensors]
        return torch.cat(padded)[torch.argsort(taken).to(padded[0].device)]

    def _entries_per_row(self, tensors: list[Tensor]) -> int | None:
        """Return the number of entries of the leading axis per row, or None unless it is the same in all groups."""
        counts = {
            len(tensor) // len(group) if tensor.ndim and len(tensor) % len(group) == 0 else None
            for tensor, group in zip(tensors, self.groups, strict=True)
        }
        return counts.pop() if len(counts) == 1 else None

    def _scatter(self, tensors: list[Tensor], per_row: int, name: str) -> Tensor:
        trailing = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        # A narrower head has no scores for the further classes of a wider one: -inf, not 0.
        narrow = self.unnamed_heads and tensors[0].is_floating_point()
        fill = float("-inf") if narrow else self._fill(name)
        joined = tensors[0].new_full((self.rows * per_row, *trailing), fill)
        by_row = joined.view(self.rows, per_row, *trailing)
        for tensor, group in zip(tensors, self.groups, strict=True):
            inside = (slice(size) for size in tensor.shape[1:])
            index: tuple[Tensor | slice, ...] = (group.to(tensor.device), slice(None), *inside)
            by_row[index] = tensor.reshape(len(group), per_row, *tensor.shape[1:]).to(joined.dtype)
        return joined

    def _rebase(self, indices: Tensor, group: Tensor) -> Tensor:
        """Convert beam indices from beams of a group to beams of the batch. -1 marks the end."""
        rows = group.to(indices.device)[indices.clamp(min=0) // self.num_beams]
        return torch.where(indices < 0, indices, rows * self.num_beams + indices % self.num_beams)


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two values of any class are equal; False if comparing them gives no truth value."""
    try:
        return bool(value == other)
    except Exception:  # comparing two tables, for example, gives a table
        return False


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _padded(tensor: Tensor, trailing: list[int], fill: float) -> Tensor:
    if list(tensor.shape[1:]) == trailing:
        return tensor
    wide = tensor.new_full((len(tensor), *trailing), fill)
    wide[(slice(None), *(slice(size) for size in tensor.shape[1:]))] = tensor
    return wide
