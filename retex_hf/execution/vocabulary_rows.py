"""Tensors with a row per token, for tasks whose vocabulary differs from the merged model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import Backend
from ..checkpoints import take_inventory

Rows = Mapping[str, Mapping[str, Tensor]]
"""Per task and tensor, the rows of tokens that the merged model does not have."""


def tokens_of(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the token ids of a call, or None if it has none."""
    found = kwargs.get("input_ids", kwargs.get("inputs"))
    is_tokens = isinstance(found, Tensor) and found.ndim > 0 and found.numel() > 0 and not found.is_floating_point()
    return found if is_tokens else None


def rows_beyond(model: nn.Module, library: Backend, heads: Rows, rows: Rows) -> dict[str, dict[str, Tensor]]:
    """Return, per task, the rows that the merged model lacks: stored as such, or part of tables stored whole."""
    tables, tensors = library.vocabulary_names(model, take_inventory(model)), model.state_dict()
    found = {
        task: {
            **rows.get(task, {}),
            **{name: heads[task][name][len(tensors[name]) :] for name in tables if name in heads[task]},
        }
        for task in heads
    }
    return {task: own for task, own in found.items() if own}


def with_own_rows(tensors: Mapping[str, Tensor], rows: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return tensors of `size` rows: the shared ones, as many as the task has, followed by its own."""
    return {
        name: torch.cat([tensors[name][:size], own.to(tensors[name].device, tensors[name].dtype)])
        for name, own in rows.items()
        if len(own) or size < len(tensors[name])
    }


def with_all_rows(tensors: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Return tensors with a row for every token of any task, for inputs whose task is unknown.

    Where several tasks use the same token id, the row is the mean of theirs.
    """
    found = {}
    for name in next(iter(rows.values()), {}):
        shared, own = tensors[name], [held[name] for held in rows.values()]
        longest = max(map(len, own))
        if longest:
            total = torch.zeros((longest, *shared.shape[1:]), dtype=torch.float32, device=shared.device)
            count = torch.zeros(longest, device=shared.device)
            for held in own:
                total[: len(held)] += held.to(shared.device, torch.float32)
                count[: len(held)] += 1
            mean = total / count.view(-1, *[1] * (total.ndim - 1))
            found[name] = torch.cat([shared, mean.to(shared.dtype)])
    return found
