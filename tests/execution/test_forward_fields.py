"""Everything a forward pass returns is put back in row order, in the expert's own form."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from helpers import MIXED, TASKS, assert_same, build_retex, leaves, rows_of, take

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
ROWS = len(MIXED)


def assert_rows(mixed, alone, task: str) -> None:
    """Every tensor of a mixed output has, in the rows of a task, what the expert gave for these rows."""
    actual, expected = dict(leaves(mixed)), dict(leaves(alone))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        own = actual[name].unflatten(0, (ROWS, -1))[rows_of(task)].flatten(0, 1)
        torch.testing.assert_close(own, tensor, msg=lambda text, n=name: f"{n}: {text}", **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "t5", "vit", "gpt2"])
def test_hidden_states_and_attentions(name):
    model, experts = build_retex(name)
    for module in (model, *experts.values()):
        module.set_attn_implementation("eager")
    inputs = FAMILIES[name].inputs(ROWS) | {"output_hidden_states": True, "output_attentions": True}
    mixed = model(**inputs, task=MIXED)
    names = dict(leaves(mixed))
    assert sum("attentions" in field for field in names) >= 2
    assert sum("hidden_states" in field for field in names) >= 3
    for task in TASKS:
        rows = {key: value[rows_of(task)] for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        assert_rows(mixed, experts[task](**{**inputs, **rows}), task)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "t5", "gpt2", "vit", "bert-classifier"])
def test_a_tuple_has_the_experts_order(name):
    model, experts = build_retex(name)
    inputs = FAMILIES[name].inputs(ROWS)
    options = {"return_dict": False, "output_hidden_states": True}
    mixed = model(**inputs, **options, task=MIXED)
    assert isinstance(mixed, tuple)
    assert mixed.routing.tasks == MIXED
    for task in TASKS:
        alone = experts[task](**take(inputs, rows_of(task)), **options)
        assert len(mixed) == len(alone)
        for actual, expected in zip(mixed, alone, strict=True):
            if actual is None:  # a cache belongs to one expert
                assert not isinstance(expected, (torch.Tensor, tuple))
            else:
                assert_rows(actual, expected, task)
    named = model(**inputs, **options, task="green")
    alone = experts["green"](**inputs, **options)
    assert len(named) == len(alone)
    assert_same(named[0], alone[0], **CLOSE)


@torch.no_grad()
def test_the_models_configuration_may_ask_for_tuples_and_hidden_states_after_a_call():
    model, experts = build_retex("bert")
    inputs = FAMILIES["bert"].inputs(ROWS)
    model(**inputs, task=MIXED)
    model.config.return_dict = False
    model.config.output_hidden_states = True
    mixed = model(**inputs, task=MIXED)
    for task in TASKS:
        alone = experts[task](**take(inputs, rows_of(task)), return_dict=False, output_hidden_states=True)
        assert_rows(mixed, alone, task)


@torch.no_grad()
def test_router_logits_of_a_mixture_of_experts():
    model, experts = build_retex("mixtral")
    inputs = FAMILIES["mixtral"].inputs(ROWS)
    mixed = model(**inputs, output_router_logits=True, task=MIXED)
    length = inputs["input_ids"].shape[1]
    for task in TASKS:
        alone = experts[task](**take(inputs, rows_of(task)), output_router_logits=True)
        assert len(mixed.router_logits) == len(alone.router_logits) == 2
        for actual, expected in zip(mixed.router_logits, alone.router_logits, strict=True):
            assert actual.shape == (ROWS * length, 4)
            own = actual.view(ROWS, length, 4)[rows_of(task)].flatten(0, 1)
            torch.testing.assert_close(own, expected, **CLOSE)


@torch.no_grad()
def test_one_task_keeps_its_cache_for_the_next_step():
    model, experts = build_retex("gpt2")
    ids = torch.randint(3, 40, (2, 5))
    first = model(input_ids=ids[:, :4], task="red")
    second = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values, task="red")
    torch.testing.assert_close(second.logits[:, -1], experts["red"](input_ids=ids).logits[:, -1], **CLOSE)
    assert model(input_ids=ids, task=["red", "blue"]).past_key_values is None
