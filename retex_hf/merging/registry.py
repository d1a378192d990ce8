"""Merge methods by name. A method turns the tensors of all experts into one tensor.

A simple method is a function of one parameter's tensors::

    @register_merge("midpoint")
    def midpoint(base, experts, *, pull=0.5):
        return base + pull * (torch.stack(experts).mean(0) - base)

A method that must see all tensors first is registered with `prepare=True`: it gets the tensors as a `TaskTensors`, may
read them as often as it likes, and returns such a function of `(name, base, experts)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..errors import ConfigError


class TaskTensors(Protocol):
    """What a method with `prepare=True` may read: every tensor that will be merged, one at a time."""

    tasks: list[str]
    names: list[str]

    def read_base(self, name: str) -> Tensor: ...

    def read_expert(self, task: str, name: str) -> Tensor: ...


Merger = Callable[[str, Tensor, list[Tensor]], Tensor]

_METHODS: dict[str, tuple[Callable, bool]] = {}


def register_merge(name: str, *, prepare: bool = False) -> Callable[[Callable], Callable]:
    """Decorator that adds a merge method under a name for `RetexConfig(merge=name)`."""

    def decorate(function: Callable) -> Callable:
        _METHODS[name] = (function, prepare)
        return function

    return decorate


def merge_methods() -> list[str]:
    """Names of the registered methods."""
    return sorted(_METHODS)


def get_merger(name: str, options: dict[str, Any], tensors: TaskTensors) -> Merger:
    """Look up a method, check its options, run its preparation; returns `merger(name, base, experts) -> tensor`."""
    if name not in _METHODS:
        raise ConfigError(f"RetexConfig.merge must be one of {merge_methods()} or a checkpoint, not {name!r}.")
    function, prepare = _METHODS[name]
    allowed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(f"RetexConfig.merge: method {name!r} has no option {unknown[0]!r}; it takes {allowed}.")
    if prepare:
        merge = function(tensors, **options)
    else:

        def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
            return function(base, experts, **options)

    def checked(parameter: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        merged = merge(parameter, base, experts)
        if not isinstance(merged, Tensor) or merged.shape != base.shape:
            found = f"one of {tuple(merged.shape)}" if isinstance(merged, Tensor) else f"a {type(merged).__name__}"
            raise ConfigError(
                f"Merge method {name!r} must return a tensor of shape {tuple(base.shape)} for {parameter!r}, "
                f"not {found}."
            )
        return merged

    return checked
