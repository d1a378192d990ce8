"""Sizes in bytes, as users write them."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ConfigError, brief

UNITS = {"": 1, "B": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: Any, name: str) -> int:
    """Return a number of bytes, given as such or as a size such as "5GB" or "1.5 GiB"; `name` names it in messages.

    Not accelerate's own function: that one reads "10mb" as megabits.

    >>> from retex_hf.utils.byte_sizes import parse_size
    >>> parse_size("2GB", "expert_cache"), parse_size(0, "expert_cache"), parse_size("1 MiB", "expert_cache")
    (2000000000, 0, 1048576)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or found[2] not in UNITS:
        raise ConfigError(f'{name} must be a number of bytes or a size such as "5GB", not {brief(size)}.')
    return int(float(found[1]) * UNITS[found[2]])
