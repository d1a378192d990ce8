"""Recovered experts as models: light copies of the wrapped model around other tensors.

An expert is a module tree of its own that shares every parameter with the merged model except those it recovers.
Nothing is swapped in and out of the merged model, so calls cannot disturb each other, whatever raises or runs beside
them.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

from torch import Tensor, nn

from ..recovery import RecoveryModule


def recover_tensors(merged: Mapping[str, Tensor], recovery: RecoveryModule, weights: Tensor) -> dict[str, Tensor]:
    """The recovered parameters of a mixture of tasks, each in the merged tensor's dtype."""
    embedding = recovery.embed(weights)
    recovered = {}
    for name in recovery:
        recovered[name] = recovery.recover(name, merged[name], embedding).to(merged[name].dtype)
    return recovered


def copy_with(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model's module tree that holds `tensors` (of any shape) and shares all other parameters; ties are
    kept. Configurations are shared too, so that a setting changed on the model holds for its copies. Buffers are not:
    modules write to them (batch normalisation in training)."""
    named = model.state_dict(keep_vars=True)
    # deepcopy takes what is in the memo instead of copying it.
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    memo = {id(shared): shared for shared in (*model.parameters(), *configs)}
    for name, tensor in tensors.items():
        is_parameter = isinstance(named[name], nn.Parameter)
        # A tensor that carries gradients to the recovery module must stay as it is.
        as_parameter = is_parameter and not tensor.requires_grad
        memo[id(named[name])] = nn.Parameter(tensor, requires_grad=False) if as_parameter else tensor
    expert = copy.deepcopy(model, memo)
    for name, tensor in tensors.items():
        if tensor.shape != named[name].shape:
            _update_size(expert.get_submodule(name.rpartition(".")[0]), tensor)
    return expert


def _update_size(module: nn.Module, weight: Tensor) -> None:
    if isinstance(module, nn.Linear) and weight.ndim == 2:
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]


class ExpertCache:
    """Keeps the most recently used experts, up to a number of bytes of tensors of their own. Safe under threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.RLock()
        self._items: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], tuple[object, int]]) -> object:
        """The item under a key; `make()` returns a new item and its bytes. Too large an item is not kept."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key][0]
            item, size = make()
            if size <= self.capacity:
                self._items[key] = (item, size)
                while self.bytes > self.capacity:
                    # What takes no bytes of its own frees none.
                    del self._items[next(key for key, (_, size) in self._items.items() if size)]
            return item

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def clear(self) -> None:
        with self._lock:
            self._items.clear()

    def __getstate__(self) -> int:
        return self.capacity  # a copied or pickled model starts with an empty cache and a lock of its own

    def __setstate__(self, capacity: int) -> None:
        self.__init__(capacity)


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
