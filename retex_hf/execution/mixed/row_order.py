"""Whether a model keeps the rows of a batch in their places.

In one pass, the place of an entry tells its task. A model may move entries: sort its rows by length, pack the tokens
that a mask leaves, cut a batch in pieces. Comparing outputs does not show all of it, because rows of a probe may happen
to be in order. So two probes with different numbers of rows are compared function by function: an axis whose size
follows the number of rows is one of rows, and a function that can move entries along it is refused, but for a selection
by something that does not depend on the inputs (`x[arange(rows), position]`). Later calls refuse functions that the
probes did not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .call import MixedCall, MixedUnsupported, current_call
from .task_tensor import DESCRIPTIONS, ELEMENTWISE, IN_PLACE, TaskTensor, flat, name_of, writes

INDEXING = frozenset({"__getitem__", "__setitem__", "index_put", "index_put_"})
# Functions along an axis that take or put entries where an index says.
BY_INDEX = frozenset(
    {"index_select", "gather", "take_along_dim", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
     "scatter_reduce_", "index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_"}
)  # fmt: skip
# Functions along an axis (by default this one) that move, cut or order entries.
ALONG_AXIS = {
    "sort": -1, "argsort": -1, "topk": -1, "msort": 0, "unique": None, "unique_consecutive": None, "split": 0,
    "split_with_sizes": 0, "tensor_split": 0, "chunk": 0, "unbind": 0, "__iter__": 0, "narrow": 0, "narrow_copy": 0,
    "select": 0, "flip": None, "flipud": 0, "roll": None, "cat": 0, "concat": 0, "concatenate": 0, "unfold": 0,
    "vsplit": 0, "dsplit": 2, "hsplit": 1,
}  # fmt: skip
# Where the axis stands among the arguments, if not second.
AXIS_AT = {"topk": 2, "split": 2, "split_with_sizes": 2, "tensor_split": 2, "chunk": 2, "roll": 2, "argsort": 1}
# Functions that take entries from anywhere.
ANYWHERE = frozenset({"take", "masked_select", "put", "put_", "as_strided", "tensordot", "nonzero_static", "vstack"})
# Products of matrices, and where their left factor stands.
PRODUCTS = {"matmul": 0, "__matmul__": 0, "mm": 0, "mv": 0, "bmm": 0, "linear": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
# Functions whose result may hold what Python code made of the inputs.
FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "frombuffer", "scalar_tensor"})
# Functions that leave every entry in its place, or reduce all of them to one: new ones do no harm.
IN_THEIR_PLACES = DESCRIPTIONS | ELEMENTWISE | IN_PLACE | {
    "to", "float", "half", "bfloat16", "double", "bool", "int", "long", "type", "type_as", "contiguous", "clone",
    "detach", "masked_fill", "masked_fill_", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__",
    "__gt__", "__ge__", "logical_and", "logical_or", "logical_not", "bitwise_not", "bitwise_and", "bitwise_or",
    "__and__", "__or__", "__invert__", "__bool__", "__int__", "__float__", "__index__", "item", "isnan", "isinf",
    "clamp", "exp", "log", "neg", "abs", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "gelu", "silu", "dropout",
    "softmax", "zeros_like", "ones_like", "full_like", "empty_like", "finfo", "is_tracing", "__get__",
}  # fmt: skip

# A function that was seen; one that indexes comes with the form of its index.
Seen = Any
# Axes of each tensor among a function's arguments that follow the number of rows.
RowAxes = list[frozenset[int]]


class RowOrder(TorchFunctionMode):
    """Refuses functions of the model that its probes did not see, and that may move rows."""

    def __init__(self, call: MixedCall, seen: frozenset[Seen]) -> None:
        super().__init__()
        self._call, self._seen = call, seen
        # This runs for every function of every step of `generate`.
        self._known = set(seen - _INDEXING)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in self._known and self._call.watched:
            name = name_of(func)
            if name not in INDEXING and name in IN_THEIR_PLACES:
                self._known.add(func)
            elif name not in INDEXING or _form(name, args) not in self._seen:
                raise MixedUnsupported(f"the model calls {name}, which it did not do in a probe.")
        return func(*args, **kwargs) if kwargs else func(*args)


class ShapeRecord(TorchFunctionMode):
    """Records the functions of the model and the shapes of the tensors that they get."""

    def __init__(self, call: MixedCall) -> None:
        super().__init__()
        self._call = call
        self.functions: list[tuple[str, list[torch.Size]]] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self._call.watched and (name := name_of(func)) not in DESCRIPTIONS:
            self.functions.append((name, [tensor.shape for tensor in _plain(args, kwargs)]))
        return func(*args, **(kwargs or {}))


class RowOrderProbe(TorchFunctionMode):
    """Refuses functions that may move rows, told by comparison with the `record` of a probe with fewer rows.

    `seen` collects the functions that may run in later calls.
    """

    def __init__(self, call: MixedCall, model: nn.Module, inputs: Iterable[Tensor], record: ShapeRecord) -> None:
        super().__init__()
        self.seen: set[Seen] = set()
        self._call, self._record, self._position = call, record.functions, 0
        self._ratio = (call.rows, record._call.rows)
        # Memory of what does not depend on the inputs, and of what does. Anything else was computed past torch's Python
        # functions (TorchScript, numpy), where nothing shows whether rows were moved.
        self._free = _memory([*model.parameters(), *model.buffers()])
        self._known = _memory(inputs)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name, given = name_of(func), _plain(args, kwargs)
        if self._call.watched and name not in DESCRIPTIONS:
            axes = self._row_axes(name, given)
            for tensor, own in zip(given, axes, strict=True):
                if own and self._depends(tensor) and not _memory([tensor]) <= self._known:
                    raise MixedUnsupported(f"{name} gets rows that were computed past torch's Python functions.")
            if reason := self._moves(name, args, kwargs, given, axes):
                raise MixedUnsupported(
                    f"the model moves or packs rows ({reason}), so that the place of a row does not tell its task."
                )
            self.seen.add(func)
            if name in INDEXING:
                self.seen.add(_form(name, args))
        result = func(*args, **kwargs)
        self._follow(name, args, kwargs, given, result)
        return result

    def _row_axes(self, name: str, given: list[Tensor]) -> RowAxes:
        before = self._record[self._position] if self._position < len(self._record) else ("nothing", [])
        self._position += 1
        if before[0] != name or [len(shape) for shape in before[1]] != [tensor.ndim for tensor in given]:
            raise MixedUnsupported(f"the model calls {name} or {before[0]}, depending on the number of rows.")
        more, fewer = self._ratio
        found = []
        for tensor, shape in zip(given, before[1], strict=True):
            changed = frozenset(axis for axis, size in enumerate(shape) if tensor.shape[axis] != size)
            if any(tensor.shape[axis] * fewer != shape[axis] * more for axis in changed):
                raise MixedUnsupported(f"{name} gets a size that does not follow the number of rows.")
            found.append(changed)
        return found

    def _follow(self, name: str, args: tuple, kwargs: Mapping[str, Any], given: list[Tensor], result: Any) -> None:
        """Note whether what a function returns or writes depends on the inputs."""
        made = _memory(flat((result,)))
        if any(map(self._depends, given)):
            made |= _memory(flat(args[:1] if writes(name) else (kwargs.get("out"),)))
            self._known |= made
            if writes(name) or kwargs.get("out") is not None:
                self._free -= made
        elif name not in FROM_PYTHON:
            self._free |= made

    def _depends(self, tensor: Tensor) -> bool:
        return not _memory([tensor]) <= self._free

    def _moves(
        self, name: str, args: tuple, kwargs: Mapping[str, Any], given: list[Tensor], axes: RowAxes
    ) -> str | None:
        """Return how a function may move rows, or None if it does not."""
        dependent = [bool(own) and self._depends(tensor) for tensor, own in zip(given, axes, strict=True)]
        if not any(dependent):
            return None
        if name in INDEXING:
            return self._index_moves(name, args, axes)
        if name in ANYWHERE:
            return name
        first = args[0] if args else kwargs.get("input", kwargs.get("tensors"))
        if name in BY_INDEX:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            indices = [tensor for tensor in given[1:] if not tensor.is_floating_point()]
            is_free = bool(indices) and not any(map(self._depends, indices))
            return None if is_free or not _touches(axis, given[0].ndim, axes[0]) else f"{name} along their axis"
        if name in ALONG_AXIS:
            at = AXIS_AT.get(name, 1)
            axis = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else ALONG_AXIS[name]))
            among = len(given) if isinstance(first, (list, tuple)) else 1
            moved = any(_touches(axis, t.ndim, own) for t, own in zip(given[:among], axes[:among], strict=True))
            return f"{name} along their axis" if moved else None
        if name == "repeat_interleave":
            return name if any(map(self._depends, given[1:])) else None
        if name == "embedding":
            tables = [n for n, tensor in enumerate(given) if tensor.is_floating_point()]
            return "a lookup among them" if any(dependent[n] and 0 in axes[n] for n in tables) else None
        if name in PRODUCTS:
            return _product_sums(name, args, kwargs, given, axes)
        if name == "einsum":
            # Parameters with one value per task meet rows by their own rules.
            return None if len(given) < len(flat(args)) else _einsum_sums(args, axes)
        return None

    def _index_moves(self, name: str, args: tuple, axes: RowAxes) -> str | None:
        tensor, values = args[0], flat(args[2:3])
        if isinstance(tensor, TaskTensor):
            return None
        writes_rows = any(map(self._depends, values)) and any(value.numel() > 1 for value in values)
        for part, places in _parts(args[1], tensor.ndim):
            if not places & axes[0]:
                continue
            if isinstance(part, slice):
                whole = part.start in (None, 0) and part.step in (None, 1)
                size = tensor.shape[min(places)]
                whole = whole and (part.stop is None or part.stop == size)
            elif isinstance(part, Tensor) and part.ndim > 0:
                # Writing one value wherever a mask says moves nothing.
                whole = not self._depends(part) or (name != "__getitem__" and not writes_rows)
            else:
                whole = False
            if not whole:
                return f"{name} along their axis"
        return None


def watch(module: nn.Module) -> None:
    """Let the torch functions of a module's calls be judged."""
    # Hooks, because a wrapped `forward` would hold the module, and the module it.
    module.register_forward_pre_hook(_begin, prepend=True)
    module.register_forward_hook(_end, always_call=True)


@contextmanager
def watched() -> Iterator[None]:
    """Let the torch functions of a block be judged."""
    _begin()
    try:
        yield
    finally:
        _end()


def _begin(*_: Any) -> None:
    current_call().watched += 1


def _end(*_: Any) -> None:
    current_call().watched -= 1


def _parts(index: Any, ndim: int) -> Iterable[tuple[Any, frozenset[int]]]:
    """Yield the parts of an index with the axes that they take."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_axes(part) for part in parts if part is not Ellipsis)
    axis = 0
    for part in parts:
        count = ndim - taken if part is Ellipsis else _axes(part)
        if part is not None and part is not Ellipsis:
            yield part, frozenset(range(axis, axis + count))
        axis += count


def _axes(part: Any) -> int:
    """Return how many axes a part of an index takes."""
    if part is None:
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _form(name: str, args: tuple) -> Seen:
    """Return the form of an index, but for its numbers."""
    index = args[1]

    def kind(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.dtype, part.ndim
        if isinstance(part, slice):
            return "all" if part == slice(None) else "slice"
        return type(part)

    return name, args[0].ndim, tuple(map(kind, index)) if isinstance(index, tuple) else kind(index)


def _touches(axis: Any, ndim: int, rows: frozenset[int]) -> bool:
    """Return whether a function along an axis, several, or (None) all entries touches rows."""
    if axis is None:
        return bool(rows)
    chosen = axis if isinstance(axis, (list, tuple)) else [axis]
    return any(not isinstance(one, int) or one % ndim in rows for one in chosen)


def _product_sums(name: str, args: tuple, kwargs: Mapping[str, Any], given: list[Tensor], axes: RowAxes) -> str | None:
    """Return whether a product of matrices sums over rows."""
    factors = flat((args, tuple(kwargs.values())))[PRODUCTS[name] :][:2]
    if any(isinstance(factor, TaskTensor) for factor in factors):
        return None  # it meets rows by its own rules
    left, right = ((factor, axes[_place(given, factor)]) for factor in factors)
    inner = -1 if name == "linear" or right[0].ndim == 1 else -2
    return "a sum over them" if left[0].ndim - 1 in left[1] or right[0].ndim + inner in right[1] else None


def _place(tensors: list[Tensor], tensor: Tensor) -> int:
    return next(place for place, one in enumerate(tensors) if one is tensor)


def _einsum_sums(args: tuple, axes: RowAxes) -> str | None:
    """Return whether an einsum sums over rows."""
    if not (isinstance(args[0], str) and "->" in args[0] and "..." not in args[0]):
        return "einsum"
    inputs, output = args[0].replace(" ", "").split("->")
    labels = {
        label for term, own in zip(inputs.split(","), axes, strict=True) for n, label in enumerate(term) if n in own
    }
    return None if labels <= set(output) else "a sum over them"


def _plain(args: Any, kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    found = flat((args, tuple((kwargs or {}).values())))
    return [tensor for tensor in found if not isinstance(tensor, TaskTensor)]


def _memory(tensors: Iterable[Tensor]) -> set[StorageWeakRef]:
    """Return the memory of tensors; parameters that have one value per task have none."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if not isinstance(tensor, TaskTensor)}


_INDEXING = frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in INDEXING if hasattr(owner, name))
