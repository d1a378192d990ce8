"""Inputs in bad weather: what references may look like when they are noisy, faint, mistyped or cut short.

Features of perturbed references show which layers are fragile, and along which directions weather moves features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..backends.input_forms import Tokens

CONTENT = ("input_ids", "inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "input_values",
           "image", "images", "inputs", "x", "input")  # fmt: skip
MASK = "attention_mask"
# Every row has its own weather, up to these: tokens exchanged, contrast and text left, deviation of noise.
EXCHANGED, CONTRAST, TEXT, NOISE = 0.6, 0.2, 0.2, 0.4
# Tokens of a text that always stay.
FEWEST = 3


def perturbed_inputs(inputs: Mapping[str, Any], tokens: Tokens | None = None) -> dict[str, Any]:
    """Return inputs in bad weather, row by row in another: up to 0.6 of the tokens (but for reserved ones, such as the
    place of an image) exchanged for others of the vocabulary, and up to 0.8 of the text masked from its end; numbers
    (images, sounds) at down to 0.2 of their contrast, under noise. Everything else stays.

    Args:
        inputs: A batch.
        tokens: The form of tokens; without it, they are exchanged among those of the batch.
    """
    draw = torch.Generator().manual_seed(0)
    reserved = torch.tensor(sorted(tokens.reserved if tokens is not None else ()), dtype=torch.int64)
    found = dict(inputs)
    for name, value in inputs.items():
        if name in CONTENT and isinstance(value, Tensor) and value.ndim > 1:
            if value.is_floating_point():
                found[name] = _fainter(value, draw)
            else:
                found[name] = _mistyped(value, tokens, reserved, draw)
    ids, mask = inputs.get("input_ids"), inputs.get(MASK)
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.shape == ids.shape:
        found[MASK] = _cut(mask, torch.isin(ids, reserved.to(ids.device)), draw)
    return found


def _strengths(rows: int, low: float, high: float, draw: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(rows, 1, generator=draw)


def _fainter(value: Tensor, draw: torch.Generator) -> Tensor:
    rows = value.flatten(1).float()
    mean, deviation = rows.mean(1, keepdim=True), rows.std(1, keepdim=True)
    contrast, level = _strengths(len(rows), CONTRAST, 1, draw), _strengths(len(rows), 0, NOISE, draw)
    noise = (level * torch.randn(rows.shape, generator=draw)).to(value.device)
    return (mean + contrast.to(value.device) * (rows - mean) + deviation * noise).view_as(value).to(value.dtype)


def _mistyped(value: Tensor, tokens: Tokens | None, reserved: Tensor, draw: torch.Generator) -> Tensor:
    if tokens is None:
        others = value.flatten()[torch.randperm(value.numel(), generator=draw).to(value.device)].view_as(value)
    else:
        others = torch.randint(tokens.size, value.shape, generator=draw).to(value)
    share = _strengths(len(value), 0, EXCHANGED, draw).view(-1, *[1] * (value.ndim - 1))
    chosen = (torch.rand(value.shape, generator=draw) < share).to(value.device)
    for either in (value, others):
        chosen &= ~torch.isin(either, reserved.to(value.device))
    return torch.where(chosen, others, value)


def _cut(mask: Tensor, kept: Tensor, draw: torch.Generator) -> Tensor:
    """Mask the end of every row, but for `kept` positions."""
    length = mask.sum(1, keepdim=True)
    left = (length * _strengths(len(mask), TEXT, 1, draw).to(mask.device)).clamp(min=FEWEST)
    return torch.where((mask.cumsum(1) <= left) | kept, mask, torch.zeros_like(mask))
