"""Tensors that have one value per task, and the torch functions defined on them.

In the copy of the model that runs mixed batches, every recovered parameter is a `TaskTensor`. It has the shape, dtype
and device of the merged parameter, and intercepts every torch function called on it. A function runs in a row-by-row
form (`operations`), or on the value of every task (shapes, elementwise functions); where neither is known to be right,
it raises `MixedUnsupported`. A task tensor has no storage, so code that bypasses torch's Python functions (TorchScript,
fused kernels) fails instead of computing wrong results. A model is computed exactly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .call import MixedCall, MixedUnsupported, Origin, current_call, is_running
from .sources import Computed, TensorSource

# Attributes and methods that do not read a tensor's values.
DESCRIPTIONS = frozenset(
    {"dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "is_meta", "is_quantized", "layout", "is_sparse",
     "is_nested", "is_leaf", "grad_fn", "is_mkldnn", "is_cpu", "is_mps", "is_xpu", "itemsize", "nbytes",
     "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous",
     "get_device", "__len__", "_is_view"}
)  # fmt: skip
# Those that depend on the shape, which differs between heads of different widths.
SIZES = frozenset({"shape", "size", "numel", "nelement", "stride", "nbytes", "__len__"})
# Functions of one tensor, applied to every task's value separately.
PER_VALUE = frozenset(
    {"view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "flatten", "unflatten", "contiguous", "to",
     "type", "type_as", "float", "double", "half", "bfloat16", "detach", "clone", "dropout", "data", "T", "mT", "t",
     "exp", "log", "neg", "__neg__", "sigmoid", "tanh", "relu", "softplus", "silu", "abs", "sqrt", "rsqrt", "pow",
     "__pow__", "square", "split", "chunk"}
)  # fmt: skip
# Functions of two or more tensors that broadcast their operands, aligned at the last axis.
ELEMENTWISE = frozenset(
    {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "mul", "__mul__", "__rmul__", "div",
     "__truediv__", "__rdiv__", "__rtruediv__", "true_divide", "maximum", "minimum", "where"}
)  # fmt: skip
JOINING = frozenset({"cat", "concat", "concatenate"})
# Functions of several tensors that have the rows along the leading axis of all of them.
ALIGNED = JOINING | {"scaled_dot_product_attention"}
IN_PLACE = frozenset({"add_", "__iadd__", "sub_", "__isub__", "mul_", "__imul__", "div_", "__itruediv__"})
WRITING = frozenset(
    {"__setitem__", "__set__", "__iand__", "__ior__", "__ixor__", "__ipow__", "__imod__", "__ifloordiv__",
     "__ilshift__", "__irshift__"}
)  # fmt: skip
# Functions whose result never shares memory with a parameter: it may be written to.
ALLOCATING = ELEMENTWISE | {
    "linear", "matmul", "__matmul__", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "group_norm", "embedding"
}  # fmt: skip


# Row-by-row forms of functions, by name; filled by `operations`, which imports this module.
OPERATIONS: dict[str, Callable] = {}


class TaskTensor(Tensor):
    """A tensor with one value per task, provided by `source`."""

    source: TensorSource

    @staticmethod
    def __new__(cls, visible: Tensor, source: TensorSource) -> TaskTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls, visible.shape, strides=visible.stride(), dtype=visible.dtype, device=visible.device
        )
        tensor.source = source
        return tensor

    def __deepcopy__(self, memo: dict) -> TaskTensor:
        return self  # it belongs to one copy of the model

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in DESCRIPTIONS:
            if name in SIZES and is_running() and not args[0].source.has_one_shape:
                raise MixedUnsupported(
                    f"The model asks for the size of {args[0].source.name!r}, which tasks differ in."
                )
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        call = current_call()
        first = args[0] if args and isinstance(args[0], cls) else None
        if first is not None and (writes(name) or (kwargs.get("inplace") and not first.source.is_allocated)):
            raise MixedUnsupported(f"{name} writes to {described(first)}, which rows of different tasks share.")
        if kwargs.get("max_norm") is not None:
            raise MixedUnsupported(f"{name} with max_norm writes to a parameter, which rows of different tasks share.")
        if name in OPERATIONS:
            return OPERATIONS[name](call, func, *args, **kwargs)
        if name in ("expand", "repeat"):
            return _repeated(call, func, *args, **kwargs)
        if name in PER_VALUE and isinstance(args[0], cls):
            return per_task(call, func, args, kwargs)
        if name in ELEMENTWISE or (name in IN_PLACE and not isinstance(args[0], cls)):
            return _elementwise(call, func, args, kwargs)
        return _other(call, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a plain function
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise MixedUnsupported(f"{func} reads a recovered parameter past torch's Python functions.")


def described(tensor: TaskTensor) -> str:
    return "a computed value" if tensor.source.name is None else repr(tensor.source.name)


def origin_of(*tensors: Any) -> Origin:
    """Return the key for decisions about a function of task tensors: a parameter's name, if one is among them."""
    sources = [tensor.source for tensor in tensors if isinstance(tensor, TaskTensor)]
    return next((source.name for source in sources if source.name is not None), sources[0].origin)


def writes(name: str) -> bool:
    """Return whether a function changes its first argument."""
    return name in WRITING or name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def values_of(call: MixedCall, value: Any) -> list[Any]:
    """Return a value for each segment: a `TaskTensor`'s own, also within a list; repeat anything else."""
    if isinstance(value, (list, tuple)) and any(isinstance(item, TaskTensor) for item in value):
        return [type(value)(items) for items in zip(*(values_of(call, item) for item in value), strict=True)]
    return value.source.values(call) if isinstance(value, TaskTensor) else [value] * len(call.segments)


def per_task(call: MixedCall, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply a function to the values of every task; the result has one value per task, too."""
    if kwargs.get("out") is not None:
        raise MixedUnsupported(f"{name_of(func)} writes the values of several tasks into one tensor.")
    columns = [values_of(call, arg) for arg in args]
    named = {key: values_of(call, value) for key, value in kwargs.items()}
    results = [
        func(*(column[part] for column in columns), **{key: column[part] for key, column in named.items()})
        for part in range(len(call.segments))
    ]
    own = (tensor for tensor in flat((args, tuple(kwargs.values()))) if isinstance(tensor, TaskTensor))
    history = (name_of(func), *(tensor.source.origin for tensor in own))
    # In place, the result is the argument, which was allocated before.
    is_allocated = name_of(func) in ALLOCATING or bool(kwargs.get("inplace"))
    if type(results[0]) in (list, tuple):
        parts = enumerate(zip(*results, strict=True))
        return type(results[0])(_computed(list(part), hash((history, number))) for number, part in parts)
    return _computed(results, hash(history), is_allocated)


def _computed(values: list[Any], origin: int, is_allocated: bool = False) -> TaskTensor:
    if not isinstance(values[0], Tensor):
        raise MixedUnsupported(f"The model reads a {type(values[0]).__name__} from the values of several tasks.")
    if any(value.shape != values[0].shape for value in values):
        raise MixedUnsupported("The model computes with heads whose sizes differ.")
    return TaskTensor(values[0], Computed(values, origin, is_allocated=is_allocated))


def by_row(call: MixedCall, tensor: TaskTensor, size: int, ndim: int) -> Tensor:
    """Return the value of each row's task, (size, ...) with `ndim` axes, aligned at the last one."""
    shape = tensor.shape
    if len(shape) >= ndim:
        if len(shape) > ndim or shape[0] != 1:
            raise MixedUnsupported(f"{described(tensor)} of shape {tuple(shape)} is combined along the rows' axis.")
        shape = shape[1:]

    def rows() -> Tensor:
        values = torch.stack(tensor.source.values(call))[call.index(size, tensor.device)]
        return values.view(size, *[1] * (ndim - 1 - len(shape)), *shape)

    return rows() if tensor.source.name is None else call.kept(("rows", tensor.source.name, size, ndim), rows)


def _elementwise(call: MixedCall, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    ndim = max(arg.ndim for arg in args if isinstance(arg, Tensor))
    with_rows = [plain for plain in _with_rows(call, func, args) if plain.ndim == ndim]
    if not with_rows:
        if name_of(func) in IN_PLACE:
            raise MixedUnsupported(f"{name_of(func)} writes the values of several tasks into one tensor.")
        return per_task(call, func, args, kwargs)
    size = len(with_rows[0])
    return func(*(by_row(call, arg, size, ndim) if isinstance(arg, TaskTensor) else arg for arg in args), **kwargs)


def _with_rows(call: MixedCall, func: Callable, args: Any) -> list[Tensor]:
    """Return the ordinary tensors among the arguments that have rows along their leading axis.

    A task tensor has no rows, so an ordinary tensor that shares its leading axis with one must not have any either.
    """
    tensors = flat(args)
    tasked = [tensor for tensor in tensors if isinstance(tensor, TaskTensor)]
    origin = origin_of(*tasked)
    named = next((tensor for tensor in tasked if tensor.source.name == origin), None)
    found = []
    for position, tensor in enumerate(tensors):
        if tensor is named or (named is None and isinstance(tensor, TaskTensor)):
            continue
        shares = any(other.ndim >= tensor.ndim and other.shape[0] != 1 for other in tasked if other.ndim)
        if named is not None:
            # Query every partner of a parameter, task tensor or not, because a probe compares the logs.
            has_rows = call.entries_per_row(origin, tensor) is not None and not isinstance(tensor, TaskTensor)
            if has_rows and shares and len(call.segments) > 1:
                raise MixedUnsupported(f"{name_of(func)} combines {origin!r} with rows along their own axis.")
        elif shares:
            has_rows = False
            call.without_rows(hash((name_of(func), origin, position)), tensor.shape[0] if tensor.ndim else 0)
        else:
            has_rows = call.entries_per_row(hash((name_of(func), origin, position)), tensor) is not None
        if has_rows and not shares:
            found.append(tensor)
    return found


def _repeated(call: MixedCall, func: Callable, tensor: TaskTensor, *sizes: Any) -> Tensor:
    """Apply `expand` or `repeat` to a parameter, for every row (a class token)."""
    target = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if len(target) >= 2 and len(target) >= tensor.ndim and target[0] > 0:
        meeting = hash((name_of(func), tensor.source.origin))
        if call.entries_of_size(meeting, target[0], target[0]) is not None:
            rows = by_row(call, tensor, target[0], len(target))
            return func(rows, target if name_of(func) == "expand" else (1, *target[1:]))
    return per_task(call, func, (tensor, *sizes), {})


def _other(call: MixedCall, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply any other function.

    Without rows among its arguments, every task gets a result. With rows, the function must be known to keep them, and
    its task tensors must have a leading axis of size 1 in the rows' place (an attention bias, a class token
    concatenated to its sequence).
    """
    arguments = (args, tuple(kwargs.values()))
    with_rows = _with_rows(call, func, arguments)
    if not with_rows:
        if writes(name_of(func)):
            raise MixedUnsupported(f"{name_of(func)} writes the values of several tasks into one tensor.")
        return per_task(call, func, args, kwargs)
    if name_of(func) in JOINING and _axis(args, kwargs) in (0, -with_rows[0].ndim):
        raise MixedUnsupported(f"{name_of(func)} joins what has one value per task to rows along their own axis.")
    for value in flat(arguments):
        fits = name_of(func) in ALIGNED and value.ndim > 1 and value.shape[0] == 1
        if isinstance(value, TaskTensor) and not fits:
            raise MixedUnsupported(f"{name_of(func)} of {described(value)} and rows is unknown.")

    def settle(value: Any) -> Any:
        if isinstance(value, TaskTensor):
            return by_row(call, value, len(with_rows[0]), value.ndim)
        return type(value)(settle(item) for item in value) if isinstance(value, (list, tuple)) else value

    return func(*settle(args), **{key: settle(value) for key, value in kwargs.items()})


def _axis(args: tuple, kwargs: dict[str, Any]) -> int:
    """Return the axis that tensors are joined along."""
    return args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))


def flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in flat(value)] if isinstance(values, (list, tuple)) else []


@lru_cache(maxsize=1024)  # called for every function that meets a parameter
def name_of(func: Callable) -> str:
    # An attribute such as `.dtype` arrives as the `__get__` of its descriptor.
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
