"""A second device for machines that have none: its numbers lie in CPU memory, its rules are those of a GPU.

Every operation runs on the CPU tensors beneath and gives their values. An operation on tensors of both devices is
refused where CUDA refuses it: a CPU tensor without axes goes with any other, indices may lie on the CPU, and copies
cross over. `numpy()` is refused too. It can be without float64, as Apple's GPUs are, and run out of memory.

torch keeps a place for devices of others, PrivateUse1. Only a device guard, a device module and kernels for new tensors
are registered, so that nothing changes for tests of the same process that do not name the device: it is not torch's
accelerator. The price: torch's backward pass starts threads for the accelerator, so gradients are not for this device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _DummyDeviceGuard

NAME = "privateuseone"  # torch's own name of the place; another one would make it the accelerator
DEVICE = torch.device(NAME, 0)
aten = torch.ops.aten
CROSSING = {aten.copy_.default, aten._to_copy.default}
# Operations whose second argument, the indices, may lie on the CPU.
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# What torch calls under Python's dispatch, where it makes and fills a new tensor.
NEW = {"empty.memory_format": aten.empty.memory_format, "empty_strided": aten.empty_strided.default,
       "copy_": aten.copy_.default, "_to_copy": aten._to_copy.default}  # fmt: skip
_rules: dict[str, Any] = {"float64": True, "largest": None}


class SecondTensor(Tensor):
    """A tensor of the second device over `raw`, a tensor of the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool | None = None) -> Tensor:
        if requires_grad is not None:  # accelerate makes a parameter by its class, wherever it is to be
            return nn.Parameter(raw, requires_grad)
        if raw.dtype == torch.float64 and not _rules["float64"]:
            raise TypeError(f"Cannot convert a {NAME} Tensor to float64 dtype as the device doesn't support float64.")
        if _rules["largest"] is not None and raw.numel() * raw.element_size() > _rules["largest"]:
            raise torch.OutOfMemoryError(f"{NAME} out of memory.\nMore about it.")
        form = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        with torch.inference_mode(False):  # torch would take a view of an ordinary tensor for one of those
            made = Tensor._make_wrapper_subclass(cls, raw.shape, device=DEVICE, **form)
        made.raw = raw
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, SecondTensor) for kind in types):
            return NotImplemented
        if func == Tensor.data.__set__:
            return _set_data(*args)
        if func in (Tensor.untyped_storage, Tensor.data_ptr, Tensor.tolist):
            return func(args[0].raw)  # what shares memory beneath shares it here
        if func is Tensor.numpy:
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")
        if func is Tensor.__deepcopy__:
            return _copied(*args)
        if func is Tensor.__repr__:
            return f"SecondTensor({args[0].raw})"
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _set_data(tensor: Tensor, new: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(tensor, new)
    tensor.raw = new.raw


def _copied(tensor: SecondTensor, memo: dict[int, Any]) -> SecondTensor:
    """A deep copy; a parameter stays one."""
    if id(tensor) not in memo:
        made = SecondTensor(deepcopy(tensor.raw, memo)).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            made._is_param = True
        memo[id(tensor)] = made
    return memo[id(tensor)]


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on what lies beneath; the result is of the device that is asked for, or that of the inputs."""
    leaves, form = tree_flatten((args, kwargs))
    _check_devices(func, args, leaves)
    plain_args, plain_kwargs = tree_unflatten([_beneath(leaf) for leaf in leaves], form)
    if func is aten.histc.default and not plain_args[0].is_floating_point():
        plain_args = [plain_args[0].float(), *plain_args[1:]]  # CUDA counts integers, the CPU does not
    results = func(*plain_args, **plain_kwargs)
    if any(result.alias_info is not None and result.alias_info.is_write for result in func._schema.returns):
        return _written(func, args, kwargs)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != NAME:
        return results
    return tree_map(lambda result: SecondTensor(result) if isinstance(result, Tensor) else result, results)


def _beneath(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu") if leaf.type == NAME else leaf
    return leaf.raw if isinstance(leaf, SecondTensor) else leaf


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an operation has written to, which are also its results."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [
        named[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for tensor in written:
        if isinstance(tensor, SecondTensor) and tensor.shape != tensor.raw.shape:  # `out=` of another size
            _set_data(tensor, SecondTensor(tensor.raw))
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _check_devices(func: Any, args: Any, leaves: list[Any]) -> None:
    if func in CROSSING:
        return
    if func in INDEXED:
        if not isinstance(args[0], SecondTensor) and any(isinstance(index, SecondTensor) for index in args[1]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        leaves = [args[0], *args[2:3]]
    foreign = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, SecondTensor)]
    if len(foreign) < sum(isinstance(leaf, Tensor) for leaf in leaves) and any(leaf.ndim for leaf in foreign):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
            f"{foreign[0].device}! (when running {func})"
        )


def _register() -> tuple[Any, ...]:
    """Make the device known to torch; what is returned must be kept."""
    module = ModuleType(NAME)
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)
    guard = _DummyDeviceGuard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    others, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(_run, "PrivateUse1")
    for name, func in NEW.items():
        own.impl(name, partial(_run, func), "PrivateUse1")
    return guard, others, own


_registered = _register()


@contextmanager
def rule(**values: Any) -> Iterator[None]:
    """Within this context the second device has other rules: `float64=False`, or `largest=`, the bytes of the largest
    tensor that it has memory for."""
    before = dict(_rules)
    _rules.update(values)
    try:
        yield
    finally:
        _rules.update(before)


@contextmanager
def in_use() -> Iterator[None]:
    """Within this context modules move to the second device as they move to a GPU: parameters keep their identity, and
    so their ties; and its tensors count as plain numbers, though their class is not torch's own."""
    from retex_hf import execution
    from retex_hf.execution import choice, expert_cache
    from retex_hf.execution.mixed import model
    from retex_hf.model.export import lora

    def is_plain(tensor: Tensor) -> bool:
        return plain(tensor.raw) if isinstance(tensor, SecondTensor) else plain(tensor)

    plain, modules = expert_cache.is_plain, (execution, choice, expert_cache, model, lora.export)
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    for module in modules:
        module.is_plain = is_plain
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)
        for module in modules:
            module.is_plain = plain


def to_second(values: Any) -> Any:
    """A nest of tensors, moved to the second device."""
    return tree_map(lambda value: value.to(DEVICE) if isinstance(value, Tensor) else value, values)


def to_cpu(values: Any) -> Any:
    """A nest of tensors, moved to the CPU."""
    return tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, values)
