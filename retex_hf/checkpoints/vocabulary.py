"""Alignment of vocabularies that differ by a few tokens, for tensors with a row per token.

An expert whose vocabulary is the base's with tokens added (or with its last rows cut off) has the same token in the
same row as the base, as far as both go. Those rows are merged and recovered like any other weight; the rows beyond the
base's are stored per task, unchanged. If tokens have moved to other rows, the tensors cannot be aligned by row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import matches
from ..errors import CheckpointError
from . import Checkpoint, Inventory, Source, TensorInfo
from .expert_set import RELATED_COSINE, ExpertSet
from .tokenizer_files import is_other_tokenizer, moved_tokens, tokenizer_folder

if TYPE_CHECKING:
    from ..backends import Backend

logger = logging.getLogger(__name__)

# Rows of unrelated tokens are nearly orthogonal, and fine-tuning moves a row by a fraction of its norm.
SAMPLED_ROWS = 512
RELATED_SHARE = 0.9


@dataclass(frozen=True)
class Vocabulary:
    """The number of tokens of the base and of each task.

    `names` are tensors with a row per token that are aligned by row, because experts differ in the number of rows;
    `whole` are those that cannot be aligned, because the same row is another token.
    """

    names: list[str]
    size: int
    sizes: dict[str, int]
    whole: list[str] = field(default_factory=list)


def align_vocabulary(
    model: nn.Module,
    library: Backend,
    inventory: Inventory,
    base: tuple[Path | None, Checkpoint],
    experts: Mapping[str, tuple[Path | None, Checkpoint]],
    heads: list[str],
) -> Vocabulary | None:
    """Find tensors with a row per token, and whether they can be aligned by row; return None if there are none.

    `base` and `experts` are pairs of tokenizer folder and checkpoint. `heads` are patterns of tensors that are stored
    in full for every task in any case.
    """
    checkpoints = {task: checkpoint for task, (_, checkpoint) in experts.items()}
    tables = library.vocabulary_names(model, inventory)
    tables = [name for name in tables if all(name in found for found in (base[1], *checkpoints.values()))]
    if len({base[1].shape(name)[0] for name in tables}) != 1:
        return None
    trailing = {name: base[1].shape(name)[1:] for name in tables}
    if any(found.shape(name)[1:] != trailing[name] for found in checkpoints.values() for name in tables):
        return None  # another architecture, which is reported where shapes are compared
    size = base[1].shape(tables[0])[0]
    sizes = {task: found.shape(tables[0])[0] for task, found in checkpoints.items()}
    names = [name for name in tables if not matches(name, heads)]
    rows = {task: {found.shape(name)[0] for name in names} for task, found in checkpoints.items()}
    reason: str | None
    for task, (folder, checkpoint) in experts.items() if names else ():
        if len(rows[task]) != 1:
            reason = f"its tensors have {sorted(rows[task])} rows"
        elif rows[task] == {size}:
            reason = _moved(base[0], folder)
        else:
            reason = _mismatch(*base, folder, checkpoint, names[0])
        if reason is not None:
            _warn(task, reason, names, checkpoints)
            return Vocabulary([], size, sizes, names)
    return Vocabulary(names if any(found != {size} for found in rows.values()) else [], size, sizes)


def _moved(base_folder: Path | None, folder: Path | None) -> str | None:
    """Return why an expert with as many tokens as the base cannot be aligned, by its tokenizer; None if it can."""
    try:
        moved = None if base_folder is None or folder is None else moved_tokens(base_folder, folder)
    except CheckpointError:  # equal numbers of rows need no tokenizer: a damaged one only causes a warning
        return None
    return _describe_moved(moved) if moved else None


def _describe_moved(moved: list[str]) -> str:
    return f"{len(moved)} of its tokens have other ids than in the base, such as {moved[0]!r}"


def _mismatch(
    base_folder: Path | None, base: Checkpoint, folder: Path | None, expert: Checkpoint, name: str
) -> str | None:
    """Return why the same row is another token, judged by the tokenizers or else the rows; None if it is the same."""
    moved = None if base_folder is None or folder is None else moved_tokens(base_folder, folder)
    if moved is not None:
        return _describe_moved(moved) if moved else None
    ours, theirs = base.read(name), expert.read(name)
    shared = min(len(ours), len(theirs))
    chosen = torch.linspace(0, shared - 1, min(SAMPLED_ROWS, shared)).long()
    ours, theirs = ours[chosen].double().flatten(1), theirs[chosen].double().flatten(1)
    alike = (nn.functional.cosine_similarity(ours, theirs) >= RELATED_COSINE) | (ours == theirs).all(1)
    share = alike.double().mean().item()
    return None if share >= RELATED_SHARE else f"only {share:.0%} of its rows resemble the base's rows of the same id"


def _warn(task: str, reason: str, names: list[str], experts: Mapping[str, Checkpoint]) -> None:
    size = sum(
        prod(found.shape(name)) * found.entries[name][0].dtype.itemsize for found in experts.values() for name in names
    )
    logger.warning(
        "The vocabulary of expert %r is not the base's with tokens added: %s. Its tensors (%s) are kept whole for "
        "every task, which takes %.1f MB.",
        task,
        reason,
        ", ".join(names),
        size / 1e6,
    )


def aligned_view(expert: Checkpoint, base: Checkpoint, vocabulary: Vocabulary) -> Checkpoint:
    """Return a checkpoint with as many rows as the base: further rows are dropped, missing ones are the base's."""
    entries, ties = dict(expert.entries), dict(expert.ties)
    for name in vocabulary.names:
        info = TensorInfo((vocabulary.size, *expert.shape(name)[1:]), expert.entries[name][0].dtype)

        def read(name: str = name) -> torch.Tensor:
            own = expert.read(name)
            missing = vocabulary.size - len(own)
            if missing <= 0:
                return own[: vocabulary.size]
            return torch.cat([own, base.read(name)[-missing:].to(own.dtype)])

        entries[name] = (info, read)
        ties.pop(name, None)  # compared when the expert itself is read
    return Checkpoint(expert.label, entries, ties, expert.device)


def describe_vocabularies(
    library: Backend, model: nn.Module, sources: Mapping[str, Source], reference: Path | None, experts: ExpertSet
) -> dict[str, dict[str, Any]]:
    """Describe the vocabularies of all tasks; return an empty dict if all share the base's vocabulary and tokenizer.

    `reference` is the folder of the tokenizer that is saved with the merged model.
    """
    described = {
        task: describe_vocabulary(library, model, sources[task], reference, size)
        for task, size in experts.sizes.items()
    }
    own = any(found["tokenizer"] for found in described.values())
    return described if own or experts.own or len(set(experts.sizes.values())) > 1 else {}


def describe_vocabulary(
    library: Backend, model: nn.Module, source: Source, base_folder: Path | None, size: int
) -> dict[str, Any]:
    """Describe a task's vocabulary: its size, special tokens whose ids differ from the merged model's, and whether a
    tokenizer of its own is kept."""
    folder = tokenizer_folder(source)
    differs = folder is not None and (base_folder is None or is_other_tokenizer(base_folder, folder))
    return {"size": size, "token_ids": library.own_token_ids(model, source, size), "tokenizer": differs}
