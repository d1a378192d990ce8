"""Inputs in bad weather: what references may look like when they are noisy, faint, mistyped or cut short.

Features of perturbed references show which layers are fragile, and along which directions weather moves features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def perturbed_inputs(inputs: Mapping[str, Any], tokens: Tokens | None = None, first: int = 0) -> dict[str, Any]:
    """Return inputs in bad weather, row by row in another: up to 0.6 of the tokens (but for reserved ones, such as the
    place of an image) exchanged for others of the vocabulary, and up to 0.8 of the text masked from its end; numbers
    (images, sounds) at down to 0.2 of their contrast, under noise. Everything else stays.

    Args:
        inputs: A batch.
        tokens: The form of tokens; without it, none is exchanged.
        first: Number of the first row, which decides its weather: other rows do not.
    """
    reserved = torch.tensor(sorted(tokens.reserved if tokens is not None else ()), dtype=torch.int64)
    found = dict(inputs)
    for name, value in inputs.items():
        if name in CONTENT and isinstance(value, Tensor) and value.ndim > 1:
            if value.is_floating_point():
                found[name] = _fainter(value, _Weather(first, len(value)))
            elif tokens is not None:
                found[name] = _mistyped(value, tokens, reserved, _Weather(first, len(value)))
    ids, mask = inputs.get("input_ids"), inputs.get(MASK)
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.shape == ids.shape:
        found[MASK] = _cut(mask, torch.isin(ids, reserved.to(ids.device)), _Weather(first, len(mask)))
    return found


class _Weather:
    """Random numbers, of every row its own."""

    def __init__(self, first: int, rows: int) -> None:
        self.draws = [torch.Generator().manual_seed(row) for row in range(first, first + rows)]

    def uniform(self, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return numbers (rows, *shape) between two."""
        return low + (high - low) * torch.stack([torch.rand(*shape, generator=draw) for draw in self.draws])

    def normal(self, count: int) -> Tensor:
        """Return normal numbers (rows, count)."""
        return torch.stack([torch.randn(count, generator=draw) for draw in self.draws])


def _fainter(value: Tensor, weather: _Weather) -> Tensor:
    rows = value.flatten(1).float()
    mean, deviation = rows.mean(1, keepdim=True), rows.std(1, keepdim=True)
    contrast, level = weather.uniform([1], CONTRAST), weather.uniform([1], high=NOISE)
    noise = (level * weather.normal(rows.shape[1])).to(value.device)
    return (mean + contrast.to(value.device) * (rows - mean) + deviation * noise).view_as(value).to(value.dtype)


def _mistyped(value: Tensor, tokens: Tokens, reserved: Tensor, weather: _Weather) -> Tensor:
    share = weather.uniform([1] * (value.ndim - 1), high=EXCHANGED)
    chosen = (weather.uniform(value.shape[1:]) < share).to(value.device)
    others = (weather.uniform(value.shape[1:]) * tokens.size).to(value)
    for either in (value, others):
        chosen &= ~torch.isin(either, reserved.to(value.device))
    return torch.where(chosen, others, value)


def _cut(mask: Tensor, kept: Tensor, weather: _Weather) -> Tensor:
    """Mask the end of every row, but for `kept` positions."""
    length = mask.sum(1, keepdim=True)
    left = (length * weather.uniform([1], TEXT).to(mask.device)).clamp(min=FEWEST)
    return torch.where((mask.cumsum(1) <= left) | kept, mask, torch.zeros_like(mask))
