"""Detection of whether a model uses `num_items_in_batch` to divide its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class NoticedItems(Tensor):
    """A number of items that records whether anything was computed with it.

    Signatures do not tell, because a model may or may not pass its keyword arguments on to the loss.
    """

    uses: list[str]

    @staticmethod
    def of(items: Tensor | int) -> NoticedItems:
        noticed = torch.as_tensor(items).as_subclass(NoticedItems)
        noticed.uses = []
        return noticed

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        own = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
            if any(isinstance(arg, Tensor) and not isinstance(arg, cls) for arg in args):
                own.uses.append(func.__name__)
            elif isinstance(result, Tensor):  # for example, moved to another device
                result = result.as_subclass(cls)
                result.uses = own.uses
        return result
