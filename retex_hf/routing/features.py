"""Features that identify a task: one module's output, pooled to one vector per row, the pass stopped right there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RetexConfig
from ..errors import ConfigError, InputError
from ..libraries import library_of

# Arguments of `forward` that say what to compute or return, not what the input is.
NOT_INPUTS = frozenset(
    {"labels", "past_key_values", "use_cache", "cache_params", "cache_position", "return_dict", "return_loss",
     "logits_to_keep", "start_positions", "end_positions", "encoder_outputs"}
)  # fmt: skip
NOT_INPUT_PREFIXES = ("output_", "decoder_")
# What `generate` and OpenCLIP's models call the input of their encoder.
MAIN_INPUT_ALIASES = ("inputs", "image", "images")
# Inputs that mean nothing alone.
ACCOMPANIMENT = frozenset({"attention_mask", "position_ids", "token_type_ids"})


class _FeaturesReady(Exception):
    """Ends a forward pass once the last wanted module has answered; its message is for a pass that escapes us."""


def feature_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks that features can be read from: the elements of the largest outermost block list."""
    root = library_of(model).feature_root(model)
    prefix = next(name for name, module in model.named_modules() if module is root)
    lists: list[tuple[int, list[str]]] = []
    taken: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(parent + ".") for parent in taken):
            continue
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            taken.append(name)
            size = sum(parameter.numel() for parameter in module.parameters())
            lists.append((size, [f"{name}.{child}" for child, _ in module.named_children()]))
    # Stages that are plain attributes (OpenCLIP's ResNet: layer1 ... layer4) outweigh any one list inside the root.
    stages = [name for name, module in root.named_children() if isinstance(module, nn.Sequential)]
    if len(stages) > 1 and not any(isinstance(module, nn.ModuleList) for module in root.children()):
        size = sum(parameter.numel() for stage in stages for parameter in root.get_submodule(stage).parameters())
        lists.append((size, stages))
    if not lists:
        lists.append((0, [name for name, module in root.named_children() if any(True for _ in module.parameters())]))
    blocks = max(lists)[1]
    return [f"{prefix}.{block}" if prefix else block for block in blocks]


def resolve_feature_layers(model: nn.Module, config: RetexConfig) -> list[str]:
    """Module names that `feature_layer` stands for: one, or all candidates for "auto"."""
    layer = config.feature_layer
    if isinstance(layer, str) and layer != "auto":
        if layer not in dict(model.named_modules()):
            raise ConfigError(
                f"RetexConfig.feature_layer: the model has no module {layer!r}; its blocks are {feature_blocks(model)}."
            )
        return [layer]
    blocks = feature_blocks(model)
    if layer == "auto":
        return blocks
    if not -len(blocks) <= layer < len(blocks):
        raise ConfigError(f"RetexConfig.feature_layer: index {layer} is outside the model's {len(blocks)} blocks.")
    return [blocks[layer]]


class FeatureExtractor:
    """Runs a model up to the last of the given modules and pools their outputs.

    The model must be this extractor's own (a light copy of the merged model): its hooks stay in place, so that several
    threads can use one extractor without adding and removing hooks under each other's feet.
    """

    def __init__(self, model: nn.Module, layers: list[str], pooling: str, recorded: Iterable[str] = ()) -> None:
        self.model, self.layers, self.pooling = model, layers, pooling
        self.root = library_of(model).feature_root(model)
        self.accepted = [
            name for name, parameter in inspect.signature(self.root.forward).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]  # fmt: skip
        self.main = getattr(self.root, "main_input_name", self.accepted[0])
        for name in {*layers, *recorded}:
            model.get_submodule(name).register_forward_hook(partial(_collect, name))

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Pooled float32 features (rows, d) per layer."""
        return self.record(inputs)[0]

    @torch.no_grad()
    def record(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The features, and the outputs of the feature layers and of the recorded modules before the last of them."""
        kwargs = self.select(inputs)
        rows = len(self._main_value(kwargs))
        if rows == 0:
            raise InputError("The batch has no rows.")
        collected = self.collect(self.root, kwargs)
        features = {}
        for layer in self.layers:
            if layer not in collected:
                raise ConfigError(
                    f"RetexConfig.feature_layer: module {layer!r} does not run when features are computed."
                )
            hidden = first_tensor(collected[layer])
            features[layer] = pool(hidden.float(), self._mask(kwargs, hidden), self.pooling)
            if len(features[layer]) != rows:
                raise ConfigError(
                    f"RetexConfig.feature_layer: module {layer!r} gives {len(features[layer])} vectors for {rows} rows."
                )
        return features, collected

    def collect(self, call: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs of the modules that answer before the pass stops, by name."""
        current, context = _Pass(self.layers), copy_context()
        context.run(_current.set, current)
        with suppress(_FeaturesReady):
            context.run(call, **kwargs)
        return current.collected

    def select(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        kwargs = {
            name: value for name, value in inputs.items()
            if name in self.accepted and value is not None
            and name not in NOT_INPUTS and not name.startswith(NOT_INPUT_PREFIXES)
        }  # fmt: skip
        alias = next((inputs[name] for name in MAIN_INPUT_ALIASES if inputs.get(name) is not None), None)
        if alias is not None:
            kwargs.setdefault(self.main, alias)
        if self._main_value(kwargs) is None:
            raise InputError(
                f"The task cannot be identified from {sorted(inputs) or 'no inputs'}: "
                f"give {self.main!r}, or name the task with task=."
            )
        if "inputs_embeds" in kwargs:
            kwargs.pop("input_ids", None)  # `generate` takes both, `forward` one of them
        if "use_cache" in self.accepted:
            kwargs["use_cache"] = False
        return self._count_positions(kwargs)

    def _main_value(self, kwargs: Mapping[str, Any]) -> Any:
        names = [name for name in (self.main, *kwargs) if name not in ACCOMPANIMENT]
        return next((kwargs[name] for name in names if isinstance(kwargs.get(name), (Tensor, list))), None)

    def _count_positions(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Positions that do not depend on left padding, where `generate` counts them so too."""
        mask = kwargs.get("attention_mask")
        generates = hasattr(self.root, "can_generate") and self.root.can_generate()
        if not generates or "position_ids" not in self.accepted or "position_ids" in kwargs:
            return kwargs
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask[:, 0].all():
            return kwargs
        return {**kwargs, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}

    def _mask(self, kwargs: Mapping[str, Any], hidden: Tensor) -> Tensor | None:
        mask = kwargs.get("attention_mask")
        fits = isinstance(mask, Tensor) and hidden.ndim == 3 and mask.shape == hidden.shape[:2]
        return mask if fits else None


@dataclass
class _Pass:
    """What must answer before a pass may stop, and what has answered so far: by name, because modules may be tied."""

    layers: list[str]
    collected: dict[str, Any] = field(default_factory=dict)


# The pass that is running, in a context of its own: one extractor serves many threads.
_current: ContextVar[_Pass] = ContextVar("retex_feature_pass")


def _collect(name: str, module: nn.Module, args: tuple, output: Any) -> None:
    """The hook of a module. It does not know its extractor: the two would keep each other, and the model, alive."""
    current = _current.get()
    current.collected[name] = output
    if all(layer in current.collected for layer in current.layers):
        raise _FeaturesReady("the forward pass was stopped at the feature layer")


def first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return output


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """One vector per row: tokens (B, L, d) by `pooling` over unmasked positions, maps (B, C, H, W) by their mean."""
    if hidden.ndim == 2:
        return hidden
    if hidden.ndim > 3:
        return hidden.flatten(2).mean(2)
    if mask is None:
        return {"mean": hidden.mean(1), "first": hidden[:, 0], "last": hidden[:, -1]}[pooling]
    mask = mask.to(hidden.device).bool()
    if pooling == "mean":
        return hidden.masked_fill(~mask.unsqueeze(-1), 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    if pooling == "first":
        index = positions.masked_fill(~mask, mask.shape[1] - 1).amin(1)
    else:
        index = positions.masked_fill(~mask, 0).amax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), index]
