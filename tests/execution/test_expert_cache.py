"""Recovered experts at hand: the most recent ones, within a number of bytes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from families import tokens
from helpers import MIXED, TASKS, assert_same, build_retex

from retex_hf import ConfigError
from retex_hf.execution import ExpertCache


def keys(cache: ExpertCache) -> list:
    return list(cache._items)


def fill(cache: ExpertCache, *entries: tuple[str, int]) -> list[str]:
    """Ask for items of given sizes; returns those that had to be made."""
    made = []
    for key, size in entries:
        cache.get(key, lambda key=key, size=size: (made.append(key), size))
    return made


def test_the_least_recently_used_goes_first():
    cache = ExpertCache(30)
    assert fill(cache, ("a", 10), ("b", 10), ("c", 10)) == ["a", "b", "c"]
    assert fill(cache, ("a", 10)) == []
    assert fill(cache, ("d", 10)) == ["d"]
    assert keys(cache) == ["c", "a", "d"]
    assert cache.bytes == 30


def test_several_go_where_one_is_not_enough():
    cache = ExpertCache(30)
    fill(cache, ("a", 10), ("b", 10), ("c", 10), ("d", 25))
    assert keys(cache) == ["d"]


def test_what_is_larger_than_the_cache_drives_nothing_out():
    cache = ExpertCache(30)
    assert fill(cache, ("a", 30), ("b", 31), ("b", 31)) == ["a", "b", "b"]
    assert keys(cache) == ["a"]


def test_what_takes_no_bytes_is_kept_and_frees_none():
    cache = ExpertCache(20)
    fill(cache, ("features", 0), ("a", 10), ("b", 10), ("c", 10))
    assert keys(cache) == ["features", "b", "c"]


def test_no_capacity_keeps_nothing_that_costs():
    cache = ExpertCache(0)
    assert fill(cache, ("a", 1), ("a", 1), ("free", 0), ("free", 0)) == ["a", "a", "free"]
    assert cache.bytes == 0


def test_a_failing_maker_leaves_no_trace():
    cache = ExpertCache(10)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: (1 / 0, 1))
    assert len(cache) == 0
    assert fill(cache, ("a", 1)) == ["a"]


@pytest.mark.parametrize("capacity", [0, 100])
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_a_copy_is_empty_with_the_same_capacity(clone, capacity):
    cache = ExpertCache(capacity)
    fill(cache, ("a", 0), ("b", 10))
    twin = clone(cache)
    assert twin.capacity == capacity
    assert len(twin) == 0
    assert fill(twin, ("a", 0)) == ["a"]


def expert_bytes(model) -> int:
    tensors = model.get_base_model().state_dict()
    return sum(tensors[name].numel() * tensors[name].element_size() for name in model.recovery)


@torch.no_grad()
def test_a_model_keeps_as_many_experts_as_fit():
    model, _ = build_retex("bert")
    size = expert_bytes(model)
    for capacity, kept in ((0, 0), (size - 1, 0), (size, 1), (2 * size, 2), (10 * size, 3)):
        model._cache = ExpertCache(capacity)
        first = model(**tokens(6), task=MIXED)
        assert len(model._cache) == kept
        assert model._cache.bytes == kept * size
        assert first.last_hidden_state.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("cache", ["2GB", "1MB", 0])
def test_the_cache_changes_no_answer(cache):
    model, experts = build_retex("bert", expert_cache=cache)
    inputs = tokens(6)
    first, second = model(**inputs, task=MIXED), model(**inputs, task=MIXED)
    assert_same(first, second, exact=True)
    for task in TASKS:
        assert_same(model(**inputs, task=task), experts[task](**inputs), rtol=1e-4, atol=1e-5)


def test_a_wrong_size_is_refused():
    with pytest.raises(ConfigError, match="expert_cache must be"):
        build_retex("bert", expert_cache="plenty")


@torch.no_grad()
@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to"])
def test_moving_or_casting_the_model_drops_experts(change):
    model, _ = build_retex("bert")
    model(**tokens(6), task=MIXED)
    assert len(model._cache) == 3
    getattr(model, change)(*([torch.bfloat16] if change == "to" else []))
    assert len(model._cache) == 0
    dtype = {"half": torch.half, "double": torch.double}.get(change, torch.bfloat16)
    assert model(**tokens(6), task=MIXED).last_hidden_state.dtype == dtype
