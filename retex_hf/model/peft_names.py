"""PEFT's and transformers' names for adapter operations: supported if the meaning is the same, else refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, InputError

if TYPE_CHECKING:
    from peft.peft_model import TunerLayerStatus, TunerModelStatus

    from .snapshot import Snapshot

PEFT_TYPE = "RETEX"
# Names of PEFT and of transformers' adapter methods that a `RetexModel` refuses, and why.
REFUSED = {
    "add_adapter": "A RetexModel gets a task from its expert, not from an untrained adapter: "
    "model.add_task(name, expert).",
    "add_weighted_adapter": "A mixture of tasks needs no adapter of its own: model.set_adapter([...]), or weights with "
    "task=.",
    "disable_adapters": "Recovery is switched off within a context: with model.disable_adapter().",
    "enable_adapters": "Recovery is on outside of model.disable_adapter().",
    "disable_adapter_layers": "Recovery is switched off within a context: with model.disable_adapter().",
    "enable_adapter_layers": "Recovery is on outside of model.disable_adapter().",
    "enable_peft_hotswap": "Experts are recovered on demand: there is nothing to swap.",
    "get_adapter_state_dict": "A task has no adapter: model.recover(task) gives the expert's weights, "
    "model.export_lora(task, folder) an adapter.",
    "inject_adapter": "A RetexModel gets a task from its expert: model.add_task(name, expert).",
    "merge_adapter": "The merged model stays as it is: model.merge_and_unload(task) gives an expert.",
    "unmerge_adapter": "The merged model stays as it is: model.get_base_model().",
    "peft_config": "A RetexModel has no PEFT configuration: its own is model.retex_config.",
    "active_peft_config": "A RetexModel has no PEFT configuration: its own is model.retex_config.",
    "set_requires_grad": "Tasks share what is trained: load with RetexModel.from_pretrained(..., is_trainable=True).",
    "supports_lora_conversion": "model.export_lora(task, folder) says what an adapter can carry.",
    "get_prompt": "A RetexModel has no prompts.",
    "get_prompt_embedding_to_save": "A RetexModel has no prompts.",
    "prepare_model_for_gradient_checkpointing": "Call model.gradient_checkpointing_enable().",
    "modules_to_save": "Heads of tasks are in model.heads.",
    "base_model_torch_dtype": "The merged model's dtype is model.dtype.",
}
# Options of PEFT's and transformers' methods that ours refuse, and why.
SAVING = {
    "save_embedding_layers": "the merged model is always saved whole, with its embeddings.",
    "path_initial_model_for_weight_conversion": "tasks are not stored as adapters: model.export_lora(task, folder) "
    "writes one.",
    "state_dict": "what is saved is the model's own state.",
    "variant": "file names have no variants: save to another folder.",
}
LOADING = {
    "is_trainable": "tasks share what is trained: add the task, save, and load with "
    "RetexModel.from_pretrained(..., is_trainable=True).",
    "torch_device": "the task goes where the model is; device= says where to solve.",
    "hotswap": "to replace a task, call delete_task first.",
    "key_mapping": "give the expert as a state dict with the model's own names.",
    "revision": "write the revision after the Hub id, org/name@revision.",
}
# Likely misspellings of `task` or `adapter_names`, which a `forward` that accepts any keyword would ignore.
MISSPELT = ("tasks", "task_name", "task_names", "adapter", "adapters", "adapter_name")


def check_options(
    method: str, given: Mapping[str, Any], known: Collection[str], reasons: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse options that a method does not have, giving the reason if there is one."""
    for name in given:
        if name not in known:
            reason = reasons.get(name, f"expected one of {sorted(known)}.")
            raise ConfigError(f"{method} has no option {name!r}: {reason}")


def check_spelling(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse misspelt names of the task argument, unless the wrapped model's method has an argument of that name."""
    for name in MISSPELT:
        if name in given and name not in inspect.signature(function).parameters:
            raise InputError(
                f"There is no argument {name!r}: tasks are named by task=, or by adapter_names= as in peft."
            )


def model_status(state: Snapshot, enabled: bool) -> TunerModelStatus:
    """Return PEFT's `get_model_status`, with tasks as adapters."""
    from peft.peft_model import TunerModelStatus

    recovery, tasks = state.parts.recovery, state.tasks
    parameters = [parameter for module in state.parts.modules.values() for parameter in module.parameters()]
    return TunerModelStatus(
        base_model_type=type(state.parts.model).__name__,
        adapter_model_type=type(recovery).__name__,
        peft_types=dict.fromkeys(tasks, PEFT_TYPE),
        trainable_params=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        total_params=sum(parameter.numel() for parameter in parameters),
        num_adapter_layers=len(list(recovery)),
        enabled=enabled,
        active_adapters=list(state.active_names or tasks) if enabled else [],
        merged_adapters=[],
        requires_grad=dict.fromkeys(tasks, recovery.task_embedding.requires_grad),
        available_adapters=list(tasks),
        devices={task: [recovery.task_embedding.device.type] for task in tasks},
        quantization_backend=None,
    )


def layer_status(state: Snapshot, enabled: bool) -> list[TunerLayerStatus]:
    """Return PEFT's `get_layer_status`, with an entry per recovered parameter."""
    from peft.peft_model import TunerLayerStatus

    whole = model_status(state, enabled)
    return [
        TunerLayerStatus(
            name=name,
            module_type=state.parts.recovery[name].layout.kind,
            enabled=enabled,
            active_adapters=list(state.active_names or state.tasks) if enabled else [],
            merged_adapters=[],
            requires_grad=whole.requires_grad,
            available_adapters=whole.available_adapters,
            devices=whole.devices,
            quantization_backend=None,
        )
        for name in state.parts.recovery
    ]
