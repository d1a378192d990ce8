"""Read experts from a `PeftModel` in memory, with its adapter merged into its own base's weights.

An adapted module is copied when one of its tensors is read, merged by peft in float32, and dropped. Scales, merged
adapters and changes that an initialisation made to the base are taken from the object, not from its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from ..errors import CheckpointError, first_line
from .adapters import AdapterSource, check_variants
from .sources import MemorySource, Source, TensorInfo, check_plain
from .tuner_layers import aside
from .tuners import TunerSettings, tuner_of

WRAPPERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)


@dataclass
class PeftModelSource(AdapterSource):
    """Tensors of a `PeftModel` under the names of its base, with the active adapter merged as they are read.

    `model` is the base without peft's wrappers, which shares its tensors, and `tensors` are these; `adapted` names the
    wrapper of each tensor that an adapter changes.
    """

    adapted: dict[str, str] = field(default_factory=dict)
    wrappers: dict[str, nn.Module] = field(default_factory=dict)
    own_base = True

    def __post_init__(self) -> None:
        # The object itself shows which modules are adapted, so the patterns of the configuration are not parsed.
        self.kind = self.settings["peft_type"]

    def read(self, name: str) -> Tensor:
        if name not in self.adapted:
            return self.tensors.read(name)
        place = self.adapted[name]
        try:
            with aside(), torch.no_grad():
                merged = _merged(self.wrappers[place], self.infos[name].dtype)
        except Exception as error:  # peft raises various errors for layers that it cannot merge
            raise CheckpointError(
                f"{self.label} is a PeftModel whose adapter does not merge into {place!r}: "
                f"{first_line(error).rstrip('.')}."
            ) from error
        return merged.state_dict()[name.removeprefix(f"{place}.")].detach()

    def identity(self) -> dict[str, Any]:
        return Source.identity(self)


def open_peft_model(model: PeftModel, label: str) -> PeftModelSource:
    """Open a `PeftModel` as a source of merged tensors; refuse one with several active adapters, or none."""
    active = model.active_adapters
    if len(active) != 1:
        raise CheckpointError(
            f"{label} is a PeftModel whose active adapters are {active}: expected exactly one; choose it with "
            "set_adapter, or give what merge_and_unload() returns."
        )
    settings = _settings(model.peft_config[active[0]])
    kind = settings["peft_type"]
    tuner_of(kind, label)
    if kind == "LORA":
        check_variants(label, settings)
    else:
        TunerSettings(kind, settings, label)
    inner = model.get_base_model()
    wrappers = dict(_wrappers(inner))
    for name, wrapper in wrappers.items():
        _check_state(label, name, wrapper)
    plain = _without_wrappers(inner, {})
    infos, adapted = _describe(label, plain, wrappers)
    origin = settings.get("base_model_name_or_path") or type(inner).__name__
    provenance = {
        "source": "memory",
        "id": Path(origin).name if Path(origin).is_absolute() else origin,
        "adapter": kind.lower(),
    }
    return PeftModelSource(
        label,
        infos,
        model=plain,
        provenance=provenance,
        tensors=MemorySource(label, infos, tensors=plain.state_dict()),
        settings=settings,
        adapted=adapted,
        wrappers=wrappers,
    )


def _settings(config: Any) -> dict[str, Any]:
    """Return a configuration as `adapter_config.json` would hold it."""
    settings: dict[str, Any] = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
    }
    return settings | {"peft_type": str(settings["peft_type"].value)}


def _wrappers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost wrappers that peft put into a model, under all of their names."""
    if isinstance(module, WRAPPERS):
        # Iterating makes peft's attention layers register the weights that their forward pass has unregistered.
        dict(module.named_modules())
        yield name, module
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _wrappers(child, f"{name}.{key}" if name else key)


def _check_state(label: str, name: str, wrapper: nn.Module) -> None:
    """Refuse a module that peft does not run with exactly one adapter, or whose tensors are not dense real numbers."""
    for key, tensor in (*wrapper.named_parameters(), *wrapper.named_buffers()):
        check_plain(f"{label}: tensor '{name}.{key}'", tensor)
    layers = [module for module in wrapper.modules() if isinstance(module, WRAPPERS)]
    if any(layer.disable_adapters for layer in layers):
        raise CheckpointError(
            f"{label} is a PeftModel whose adapter is disabled in {name!r}: call its enable_adapter_layers() first, or "
            "give the base model itself."
        )
    tuners = [layer for layer in layers if isinstance(layer, BaseTunerLayer)]
    if len({layer.merged for layer in tuners}) > 1:
        raise CheckpointError(
            f"{label} is a PeftModel whose adapter is merged into parts of {name!r} only: call its unmerge_adapter() "
            "first, or give what merge_and_unload() returns."
        )
    for layer in layers:
        active = [adapter for adapter in layer.active_adapters if adapter in layer._get_available_adapters()]
        if len(active) > 1 and not _is_merged(wrapper):
            raise CheckpointError(
                f"{label} is a PeftModel whose active adapters in {name!r} are {active}: expected exactly one; choose "
                "it with set_adapter, or give what merge_and_unload() returns."
            )


def _is_merged(wrapper: nn.Module) -> bool:
    """Return whether peft runs a module's own weights only: replaced ones, or ones with an adapter already merged."""
    return all(layer.merged for layer in wrapper.modules() if isinstance(layer, BaseTunerLayer))


def _describe(
    label: str, plain: nn.Module, wrappers: dict[str, nn.Module]
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return shapes and dtypes of a model's tensors, and the wrapper to merge for each adapted one."""
    computed = {name: wrapper for name, wrapper in wrappers.items() if not _is_merged(wrapper)}
    quantised = getattr(getattr(plain, "config", None), "quantization_config", None) is not None
    infos, adapted = {}, {}
    for name, tensor in plain.state_dict().items():
        check_plain(f"{label}: tensor {name!r}", tensor)
        place = next((place for place in _parents(name) if place in computed), None)
        dtype = tensor.dtype
        if place is not None:
            quantised |= name.endswith("weight") and not dtype.is_floating_point
            # Do not round to the base's dtype: peft does not round what it adds to the output either.
            dtype, adapted[name] = _wide_dtype(computed[place]) if dtype.is_floating_point else dtype, place
        infos[name] = TensorInfo(tuple(tensor.shape), dtype)
    if quantised:
        raise CheckpointError(
            f"{label} is a PeftModel on a quantised base, which is not read from memory: save the adapter with its "
            "save_pretrained, and give that folder."
        )
    return infos, adapted


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _wide_dtype(wrapper: nn.Module) -> torch.dtype:
    """Return the dtype to merge in: float32, or float64 where a tensor has it."""
    floating = (tensor.dtype for tensor in wrapper.parameters() if tensor.is_floating_point())
    return reduce(torch.promote_types, floating, torch.float32)


def _without_wrappers(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """Return the model without peft's wrappers. It shares all tensors with the original: do not modify it."""
    if id(module) in known:
        return known[id(module)]
    if isinstance(module, ModulesToSaveWrapper):
        chosen = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
        found = _without_wrappers(module.modules_to_save[chosen[0]] if chosen else module.original_module, known)
    elif isinstance(module, TrainableTokensWrapper):
        found = _without_wrappers(module.token_adapter.get_base_layer(), known)
    elif isinstance(module, BaseTunerLayer):
        found = _without_wrappers(module.get_base_layer(), known)
    elif not any(isinstance(part, WRAPPERS) for part in module.modules()):
        found = module
    else:
        found = module.__class__.__new__(module.__class__)
        found.__dict__ = dict(module.__dict__)
        found._modules = {
            key: None if child is None else _without_wrappers(child, known) for key, child in module._modules.items()
        }
    known[id(module)] = found
    return found


def _merged(wrapper: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of an adapted module with its active adapter merged, without peft's wrapper."""
    # Leave out the layers' constructor arguments: for tied embeddings they hold views, which deepcopy refuses.
    memo: dict[int, Any] = {id(layer.kwargs): {} for layer in wrapper.modules() if hasattr(layer, "kwargs")}
    for tensor in (*wrapper.parameters(), *wrapper.buffers()):
        own = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        memo[id(tensor)] = nn.Parameter(own, requires_grad=False) if isinstance(tensor, nn.Parameter) else own
    copied = deepcopy(wrapper, memo)
    for layer in copied.modules():
        if isinstance(layer, LoraLayer):
            _drop_empty_biases(layer)
    unload = getattr(copied, "unload_and_optionally_merge_module", None)
    if unload is not None:
        return unload(merge=True, safe_merge=False, adapter_names=None)
    assert isinstance(copied, BaseTunerLayer)  # the other wrappers have that method
    copied.merge()
    return copied.get_base_layer()


def _drop_empty_biases(layer: LoraLayer) -> None:
    """Drop adapter biases of zeros where the base has no bias: peft would refuse to merge the layer."""
    if getattr(layer.get_base_layer(), "bias", None) is None:
        for adapter, has_bias in layer.lora_bias.items():
            if has_bias and not layer.lora_B[adapter].get_parameter("bias").any():
                layer.lora_bias[adapter] = False
