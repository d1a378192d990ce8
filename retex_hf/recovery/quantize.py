"""Storage of factors: as floats of some width, or quantised to int8 with one scale per row. Arithmetic is in float32.

Only large tensors are stored narrow: the factors of matrices, and differences stored whole. Vectors, task embeddings
and gammas are few numbers and stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from ..errors import ConfigError
from .layout import MATRIX, VECTOR, Layout

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INT8 = "int8"
LARGEST_CODE = 127
# One scale per row costs as much as two codes; its relative precision of half a per cent suffices.
SCALE_DTYPE = torch.bfloat16
SCALE = "_scale"
# Rows of differences stored whole are joined until they hold this many numbers (a 3 x 3 kernel has rows of three).
SHORTEST_ROW = 32


def encode(values: Tensor, dtype: str, row: int) -> tuple[Tensor, Tensor | None]:
    """Return numbers as they are stored, and for int8 the scale of every `row` of them along the last axis.

    >>> import torch
    >>> from retex_hf.recovery.quantize import encode
    >>> codes, scale = encode(torch.tensor([[1.0, -2.0, 0.5, 0.25]]), "int8", row=2)
    >>> codes.tolist(), scale.shape
    ([[64, -127, 127, 64]], torch.Size([1, 2]))
    """
    if dtype != INT8:
        return values.to(FLOATS[dtype]), None
    rows = values.float().unflatten(-1, (-1, row))
    scale = (rows.abs().amax(-1, keepdim=True) / LARGEST_CODE).to(SCALE_DTYPE)
    # The codes use the scale as stored; a row of zeros has scale zero, and codes of zero.
    codes = torch.where(scale > 0, rows / scale.float(), 0).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8).flatten(-2), scale.squeeze(-1)


def decode(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return the float32 values of stored numbers."""
    if scale is None:
        return stored.float()
    return (stored.float().unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)).flatten(-2)


def encode_parts(layout: Layout, parts: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return a generator's tensors (`weight`, `bias`, `shared`, `inner`) as they are stored, with their scales."""
    if layout.kind == VECTOR:
        return dict(parts)
    stored = {}
    for part, values in parts.items():
        if dtype == "float16" and (values.abs() > torch.finfo(torch.float16).max).any():
            raise ConfigError(
                f'recovery_dtype="float16" cannot hold {values.abs().max().item():.1e}, which the recovery of a '
                f'parameter of shape {tuple(layout.shape)} needs: take "bfloat16" or "int8".'
            )
        stored[part], scale = encode(values, dtype, _row_length(layout, part))
        if scale is not None:
            stored[part + SCALE] = scale
    return stored


def stored_parts(
    layout: Layout, embedding_dim: int, bias: bool, dtype: str
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every tensor that a generator is stored as."""
    numbers = prod(layout.generated_shape)
    shapes = {
        "weight": (embedding_dim, numbers),
        "bias": (numbers,) if bias else None,
        "shared": layout.shared_shape,
        "inner": layout.inner_shape,
    }
    expected = {}
    for part, shape in shapes.items():
        if shape is None:
            continue
        if layout.kind == VECTOR or dtype != INT8:
            expected[part] = (shape, torch.float32 if layout.kind == VECTOR else FLOATS[dtype])
        else:
            expected[part] = (shape, torch.int8)
            expected[part + SCALE] = ((*shape[:-1], shape[-1] // _row_length(layout, part)), SCALE_DTYPE)
    return expected


def _row_length(layout: Layout, part: str) -> int:
    """Return how many numbers share a scale: a row of `G_t`, of `S` or of `B`."""
    if part in ("shared", "inner"):
        shape = layout.shared_shape if part == "shared" else layout.inner_shape
        assert shape is not None  # the part exists
        return shape[-1]
    if layout.kind == MATRIX:
        return layout.generated_shape[-1]
    length = 1
    for size in reversed(layout.shape):
        if length >= SHORTEST_ROW:
            break
        length *= size
    return length
