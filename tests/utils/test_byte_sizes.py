"""Sizes as users write them."""

from __future__ import annotations

import pytest

from retex_hf import ConfigError
from retex_hf.utils.byte_sizes import parse_size


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (5, 5),
        ("0", 0),
        ("17", 17),
        ("3B", 3),
        ("2KB", 2000),
        ("2 GB", 2 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_bytes(size, count):
    assert parse_size(size, "expert_cache") == count


@pytest.mark.parametrize("size", [None, True, 1.5, -1, "", "lots", "10mb", "10Mb", "-5GB", "5 GB of memory", [], "GB"])
def test_other_sizes_are_refused(size):
    """Lower-case letters too: some programs read `mb` as megabits."""
    with pytest.raises(ConfigError, match='expert_cache must be a number of bytes or a size such as "5GB", not'):
        parse_size(size, "expert_cache")
