"""Describe what a module's output depends on besides its tensors: its attributes with plain values, and its hooks."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# Libraries whose attributes are settings; in other packages they may be names or counters.
LIBRARIES = ("torch", "timm", "open_clip", "diffusers")
# Attributes of every module are torch's own bookkeeping.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
NOT_COMPUTED = re.compile(
    r"distilled_training|momentum|inplace|sparse|scale_grad_by_freq"  # read in training only
    r"|_?grad(ient)?_checkpointing(_func)?|use_checkpoint"
    r"|(.*_)?init(_.*)?|initializer_.*|(pretrained)?_model_args"  # read when a module is made
    r"|fused_attn|_fast_norm|_chunk_(size|dim)|use_slicing|tile_.*|_from_deprecated_attn_block"  # the same numbers
    r"|num_classes|num_labels|n_classes|label_names"  # heads may have other widths
    r"|output_dict"  # the same numbers in another container
    r"|pretrained_cfg|default_cfg|timm_config|open_clip_config|image_mean|image_std|preprocess_cfg|sample_size"
    r"|_?name_or_path|_commit_hash|hf_device_map|_(is_)?hf_.*|_old_forward|_version|_compiled_call_impl"
    r"|_(is_)?(fsdp|ddp)_.*|_flat_weight.*|_all_weights|processor_class"
    r"|_of_retex"  # the mark of a model that a `RetexModel` wraps
    r"|global_step|current_step|step|_?step_count|(current_|last_|global_)?epoch|num_updates|num_batches_tracked"
)
# Affixes of diffusers' attention processors that compute the same with different kernels.
KERNELS = re.compile(r"^(XFormers|Sliced|Fused|XLAFlash|XLAFlux)|2_0$|NPU$")
HOOKS = {"forward hooks": "_forward_hooks", "forward pre-hooks": "_forward_pre_hooks"}
# Attribute in which diffusers keeps the configuration that its `forward` methods read.
DIFFUSERS_CONFIG = "_internal_dict"
DEPTH = 6


class _Missing:
    def __repr__(self) -> str:
        return "missing"


# Stand for attributes that are missing, and for those without a plain value (modules, tensors, other objects).
MISSING, OPAQUE = _Missing(), object()


@dataclass(frozen=True)
class Named:
    """Identify a callable by its name; `content` distinguishes callables of the same name (lambdas, partials)."""

    name: str
    content: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        return self.name


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module that inference may depend on."""
    found = dict(vars(module))
    config = found.pop(DIFFUSERS_CONFIG, None)
    forward = found.get("forward")
    # accelerate and this package replace `forward` by wrappers that call the one of the class.
    if "_hf_hook" in found or type(forward).__module__.startswith("retex_hf."):
        found.pop("forward", None)
    kept = {name: value for name, value in found.items() if not _is_unused(module, name, value)}
    if isinstance(config, Mapping):
        kept |= {
            f"config.{key}": value
            for key, value in config.items()
            if not key.startswith("_") and not _is_unused(module, key, value)
        }
    return {name: described(value) for name, value in kept.items()}


def attribute_differences(one: nn.Module, other: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the plain attributes in which two modules of one class differ, with both values."""
    ours, theirs = attributes(one), attributes(other)
    for name in {**ours, **theirs}:
        values = [_value_of(module, found, name) for module, found in ((one, ours), (other, theirs))]
        # A value that is plain in one module only is a cache, or a module or tensor, which is compared elsewhere.
        if OPAQUE not in values and not _equal(*values) and not _is_elsewhere(one, other, name):
            yield name, *values


def hook_difference(one: nn.Module, other: nn.Module) -> str | None:
    """Describe the first kind of hooks in which two modules differ; return None if they have the same hooks."""
    for kind, attribute in HOOKS.items():
        ours, theirs = (_hooks(module, attribute) for module in (one, other))
        if ours != theirs:
            return f"has {kind} {_listed(ours)}, not {_listed(theirs)}"
    return None


def is_setting(module: nn.Module, name: str, values: list[Any]) -> bool:
    """Return whether an attribute is a setting of a library's class.

    An attribute that the class never mentions was set from outside, as a note. One that only one of two modules has
    was added by another release of the library, or by running the model.
    """
    if name == "forward":  # a replaced `forward` changes the output, as a hook does
        return True
    kind: type = type(module)
    if kind.__module__.partition(".")[0] not in LIBRARIES or MISSING in values:
        return False
    return name.startswith("config.") or name in _names_in(kind)


def described(value: Any, depth: int = 0) -> Any:
    """Convert a plain value to a form that can be compared and printed; return `OPAQUE` for any other value."""
    if isinstance(value, (nn.Module, Tensor)) or depth > DEPTH:
        return OPAQUE
    if isinstance(value, enum.Enum):
        return Named(str(value))
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (list, tuple)):
        entries = tuple(described(entry, depth + 1) for entry in value)
        return OPAQUE if any(entry is OPAQUE for entry in entries) else entries
    if isinstance(value, Mapping):
        items = {key: described(entry, depth + 1) for key, entry in value.items()}
        return OPAQUE if any(entry is OPAQUE for entry in items.values()) else items
    return _described_callable(value, depth) if callable(value) else OPAQUE


def _described_callable(value: Any, depth: int) -> Any:
    if isinstance(value, partial):
        given = {"": value.func, **{str(n): entry for n, entry in enumerate(value.args)}, **value.keywords}
        parts = {key: described(entry, depth + 1) for key, entry in given.items()}
        shown = [f"{key}={p!r}" if key.isidentifier() else repr(p) for key, p in parts.items() if p is not OPAQUE]
        return Named(f"partial({', '.join(shown)})", parts)
    if isinstance(value, MethodType):
        value = value.__func__
    if not hasattr(value, "__qualname__"):  # a callable object
        kind = type(value)
        name = KERNELS.sub("", kind.__qualname__) if kind.__module__.startswith("diffusers.") else kind.__qualname__
        return Named(f"{kind.__module__}.{name}")
    name = ".".join(filter(None, (getattr(value, "__module__", None), value.__qualname__)))
    return Named(name, _content(value, depth))


def _content(function: Any, depth: int) -> Any:
    """Return the code of a Python function with its defaults and closure; None for any other callable."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # the cell is still empty
            continue
    # Leave out containers, which change while a hook runs (a list that it fills).
    fixed = [value for value in values if not isinstance(value, (list, Mapping))]
    return _code_content(code), [described(value, depth + 1) for value in fixed]


def _code_content(code: CodeType) -> tuple[Any, ...]:
    constants = [_code_content(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


def _is_unused(module: nn.Module, name: str, value: Any) -> bool:
    """Return whether no output in evaluation depends on an attribute."""
    if name in OF_EVERY_MODULE or NOT_COMPUTED.fullmatch(name):
        return True
    if name == "padding_idx":  # only `EmbeddingBag` excludes padding from its output
        return not isinstance(module, nn.EmbeddingBag)
    return "drop" in name.lower() and _are_numbers(value)


def _are_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_are_numbers(entry) for entry in value)
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _value_of(module: nn.Module, found: dict[str, Any], name: str) -> Any:
    """Return an attribute of a module, or the default of its class."""
    if name in found:
        return found[name]
    default = getattr(type(module), name, MISSING)
    return MISSING if default is MISSING else described(default)


def _is_elsewhere(one: nn.Module, other: nn.Module, name: str) -> bool:
    """Return whether a name is a submodule or a tensor in one of two modules: these are compared elsewhere."""
    return any(name in places for m in (one, other) for places in (m._modules, m._parameters, m._buffers))


def _equal(one: Any, other: Any) -> bool:
    return one == other or repr(one) == repr(other) == "nan"


def _hooks(module: nn.Module, attribute: str) -> list[Any]:
    """Return a module's hooks of one kind, in order, each with whether it gets keyword arguments."""
    with_kwargs = getattr(module, f"{attribute}_with_kwargs", {})
    return [(described(hook), key in with_kwargs) for key, hook in getattr(module, attribute).items()]


def _listed(hooks: list[Any]) -> str:
    return f"({', '.join(repr(hook) for hook, _ in hooks)})"


@cache
def _names_in(kind: type) -> frozenset[str]:
    """Return the names that a class defines or that its code mentions."""
    names: set[str] = set()
    for cls in kind.__mro__:
        if cls in (nn.Module, object):
            continue
        names |= vars(cls).keys() | vars(cls).get("__annotations__", {}).keys()
        for value in vars(cls).values():
            functions = (value.fget, value.fset) if isinstance(value, property) else (value,)
            for function in functions:
                names.update(_names_in_function(function))
    return frozenset(names)


def _names_in_function(function: Any) -> Iterator[str]:
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield from _names_in_code(code)
        function = getattr(function, "__wrapped__", None)


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)
