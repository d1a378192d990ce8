"""Choice of the torch device: whether it exists, has float64 where that is needed, and has enough memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, RetexError, brief, first_line

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
META = torch.device("meta")
AUTO = "auto"
# Strategies by which accelerate spreads a model, and the targets of offloading.
SPREAD = (AUTO, "balanced", "balanced_low_0", "sequential")
OFFLOADED = ("cpu", "disk")


def parse_device(device: str | torch.device) -> torch.device:
    """Return a device that is available; `"auto"` is the machine's accelerator, or the CPU where it has none.

    >>> from retex_hf.utils.devices import parse_device
    >>> parse_device("cpu")
    device(type='cpu')
    """
    if device == AUTO:
        return torch.accelerator.current_accelerator(check_available=True) or CPU
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f'device must be one of torch, such as "cuda:0", or "auto", not {brief(device)}.') from None
    if found == META:
        raise ConfigError('device must be one that computes; "meta" holds no numbers.')
    try:
        torch.zeros(1, device=found).add_(1)  # the driver may be missing even if torch was built for the device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, AttributeError) as error:
        raise ConfigError(f"device {str(device)!r} is not on this machine: {_short(error)}") from None
    return found


def parse_placement(device: Any, device_map: Any) -> Any:
    """Return transformers' `device_map` for `device` or `device_map`; None leaves a model on the CPU."""
    if device is not None and device_map is not None:
        raise ConfigError("device puts a model in one place, and device_map in several: give one of them.")
    if device is not None:
        return {"": parse_device(device)}
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for place in places:
        if isinstance(place, (str, torch.device)) and str(place) not in (*SPREAD, *OFFLOADED):
            parse_device(place)
    return device_map


def one_device(device_map: Any) -> torch.device:
    """Return the one device of a `device_map`. Refuse several: accelerate spreads models of transformers only."""
    if isinstance(device_map, Mapping) and list(device_map) == [""]:
        device_map = device_map[""]
    if isinstance(device_map, Mapping) or device_map in (*SPREAD, "disk"):
        raise ConfigError(
            f"this model goes to one device, which rules out device_map={brief(device_map)}: give device=."
        )
    return CPU if device_map is None else torch.device(device_map)


def device_of(*models: Any) -> torch.device:
    """Return the device of the first parameter of the first module; the CPU if there is none, or it is offloaded."""
    modules = (model for model in models if isinstance(model, nn.Module))
    parameters = (parameter for module in modules for parameter in module.parameters())
    return next((parameter.device for parameter in parameters if parameter.device != META), CPU)


def has_float64(device: torch.device) -> bool:
    """Return whether a device supports float64; Apple's GPUs do not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def exact_device(device: torch.device) -> torch.device:
    """Return the device to merge and solve on, which takes float64: this one, or else the CPU, with a warning."""
    if has_float64(device):
        return device
    logger.warning("%s has no float64: experts are merged and solved on the CPU.", device)
    return CPU


def moved(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch with its tensors moved to a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}


def as_model_takes(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a batch on the model's device, floating-point tensors in its dtype.

    For an offloaded model, the batch stays on its device.
    """
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    if first is None:
        return dict(batch)

    def fitted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        device = value.device if first.is_meta else first.device
        return value.to(device, first.dtype if value.is_floating_point() else value.dtype)

    return {name: fitted(value) for name, value in batch.items()}


@contextmanager
def enough_memory(work: str) -> Iterator[None]:
    """Turn running out of device memory into an error that names the work."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise RetexError(f"The device does not have enough memory to {work}: take another, such as the CPU.") from None


def _short(error: Exception) -> str:
    text = first_line(error)
    return text if text.endswith(".") else f"{text}."
