"""Access to the fields of model outputs (mappings, dataclasses, named tuples), and copies with other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers.utils import ModelOutput


def is_named_tuple(output: Any) -> bool:
    """Return whether an output is a named tuple."""
    return isinstance(output, tuple) and hasattr(output, "_fields")


def is_record(output: Any) -> bool:
    """Return whether an output is a dataclass (but no mapping) or a named tuple."""
    return is_named_tuple(output) or (dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)))


def record_fields(output: Any) -> Mapping[str, Any]:
    """Return the fields of a mapping, a dataclass or a named tuple, by name."""
    if isinstance(output, Mapping):
        return output
    if is_named_tuple(output):
        return output._asdict()
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}


def rebuilt(like: Any, fields: Mapping[str, Any]) -> Any:
    """Return an output of the same class with other field values; a mapping of unknown class becomes a dict."""
    if is_named_tuple(like):
        return type(like)(**fields)
    if isinstance(like, ModelOutput) or (isinstance(like, Mapping) and dataclasses.is_dataclass(like)):
        return type(like)(**fields)
    if isinstance(like, Mapping):
        return dict(fields)
    made = object.__new__(type(like))  # skips __init__ and __post_init__
    for name, value in {**getattr(like, "__dict__", {}), **fields}.items():
        object.__setattr__(made, name, value)
    return made
