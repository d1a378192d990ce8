"""Recovered experts as light copies of the wrapped model, and the cache that holds them.

An expert is a separate module tree that shares every parameter with the merged model except those it recovers. Nothing
is swapped in and out of the merged model, so concurrent or failing calls cannot disturb each other.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..recovery import RecoveryModule
from ..utils.locks import renew_in_children

Item = TypeVar("Item")

ALIGNMENT = 64  # bytes; suits vector instructions
# Where timm's windowed attentions (TinyViT, LeViT, EfficientFormer) cache values computed from their weights.
BIAS_CACHE = "attention_bias_cache"


def recover_tensors(merged: Mapping[str, Tensor], recovery: RecoveryModule, weights: Tensor) -> dict[str, Tensor]:
    """Return the recovered parameters of a mixture of tasks, each in the merged tensor's dtype.

    Matrices without gradients share one block of memory per device, so that freeing an expert does not fragment memory.
    """
    # An expert recovered under autocast also serves calls without it.
    with torch.autocast(weights.device.type, enabled=False):
        embedding = recovery.embed(weights)
        if torch.is_grad_enabled() and embedding.requires_grad:
            return {name: recovery.recover(name, merged[name], embedding).to(merged[name].dtype) for name in recovery}
        recovered: dict[str, Tensor] = {}
        for device in {merged[name].device for name in recovery}:
            wide = (name for name in recovery if merged[name].ndim > 1 and merged[name].device == device)
            recovered |= _one_block({name: merged[name] for name in wide})
        for name in recovery:
            out = recovered.get(name)
            direct = out is not None and out.dtype in (torch.float32, torch.float64)
            tensor = recovery.recover(name, merged[name], embedding, out if direct else None)
            if out is None:
                recovered[name] = tensor.to(merged[name].dtype)
            elif not direct:
                out.copy_(tensor)
    return recovered


def _one_block(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate uninitialised tensors of the given shapes and dtypes in one block, on the device of the first."""
    starts, end = {}, 0
    for name, tensor in like.items():
        starts[name] = end
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    device = next(iter(like.values())).device if like else None
    block = torch.empty(end, dtype=torch.uint8, device=device)
    pieces = {}
    for name, tensor in like.items():
        piece = block[starts[name] : starts[name] + tensor.numel() * tensor.element_size()]
        pieces[name] = piece.view(tensor.dtype).view(tensor.shape)
    return pieces


def copy_with(
    model: nn.Module, tensors: Mapping[str, Tensor], modules: Mapping[int, nn.Module] | None = None
) -> nn.Module:
    """Copy a model's module tree with `tensors` (of any shape) replaced and all other parameters shared.

    Ties are kept. Configurations are shared, so that a changed setting also holds for the copies. Buffers are copied,
    because modules write to them (batch normalisation in training). `modules` maps the `id` of a module to its
    replacement. A copy is freed as soon as nothing refers to it.
    """
    named = model.state_dict(keep_vars=True)
    # deepcopy returns what is in the memo instead of copying it.
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    memo = {id(shared): shared for shared in (*model.parameters(), *configs)} | dict(modules or {})
    for name, tensor in tensors.items():
        is_parameter = isinstance(named[name], nn.Parameter)
        # Wrapping a tensor in a parameter would cut its gradient to the recovery module.
        as_parameter = is_parameter and not tensor.requires_grad and type(tensor) is Tensor
        memo[id(named[name])] = nn.Parameter(tensor, requires_grad=False) if as_parameter else tensor
    expert = copy.deepcopy(model, memo)
    for module in expert.modules():
        _weaken_hooks(module)
        if hasattr(module, BIAS_CACHE):
            setattr(module, BIAS_CACHE, _NoCache())
    for name, tensor in tensors.items():
        if tensor.shape != named[name].shape:
            _update_size(expert.get_submodule(name.rpartition(".")[0]), tensor)
    return expert


def beside_own(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move tensors to the devices and dtypes of the model's own.

    A `device_map` may have spread the model over devices, and it may have been loaded in another dtype than it was
    saved in. Replacements of offloaded tensors stay where they are.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}

    def moved(name: str, tensor: Tensor) -> Tensor:
        like = own.get(name, tensor)
        return tensor.to(tensor.device if like.is_meta else like.device, like.dtype)

    return {name: moved(name, tensor) for name, tensor in tensors.items()}


def is_plain(tensor: Tensor) -> bool:
    """Return whether a parameter holds plain numbers: neither offloaded nor quantised."""
    return not tensor.is_meta and tensor.is_floating_point() and type(tensor) in (Tensor, nn.Parameter)


def names_of(model: nn.Module, name: str) -> list[str]:
    """Return all names of a parameter, including ties that offloading or quantising has separated."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    source = ties.get(name, name)
    return [name, *({source, *(target for target, other in ties.items() if other == source)} - {name})]


def _update_size(module: nn.Module, weight: Tensor) -> None:
    if isinstance(module, nn.Linear) and weight.ndim == 2:
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]


class _NoCache(dict):
    """A replacement for a module's cache that returns each value once, to the thread that stored it.

    A copied cache would belong to other weights, and a copy's weights may stand for other tensors at every call, or
    carry gradients.
    """

    def __contains__(self, key: Hashable) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __setitem__(self, key: Hashable, value: Any) -> None:
        super().__setitem__((threading.get_ident(), key), value)

    def __getitem__(self, key: Hashable) -> Any:
        return self.pop((threading.get_ident(), key))


def _weaken_hooks(module: nn.Module) -> None:
    """Make hooks that are a module's own methods (Mamba's load hook) refer to it weakly.

    Such a reference cycle would keep the module's tensors alive until the garbage collector runs.
    """
    for attribute, hooks in vars(module).items():
        if not attribute.endswith("_hooks") or not isinstance(hooks, dict):
            continue
        for key, hook in hooks.items():
            method = getattr(hook, "hook", hook)  # torch wraps load hooks
            if isinstance(method, MethodType) and method.__self__ is module:
                hooks[key] = _WeakMethod(method)


class _WeakMethod:
    """A method that does not keep its object alive; copying or pickling restores the ordinary method."""

    def __init__(self, method: MethodType) -> None:
        self._owner, self._name = weakref.ref(method.__self__), method.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._owner(), self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return getattr, (self._owner(), self._name)


class _Making:
    """An item being made. One thread at a time tries; if it fails, the next waiting thread does."""

    def __init__(self) -> None:
        # Reentrant, because making an item may need the item itself.
        self.turn = threading.RLock()
        self.wanted = 0  # number of waiting threads
        self.done = False
        self.item: Any = None


class ExpertCache:
    """A thread-safe cache of the most recently used experts, limited by the bytes of their own tensors.

    Room is made before an expert is recovered, so a cache of one expert never holds two. Items without bytes of their
    own (the feature extractor, the merged body with a task's head) are kept too, and not counted.

    `len(cache)` experts take `bytes` of the `capacity`; `hits`, `misses` and `evictions` are totals.

    >>> from retex_hf.execution import ExpertCache
    >>> cache = ExpertCache(100)
    >>> for task in ("a", "b", "a", "c"):
    ...     expert = cache.get(task, lambda: f"the expert of {task}", size=lambda: 50)
    >>> cache
    ExpertCache(experts=2, 100 of 100 bytes, hits=1, misses=3, evictions=1)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hits = self.misses = self.evictions = 0
        self._items: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        """Reset the locks in a forked child, where the threads that held them do not exist."""
        self._lock = threading.Lock()
        self._making: dict[Hashable, _Making] = {}

    def get(self, key: Hashable, make: Callable[[], Item], size: Callable[[], int] | None = None) -> Item:
        """Return the item under a key, or make and store a new one.

        Threads that need the same item at the same time make it once; other keys are not blocked.

        Args:
            key: Key of the item.
            make: Returns a new item.
            size: Returns the bytes of a new item before it is made; one larger than the cache is not kept. None for
                items without bytes of their own.
        """
        counted = size is not None
        with self._lock:
            if key in self._items:
                self.hits += counted
                self._items.move_to_end(key)
                return self._items[key][0]
            making = self._making.setdefault(key, _Making())
            making.wanted += 1
        try:
            with making.turn:
                if making.done:
                    with self._lock:
                        self.hits += counted
                else:
                    self._make(key, making, make, size)
                return making.item
        except BaseException:
            with self._lock:
                making.wanted -= 1
                if not making.wanted and self._making.get(key) is making:
                    del self._making[key]
            raise

    def _make(self, key: Hashable, making: _Making, make: Callable[[], Any], size: Callable[[], int] | None) -> None:
        own = size() if size is not None else 0
        with self._lock:
            self.misses += size is not None
            self._evict(own)
        making.item = make()
        with self._lock:
            # Do not keep an item made from old weights if the cache was cleared meanwhile.
            if self._making.get(key) is making:
                del self._making[key]
                if own <= self.capacity:
                    self._evict(own)  # another thread may have filled it
                    self._items[key] = (making.item, own)
        making.done = True

    def _evict(self, size: int) -> None:
        """Evict the oldest items until `size` more bytes fit; evict none for an item too large to keep."""
        while size <= self.capacity < self.bytes + size:
            # Items without bytes of their own free no room.
            del self._items[next(key for key, (_, own) in self._items.items() if own)]
            self.evictions += 1

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._items.copy().values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return sum(size > 0 for _, size in self._items.copy().values())

    def __repr__(self) -> str:
        return (
            f"ExpertCache(experts={len(self)}, {self.bytes} of {self.capacity} bytes, "
            f"hits={self.hits}, misses={self.misses}, evictions={self.evictions})"
        )

    def clear(self) -> None:
        """Drop all items, including those being made."""
        with self._lock:
            self._items.clear()
            self._making.clear()

    def emptied(self) -> ExpertCache:
        """Return an empty cache of the same capacity that continues the counts."""
        cache = ExpertCache(self.capacity)
        cache.hits, cache.misses, cache.evictions = self.hits, self.misses, self.evictions
        return cache

    def __getstate__(self) -> int:
        return self.capacity  # a copied or pickled model starts with an empty cache and its own lock

    def __setstate__(self, capacity: int) -> None:
        ExpertCache.__init__(self, capacity)


def expert_bytes(merged: Mapping[str, Tensor], recovery: RecoveryModule) -> int:
    """Return the bytes of the tensors that an expert does not share with the merged model."""
    return sum(merged[name].numel() * merged[name].element_size() for name in recovery)
