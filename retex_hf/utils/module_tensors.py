"""In-place changes to the tensors behind a module's parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def resize_tensors(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Resize parameters and buffers in place; their values are lost, tied names stay tied."""
    current = model.state_dict(keep_vars=True)
    for name, shape in shapes.items():
        tensor = current[name]
        tensor.data = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
