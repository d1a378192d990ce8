"""`task=` in all its forms, pinned tasks, and recovery switched off."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from families import FAMILIES, tokens
from helpers import MIXED, TASKS, assert_same, build_retex, rows_of

from retex_hf import InputError, TaskError
from retex_hf.execution import Assignment, parse_task

IDS = [TASKS.index(task) for task in MIXED]
ONE_HOT = torch.eye(len(TASKS))[IDS]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@cache
def bert():
    """A model, its experts and a batch, for tests that leave them as they are."""
    torch.manual_seed(0)
    return (*build_retex("bert"), tokens(len(MIXED)))


FORMS = {
    "list of names": MIXED,
    "tuple of names": tuple(MIXED),
    "array of names": np.array(MIXED),
    "list of ids": IDS,
    "tuple of ids": tuple(IDS),
    "tensor of ids": torch.tensor(IDS),
    "tensor of small ids": torch.tensor(IDS, dtype=torch.uint8),
    "array of ids": np.array(IDS),
    "one-hot weights": ONE_HOT,
    "one-hot double weights": ONE_HOT.double(),
    "array of weights": ONE_HOT.numpy(),
    "list of weights": ONE_HOT.tolist(),
}


@torch.no_grad()
@pytest.mark.parametrize("task", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_one_task_per_row_gives_each_row_its_expert(task):
    model, experts, inputs = bert()
    output = model(**inputs, task=task)
    assert output.routing.tasks == MIXED
    assert output.routing.task_ids.tolist() == IDS
    for name in TASKS:
        expected = experts[name](**inputs).last_hidden_state
        torch.testing.assert_close(output.last_hidden_state[rows_of(name)], expected[rows_of(name)], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("task", ["green", 1, np.int64(1), torch.tensor(1), np.array(1)], ids=lambda task: repr(task))
def test_every_form_of_one_task_for_all_rows(task):
    model, experts, inputs = bert()
    output = model(**inputs, task=task)
    assert output.routing.tasks == ["green"] * len(MIXED)
    assert_same(output, experts["green"](**inputs), **CLOSE)


WRONG = {
    "unknown name": "purple",
    "unknown name in a list": [*MIXED[:-1], "purple"],
    "empty name": "",
    "id too large": [0, 1, 2, 3, 0, 0],
    "negative id": torch.tensor([0, 1, 2, -1, 0, 0]),
    "float ids": torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0, 0.0]),
    "one float": 0.5,
    "flags": [True] * 6,
    "one flag": True,
    "complex": torch.zeros(6, dtype=torch.complex64),
    "names and ids": [*MIXED[:-1], 1],
    "table of ids": torch.zeros(6, 3, dtype=torch.long),
    "cube of weights": torch.zeros(6, 3, 1),
    "dict": {"red": 1},
    "set": {"red"},
    "object": object(),
    "weights for two tasks": torch.full((6, 2), 0.5),
    "weights that sum to two": ONE_HOT * 2,
    "negative weights": torch.tensor([[1.5, -0.5, 0.0]] * 6),
    "NaN weights": ONE_HOT * float("nan"),
}


@pytest.mark.parametrize("task", WRONG.values(), ids=WRONG.keys())
def test_every_wrong_form_is_refused_with_the_known_tasks(task):
    model, _, inputs = bert()
    with pytest.raises(TaskError, match=r"red.*green.*blue"):
        model(**inputs, task=task)


@pytest.mark.parametrize("task", [MIXED[:5], [*MIXED, "red"], IDS[:5], torch.tensor(IDS[:1]), ONE_HOT[:5], []])
def test_a_wrong_number_of_tasks_is_refused(task):
    model, _, inputs = bert()
    with pytest.raises(TaskError, match=rf"task= has {len(task)} entries, but the batch has 6 rows"):
        model(**inputs, task=task)


def test_a_batch_without_rows_is_refused():
    model, _, _ = bert()
    with pytest.raises(InputError, match="no rows"):
        model(input_ids=torch.zeros(0, 5, dtype=torch.long), task="red")


@torch.no_grad()
@pytest.mark.parametrize(
    "merge", ["average", {"method": "task_arithmetic", "scale": 0.3}], ids=["average", "arithmetic"]
)
def test_mixing_weights_interpolate_the_recovered_experts(merge):
    model, _ = build_retex("bert", merge=merge)
    inputs = tokens(4)
    weights = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])
    output = model(**inputs, task=weights)
    recovered = [model.recover(task) for task in TASKS]
    for row, mixture in enumerate(weights.tolist()):
        explicit = deepcopy(model.get_base_model())
        explicit.load_state_dict(
            {
                name: sum(weight * state[name] for weight, state in zip(mixture, recovered, strict=True))
                if tensor.is_floating_point()
                else tensor
                for name, tensor in recovered[0].items()
            }
        )
        expected = explicit(**{name: value[row : row + 1] for name, value in inputs.items()})
        torch.testing.assert_close(output.last_hidden_state[row], expected.last_hidden_state[0], **CLOSE)
    assert output.routing.tasks == ["blue", "green", "blue", "red"]
    assert torch.equal(output.routing.weights, weights)


@torch.no_grad()
def test_a_mixture_uses_the_head_of_its_likeliest_task():
    model, experts = build_retex("bert-classifier")
    inputs = tokens(1)
    output = model(**inputs, task=torch.tensor([[0.3, 0.6, 0.1]]))
    hidden = model(**inputs, task=torch.tensor([[0.3, 0.6, 0.1]]), output_hidden_states=True).hidden_states[-1]
    expected = experts["green"].classifier(torch.tanh(_mixed_pooler(experts)(hidden[:, 0])))
    torch.testing.assert_close(output.logits, expected, **CLOSE)


def _mixed_pooler(experts):
    dense = deepcopy(experts["red"].bert.pooler.dense)
    for name, parameter in dense.named_parameters():
        parts = [dict(experts[task].bert.pooler.dense.named_parameters())[name] for task in TASKS]
        parameter.copy_(0.3 * parts[0] + 0.6 * parts[1] + 0.1 * parts[2])
    return dense


def test_weights_that_nearly_sum_to_one_are_normalised():
    weights = torch.tensor([[0.5, 0.5, 0.0]]) * 0.9995
    assert parse_task(weights, TASKS, 1).weights.tolist() == [[0.5, 0.5, 0.0]]


def test_rows_of_equal_weights_share_a_group_and_pure_weights_are_a_task():
    groups = Assignment(torch.tensor([0, 1, 0]), torch.tensor([[0.6, 0.4], [0.0, 1.0], [0.6, 0.4]])).groups()
    described = {tuple(group.rows.tolist()): (group.task_id, group.weights is None) for group in groups}
    assert described == {(0, 2): (0, False), (1,): (1, True)}


@torch.no_grad()
def test_a_pinned_task_holds_for_calls_that_name_none():
    model, experts = build_retex("bert", signatures="inputs")
    inputs = tokens(3)
    model.set_adapter("green")
    assert model.active_adapter == "green"
    assert_same(model(**inputs), experts["green"](**inputs), **CLOSE)
    assert_same(model(**inputs, task="red"), experts["red"](**inputs), **CLOSE)
    with pytest.raises(TaskError, match=r"'purple'.*red.*green.*blue"):
        model.set_adapter("purple")
    assert model.active_adapter == "green"
    model.set_adapter(None)
    with pytest.raises(Exception, match="no task signatures"):
        model(**inputs)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "open_clip-vit", "t5"])
def test_without_recovery_it_is_the_merged_model_bit_by_bit(name):
    model, _ = build_retex(name)
    inputs = FAMILIES[name].inputs(4)
    merged = deepcopy(model.get_base_model())
    model(**inputs, task="red")
    model.set_adapter("red")
    with model.disable_adapter():
        assert_same(model(**inputs), merged(**inputs), exact=True)
        with model.disable_adapter():
            assert_same(model(**inputs), merged(**inputs), exact=True)
        assert_same(model(**inputs), merged(**inputs), exact=True)
    assert_same(model(**inputs), model(**inputs, task="red"), exact=True)


@torch.no_grad()
def test_recovery_comes_back_after_an_exception():
    model, experts, inputs = bert()
    with pytest.raises(RuntimeError, match="inside"), model.disable_adapter():
        raise RuntimeError("inside")
    assert_same(model(**inputs, task="blue"), experts["blue"](**inputs), **CLOSE)


@torch.no_grad()
def test_switching_one_model_off_leaves_another_on():
    model, _, inputs = bert()
    other, experts = build_retex("bert")
    with model.disable_adapter():
        assert_same(other(**inputs, task="red"), experts["red"](**inputs), **CLOSE)


@torch.no_grad()
def test_without_recovery_a_task_selects_the_head_only():
    model, experts = build_retex("bert-classifier")
    inputs = tokens(len(MIXED))
    recovered = model(**inputs, task=MIXED)
    with model.disable_adapter():
        output = model(**inputs, task=MIXED)
        pooled = model.get_base_model().bert(**inputs).pooler_output
    for task in TASKS:
        expected = experts[task].classifier(pooled[rows_of(task)])
        torch.testing.assert_close(output.logits[rows_of(task)], expected, **CLOSE)
    assert_same(model(**inputs, task=MIXED), recovered, exact=True)


@torch.no_grad()
def test_experts_and_merged_model_are_distinct():
    # Guards the tests above: were the experts alike, routing to the wrong one would go unseen.
    model, experts, inputs = bert()
    outputs = [expert(**inputs).last_hidden_state for expert in experts.values()]
    outputs.append(model.get_base_model()(**inputs).last_hidden_state)
    for index, output in enumerate(outputs):
        assert all((output - other).abs().max() > 0.1 for other in outputs[:index])
