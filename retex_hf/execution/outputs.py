"""Access to the logits of model outputs, and attachment of the routing to them."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from ..routing import Routing
from ..utils.records import is_named_tuple


class RoutedTuple(tuple):
    """A tuple output that carries its `routing`."""

    routing: Routing | None = None


class RoutedDict(dict):
    """A dict output that carries its `routing`."""

    routing: Routing | None = None


class RoutedList(list):
    """A list output that carries its `routing`."""

    routing: Routing | None = None


ROUTED: dict[type, type] = {tuple: RoutedTuple, dict: RoutedDict, list: RoutedList}


def attach_routing(output: Any, routing: Routing | None) -> Any:
    """Return the output with an attribute `routing`.

    Plain tuples, dicts, lists and named tuples become subclasses that accept attributes. Numbers, strings and None are
    returned unchanged.
    """
    kind: type = type(output)
    if kind in ROUTED:
        output = ROUTED[kind](output)
    elif is_named_tuple(output):
        output = _carrying(kind)._make(output)
    if not hasattr(output, "__dict__"):
        return output
    object.__setattr__(output, "routing", routing)  # works on frozen dataclasses too
    return output


@cache
def _carrying(kind: type) -> type[Any]:
    """Return a subclass of a named tuple that accepts attributes."""
    return type(kind.__name__, (kind,), {"routing": None, "__module__": kind.__module__})


def logits_of(output: Any) -> Tensor | None:
    """Return the logits of a classifier: the field of that name, or the whole output if it is one vector per row."""
    if isinstance(output, Tensor):
        return output if output.ndim == 2 else None
    return output.get("logits") if isinstance(output, ModelOutput) else None
