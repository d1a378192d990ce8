"""Features that identify a task: one module's output, pooled to one vector per row; the forward pass stops there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar, copy_context
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ..backends import library_of
from ..errors import ConfigError, InputError, RetexError
from ..rows import (
    NOT_ROWS,
    TEXT_INPUTS,
    Along,
    AlongItems,
    Proof,
    Reading,
    Splitter,
    count_rows,
    leaves,
    pattern,
    prove,
    readings,
)
from ..utils.random_numbers import repeatable
from .axes import axes_by_size, axis_by_change
from .pooling import Layout, pool_rows

# Arguments of `forward` that control what to compute or return, and are no inputs.
NOT_INPUTS = frozenset(
    {"labels", "past_key_values", "use_cache", "cache_params", "cache_position", "return_dict", "return_loss",
     "logits_to_keep", "start_positions", "end_positions", "encoder_outputs"}
)  # fmt: skip
NOT_INPUT_PREFIXES = ("output_", "decoder_")
# Names that `generate` and OpenCLIP's models use for the input of their encoder.
MAIN_INPUT_ALIASES = ("inputs", "image", "images")
# Inputs that are meaningless on their own.
ACCOMPANIMENT = frozenset({"attention_mask", "position_ids", "token_type_ids"})


# If a model drops positions by their content and pads the rest, a row's output depends on the other rows.
UNEVEN = "gives different numbers of positions to rows of the same size"


class _FeaturesReady(Exception):
    """Ends a forward pass once the last wanted module has run; its message is seen only if it escapes."""


class Entry(nn.Module):
    """The part of a model that computes features, called as a module that holds all parameters of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        path, self.method = library_of(model).feature_call(model)
        self.model, self.path = model, path
        parameters = inspect.signature(getattr(self.part, self.method)).parameters
        self.accepted = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]

    @property
    def part(self) -> nn.Module:
        """Return the part of the model that is called."""
        return self.model.get_submodule(self.path)

    def forward(self, **kwargs: Any) -> Any:
        return self.part(**kwargs) if self.method == "forward" else getattr(self.part, self.method)(**kwargs)


@dataclass(frozen=True)
class Layouts:
    """Findings about a kind of call: how its inputs belong to rows, where recorded outputs have them, and the layout of
    each layer's output, or the problem with it."""

    proof: Proof
    of_layers: Mapping[str, Layout | str]


@dataclass(frozen=True)
class FilledCache:
    """The layers (of a decoder's cache) that each recorded module has filled, by their number; and what the first of
    the modules was called with: hidden states and positions."""

    layers: Mapping[str, Mapping[int, CacheLayerMixin]]
    start: list[Tensor]


def hidden_and_positions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return what a decoder's block is called with: its hidden states, then positions in any form."""
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    given = [value for name, value in kwargs.items() if name.startswith("position_")]
    positions = [part for value in given for part in (value if isinstance(value, tuple) else (value,))]
    return [value for value in (hidden, *positions) if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Recorded:
    """The result of a pass: features (rows, d) and layouts by layer, all recorded outputs, the rows they belong to, and
    the keys and values of a decoder's blocks, where they were asked for."""

    features: dict[str, Tensor]
    layouts: dict[str, Layout]
    outputs: dict[str, Any]
    proof: Proof
    reading: Reading
    rows: int
    cache: FilledCache | None = None


class FeatureExtractor:
    """Runs a model up to the last of the given modules and pools their outputs.

    The position of rows and features in a module's output is proven once for every kind of call. The model must be this
    extractor's own (a light copy of the merged model): its hooks stay in place, so that several threads can share one
    extractor without adding and removing hooks concurrently.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[str],
        pooling: str,
        recorded: Iterable[str] = (),
        known: dict[Any, Any] | None = None,
        with_cache: bool = False,
    ) -> None:
        self.model, self.layers, self.pooling = model, layers, pooling
        self.entry, self.with_cache = Entry(model), with_cache
        self.accepted = self.entry.accepted
        # The texts of a dual encoder are not matched to the rows.
        self._others = NOT_INPUTS | (TEXT_INPUTS if library_of(model).is_dual_encoder(model) else frozenset())
        named = getattr(self.entry.part, "main_input_name", ())
        named = [named] if isinstance(named, str) else list(named)
        self.main = [name for name in named if name in self.accepted] or self.accepted[:1]
        # Findings, which depend on the architecture and not on the weights.
        self._known = {} if known is None else known
        self._modules = (*layers, *recorded)
        for name in {*layers, *recorded}:
            model.get_submodule(name).register_forward_hook(partial(_collect, name))
            if with_cache:
                model.get_submodule(name).register_forward_pre_hook(_begin, with_kwargs=True)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pooled float32 features (rows, d) per layer."""
        return self.record(inputs).features

    @torch.no_grad()
    def record(self, inputs: Mapping[str, Any]) -> Recorded:
        """Return the features, and the outputs of the feature layers and of the recorded modules before the last of
        them."""
        kwargs = self.select(inputs)
        rows, given = self._rows(kwargs)
        layouts = self._found(kwargs, rows, given)
        if self.with_cache:
            config: Any = self.model.config
            kwargs |= {"use_cache": True, "past_key_values": DynamicCache(config=config)}
        current = self._run(self.entry, kwargs)
        collected = current.collected
        reading, features, usable = given[layouts.proof.reading], {}, {}
        sizes = _sizes_of_rows(kwargs, rows)
        for layer in self.layers:
            layout = layouts.of_layers[layer]
            if isinstance(layout, str):
                raise ConfigError(f"RetexConfig.feature_layer: module {layer!r} {layout}.")
            usable[layer] = layout
            hidden = first_tensor(collected[layer]).float()
            if sizes is not None and isinstance(layout.rows, Along):
                form = _form_of_row(hidden, layout.rows)
                if self._known.setdefault(("form", layer, sizes), form) != form:
                    raise ConfigError(f"RetexConfig.feature_layer: module {layer!r} {UNEVEN}.")
            mask = kwargs.get("attention_mask")
            features[layer] = pool_rows(hidden, layout, reading, rows, mask, self.pooling)
        cache = current.cache_record if self.with_cache else None
        return Recorded(features, usable, collected, layouts.proof, reading, rows, cache)

    @torch.no_grad()
    def layouts(self, inputs: Mapping[str, Any]) -> Mapping[str, Layout | str]:
        """Return where each layer's output has rows and features, or the problem with it."""
        kwargs = self.select(inputs)
        return self._found(kwargs, *self._rows(kwargs)).of_layers

    def collect(self, call: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the modules that run before the pass stops, by name."""
        return self._run(call, kwargs).collected

    def _run(self, call: Callable[..., Any], kwargs: Mapping[str, Any]) -> _Pass:
        current, context = _Pass(self.layers, kwargs.get("past_key_values")), copy_context()
        context.run(_current.set, current)
        with suppress(_FeaturesReady):
            context.run(call, **kwargs)
        return current

    def select(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that features depend on."""
        kwargs = {
            name: value for name, value in inputs.items()
            if name in self.accepted and value is not None
            and name not in self._others and not name.startswith(NOT_INPUT_PREFIXES)
        }  # fmt: skip
        alias = next((inputs[name] for name in MAIN_INPUT_ALIASES if inputs.get(name) is not None), None)
        if alias is not None:
            kwargs.setdefault(self.main[0], alias)
        if not self._row_inputs(kwargs):
            raise InputError(
                f"The task cannot be identified from {sorted(inputs) or 'no inputs'}: "
                f"give {self.main[0]!r}, or name the task with task=."
            )
        if "inputs_embeds" in kwargs:
            kwargs.pop("input_ids", None)  # `generate` accepts both, `forward` only one of them
        if "use_cache" in self.accepted:
            kwargs["use_cache"] = False
        return self._begin_decoding(self._count_positions(kwargs))

    def _row_inputs(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the inputs that tell how many rows there are, the best first."""
        names = (*library_of(self.model).row_inputs(self.model), *self.main, *kwargs)
        return tuple(
            name for name in names if name not in ACCOMPANIMENT and isinstance(kwargs.get(name), (Tensor, list))
        )

    def count_rows(self, inputs: Mapping[str, Any]) -> int:
        """Return how many rows a batch has."""
        return self._rows(self.select(inputs))[0]

    def _rows(self, kwargs: Mapping[str, Any]) -> tuple[int, dict[str, Reading]]:
        """Return how many rows a call has, and the possible readings of its inputs."""
        rows = count_rows(kwargs, self._row_inputs(kwargs))
        if rows == 0:
            raise InputError("The batch has no rows.")
        return rows, readings(self.model, kwargs, rows, NOT_ROWS)

    def _begin_decoding(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add a decoder input for models that run encoder and decoder in one call and require it, though no feature
        depends on it."""
        if "decoder_input_ids" not in self.accepted:
            return kwargs
        first = getattr(self.model.config, "decoder_start_token_id", None) or 0
        rows = count_rows(kwargs, self._row_inputs(kwargs))
        device = next(value.device for value in kwargs.values() if isinstance(value, Tensor))
        return {**kwargs, "decoder_input_ids": torch.full((rows, 1), first, device=device)}

    def _count_positions(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add positions that do not depend on left padding, as `generate` does."""
        mask, can_generate = kwargs.get("attention_mask"), getattr(self.entry.part, "can_generate", None)
        generates = can_generate is not None and can_generate()
        if not generates or "position_ids" not in self.accepted or "position_ids" in kwargs:
            return kwargs
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask[:, 0].all():
            return kwargs
        return {**kwargs, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}

    # ---- where rows and features are ---------------------------------------------------------------------------------

    def _found(self, kwargs: Mapping[str, Any], rows: int, given: Mapping[str, Reading]) -> Layouts:
        """Return the findings for this kind of call; concurrent first calls may repeat the work, with the same
        result."""
        kind = frozenset((name, value.ndim) for name, value in kwargs.items() if isinstance(value, Tensor))
        shape = pattern(kwargs, given)
        key = ("features", self._modules, kind, rows == 1, *given, shape)
        if key in self._known:
            return self._known[key]
        # Where rows have different inputs, one batch tells nothing about another, and each row must be run alone.
        found = self._find(kwargs, rows, given, None if shape is None else list(torch.arange(rows).split(1)))
        if len(given) == 1:
            self._known[key] = found
        return found

    def _find(
        self, kwargs: Mapping[str, Any], rows: int, given: Mapping[str, Reading], parts: list[Tensor] | None
    ) -> Layouts:
        def call(part: Mapping[str, Any]) -> dict[str, Any]:
            return self._repeatable(self.entry, part)

        def split(reading: Reading, part: Tensor) -> dict[str, Any]:
            return Splitter(rows, NOT_ROWS, reading).take(kwargs, part)

        proof = prove(call, split, given, rows, parts)
        some = split(given[proof.reading], torch.arange(min(rows, 2)))
        outputs = call(some)
        found = {layer: self._layout(layer, outputs, proof, some) for layer in self.layers}
        if rows > 2 and _sizes_of_rows(kwargs, rows) is not None:
            whole = call(kwargs)
            uneven = [
                layer
                for layer, layout in found.items()
                if isinstance(layout, Layout)
                and isinstance(layout.rows, Along)
                and len({_form_of_row(first_tensor(each[layer]), layout.rows) for each in (outputs, whole)}) > 1
            ]
            found |= dict.fromkeys(uneven, UNEVEN)
        return Layouts(proof, found)

    def _layout(self, layer: str, outputs: Mapping[str, Any], proof: Proof, some: Mapping[str, Any]) -> Layout | str:
        if layer not in outputs:
            return "does not run when features are computed"
        found = next(_numbers(outputs[layer], layer), None)
        if found is None:
            return "gives no floating-point tensor"
        path, hidden = found
        place = proof.places.get(path)
        if not isinstance(place, (Along, AlongItems)):
            return f"has an output that {proof.refused.get(path, 'is the same for all rows')}"
        others = [axis for axis in range(hidden.ndim) if axis != (place.axis if isinstance(place, Along) else 0)]
        axes = axes_by_size(hidden.shape, others, self.model.get_submodule(layer))
        axis = axes[0] if len(axes) == 1 else self._axis_by_change(layer, some, axes)
        if axis is None:
            return f"has an output of shape {tuple(hidden.shape)}, whose axis of features is ambiguous"
        return Layout(place, axis)

    def _axis_by_change(self, layer: str, kwargs: Mapping[str, Any], axes: list[int]) -> int | None:
        # `functional_call` changes the module while it runs, and other threads may be calling this one.
        shared = (*self.entry.parameters(), *self.entry.buffers())
        own = deepcopy(self.entry, {id(tensor): tensor for tensor in shared})

        def hidden_of(parameters: Mapping[str, Tensor]) -> Tensor:
            named = {f"model.{layer}.{name}": tensor for name, tensor in parameters.items()}
            collected = self._repeatable(lambda **values: functional_call(own, named, (), values), kwargs)
            return first_tensor(collected[layer])

        parameters = dict(self.model.get_submodule(layer).named_parameters())
        return axis_by_change(hidden_of, parameters, axes) if axes and parameters else None

    def _repeatable(self, call: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Collect outputs with a fixed random seed, so that models that draw random numbers are repeatable."""
        parameter = next(self.model.parameters(), None)
        with repeatable(torch.device("cpu") if parameter is None else parameter.device):
            return self.collect(call, kwargs)


@dataclass
class _Pass:
    """The layers that must run before a pass may stop, and the outputs so far: by name, because modules may be tied.

    `filled` are the layers of the cache that were empty when a module began, and no longer when it ended.
    """

    layers: list[str]
    cache: DynamicCache | None = None
    collected: dict[str, Any] = field(default_factory=dict)
    filled: dict[str, dict[int, CacheLayerMixin]] = field(default_factory=dict)
    start: list[Tensor] = field(default_factory=list)

    @property
    def cache_record(self) -> FilledCache:
        """Return what the modules have left in the cache."""
        return FilledCache(self.filled, self.start)

    def collect(self, name: str, output: Any) -> None:
        """Note that a module has run."""
        self.collected[name] = output
        before = {index for layers in self.filled.values() for index in layers}
        layers = enumerate([] if self.cache is None else self.cache.layers)
        keys = {i: layer for i, layer in layers if isinstance(layer, CacheLayerMixin) and layer.is_initialized}
        self.filled[name] = {i: layer for i, layer in keys.items() if i not in before}


# The running pass, in a context of its own, because many threads share one extractor.
_current: ContextVar[_Pass] = ContextVar("retex_feature_pass")


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record what the first module is called with (a forward pre-hook)."""
    current = _current.get()
    current.start = current.start or hidden_and_positions(args, kwargs)


def _collect(name: str, module: nn.Module, args: tuple, output: Any) -> None:
    """Record the output of a module (a forward hook). It holds no reference to its extractor, which would be a cycle
    that keeps the model alive."""
    current = _current.get()
    current.collect(name, output)
    if all(layer in current.collected for layer in current.layers):
        raise _FeaturesReady("the forward pass was stopped at the feature layer")


def _sizes_of_rows(kwargs: Mapping[str, Any], rows: int) -> Hashable | None:
    """Return the sizes of a row's inputs, where all rows have the same: other rows of these sizes must be treated
    alike."""
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.ndim > 0}
    if any(len(value) != rows for value in tensors.values()):
        return None
    return frozenset((name, value.shape[1:]) for name, value in tensors.items())


def _form_of_row(hidden: Tensor, rows: Along) -> tuple[int, ...]:
    """Return the shape of a layer's output for one row, or for each of several entries per row."""
    return tuple(size for axis, size in enumerate(hidden.shape) if axis != rows.axis)


def ordinary(value: Any) -> Any:
    """Return a copy of a tensor created in inference mode, which autograd would refuse; other values unchanged."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def first_tensor(output: Any) -> Tensor:
    """Return the first floating-point tensor in an output; refuse an output without one."""
    found = next(_numbers(output), None)
    if found is None:
        raise RetexError(
            f"The model gives a {type(output).__name__} without floating-point numbers to compare outputs by."
        )
    return found[1]


def _numbers(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of an output, and the paths that lead to them."""
    return ((below, tensor) for below, tensor in leaves(output, path) if tensor.is_floating_point())
