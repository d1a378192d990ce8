"""The cost model behind `execution="auto"`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, ROWS
from helpers import MIXED, build_retex

from retex_hf.execution import ExpertCache, Group
from retex_hf.execution.choice import Chooser, size_of_call
from retex_hf.execution.mixed import Call, grouped_cost, mixed_cost
from retex_hf.execution.mixed.cost import Product, Work


def transformer(width: int, depth: int, rank: int, positions: float, prefix: str = "") -> Work:
    """The products of a row of `positions` tokens in a stack of blocks."""
    products = []
    for layer in range(depth):
        for part in range(4):
            products.append(Product(width, width, rank, positions, f"{prefix}{layer}.attention.{part}"))
        products.append(Product(4 * width, width, rank, positions, f"{prefix}{layer}.up"))
        products.append(Product(width, 4 * width, rank, positions, f"{prefix}{layer}.down"))
    return Work(products, input_size=int(positions))


T5 = Work(
    transformer(512, 6, 64, 32, "encoder.").products + transformer(512, 6, 64, 1, "decoder.").products, input_size=32
)
VIT = transformer(768, 12, 256, 50)


def prefers_mixed(work: Work, call: Call) -> bool:
    return mixed_cost(work, call) < grouped_cost(work, call)


def test_decoding_with_many_groups_goes_in_one_pass():
    call = Call([4] * 7, missing=0, input_size=32, steps=32, once="encoder.")
    assert prefers_mixed(T5, call)
    assert grouped_cost(T5, call) > 2 * mixed_cost(T5, call)
    assert prefers_mixed(T5, replace(call, beams=4))
    assert prefers_mixed(T5, replace(call, once=None))


def test_large_groups_on_experts_at_hand_go_group_by_group():
    assert not prefers_mixed(VIT, Call([8] * 8, missing=0, input_size=50))
    assert not prefers_mixed(VIT, Call([64], missing=0, input_size=50))


def test_experts_that_must_be_made_are_paid_for():
    call = Call([8] * 8, missing=8, input_size=50)
    assert prefers_mixed(VIT, call)
    costs = [grouped_cost(VIT, replace(call, missing=missing)) for missing in range(9)]
    assert all(fewer < more for fewer, more in pairwise(costs))
    assert mixed_cost(VIT, call) == mixed_cost(VIT, replace(call, missing=0))


def test_factors_at_a_few_bits_are_unpacked_for_every_call_or_once_for_an_expert():
    packed = Work([replace(product, packed=True) for product in T5.products], T5.input_size)
    few = Call([2, 3], missing=1 / 16, input_size=32)  # one expert is made, for sixteen calls
    assert prefers_mixed(T5, few) and not prefers_mixed(packed, few)
    many = Call([4] * 7, missing=7, input_size=32, steps=32, once="encoder.")  # experts that the cache cannot hold
    assert prefers_mixed(packed, many)


@pytest.mark.parametrize("cost", [grouped_cost, mixed_cost])
def test_more_work_costs_more(cost):
    call = Call([4] * 4, missing=1, input_size=32, steps=8, once="encoder.")
    assert cost(T5, call) < cost(T5, replace(call, steps=9))
    assert cost(T5, call) < cost(T5, replace(call, groups=[4] * 5))
    assert cost(T5, call) < cost(T5, replace(call, beams=64))
    assert cost(T5, call) < cost(T5, replace(call, input_size=320))


def test_a_higher_rank_makes_one_pass_dearer():
    call = Call([8] * 8, missing=0, input_size=50)
    ranks = [mixed_cost(transformer(768, 2, rank, 50), call) for rank in (8, 64, 256)]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]


def test_the_encoder_of_a_generation_runs_once():
    long, short = (Call([4] * 7, 0, 32, steps=steps, once="encoder.") for steps in (64, 32))
    encoder = Work([product for product in T5.products if product.name.startswith("encoder.")], 32)
    assert grouped_cost(encoder, long) == grouped_cost(encoder, short)
    assert mixed_cost(encoder, long) == mixed_cost(encoder, short)
    assert grouped_cost(T5, long) > 1.5 * grouped_cost(T5, short)


# ---- from a call to its size -----------------------------------------------------------------------------------------


def groups(*lengths: int) -> list[Group]:
    return [Group(task, torch.arange(length)) for task, length in enumerate(lengths)]


def chooser(capacity: int, cached: tuple[int, ...] = ()) -> Chooser:
    return Chooser("auto", ExpertCache(capacity), lambda group: group.task_id in cached, 100, True, lambda: None)


def test_missing_experts_that_stay_are_shared_by_later_calls():
    assert chooser(300, cached=(0, 1, 2)).missing(groups(1, 1, 1)) == 0
    assert chooser(299, cached=(0, 1)).missing(groups(1, 1, 1)) == 3
    some = chooser(300, cached=(0, 1)).missing(groups(1, 1, 1))
    assert 0 < some < 1
    assert chooser(300, cached=(0,)).missing(groups(1, 1, 1)) == 2 * some


def test_mixtures_are_made_for_every_call():
    mixtures = [replace(group, weights=torch.tensor([0.5, 0.5])) for group in groups(1, 1)]
    assert chooser(300).missing(mixtures) == 2


def test_one_task_that_stays_at_hand_is_run_on_its_expert():
    model, _ = build_retex("bert", rank=4)
    inputs = FAMILIES["bert"].inputs(ROWS)
    with torch.no_grad():
        model(**inputs, task="red")
        assert len(model.expert_cache) == 1 and "mixed" not in model.expert_cache
        model(**inputs, task=["red"] * ROWS)
    assert "mixed" not in model.expert_cache and model.expert_cache.hits == 1


@torch.no_grad()
def test_a_cache_that_holds_no_expert_makes_one_pass_of_a_mixed_batch():
    model, _ = build_retex("bert", rank=1, expert_cache=0)
    model(**FAMILIES["bert"].inputs(ROWS), task=MIXED)
    assert "mixed" in model.expert_cache and model.expert_cache.misses == 0


def size(method: str, encoder: str | None = None, **options) -> Call:
    inputs = {"input_ids": torch.zeros(6, 8, dtype=torch.long)}
    option = SimpleNamespace(**options)
    return size_of_call(method, inputs, groups(4, 2), 1.5, lambda name: getattr(option, name, None), encoder)


def test_the_size_of_a_call():
    assert size("forward") == Call([4, 2], 1.5, 8)
    assert size("generate", max_new_tokens=5) == Call([4, 2], 1.5, 8, steps=5)
    assert size("generate", max_length=20) == Call([4, 2], 1.5, 8, steps=12)
    assert size("generate", "encoder.", max_length=20).steps == 20
    assert size("generate", max_length=3).steps == 1
    assert size("generate", num_beams=4, num_return_sequences=2).beams == 4


@torch.no_grad()
def test_the_work_of_a_model_is_read_off_a_pass():
    model, _ = build_retex("t5", rank=4)
    inputs = FAMILIES["t5"].inputs(ROWS)
    model.execution = "mixed"
    model(**inputs, task=MIXED)
    ((_, work), _), *_ = model.expert_cache.get("mixed", lambda: None)._probed._items.values()
    by_name = {product.name: product for product in work.products}
    up = by_name["encoder.block.0.layer.1.DenseReluDense.wi.weight"]
    assert (up.rows, up.columns, up.rank, up.positions) == (24, 16, 4, 8)
    assert by_name["decoder.block.0.layer.2.DenseReluDense.wi.weight"].positions == 5
    assert work.input_size == 8
