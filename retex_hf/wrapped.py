"""What a wrapper shows of the model it wraps, to those that look before they call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, update_wrapper
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NOT_COMPILED = (
    "A RetexModel runs each row on the expert of its task, which torch.compile cannot follow, and runs uncompiled: "
    "compile one expert, torch.compile(model.merge_and_unload(task))."
)


class shows_wrapped:
    """A method that, asked of an instance, has the signature of the wrapped model's method of that name, and `task`.

    transformers asks it: `Trainer` drops the columns of a dataset that are not named there, pipelines look whether
    there is a `use_cache`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return self.function if instance is None else _Bound(self.function, instance)


class _Bound:
    """The method of one instance. The signature is made when somebody asks for it, not at every call."""

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self.__func__, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _uncompiled(self.__func__, self.__self__, *args, **kwargs)
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        signature = inspect.signature(getattr(self.__self__.get_base_model(), self.__func__.__name__))
        task = Parameter("task", Parameter.KEYWORD_ONLY, default=None)
        parameters = list(signature.parameters.values())
        end = len(parameters) - any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        return signature.replace(parameters=[*parameters[:end], task, *parameters[end:]])


def without_shared_memory(tensors: dict[str, Any]) -> dict[str, Any]:
    """A state dict in which the further names of tied tensors stand for copies: safetensors, in which `Trainer` keeps
    its checkpoints, refuses shared memory."""
    seen: set[int] = set()
    for name, value in tensors.items():
        if type(value) is Tensor and not value.is_meta and value.numel():
            tensors[name] = value.clone() if value.data_ptr() in seen else value
            seen.add(value.data_ptr())
    return tensors


@torch.compiler.disable(reason=NOT_COMPILED)
def _uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _say_once()
    return function(*args, **kwargs)


@cache
def _say_once() -> None:
    logger.warning(NOT_COMPILED)
