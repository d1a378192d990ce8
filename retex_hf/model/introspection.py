"""Exposure of the wrapped model's signatures and attributes to introspection."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, update_wrapper
from inspect import Parameter, Signature
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RetexError

logger = logging.getLogger(__name__)

# Methods of wrapped models that neither run nor change the model, or that set up what experts inherit.
READERS = frozenset(
    {"add_model_tags", "can_generate", "compute_transition_scores", "create_extended_attention_mask_for_decoder",
     "disable_input_require_grads",
     "enable_input_require_grads", "estimate_tokens", "floating_point_ops", "get_experts_implementation",
     "get_extended_attention_mask", "get_input_embeddings", "get_memory_footprint", "get_output_embeddings",
     "get_parameter_or_buffer", "get_position_embeddings", "gradient_checkpointing_disable",
     "gradient_checkpointing_enable", "invert_attention_mask", "is_backend_compatible", "named_non_persistent_buffers",
     "no_weight_decay", "num_parameters", "prepare_decoder_input_ids_from_labels", "retrieve_modules_from_names",
     "warn_if_padding_and_no_attention_mask"}
)  # fmt: skip

NOT_COMPILED = (
    "A RetexModel runs each row on the expert of its task, which torch.compile cannot follow, and runs uncompiled: "
    "compile one expert, torch.compile(model.merge_and_unload(task))."
)
NOT_EXPORTED = (
    "A RetexModel chooses experts by what it is given, which torch.export cannot record: export one expert, "
    "torch.export.export(model.merge_and_unload(task), ...)."
)


class shows_wrapped:
    """A method whose signature on an instance is that of the wrapped model's method of the same name, plus `task`.

    transformers inspects it: `Trainer` drops dataset columns that are not named there, and pipelines look for
    `use_cache`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(cast(Callable[..., Any], self), function)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return self.function if instance is None else _Bound(self.function, instance)


class _Bound:
    """The method bound to one instance. Its signature is computed on demand, not at every call."""

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self.__func__, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            raise RetexError(NOT_EXPORTED)
        if torch.compiler.is_compiling():
            return _uncompiled(self.__func__, self.__self__, *args, **kwargs)
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __code__(self) -> CodeType:  # inspected by torch.export before it calls
        return self.__func__.__code__

    @property
    def __signature__(self) -> Signature:
        signature = inspect.signature(getattr(self.__self__.get_base_model(), self.__func__.__name__))
        own = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in ("task", "adapter_names")]
        parameters = list(signature.parameters.values())
        end = len(parameters) - any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        return signature.replace(parameters=[*parameters[:end], *own, *parameters[end:]])


def may_pass(name: str, value: Any) -> bool:
    """Return whether the wrapper passes on an attribute, which must neither run nor change the wrapped model."""
    runs = callable(value) and not isinstance(value, type)
    return not runs or name in READERS or name.startswith("_")


def refuse(name: str, wrapped: str, *args: Any, **kwargs: Any) -> None:
    """Refuse a method of the wrapped model that would run or change the merged model alone."""
    raise RetexError(
        f"{name!r} of {wrapped} does not take tasks: call it on an expert, model.merge_and_unload(task), or on the "
        "merged model, model.get_base_model()."
    )


def without_shared_memory(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy tied tensors of a state dict under all but their first name.

    `Trainer` saves checkpoints as safetensors, which refuses shared memory.
    """
    seen: set[int] = set()
    for name, value in tensors.items():
        if type(value) is Tensor and not value.is_meta and value.numel():
            tensors[name] = value.clone() if value.data_ptr() in seen else value
            seen.add(value.data_ptr())
    return tensors


@torch.compiler.disable(reason=NOT_COMPILED)
def _uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _warn_once()
    return function(*args, **kwargs)


@cache
def _warn_once() -> None:
    logger.warning(NOT_COMPILED)
