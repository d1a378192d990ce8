"""Recovered experts as models: light copies of the wrapped model around other tensors.

An expert is a module tree of its own that shares every parameter with the merged model except those it recovers.
Nothing is swapped in and out of the merged model, so calls cannot disturb each other, whatever raises or runs beside
them.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..recovery import RecoveryModule
from ..utils.locks import renew_in_children

ALIGNMENT = 64  # bytes; what vector instructions like best
# Where the windowed attentions of timm (TinyViT, LeViT, EfficientFormer) keep what they compute from their weights.
BIAS_CACHE = "attention_bias_cache"


def recover_tensors(merged: Mapping[str, Tensor], recovery: RecoveryModule, weights: Tensor) -> dict[str, Tensor]:
    """The recovered parameters of a mixture of tasks, each in the merged tensor's dtype.

    Matrices that carry no gradients lie in one block of memory on each device: freed with their expert, it leaves no
    holes that are too small for anything else.
    """
    # An expert may be made in a call under autocast, but serves others too.
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
    """Uninitialised tensors of the shapes and dtypes of others, on the device of the first, in one allocation."""
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
    """A copy of a model's module tree that holds `tensors` (of any shape) and shares all other parameters; ties are
    kept. Configurations are shared too, so that a setting changed on the model holds for its copies. Buffers are not:
    modules write to them (batch normalisation in training). `modules` take the place of those with their `id`. A copy
    is freed as soon as nobody uses it."""
    named = model.state_dict(keep_vars=True)
    # deepcopy takes what is in the memo instead of copying it.
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    memo = {id(shared): shared for shared in (*model.parameters(), *configs)} | dict(modules or {})
    for name, tensor in tensors.items():
        is_parameter = isinstance(named[name], nn.Parameter)
        # A tensor that carries gradients to the recovery module must stay as it is.
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
    """Tensors where the model's own are, which a `device_map` may have put in several places, and in their dtypes: it
    may have been loaded in another than it was saved in. What takes the place of an offloaded one stays where it is."""
    own = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}

    def moved(name: str, tensor: Tensor) -> Tensor:
        like = own.get(name, tensor)
        return tensor.to(tensor.device if like.is_meta else like.device, like.dtype)

    return {name: moved(name, tensor) for name, tensor in tensors.items()}


def is_plain(tensor: Tensor) -> bool:
    """Whether a parameter holds plain numbers: not offloaded, not quantised."""
    return not tensor.is_meta and tensor.is_floating_point() and type(tensor) in (Tensor, nn.Parameter)


def names_of(model: nn.Module, name: str) -> list[str]:
    """All names of a parameter: transformers knows its ties also where offloading or quantising has torn them apart."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    source = ties.get(name, name)
    return [name, *({source, *(target for target, other in ties.items() if other == source)} - {name})]


def _update_size(module: nn.Module, weight: Tensor) -> None:
    if isinstance(module, nn.Linear) and weight.ndim == 2:
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]


class _NoCache(dict):
    """Stands for a cache and gives each thing back once, to the thread that put it in.

    A copy takes its model's caches along, though they belong to other weights; and the weights of a copy may mean other
    tensors at every call, or carry gradients.
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
    """A module whose own method is its hook (Mamba's load hook) refers to itself: with its tensors it would outlive
    its last user, until the garbage collector comes round."""
    for attribute, hooks in vars(module).items():
        if not attribute.endswith("_hooks") or not isinstance(hooks, dict):
            continue
        for key, hook in hooks.items():
            method = getattr(hook, "hook", hook)  # torch wraps hooks of loading
            if isinstance(method, MethodType) and method.__self__ is module:
                hooks[key] = _WeakMethod(method)


class _WeakMethod:
    """Calls a method without keeping its object alive; copied or pickled, it is the ordinary method again."""

    def __init__(self, method: MethodType) -> None:
        self._owner, self._name = weakref.ref(method.__self__), method.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._owner(), self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return getattr, (self._owner(), self._name)


class _Making:
    """An item in the making. Threads that need it take turns: the first one makes it, or if that fails the next."""

    def __init__(self) -> None:
        # A maker that comes to need the item itself must not wait for itself.
        self.turn = threading.RLock()
        self.wanted = 0  # by so many threads
        self.done, self.item = False, None


class ExpertCache:
    """Keeps the most recently used experts, up to a number of bytes of tensors of their own. Safe under threads.

    Room is made before an expert is, so a cache of one expert never holds two. What takes no bytes of its own (the
    feature extractor, the merged body under a task's head) is kept beside the experts and not counted.

    `len(cache)` experts take `bytes` of the `capacity`; `hits`, `misses` and `evictions` count from the beginning.

    >>> from retex_hf.execution import ExpertCache
    >>> cache = ExpertCache(100)
    >>> for task in ("a", "b", "a", "c"):
    ...     expert = cache.get(task, lambda: f"the expert of {task}", size=lambda: 50)
    >>> cache
    ExpertCache(2 experts, 100 of 100 bytes, hits=1, misses=3, evictions=1)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hits = self.misses = self.evictions = 0
        self._items: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        """For the child of a fork, in which nobody makes what other threads were making."""
        self._lock = threading.Lock()
        self._making: dict[Hashable, _Making] = {}

    def get(self, key: Hashable, make: Callable[[], object], size: Callable[[], int] | None = None) -> object:
        """The item under a key, or a new one.

        Threads that need one item at the same time make it once; making it holds up nobody else.

        Args:
            key: What the item goes by.
            make: Returns a new item.
            size: Tells beforehand how many bytes a new item takes; one larger than the cache is not kept. None for
                what takes no bytes of its own.
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

    def _make(self, key: Hashable, making: _Making, make: Callable[[], object], size: Callable[[], int] | None) -> None:
        own = size() if size is not None else 0
        with self._lock:
            self.misses += size is not None
            self._evict(own)
        making.item = make()
        with self._lock:
            # If the cache was cleared meanwhile, what was made of old weights is not kept.
            if self._making.get(key) is making:
                del self._making[key]
                if own <= self.capacity:
                    self._evict(own)  # another thread may have taken the room
                    self._items[key] = (making.item, own)
        making.done = True

    def _evict(self, size: int) -> None:
        """Let the oldest go until `size` more bytes fit; what will not be kept drives nothing out."""
        while size <= self.capacity < self.bytes + size:
            # What takes no bytes of its own frees none.
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
            f"ExpertCache({len(self)} experts, {self.bytes} of {self.capacity} bytes, "
            f"hits={self.hits}, misses={self.misses}, evictions={self.evictions})"
        )

    def clear(self) -> None:
        """Let all items go, and keep none of those in the making."""
        with self._lock:
            self._items.clear()
            self._making.clear()

    def emptied(self) -> ExpertCache:
        """A cache of the same capacity that goes on counting, and holds nothing yet."""
        cache = ExpertCache(self.capacity)
        cache.hits, cache.misses, cache.evictions = self.hits, self.misses, self.evictions
        return cache

    def __getstate__(self) -> int:
        return self.capacity  # a copied or pickled model starts with an empty cache and a lock of its own

    def __setstate__(self, capacity: int) -> None:
        self.__init__(capacity)


def expert_bytes(merged: Mapping[str, Tensor], recovery: RecoveryModule) -> int:
    """Bytes of the tensors that an expert does not share with the merged model."""
    return sum(merged[name].numel() * merged[name].element_size() for name in recovery)
