"""Experts given as PEFT adapters: the tensors of the base, with the adapter merged into them as they are read.

Nothing is merged beforehand, and no model is held. With plain LoRA, a tensor of such an expert is the base's tensor
plus `scaling * B @ A`, computed in float32 when it is read. With every other type, and with LoRA whose weight is not
that sum (DoRA, and initialisations that peft derives from the base: see `by_layers`), a module is merged through peft's
own layer (`adapted_layers.py`, `tuner_layers.py`) when one of its tensors is read. The result equals that of peft's
`merge_and_unload`. A `PeftModel` in memory is read by `peft_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from ..errors import CheckpointError, brief, shorten
from .adapted_layers import Change, Entry, Layers, layer_changes
from .adapted_modules import AdaptedModules, submodule
from .expert_set import Entries, check_floating
from .patterns import Patterns
from .sources import MemorySource, Source, TensorInfo
from .tuners import REMEDY, TunerSettings, tuner_of

ADAPTER_CONFIG, ADAPTER_STEM = "adapter_config.json", "adapter_model"
PREFIX, SHARED_PREFIX = "base_model.model.", "base_model."
if TYPE_CHECKING:
    from ..backends import Backend

# The Auto class of each task type of peft: {model type: class name}.
TASK_CLASSES: dict[str, Mapping[str, str | Sequence[str]]] = {
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "CAUSAL_LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_2_SEQ_LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "FEATURE_EXTRACTION": modeling_auto.MODEL_MAPPING_NAMES,
}
# Options of LoRA that change how a weight is merged, and that are not supported.
VARIANTS = (
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config", "megatron_config",
)  # fmt: skip
# Initialisations that leave the base's weights unchanged.
PLAIN_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
# Initialisations that peft recomputes from the base's weights whenever it loads the adapter: it subtracts the initial
# factors from the base (PiSSA: the largest singular values, OLoRA: a QR decomposition), or starts from them (MiCA,
# whose second factor is not trained). Others need data (CorDA, LoRA-GA), randomness (PiSSA's fast variant) or a
# quantised base (LoftQ), so that the adapter's files do not determine the changed base.
DERIVED_INITIALISATIONS = ("pissa", "olora", "mica")
INITIALISATIONS = (*PLAIN_INITIALISATIONS, *DERIVED_INITIALISATIONS)
# The tensors that peft saves for an adapted module, after its name.
FACTORS = ("lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_embedding_A", "lora_embedding_B")
# peft wraps the other parameters of a module under this name, around an adapted parameter.
WRAPPED = ".base_layer"
# With bias="all" peft also saves the biases of modules_to_save under its wrapper's names, both old and new ones.
WRAPPERS = (".original_module.", ".modules_to_save.")
# The types that peft writes under the keys that are read here, all of which may be missing.
SETTINGS: dict[str, tuple[type, str]] = {
    "task_type": (str, "a text"), "auto_mapping": (dict, "keys and values"), "target_parameters": (list, "a list"),
    "rank_pattern": (dict, "names and numbers"), "alpha_pattern": (dict, "names and numbers"),
    "base_model_name_or_path": (str, "a text"), "use_rslora": (bool, "true or false"),
    "use_dora": (bool, "true or false"),
}  # fmt: skip
DEFAULT_RANK = DEFAULT_ALPHA = 8
LARGEST_RANK = 2**31
# Beyond it, the product may overflow float32.
LARGEST_ALPHA = 1e30

# The tensor that peft saves for tokens trained beside LoRA, after the name of an embedding.
TOKENS = "token_adapter.trainable_tokens_delta"


@dataclass
class AdapterSource(Source):
    """An expert that is an adapter. `infos` and `read` give the adapter's own tensors, `settings` is the content of its
    `adapter_config.json`; [`align_source`] combines this and the base into the expert."""

    tensors: Source = field(kw_only=True)
    settings: dict[str, Any] = field(default_factory=dict)
    # Whether the source holds the base's tensors too, changed already: then it is the whole expert.
    own_base: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.kind = self.settings["peft_type"]
        if self.kind == "LORA":
            self._ranks, self._alphas = (
                Patterns(self.settings.get(key) or {}, f"{self.label}: {key} of its configuration")
                for key in ("rank_pattern", "alpha_pattern")
            )
        self._targets = frozenset(self.settings.get("target_parameters") or ())
        self.modules = AdaptedModules(self.settings, self.label)
        self.tuner = TunerSettings(self.kind, self.settings, self.label) if self.by_layers else None

    @property
    def by_layers(self) -> bool:
        """Return whether modules are merged through peft's own layers instead of the formula of LoRA."""
        options = self.settings
        return self.kind != "LORA" or bool(
            options.get("use_dora") or options.get("init_lora_weights") in DERIVED_INITIALISATIONS
        )

    def rank(self, module: str) -> int:
        """Return the rank of a module's factors."""
        return int(self._ranks.value(module, self.settings.get("r", DEFAULT_RANK)))

    def alpha(self, module: str) -> float:
        """Return the numerator of the scale of a module's product."""
        return self._alphas.value(module, self.settings.get("lora_alpha", DEFAULT_ALPHA))

    def targets(self, parameter: str) -> bool:
        """Return whether a parameter is adapted by its own name, and not as the weight of a module."""
        parts = parameter.split(".")
        return any(".".join(parts[start:]) in self._targets for start in range(len(parts)))

    def read(self, name: str) -> Tensor:
        return self.tensors.read(name)

    def identity(self) -> dict[str, Any]:
        return {**self.tensors.identity(), "settings": repr(sorted(self.settings.items()))}

    def architecture(self, model_type: str | None) -> str | None:
        """Return the expert's class for a base of a model type: as the adapter says, or by its task type. None if it
        says neither; then the base's own class applies."""
        if self.model is not None:
            return type(self.model).__name__
        named = (self.settings.get("auto_mapping") or {}).get("base_model_class")
        classes = TASK_CLASSES.get(self.settings.get("task_type", ""))
        if named or classes is None or model_type is None:
            return named
        if model_type not in classes:
            raise CheckpointError(
                f"{self.label} is an adapter of task type {self.settings['task_type']}, but transformers has no such "
                f"class for the base, a {model_type!r} model."
            )
        found = classes[model_type]
        return found if isinstance(found, str) else found[0]


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a PEFT adapter, and no full model."""
    weights = [file for pattern in ("model*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)]
    return (folder / ADAPTER_CONFIG).is_file() and not weights


def open_adapter(tensors: Source, settings: dict[str, Any], **kwargs: Any) -> AdapterSource:
    """Return a source over an adapter's tensors; refuse one whose merged weights do not follow from it and the base."""
    label = tensors.label
    tuner_of(settings.get("peft_type"), label)
    kind = settings["peft_type"]
    kwargs["provenance"] = kwargs.get("provenance", {}) | {"adapter": kind.lower()}
    _check_settings(label, settings)
    if kind == "LORA":
        _check_lora(label, settings)
    return AdapterSource(label, tensors.infos, files=tensors.files, tensors=tensors, settings=settings, **kwargs)


def _check_settings(label: str, settings: dict[str, Any]) -> None:
    """Refuse settings of other types than peft writes."""
    for key, (kind, words) in SETTINGS.items():
        value = settings.get(key)
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(f"{label}: {key} of its configuration must be {words}, not {brief(value)}.")
    named = (settings.get("auto_mapping") or {}).get("base_model_class")
    for value in (*(settings.get("target_parameters") or ()), *([] if named is None else [named])):
        if not isinstance(value, str):
            raise CheckpointError(f"{label}: its configuration must name what it adapts as text, not {brief(value)}.")


def _check_lora(label: str, settings: dict[str, Any]) -> None:
    """Refuse variants of LoRA that are not read, and numbers that peft does not write."""
    check_variants(label, settings)
    begun = settings.get("init_lora_weights")
    if not any(begun is known or (isinstance(known, str) and begun == known) for known in INITIALISATIONS):
        raise CheckpointError(
            f"{label} is a LoRA adapter with init_lora_weights={brief(begun)}, for which the base was changed in a way "
            f"that its files do not record: {REMEDY}, or save it with path_initial_model_for_weight_conversion."
        )
    option = "use_dora" if settings.get("use_dora") else f"init_lora_weights={brief(begun)}"
    if (settings.get("use_dora") or begun in DERIVED_INITIALISATIONS) and settings.get("target_parameters"):
        raise CheckpointError(
            f"{label} is a LoRA adapter with {option} and target_parameters, which are not read together: {REMEDY}."
        )
    for key, is_allowed, words in (("r", _is_rank, RANK), ("lora_alpha", _is_alpha, ALPHA)):
        if key in settings and not is_allowed(settings[key]):
            raise CheckpointError(f"{label}: {key} of its configuration must be {words}, not {brief(settings[key])}.")
    for key, is_allowed, words in (("rank_pattern", _is_rank, RANK), ("alpha_pattern", _is_alpha, ALPHA)):
        for pattern, value in (settings.get(key) or {}).items():
            if not is_allowed(value):
                raise CheckpointError(
                    f"{label}: {key} of its configuration gives {brief(pattern)} the value {brief(value)}, expected "
                    f"{words}."
                )


def check_variants(label: str, settings: dict[str, Any]) -> None:
    """Refuse options of LoRA with which no weight stands for what the adapter computes."""
    for option in VARIANTS:
        if settings.get(option):
            raise CheckpointError(f"{label} is a LoRA adapter with {option}, which is not read: {REMEDY}.")


RANK, ALPHA = f"a whole number above 0, and at most {LARGEST_RANK}", f"a number from 0 to {LARGEST_ALPHA:g}"


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_RANK


def _is_alpha(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST_ALPHA


def align_source(library: Backend, model: nn.Module, source: Source, base: Entries) -> tuple[Entries, list[str]]:
    """Return an expert's tensors under a model's names, and its names that the model does not have.

    Works like `library.align`, but applies an adapter without its own base to `base`, whose names are aligned already.
    """
    if not isinstance(source, AdapterSource):
        return library.align(model, source)
    if source.own_base:
        return _align_whole(library, model, source)
    plain, deltas, layers = _sort(source, model)
    originals, values, deltas = (_aligned(library, model, source, part) for part in (*plain, deltas))
    ties = {name: names for names in _ties(model) for name in names}
    changes: dict[str, Change] = {
        name: partial(_changed, source, model, name, delta) for name, delta in deltas.items()
    } | layer_changes(source, model, _model_names(library, model, source, layers), layers, ties)
    entries = dict(base)

    def before(name: str) -> Entry | None:
        """Return a tensor as it is before the adapter changes it."""
        known = (part[alias] for part in (originals, base) for alias in ties.get(name, ()) if alias in part)
        return values.get(name) or next(known, None)

    for names in _ties(model):
        known = next((part[name] for part in (originals, base) for name in names if name in part), None)
        changed = [name for name in names if name in values or name in changes]
        untouched = [name for name in names if name not in changed]
        if untouched and any(name in values for name in names):
            raise CheckpointError(
                f"{source.label} has a {changed[0]!r} of its own, but no {untouched[0]!r}, which is the same tensor in "
                f"the model: {REMEDY}."
            )
        found = [changes[name](before) if name in changes else values[name] for name in changed]
        if found:
            label = f"{source.label}: tensor {names[0]!r}"
            found += [known] if untouched and known is not None else []
            known = (found[0][0], partial(_read_alike, label, [read for _, read in found]))
        if known is not None and (found or any(name in originals for name in names)):
            entries |= dict.fromkeys(names, known)
    return entries, []


def _align_whole(library: Backend, model: nn.Module, source: AdapterSource) -> tuple[Entries, list[str]]:
    """Align an adapter that comes with its base; what is tied in the model may differ by rounding only."""
    parts: Entries = {name: (info, partial(source.read, name)) for name, info in source.infos.items()}
    entries, unexpected = library.align(model, _Lazy(source.label, source.infos, entries=parts))
    for names in _ties(model):
        present = [name for name in names if name in entries]
        if len(present) > 1:
            label, reads = f"{source.label}: tensor {names[0]!r}", [entries[name][1] for name in present]
            entries |= dict.fromkeys(present, (entries[present[0]][0], partial(_read_alike, label, reads)))
    return entries, unexpected


def _changed(
    source: AdapterSource, model: nn.Module, name: str, delta: Entry, before: Callable[[str], Entry | None]
) -> Entry:
    """Return a tensor with the adapter's difference added."""
    known = before(name)
    if known is None:
        raise CheckpointError(f"{source.label} changes {name!r}, which the base does not have.")
    (info, read), (change, read_change) = known, delta
    transposed = isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D) and len(change.shape) == 2
    shape = change.shape[::-1] if transposed else change.shape
    if info.shape != shape:
        raise CheckpointError(
            f"{source.label} changes {name!r} of shape {shape}, but the base's has shape {info.shape}: it is an "
            f"adapter of another base{_origin(source)}."
        )

    def add() -> Tensor:
        tensor, difference = read(), read_change()
        return (tensor.float() + (difference.T if transposed else difference)).to(tensor.dtype)

    return info, add


def _read_alike(label: str, reads: list[Callable[[], Tensor]]) -> Tensor:
    """Read a tensor that a model has under several names (an embedding that is also the output layer); refuse
    different values. An adapter may change each name; those it does not change were trained as in the base."""
    tensor, *others = (read() for read in reads)
    for other in others:
        if tensor.shape != other.shape or not torch.allclose(
            tensor.float(), other.float(), rtol=1e-4, atol=1e-5 * tensor.abs().max().item()
        ):
            raise CheckpointError(
                f"{label} is tied to another in the model, and the adapter changes them differently: train it with "
                "peft's ensure_weight_tying, or give a base and experts whose weights are not tied."
            )
    return tensor


def _aligned(library: Backend, model: nn.Module, source: AdapterSource, part: Entries) -> Entries:
    infos = {name: info for name, (info, _) in part.items()}
    entries, unexpected = library.align(model, _Lazy(source.label, infos, entries=part))
    if unexpected:
        raise CheckpointError(
            f"{source.label} is an adapter for {shorten(unexpected)}, which the model does not have: its base is "
            f"another{_origin(source)}."
        )
    return entries


@dataclass
class _Lazy(MemorySource):
    """Tensors that are computed when they are read. A `MemorySource`, because they have the names of a loaded model."""

    entries: Entries = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        return self.entries[name][1]()


def _origin(source: AdapterSource) -> str:
    origin = source.settings.get("base_model_name_or_path")
    return f" (it was trained on {origin!r})" if origin else ""


def _ties(model: nn.Module) -> list[list[str]]:
    """Return the names of every tensor, one or several each."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _model_names(library: Backend, model: nn.Module, source: AdapterSource, layers: Layers) -> dict[str, str]:
    """Map the adapter's names of modules, which are those of its own base, to the model's."""
    modules = [*layers.modules, *layers.tokens]
    probes: Entries = {
        f"{name}.weight": (TensorInfo((), torch.int64), partial(torch.tensor, place))
        for place, name in enumerate(modules)
    }
    found = _aligned(library, model, source, probes)
    return {modules[int(read())]: name.rpartition(".")[0] for name, (_, read) in found.items()}


def _sort(source: AdapterSource, model: nn.Module) -> tuple[tuple[Entries, Entries], Entries, Layers]:
    """Sort an adapter's tensors, under the names of the tensors they apply to: copies of the base's tensors (embeddings
    of another size) and replacements of the base's; differences; and tensors that peft's layers merge."""
    originals: Entries = {}
    values: Entries = {}
    deltas: Entries = {}
    factors: dict[tuple[str, int], dict[str, str]] = {}
    layers = Layers()
    prefix = tuner_of(source.kind, source.label).prefix
    for key, info in source.infos.items():
        name = key.removeprefix(PREFIX)
        if key.startswith(SHARED_PREFIX) and not key.startswith(PREFIX) and f".{prefix}" in key:
            _put(source, layers.shared, key.removeprefix(SHARED_PREFIX), key)
        elif source.kind == "LORA" and name.endswith(f".{TOKENS}"):
            _put(source, layers.tokens, name.removesuffix(f".{TOKENS}"), key)
        elif source.by_layers and (place := f".{name}".find(f".{prefix}")) > 0:
            _put(source, layers.modules.setdefault(name[: place - 1], {}), name[place:], key)
        elif not source.by_layers and (found := _factor(name)) is not None:
            module, depth, part = found
            _put(source, factors.setdefault((module, depth), {}), part, key)
        elif not any(wrapper in name for wrapper in WRAPPERS):
            entries = originals if name.endswith(f"{WRAPPED}.weight") else values
            _put(source, entries, name.replace(WRAPPED, ""), (info, partial(source.read, key)))
    known = model.state_dict().keys()
    together = source.settings.get("ensure_weight_tying")  # adapting one name of a tied tensor adapts all of them
    tied = {name: names for names in _ties(model) for name in names} if together else {}
    for (wrapped, depth), parts in factors.items():
        module = wrapped.replace(WRAPPED, "")
        parameter = _adapted_parameter(source, model, module, depth)
        delta = _Delta.of(source, model, module, parameter, parts)
        if not _is_adapted(source, model, wrapped, parameter, depth, tied):
            raise CheckpointError(
                f"{source.label} holds {brief(next(iter(parts.values())))}, but its configuration does not adapt that "
                "module, so peft would ignore it: remove it, or name the module in target_modules."
            )
        # The output layer of nn.MultiheadAttention, which is adapted together with it: peft adds its product twice, in
        # merging as well as in training.
        delta.times = 2 if module != wrapped else 1
        _put(source, deltas, f"{module}.{parameter}", (delta.info, delta.read))
        bias_key, bias = parts.get("lora_B.bias"), f"{module}.bias"
        # With lora_bias peft also gives a bias to layers without one, where it has no effect.
        if bias_key is not None and (bias in known or source.read(bias_key).any()):
            _put(source, deltas, bias, (source.infos[bias_key], partial(delta.scaled, bias_key)))
    return (originals, values), deltas, layers


def _is_adapted(
    source: AdapterSource, model: nn.Module, wrapped: str, parameter: str, depth: int, tied: dict[str, list[str]]
) -> bool:
    """Return whether peft would apply the factors of a module."""
    module, _, inner = wrapped.partition(f"{WRAPPED}.")
    if inner:  # the output layer of an nn.MultiheadAttention, which is adapted together with it
        return isinstance(submodule(model, module), nn.MultiheadAttention) and source.modules.has(module, model)
    name = f"{module}.{parameter}"
    owners = [name.rpartition(".")[0] for name in tied.get(name, [name])]
    return source.targets(name) or (depth == 0 and any(source.modules.has(owner, model) for owner in owners))


def _factor(name: str) -> tuple[str, int, str] | None:
    """Return the module of a factor, the number of the module's adapted parameters that are wrapped around this one,
    and the name of the factor; None for other tensors."""
    part = next((part for part in FACTORS if name.endswith(f".{part}")), None)
    if part is None:
        return None
    module, depth = name.removesuffix(f".{part}"), 0
    while module.endswith(WRAPPED) and module != WRAPPED:
        module, depth = module.removesuffix(WRAPPED), depth + 1
    return (module, depth, part) if module else None


def _put(source: AdapterSource, entries: dict[str, Any], name: str, value: Any) -> None:
    if name in entries:
        raise CheckpointError(f"{source.label} holds two tensors for {brief(name)} of the model.")
    entries[name] = value


def _adapted_parameter(source: AdapterSource, model: nn.Module, module: str, depth: int) -> str:
    """Return the name of the parameter of a module that a pair of factors adapts."""
    owner = submodule(model, module)
    if owner is None:  # named as in an earlier version, or missing: alignment decides
        return "weight"
    if isinstance(owner, nn.MultiheadAttention):
        return "in_proj_weight"
    # peft wraps the parameters in the order in which the module has them, so the first is innermost.
    names = [name for name in owner._parameters if source.targets(f"{module}.{name}")]
    return names[-1 - depth] if depth < len(names) else "weight"


@dataclass
class _Delta:
    """`scaling * B @ A` of one parameter, in the parameter's shape (for a Conv1D, in that of an nn.Linear)."""

    source: AdapterSource
    keys: tuple[str, str]
    scaling: float
    info: TensorInfo
    stacked: int = 0
    transposed: bool = False
    times: int = 1

    @classmethod
    def of(cls, source: AdapterSource, model: nn.Module, module: str, parameter: str, parts: dict[str, str]) -> _Delta:
        embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
        wanted = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        for part in wanted:
            if part not in parts:
                raise CheckpointError(f"{source.label} lacks {part.removesuffix('.weight')} of {module!r}.")
        keys = (parts[wanted[0]], parts[wanted[1]])
        for key in parts.values():
            check_floating(source.label, key, source.infos[key].dtype)
        a, b = (source.infos[key].shape for key in keys)
        stacked, targeted = 0, source.targets(f"{module}.{parameter}")
        name = f"{module}.{parameter}" if targeted else module
        rank, alpha = source.rank(name), source.alpha(name)
        owner = submodule(model, module)
        full = None if owner is None else owner._parameters.get(parameter)
        if targeted and full is not None and full.ndim == 3:
            stacked = full.shape[0]
        fits = min(len(a), len(b)) > 1 and a[0] == b[1] == rank * max(stacked, 1) and set(b[2:]) <= {1}
        if not fits or ((embedding or stacked) and len(a) + len(b) > 4):
            raise CheckpointError(
                f"{source.label}: the factors of {module!r} have shapes {a} and {b}, but its configuration asks for "
                f"rank {rank}."
            )
        transposed = embedding
        shape: tuple[int, ...]
        if stacked:
            transposed = bool(getattr(owner, "is_transposed", False))
            shape = (stacked, a[1], b[0]) if transposed else (stacked, b[0], a[1])
        else:
            shape = (a[1], b[0]) if embedding else (b[0], *a[1:])
        scaling = alpha / (sqrt(rank) if source.settings.get("use_rslora") else rank)
        return cls(source, keys, scaling, TensorInfo(shape, torch.float32), stacked, transposed)

    def scaled(self, key: str) -> Tensor:
        return self.scaling * self.source.read(key).float()

    def read(self) -> Tensor:
        a, b = (self.source.read(key).float() for key in self.keys)
        if self.stacked:
            # peft orders the columns of B by rank first and by expert second, the rows of A the other way round.
            a = a.reshape(self.stacked, -1, a.shape[1])
            b = b.reshape(b.shape[0], -1, self.stacked).permute(2, 0, 1)
        product = self.times * self.scaling * (b.flatten(1) @ a.flatten(1) if not self.stacked else b @ a)
        return (product.mT if self.transposed else product).reshape(self.info.shape)
