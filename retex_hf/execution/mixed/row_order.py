"""Whether a model keeps the rows of a batch in their places.

In one pass, the place of an entry tells its task. A model that sorts its rows by length, or packs the tokens that a
mask leaves, moves entries by what the rows contain: two rows of a probe may happen to be in order already, and the rows
of a later batch not. So a probe follows which tensors depend on the inputs and refuses a selection along the rows' axis
by one of them, and later calls refuse selections that the probe did not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .call import MixedUnsupported, Selection, current_call
from .task_tensor import TaskTensor, flat, name_of, writes


def _functions(*names: str) -> dict[Any, str]:
    """Return torch's functions of these names, as functions and as methods."""
    owners = (torch, Tensor)
    return {getattr(owner, name): name for name in names for owner in owners if hasattr(owner, name)}


INDEXING = _functions("__getitem__", "__setitem__", "index_put", "index_put_")
# Functions with an axis and an index, in this order after the tensor.
ALONG_AXIS = _functions(
    "index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "scatter_reduce_", "index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_",
)  # fmt: skip
# Those that take entries from anywhere.
ANYWHERE = _functions("take", "masked_select", "masked_scatter", "masked_scatter_", "put", "put_", "take_along_dim")
# Those that order entries by their values along an axis, by default the last one, or (unique) the leading one.
ORDERING = _functions("sort", "argsort", "topk", "msort", "unique", "unique_consecutive", "unique_dim")
SELECTING = INDEXING | ALONG_AXIS | ANYWHERE | ORDERING
# Their entries may list rows in an order that was computed outside of torch.
FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})


class RowOrder(TorchFunctionMode):
    """Refuses selections along the rows' axis that a probe did not see."""

    def __init__(self, seen: frozenset[Selection]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in SELECTING and current_call().is_watched:
            selection, _ = _selection(SELECTING[func], args, kwargs or {})
            if selection is not None and selection not in self.seen:
                raise MixedUnsupported(f"the model calls {selection[0]} on its rows, which it did not do in a probe.")
        return func(*args, **(kwargs or {}))


class RowOrderProbe(TorchFunctionMode):
    """Refuses selections along the rows' axis that depend on the inputs; `seen` collects the others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: set[Selection] = set()
        # Memory that does not depend on the inputs. What comes from elsewhere (TorchScript, numpy) counts as dependent.
        self._free = _memory([*model.parameters(), *model.buffers()])

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in SELECTING and current_call().is_watched:
            self._check(SELECTING[func], args, kwargs)
        result = func(*args, **kwargs)
        name = name_of(func)
        if any(map(self._depends, flat((args, tuple(kwargs.values()))))):
            written = args[:1] if writes(name) else (kwargs.get("out"),)
            self._free -= _memory(flat(written))
        elif name not in FROM_PYTHON:
            self._free |= _memory(flat((result,)))
        return result

    def _depends(self, tensor: Tensor) -> bool:
        return bool(_memory([tensor]) - self._free)

    def _check(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        selection, chosen_by = _selection(name, args, kwargs)
        if selection is None:
            return
        moved = [args[0]] if name not in ("__setitem__", "index_put", "index_put_") else flat(args[2:3])
        by_contents = any(not isinstance(index, Tensor) or self._depends(index) for index in chosen_by)
        if by_contents and any(map(self._depends, moved)):
            raise MixedUnsupported(
                f"the model moves or packs rows by what they contain ({name} along their axis), so that the place of a "
                "row does not tell its task."
            )
        self.seen.add(selection)


def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's `forward` that runs under the current call's watch over the order of rows."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call.watch is None or call.is_watched:
            return forward(*args, **kwargs)
        call.is_watched = True
        try:
            with call.watch:
                return forward(*args, **kwargs)
        finally:
            call.is_watched = False

    return run


def _selection(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Selection | None, list[Any]]:
    """Return a selection along the leading axis of a tensor, None for any other call, and what it is made by."""
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, Tensor) or isinstance(tensor, TaskTensor) or tensor.ndim == 0:
        return None, []
    found: list[Any] = []
    if name in ("__getitem__", "__setitem__", "index_put", "index_put_"):
        index = args[1] if len(args) > 1 else kwargs["indices"]
        found = _leading(index if isinstance(index, tuple) or name.startswith("index_put") else (index,), tensor.ndim)
    elif name in ORDERING.values():
        default = 0 if name.startswith(("unique", "msort")) else -1
        position = 2 if name == "topk" else 1
        axis = kwargs.get("dim", args[position] if len(args) > position else default)
        found = [tensor] if axis is None or axis in (0, -tensor.ndim) or not isinstance(axis, int) else []
        found = found if tensor.ndim > 1 or len(tensor) > 1 else []
    elif name in ANYWHERE.values():
        found = flat((args[1:2], tuple(kwargs.values())))
    else:
        axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
        found = [index] if axis in (0, -tensor.ndim) else []
    if not found:
        return None, []
    kinds = ",".join(f"{index.dtype}{index.ndim}" if isinstance(index, Tensor) else "list" for index in found)
    return (name, tensor.ndim, kinds), found


def _leading(index: Iterable[Any], ndim: int) -> list[Any]:
    """Return the part of an index that selects entries of the leading axis, other than a slice or one number."""
    for part in index:
        if part is None:
            continue
        if part is Ellipsis:
            axes = sum(_axes(other) for other in index if other is not Ellipsis)
            if axes < ndim:
                return []
            continue
        is_plain = isinstance(part, (int, slice)) or (isinstance(part, Tensor) and part.ndim == 0)
        return [] if is_plain else [part]
    return []


def _axes(part: Any) -> int:
    """Return how many axes a part of an index takes."""
    if part is None:
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _memory(tensors: list[Tensor]) -> set[StorageWeakRef]:
    """Return the memory of tensors; parameters that have one value per task have none."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if not isinstance(tensor, TaskTensor)}
