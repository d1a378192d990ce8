"""Outputs that carry the routing of their call."""

from __future__ import annotations

from typing import Any

from ..routing import Routing


class RoutedTuple(tuple):
    """A tuple output that carries its `routing`."""

    routing: Routing | None = None


class RoutedDict(dict):
    """A dict output that carries its `routing`."""

    routing: Routing | None = None


def attach_routing(output: Any, routing: Routing | None) -> Any:
    """The output with an attribute `routing`; plain tuples and dicts, which take none, become ones that do."""
    if type(output) is tuple:
        output = RoutedTuple(output)
    elif type(output) is dict:
        output = RoutedDict(output)
    output.routing = routing
    return output
