"""What error messages show of a value has an end, however large the value is."""

from __future__ import annotations

import time

import pytest

from retex_hf.errors import brief


@pytest.mark.parametrize(
    "value",
    [
        None, True, 7, -2.5, "a'b", b"\0", "é\n", [], (), {}, set(), frozenset(), [1, "a"], (1,), (1, 2), {1},
        {"a": {"b": (2,)}}, frozenset([3]), {None: [(), [], {}]}, range(3),
    ],
)  # fmt: skip
def test_short_values_are_shown_as_python_shows_them(value):
    assert brief(value) == repr(value)


def doubled() -> tuple:
    value: tuple = ()
    for _ in range(60):
        value = (value, value)
    return value


def deep() -> list:
    value: list = []
    for _ in range(100_000):
        value = [value]
    return value


def endless() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "make", [doubled, deep, endless, lambda: "a" * 10**8, lambda: dict.fromkeys(range(10**6)), lambda: [[]] * 10**7]
)
def test_what_is_shown_has_an_end(make):
    value, start = make(), time.perf_counter()
    text = brief(value)
    assert len(text) == 203
    assert text.endswith("...")
    assert time.perf_counter() - start < 0.5


def test_numbers_that_python_does_not_print():
    assert brief([10**5000, 1]) == "[a very long int, 1]"
