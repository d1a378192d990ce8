"""All tasks of a model as adapters of one `PeftModel`, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from ....artifact.state import RetexParts
from ....checkpoints.adapters import PREFIX
from ....errors import ConfigError, RetexError, TaskError, shorten
from .export import Adapter, make_adapter, warn_of_losses


def to_peft(parts: RetexParts, tasks: Iterable[str] | None = None, *, scope: str = "all") -> PeftModel:
    """Return the merged model with an adapter per task. See `RetexModel.to_peft`."""
    names = list(parts.config.tasks if tasks is None else tasks)
    if not names:
        raise TaskError("to_peft needs at least one task.")
    for name in names:
        if "." in name:
            raise ConfigError(f"peft does not allow a dot in the name of an adapter, which task {name!r} has.")
    if resized := [name for name in names if parts.rows.get(name)]:
        raise ConfigError(
            f"Task {resized[0]!r} has tokens of its own, and a PeftModel has one vocabulary: load the adapter that "
            "export_lora writes, alone."
        )
    model = deepcopy(parts.model).requires_grad_(False)
    peft_model: PeftModel | None = None
    for name in names:
        adapter = make_adapter(parts, name, scope, alike=True)
        if scope == "all":
            warn_of_losses(adapter.summary)
        config = replace(adapter.config)  # peft notes the model's name in it
        if peft_model is None:
            peft_model = get_peft_model(model, config, adapter_name=name)
        else:
            peft_model.add_adapter(name, config)
        assert peft_model is not None
        _load(peft_model, name, adapter)
    assert peft_model is not None
    peft_model.set_adapter(names[0])
    return peft_model.requires_grad_(False).eval()


def _load(peft_model: PeftModel, name: str, adapter: Adapter) -> None:
    """Set the weights of one adapter; refuse to leave any of them as initialised."""
    _resize_heads(peft_model, name, adapter)
    result: Any = set_peft_model_state_dict(
        peft_model, {PREFIX + key: tensor for key, tensor in adapter.tensors.items()}, adapter_name=name
    )
    missing = [key for key in result.missing_keys if f".{name}" in key and ("lora_" in key or "modules_to_save" in key)]
    if wrong := [*missing, *result.unexpected_keys]:
        raise RetexError(f"peft did not take the adapter of task {name!r}: {shorten(wrong)} do not match.")


def _resize_heads(peft_model: PeftModel, name: str, adapter: Adapter) -> None:
    """Give a task's copies of saved modules the width of its own head, which may differ from the merged model's."""
    for path, module in peft_model.get_base_model().named_modules():
        if not isinstance(module, ModulesToSaveWrapper) or name not in module.modules_to_save:
            continue
        own = module.modules_to_save[name]
        for inner, parameter in list(own.named_parameters()):
            tensor = adapter.tensors.get(f"{path}.{inner}")
            if tensor is not None and tensor.shape != parameter.shape:
                owner, _, attribute = inner.rpartition(".")
                setattr(own.get_submodule(owner), attribute, nn.Parameter(parameter.new_empty(tensor.shape), False))
