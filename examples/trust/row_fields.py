"""Outputs field by field: the axis of rows in each, found on a plain model, and distances between outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Relative to the largest number of a field. The weights compared are the same, so only rounding is left.
TOLERANCE = 2e-3
# Caches belong to one expert.
CACHES = re.compile(
    r"(^|\.)(past_key_values|cache_params|mems|state|past_buckets_states|rope_deltas|padding_cache|decoder_cache)(\.|$)"
)


def fields(output: Any) -> dict[str, Tensor]:
    """Return all tensors of an output by path, except caches."""
    return {path: tensor for path, tensor in _leaves(output) if not CACHES.search(path)}


def _leaves(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from _leaves(value, f"{path}.{index}" if path else str(index))


def error(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors, relative to the largest number; infinite where they differ in kind."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.numel():
        return 0.0
    if not found.is_floating_point() and not found.is_complex():
        return 0.0 if torch.equal(found, expected) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    if not finite.any():
        return 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    found, expected = found[finite].to(wide), expected[finite].to(wide)
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def same(found: Tensor, expected: Tensor) -> bool:
    return error(found, expected) < TOLERANCE


@dataclass(frozen=True)
class Place:
    """How the plain model joins the fields of rows into that of a batch.

    Rows are joined along an axis, or share one value (`axis` is None), of which experts give each row its own.
    """

    axis: int | None


def _joined(alone: list[Tensor], axis: int, like: Tensor) -> Tensor | None:
    """Join rows along an axis, in a tensor `like` another one where some are shorter; None if they do not fit."""
    if any(part.ndim != like.ndim or part.dtype != like.dtype for part in alone):
        return None
    sizes = [{part.shape[other] for part in alone} for other in range(like.ndim)]
    if like.shape[axis] != sum(part.shape[axis] for part in alone):
        return None
    if any(like.shape[other] != max(of) for other, of in enumerate(sizes) if other != axis):
        return None
    joined, start = like.clone(), 0
    for part in alone:
        index = [slice(size) for size in part.shape]
        index[axis] = slice(start, start + part.shape[axis])
        joined[tuple(index)] = part
        start += part.shape[axis]
    return joined


def find_places(batch: Mapping[str, Tensor], alone: list[dict[str, Tensor]]) -> tuple[dict[str, Place], list[str]]:
    """Return where the rows are, by field, and the fields in which rows depend on each other."""
    places, dependent = {}, []
    for path, tensor in batch.items():
        parts = [row[path] for row in alone if path in row]
        axis = next((axis for axis in range(tensor.ndim) if _joins(tensor, parts, axis)), None)
        if axis is not None:
            places[path] = Place(axis)
        elif len(parts) == len(alone) and all(same(tensor, part) for part in parts):
            places[path] = Place(None)
        else:
            dependent.append(path)
    return places, dependent


def _joins(tensor: Tensor, parts: list[Tensor], axis: int) -> bool:
    joined = _joined(parts, axis, tensor) if parts else None
    return joined is not None and same(tensor, joined)


def deviations(found: Mapping[str, Tensor], alone: list[dict[str, Tensor]], places: Mapping[str, Place]) -> list[str]:
    """Return the deviations of an answer to rows from the experts' answers to each row `alone`."""
    wrong = []
    for path, place in places.items():
        parts = [row[path] for row in alone if path in row]
        if not parts:
            continue
        if path not in found:
            wrong.append(f"{path} is missing")
            continue
        if (off := _off(found[path], parts, place)) == float("inf"):
            shapes = [list(part.shape) for part in parts]
            wrong.append(f"{path} is {list(found[path].shape)} for rows of {shapes[:3]}, or of another kind")
        elif off > TOLERANCE:
            wrong.append(f"{path} is off by {off:.1e}")
    return wrong


def _off(found: Tensor, parts: list[Tensor], place: Place) -> float:
    if place.axis is not None:
        joined = _joined(parts, place.axis, found)
        return float("inf") if joined is None else error(found, joined)
    if found.shape == parts[0].shape and all(same(parts[0], part) for part in parts):
        return error(found, parts[0])
    return error(found, torch.stack(parts))
