"""Callbacks of `generate` that follow their rows, however execution splits or orders a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..routing import Routing

# Arguments of `generate` that are called with the rows of one group, numbered within that group.
CALLED_WITH_ROWS = ("logits_processor", "stopping_criteria")


class RowCallback(ABC):
    """A logits processor or stopping criterion that tells the rows of a batch of several tasks apart.

    transformers passes it the rows of one group, or all rows sorted by task, and numbers them anew. Pass an object of
    this class in `logits_processor` or `stopping_criteria` of a routed `generate`: what runs is what `of_rows` returns.

    Example:
        >>> import torch
        >>> from retex_hf.execution import RowCallback
        >>> class Lengths(RowCallback):
        ...     "Stop every row after a number of tokens of its own."
        ...     def __init__(self, lengths):
        ...         self.lengths = torch.tensor(lengths)
        ...     def of_rows(self, rows):
        ...         steps, own = 0, self.lengths if rows is None else self.lengths[rows]
        ...         def stop(input_ids, scores, **options):
        ...             nonlocal steps
        ...             steps += 1
        ...             return own <= steps
        ...         return stop
        >>> Lengths([1, 5, 2]).of_rows(torch.tensor([2, 0]))(None, None)
        tensor([False,  True])
    """

    @abstractmethod
    def of_rows(self, rows: Tensor | None) -> Callable[..., Tensor]:
        """Return the processor or criterion of some rows of the batch, in this order; None: of all rows.

        It is called whenever rows are about to run. Rows begin anew if one pass turns out to be impossible and the
        batch runs group by group instead.
        """

    def routed(self, routing: Routing) -> None:  # noqa: B027  # most callbacks do not need to know
        """Learn the tasks of the rows, before anything is generated."""


def announce(kwargs: Mapping[str, Any], routing: Routing) -> None:
    """Tell the callbacks of a call how its rows were routed."""
    for name in CALLED_WITH_ROWS:
        for entry in kwargs.get(name) or ():
            if isinstance(entry, RowCallback):
                entry.routed(routing)


def for_rows(kwargs: dict[str, Any], rows: Tensor | None) -> dict[str, Any]:
    """Return the arguments of a call on some rows, with callbacks of these rows."""
    replaced = {
        name: [entry.of_rows(rows) if isinstance(entry, RowCallback) else entry for entry in kwargs[name]]
        for name in CALLED_WITH_ROWS
        if any(isinstance(entry, RowCallback) for entry in kwargs.get(name) or ())
    }
    return {**kwargs, **replaced}
