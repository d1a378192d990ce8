"""Recovered experts at hand: the most recent ones, within a number of bytes."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from families import FAMILIES, tokens
from helpers import MIXED, TASKS, assert_same, build_retex

from retex_hf import ConfigError, RetexModel
from retex_hf.execution import ExpertCache, copy_with


def keys(cache: ExpertCache) -> list:
    return list(cache._items)


def fill(cache: ExpertCache, *entries: tuple[str, int | None]) -> list[str]:
    """Ask for items of given sizes; returns those that had to be made."""
    made = []
    for key, size in entries:
        cache.get(key, lambda key=key: made.append(key), None if size is None else lambda size=size: size)
    return made


def counts(cache: ExpertCache) -> tuple[int, int, int]:
    return cache.hits, cache.misses, cache.evictions


def test_the_least_recently_used_goes_first():
    cache = ExpertCache(30)
    assert fill(cache, ("a", 10), ("b", 10), ("c", 10)) == ["a", "b", "c"]
    assert fill(cache, ("a", 10)) == []
    assert fill(cache, ("d", 10)) == ["d"]
    assert keys(cache) == ["c", "a", "d"]
    assert cache.bytes == 30
    assert counts(cache) == (1, 4, 1)
    assert repr(cache) == "ExpertCache(experts=3, 30 of 30 bytes, hits=1, misses=4, evictions=1)"


def test_several_go_where_one_is_not_enough():
    cache = ExpertCache(30)
    fill(cache, ("a", 10), ("b", 10), ("c", 10), ("d", 25))
    assert keys(cache) == ["d"]
    assert cache.evictions == 3


def test_what_is_larger_than_the_cache_drives_nothing_out():
    cache = ExpertCache(30)
    assert fill(cache, ("a", 30), ("b", 31), ("b", 31)) == ["a", "b", "b"]
    assert keys(cache) == ["a"]
    assert counts(cache) == (0, 3, 0)


def test_what_takes_no_bytes_is_kept_frees_none_and_is_not_counted():
    cache = ExpertCache(20)
    fill(cache, ("features", None), ("a", 10), ("b", 10), ("c", 10), ("features", None))
    assert keys(cache)[:2] == ["b", "c"]
    assert "features" in keys(cache)
    assert len(cache) == 2
    assert counts(cache) == (0, 3, 1)


def test_no_capacity_keeps_nothing_that_costs():
    cache = ExpertCache(0)
    assert fill(cache, ("a", 1), ("a", 1), ("free", None), ("free", None)) == ["a", "a", "free"]
    assert cache.bytes == 0


def test_room_is_made_before_the_next_is():
    cache, seen = ExpertCache(10), []
    fill(cache, ("a", 10))
    cache.get("b", lambda: seen.append((len(cache), cache.bytes)), lambda: 10)
    assert seen == [(0, 0)]
    assert keys(cache) == ["b"]


def test_a_failing_maker_leaves_no_trace():
    cache = ExpertCache(10)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 / 0, lambda: 1)
    assert len(cache) == 0
    assert fill(cache, ("a", 1)) == ["a"]


class SlowMaker:
    """Makes an item when it is let."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started, self.let, self.count, self.error = threading.Event(), threading.Event(), 0, error

    def __call__(self) -> object:
        self.count += 1
        self.started.set()
        assert self.let.wait(10)
        if self.error is not None and self.count == 1:
            raise self.error
        return object()


def ask(cache: ExpertCache, key: str, make, results: list) -> threading.Thread:
    def run() -> None:
        try:
            results.append(cache.get(key, make, lambda: 1))
        except ValueError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("capacity", [0, 10])
def test_threads_that_need_one_item_make_it_once(capacity):
    cache, make, results = ExpertCache(capacity), SlowMaker(), []
    first = ask(cache, "a", make, results)
    assert make.started.wait(10)
    others = [ask(cache, "a", make, results) for _ in range(3)]
    while cache._making["a"].wanted < 4:  # without capacity, who comes late makes it anew
        time.sleep(0.001)
    make.let.set()
    for thread in (first, *others):
        thread.join(10)
    assert make.count == 1
    assert len(results) == 4
    assert len(set(map(id, results))) == 1
    assert counts(cache) == (3, 1, 0)


def test_making_one_item_holds_up_no_other():
    cache, make, results = ExpertCache(10), SlowMaker(), []
    fill(cache, ("there", 1))
    thread = ask(cache, "slow", make, results)
    assert make.started.wait(10)
    assert fill(cache, ("there", 1), ("new", 1)) == ["new"]
    make.let.set()
    thread.join(10)
    assert keys(cache) == ["there", "new", "slow"]


def test_who_waits_for_a_maker_that_fails_tries_again():
    cache, make, results = ExpertCache(10), SlowMaker(ValueError("no")), []
    first = ask(cache, "a", make, results)
    assert make.started.wait(10)
    second = ask(cache, "a", make, results)
    make.let.set()
    first.join(10)
    second.join(10)
    assert sorted(type(result).__name__ for result in results) == ["ValueError", "object"]
    assert make.count == 2


def test_what_is_being_made_while_the_cache_is_cleared_is_not_kept():
    cache, make, results = ExpertCache(10), SlowMaker(), []
    thread = ask(cache, "a", make, results)
    assert make.started.wait(10)
    cache.clear()
    make.let.set()
    thread.join(10)
    assert len(results) == 1
    assert keys(cache) == []
    assert fill(cache, ("a", 1)) == ["a"]


@pytest.mark.parametrize("capacity", [0, 100])
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_a_copy_is_empty_with_the_same_capacity(clone, capacity):
    cache = ExpertCache(capacity)
    fill(cache, ("a", None), ("b", 10))
    twin = clone(cache)
    assert twin.capacity == capacity
    assert len(twin) == 0
    assert fill(twin, ("a", None)) == ["a"]


def build_grouped(name: str, **options) -> tuple[RetexModel, dict]:
    """A model that runs every batch group by group, on experts."""
    model, experts = build_retex(name, **options)
    model.execution = "grouped"
    return model, experts


def expert_bytes(model) -> int:
    tensors = model.get_base_model().state_dict()
    return sum(tensors[name].numel() * tensors[name].element_size() for name in model.recovery)


@torch.no_grad()
def test_a_model_keeps_as_many_experts_as_fit():
    model, _ = build_grouped("bert")
    size = expert_bytes(model)
    for capacity, kept in ((0, 0), (size - 1, 0), (size, 1), (2 * size, 2), (10 * size, 3)):
        model.expert_cache = capacity
        first = model(**tokens(6), task=MIXED)
        assert len(model.expert_cache) == kept
        assert model.expert_cache.bytes == kept * size
        assert first.last_hidden_state.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("cache", ["2GB", "1MB", 0])
def test_the_cache_changes_no_answer(cache):
    model, experts = build_grouped("bert", expert_cache=cache)
    inputs = tokens(6)
    first, second = model(**inputs, task=MIXED), model(**inputs, task=MIXED)
    assert_same(first, second, exact=True)
    for task in TASKS:
        assert_same(model(**inputs, task=task), experts[task](**inputs), rtol=1e-4, atol=1e-5)


def test_a_wrong_size_is_refused():
    with pytest.raises(ConfigError, match="expert_cache must be"):
        build_grouped("bert", expert_cache="plenty")


@torch.no_grad()
@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to"])
def test_moving_or_casting_the_model_drops_experts(change):
    model, _ = build_grouped("bert")
    model(**tokens(6), task=MIXED)
    assert len(model.expert_cache) == 3
    getattr(model, change)(*([torch.bfloat16] if change == "to" else []))
    assert len(model.expert_cache) == 0
    dtype = {"half": torch.half, "double": torch.double}.get(change, torch.bfloat16)
    assert model(**tokens(6), task=MIXED).last_hidden_state.dtype == dtype


@torch.no_grad()
def test_a_model_counts_experts_not_features():
    model, _ = build_grouped("bert")
    model.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
    model.identify(**tokens(6))
    model.identify(**tokens(6))
    assert counts(model.expert_cache) == (0, 0, 0)
    model(**tokens(6), task=MIXED)
    model(**tokens(6), task="red")
    assert counts(model.expert_cache) == (1, 3, 0)


@torch.no_grad()
@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_expert_is_freed_without_the_garbage_collector(name):
    model = FAMILIES[name].make().eval()
    expert = copy_with(model, {name: tensor.clone() for name, tensor in model.state_dict().items()})
    expert(**FAMILIES[name].inputs(2))
    tensors = [weakref.ref(tensor) for tensor in expert.parameters()]
    gc.disable()
    try:
        del expert
        assert not any(tensor() is not None for tensor in tensors)
    finally:
        gc.enable()


@torch.no_grad()
def test_a_cache_of_one_expert_never_holds_two():
    model, _ = build_grouped("bert")
    model.expert_cache = expert_bytes(model)
    alive = []

    def watch(expert, *_):
        alive.append(sum(tensor() is not None for tensor in seen))
        seen.append(weakref.ref(expert.embeddings.word_embeddings.weight))

    seen: list[weakref.ref] = []
    model.get_base_model().register_forward_pre_hook(watch)
    gc.disable()
    try:
        for task in (*TASKS, *TASKS):
            model(**tokens(2), task=task)
    finally:
        gc.enable()
    assert alive == [0] * 6
    assert counts(model.expert_cache) == (0, 6, 5)


def test_an_expert_shares_what_it_does_not_recover():
    model, _ = build_grouped("bert", exclude=["*embeddings*"])
    expert, merged = model._state.expert("red").state_dict(), model.get_base_model().state_dict()
    shared = {name for name in merged if expert[name].data_ptr() == merged[name].data_ptr()}
    assert shared == {name for name in merged if "embeddings" in name and "position_ids" not in name}
    assert set(merged) - shared - set(model.recovery) <= {"embeddings.position_ids", "embeddings.token_type_ids"}


def test_a_hook_of_a_modules_own_survives_copies():
    model, _ = build_grouped("mamba")
    plain = model.merge_and_unload("red")
    for twin in (plain, pickle.loads(pickle.dumps(model._state.expert("red"))), model._state.expert("red")):
        old_names = {name.replace("embeddings.", "embedding."): t for name, t in plain.backbone.state_dict().items()}
        assert twin.backbone.load_state_dict(old_names).missing_keys == []


@torch.no_grad()
def test_an_expert_made_under_autocast_is_recovered_in_float32():
    model, experts = build_grouped("bert")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**tokens(2), task="red")
    assert_same(model.recover("red"), dict(experts["red"].state_dict()), rtol=1e-5, atol=1e-6)
