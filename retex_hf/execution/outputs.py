"""Outputs of models: their logits, and the routing of a call that travels on them."""

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


ROUTED = {tuple: RoutedTuple, dict: RoutedDict, list: RoutedList}


def attach_routing(output: Any, routing: Routing | None) -> Any:
    """The output with an attribute `routing`; those that take none (plain tuples, dicts and lists, named tuples) become
    ones that do. Numbers, texts and None stay as they are."""
    if type(output) in ROUTED:
        output = ROUTED[type(output)](output)
    elif is_named_tuple(output):
        output = _carrying(type(output))._make(output)
    if not hasattr(output, "__dict__"):
        return output
    object.__setattr__(output, "routing", routing)  # also on a frozen dataclass
    return output


@cache
def _carrying(kind: type) -> type:
    """A named tuple's class with room for attributes."""
    return type(kind.__name__, (kind,), {"routing": None, "__module__": kind.__module__})


def logits_of(output: Any) -> Tensor | None:
    """The logits of a classifier: the field of that name, or the whole output where that is one vector per row."""
    if isinstance(output, Tensor):
        return output if output.ndim == 2 else None
    return output.get("logits") if isinstance(output, ModelOutput) else None
