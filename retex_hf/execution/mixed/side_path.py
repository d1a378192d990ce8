"""Layers whose merged weights cannot be replaced because they are quantised or offloaded.

They run unchanged, and the offsets of each row's task are computed beside them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .call import MixedCall, MixedUnsupported, current_call, unwatched
from .operations import add_offset, embedding
from .sources import Head, Recovered, TensorSource
from .task_tensor import TaskTensor, by_row, per_task


def beside(layer: nn.Module, sources: dict[str, TensorSource]) -> nn.Module:
    """Return a replacement for a layer whose tensors cannot be replaced."""
    recovered = {attribute: source for attribute, source in sources.items() if isinstance(source, Recovered)}
    return SidePath(layer, recovered) if len(recovered) == len(sources) else HeadLayer(layer, sources)


class HeadLayer(nn.Module):
    """A linear layer that every task stores whole, so that the quantised or offloaded weights are not needed."""

    def __init__(self, layer: nn.Module, sources: dict[str, TensorSource]) -> None:
        super().__init__()
        own = {name for name, _ in layer.named_parameters()}
        heads = {attribute: source for attribute, source in sources.items() if isinstance(source, Head)}
        whole = len(heads) == len(sources) and own <= set(sources)
        if not whole or _kind(layer, set(sources)) != "linear":
            name = next(iter(heads.values())).name
            raise MixedUnsupported(f"{name!r} belongs to a {type(layer).__name__} that is quantised or offloaded.")
        self.sources = heads

    def forward(self, x: Tensor) -> Tensor:
        parameters = {}
        for attribute, source in self.sources.items():
            parameters[attribute] = TaskTensor(next(iter(source.tensors.values())), source)
        return nn.functional.linear(x, parameters["weight"], parameters.get("bias"))


class SidePath(nn.Module):
    """A layer shared with the wrapped model, plus the offsets of its recovered parameters."""

    def __init__(self, layer: nn.Module, sources: dict[str, Recovered]) -> None:
        super().__init__()
        self.layer = layer
        self.sources = sources
        self.kind = _kind(layer, set(sources))
        scaled = next((source.name for source in sources.values() if source.recovery.scale(source.name)), None)
        if self.kind is None or scaled:
            reason = "is scaled as well as moved" if scaled else f"belongs to a {type(layer).__name__}"
            raise MixedUnsupported(
                f"{scaled or next(iter(sources.values())).name!r} {reason}, and its merged value cannot be read: it is "
                "quantised or offloaded."
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer":  # not set yet: delegating would recurse
                raise
            return getattr(self.layer, name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.layer(x, *args, **kwargs)
        with unwatched():
            return self._moved(current_call(), out, x)

    def _moved(self, call: MixedCall, out: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output for `x`, `out`, plus the offsets of each row's task."""
        weight, bias = self.sources.get("weight"), self.sources.get("bias")
        if weight is not None and self.kind == "embedding":
            zero = torch.zeros(1, out.shape[-1], device=out.device).expand(weight.layout.shape)
            table = TaskTensor(zero, Recovered(weight.name, zero, weight.recovery))
            offset = embedding(call, nn.functional.embedding, x, table).to(out.dtype)
            # Ids without rows (relative positions) have one result per task.
            return per_task(call, torch.add, (out, offset), {}) if isinstance(offset, TaskTensor) else out + offset
        if weight is not None:
            if call.entries_per_row(weight.name, x) is None:
                raise MixedUnsupported(f"{weight.name!r} is applied to what has no rows.")
            if self.kind == "norm":
                out = out + _normal(self.layer, x) * self._vector(weight, out)
            else:
                out = add_offset(call, out.clone(), x, weight, transposed=self.kind == "conv1d")
        return out if bias is None else out + self._vector(bias, out)

    def _vector(self, source: Recovered, out: Tensor) -> Tensor:
        zero = torch.zeros(source.layout.shape, device=out.device)
        offset = TaskTensor(zero, Recovered(source.name, zero, source.recovery))
        return by_row(current_call(), offset, len(out), out.ndim).to(out.dtype)


def _kind(layer: nn.Module, parameters: set[str]) -> str | None:
    """Return what a layer computes, or None if it is unknown.

    Quantised layers have their own classes, but keep the size attributes of the layers they replace.
    """
    if not parameters <= {"weight", "bias"}:
        return None
    if isinstance(layer, Conv1D):
        return "conv1d"
    # Others scale what they look up, or look up something else; `max_norm` bounds the sum of merged row and offset.
    if type(layer).forward is nn.Embedding.forward and layer.max_norm is None:
        return "embedding"
    if isinstance(layer, nn.Embedding):
        return None
    if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
        return "linear"
    is_rms = type(layer).__name__.endswith("RMSNorm") or hasattr(layer, "variance_epsilon")
    return "norm" if isinstance(layer, nn.LayerNorm) or is_rms else None


def _normal(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the normalised input that a normalisation multiplies by its weight."""
    if isinstance(layer, nn.LayerNorm):
        return nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
    return nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
