"""Changes that an adapter makes to the base's tensors, module by module, for types that are merged through peft's own
layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import CheckpointError, brief
from .adapted_modules import submodule
from .expert_set import check_floating
from .sources import TensorInfo
from .tuner_layers import MODULE, MOST_NUMBERS, PROJECTIONS, derive_projections, merge_module, slice_projections
from .tuners import TUNERS

if TYPE_CHECKING:
    from .adapters import AdapterSource

Entry = tuple[TensorInfo, Callable[[], Tensor]]
# Takes a lookup of tensors before the adapter, by name, and returns the changed tensor.
Change = Callable[[Callable[[str], Entry | None]], Entry]
TOKENS = "TRAINABLE_TOKENS"
DELTA = "trainable_tokens_delta"
WHOLE_NUMBERS = ("indices",)


@dataclass
class Layers:
    """Names of an adapter's tensors: of each module, by the part after the module's name; of tokens that are trained
    beside LoRA, by module; and of tensors that modules share."""

    modules: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)


def layer_changes(
    source: AdapterSource, model: nn.Module, names: Mapping[str, str], layers: Layers, ties: Mapping[str, list[str]]
) -> dict[str, Change]:
    """Return the changes that an adapter makes to tensors, by their names in the model.

    Args:
        source: The adapter.
        model: The model; its own values are not used.
        names: The model's names of the adapter's modules.
        layers: The adapter's tensors.
        ties: All names of each tensor, by name.
    """
    order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    modules = sorted(layers.modules, key=lambda module: order[names[module]])
    _check_complete(source, model, names)
    shared = _Shared(source, [model.get_submodule(names[module]) for module in modules], layers.shared)
    changes: dict[str, Change] = {}
    for index, module in enumerate(modules):
        owners = [module]
        if source.kind == TOKENS:  # layers tied to an embedding are saved with it
            owners += [alias.rpartition(".")[0] for alias in ties[f"{names[module]}.weight"]]
        if not any(source.modules.has(owner, model) or _is_default(source, model, owner) for owner in owners):
            raise CheckpointError(
                f"{source.label} holds {brief(next(iter(layers.modules[module].values())))}, but its configuration "
                "does not adapt that module, so peft would ignore it: remove it, or name the module in "
                "target_modules."
            )
        owner = model.get_submodule(names[module])
        weight, tuner = owner.weight, source.tuner
        # Modules are found by their weights, and only adapters that are merged by layers have any here.
        assert isinstance(weight, Tensor) and tuner is not None
        settings = tuner.of(module, tuple(weight.shape))
        if source.kind == "IA3":
            settings["feedforward_modules"] = [MODULE] if source.modules.is_feedforward(module, model) else []
        layer = _Layer(source, source.kind, module, names[module], owner, settings, layers.modules[module])
        layer.shared = partial(shared.of, layer, index)
        changes |= layer.changes(ties)
    for module, key in layers.tokens.items():
        settings = {"token_indices": _tokens(source, module)}
        owner = model.get_submodule(names[module])
        changes |= _Layer(source, TOKENS, module, names[module], owner, settings, {DELTA: key}).changes(ties)
    if source.kind == "LORA" and source.settings.get("trainable_token_indices") and not layers.tokens:
        raise CheckpointError(
            f"{source.label} lacks the tokens that trainable_token_indices of its configuration names."
        )
    return changes


@dataclass
class _Layer:
    """A module and the names of an adapter's tensors for it."""

    source: AdapterSource
    kind: str
    module: str
    name: str
    owner: nn.Module
    settings: dict[str, Any]
    parts: dict[str, str]
    shared: Callable[[], dict[str, Tensor]] = dict

    def changes(self, ties: Mapping[str, list[str]]) -> dict[str, Change]:
        if next(self.owner.children(), None) is not None:
            raise CheckpointError(
                f"{self.source.label} adapts {self.module!r}, which contains other modules: expected a single layer."
            )
        for part, key in self.parts.items():
            if not part.endswith(WHOLE_NUMBERS):
                check_floating(self.source.label, key, self.source.infos[key].dtype)
        found: dict[str, Change] = {
            f"{self.name}.{parameter}": partial(self.change, parameter)
            for parameter, tensor in self.owner._parameters.items()
            if tensor is not None
        }
        if self.kind == TOKENS:  # peft gives the same rows to layers tied to an embedding
            found |= dict.fromkeys(ties[f"{self.name}.weight"], found[f"{self.name}.weight"])
        return found

    def change(self, parameter: str, before: Callable[[str], Entry | None]) -> Entry:
        """Return a parameter with the adapter merged into it."""
        entries = {}
        for name, tensor in self.owner._parameters.items():
            if tensor is None:
                continue
            entry = before(f"{self.name}.{name}")
            if entry is None:
                raise CheckpointError(
                    f"{self.source.label} changes {self.name!r}, whose {name} the base does not have."
                )
            if entry[0].shape != tensor.shape:
                raise CheckpointError(
                    f"{self.source.label} changes '{self.name}.{name}' of shape {tuple(tensor.shape)}, but the base's "
                    f"has shape {entry[0].shape}: it is an adapter of another base."
                )
            entries[name] = entry
        return entries[parameter][0], partial(self._read, parameter, entries)

    def _read(self, parameter: str, entries: Mapping[str, Entry]) -> Tensor:
        parameters = {name: read() for name, (_, read) in entries.items()}
        try:
            # Shared tensors come last, to replace the projections that RandLoRA also saves with every module.
            parts = {part: self.source.read(key) for part, key in self.parts.items()} | self.shared()
            merged = merge_module(self.kind, self._settings(parts), self.owner, parameters, parts)
        except CheckpointError as error:
            raise CheckpointError(f"{self.source.label} adapts {self.module!r}, but {error}.") from error.__cause__
        return merged[parameter].to(parameters[parameter].dtype)

    def _settings(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the settings with which peft makes a layer for this module alone."""
        if self.kind == "ADALORA":
            return _adalora(self.settings, parts)
        if self.kind == "TINYLORA":  # a single module is the only one of its group
            return {key: value for key, value in self.settings.items() if key != "weight_tying"}
        return self.settings


class _Shared:
    """The tensors that an adapter's modules share."""

    def __init__(self, source: AdapterSource, owners: list[nn.Module], keys: Mapping[str, str]) -> None:
        self._source, self._owners, self._keys = source, owners, keys
        self._projections = cache(self._find_projections)

    def of(self, layer: _Layer, index: int) -> dict[str, Tensor]:
        """Return the shared tensors that a module uses; `index` is its position among all adapted ones."""
        kind = layer.kind
        if kind in PROJECTIONS:
            return slice_projections(kind, self._projections(), *_sides(layer.owner))
        if kind == "VBLORA":
            return {"vblora_vector_bank": self._bank(layer)}
        if kind == "TINYLORA":
            return {"tinylora_v.0": self._vector(layer.settings.get("weight_tying", 0.0), index)}
        return {}

    def _find_projections(self) -> dict[str, Tensor]:
        source = self._source
        names = PROJECTIONS[source.kind]
        if source.settings.get("save_projection", True):
            return {name: self._read(name) for name in names}
        rows, columns = (max(sides) for sides in zip(*map(_sides, self._owners), strict=True))
        assert source.tuner is not None  # all types with projections are merged by layers
        settings = source.tuner.of("", (rows, columns))
        return derive_projections(source.kind, settings, rows, columns)

    def _bank(self, layer: _Layer) -> Tensor:
        bank = self._read("vblora_vector_bank")
        expected = (layer.settings.get("num_vectors", 256), layer.settings.get("vector_length", 256))
        if tuple(bank.shape) != expected:
            raise CheckpointError(
                f"has a vector bank of shape {tuple(bank.shape)}, and its configuration of {expected}"
            )
        logits = layer.settings.get("r", 4) * sum(_sides(layer.owner)) // expected[1] * expected[0]
        if logits > MOST_NUMBERS:
            raise CheckpointError(f"asks for {logits} logits, expected {MOST_NUMBERS} at most")
        return bank

    def _vector(self, tying: float, index: int) -> Tensor:
        """Return the vector of a module's group; peft groups consecutive modules."""
        count = len(self._owners)
        groups = max(1, round(count * (1.0 - min(1.0, max(0.0, tying)))))
        return self._read(f"tinylora_v.{min(index // max(1, count // groups), groups - 1)}")

    def _read(self, name: str) -> Tensor:
        if name not in self._keys:
            raise CheckpointError(f"lacks {name!r}, which its modules share")
        key = self._keys[name]
        check_floating(self._source.label, key, self._source.infos[key].dtype)
        return self._source.read(key)


def _check_complete(source: AdapterSource, model: nn.Module, names: Mapping[str, str]) -> None:
    """Refuse an adapter that lacks modules, if its shared tensors depend on the set of modules."""
    derived = source.kind in PROJECTIONS and not source.settings.get("save_projection", True)
    if not derived and source.kind != "TINYLORA":
        return
    found = set(names.values())
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and name not in found and source.modules.has(name, model):
            raise CheckpointError(f"{source.label} lacks tensors of {name!r}, which its configuration adapts.")


def _sides(owner: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear layer."""
    weight = owner.weight
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise CheckpointError(f"it is a {type(owner).__name__}, expected a linear layer")
    rows, columns = weight.shape
    return (columns, rows) if isinstance(owner, Conv1D) else (rows, columns)


def _adalora(settings: Mapping[str, Any], parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return settings for a module that kept only some of its ranks: peft still divides by the initial number."""
    begun, rank = settings.get("init_r", 12), max(1, len(parts.get("lora_E", ())))
    alpha = settings.get("lora_alpha", 8)
    alpha = alpha if alpha > 0 else begun
    return {**settings, "init_r": rank, "lora_alpha": alpha * (rank + 1e-5) / (begun + 1e-5)}


def _tokens(source: AdapterSource, module: str) -> list[int]:
    """Return the ids of the tokens that are trained in a module: one list for the embedding, or one per name."""
    found: Any = source.settings.get("trainable_token_indices")
    if isinstance(found, dict):
        found = next((value for key, value in found.items() if f".{module}".endswith(f".{key}")), None)
    allowed = TUNERS[TOKENS].settings["token_indices"]
    if not allowed.is_allowed(found):
        raise CheckpointError(
            f"{source.label}: trainable_token_indices of its configuration must hold {allowed.words} for {module!r}, "
            f"not {brief(found)}."
        )
    return found


def _is_default(source: AdapterSource, model: nn.Module, module: str) -> bool:
    """Return whether peft trains the tokens of this module if the configuration names no module."""
    if source.kind != TOKENS or source.settings.get("target_modules") is not None:
        return False
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return embedding is not None and embedding is submodule(model, module)
