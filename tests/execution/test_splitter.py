"""Taking a batch apart by rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from retex_hf import InputError
from retex_hf.execution.joining import INSEPARABLE, check_separable
from retex_hf.rows import NOT_ROWS, Splitter, count_rows, readings

ROWS = torch.tensor([0, 3])


def split(**kwargs):
    return Splitter(4, NOT_ROWS | {"bad_words_ids"}).take(kwargs, ROWS)


def test_tensors_follow_the_rows_in_order():
    ids = torch.arange(12).view(4, 3)
    assert split(input_ids=ids)["input_ids"].tolist() == [[0, 1, 2], [9, 10, 11]]


@pytest.mark.parametrize(
    "value",
    [torch.tensor(7), torch.arange(3)[None], None, True, 0.5, "text", [1, 2, 3, 4], ["a", "b"]],
    ids=["0-D", "broadcast", "none", "flag", "number", "string", "numbers", "other length"],
)
def test_what_has_no_row_per_entry_goes_to_every_group_whole(value):
    assert split(argument=value)["argument"] is value


@pytest.mark.parametrize("name", ["cache_position", "head_mask", "logits_to_keep", "bad_words_ids"])
def test_named_arguments_stay_whole_even_with_as_many_entries_as_rows(name):
    value = torch.arange(4)
    assert split(**{name: value})[name] is value


def test_processors_and_criteria_stay_whole_even_with_as_many_entries_as_rows():
    processors, criteria = LogitsProcessorList([print] * 4), StoppingCriteriaList([print] * 4)
    part = split(logits_processor=processors, stopping_criteria=criteria)
    assert part["logits_processor"] is processors
    assert part["stopping_criteria"] is criteria


def test_lists_of_one_entry_per_row_follow_the_rows():
    part = split(texts=["a", "b", "c", "d"], boxes=({"x": 0}, {"x": 1}, {"x": 2}, {"x": 3}))
    assert part == {"texts": ["a", "d"], "boxes": ({"x": 0}, {"x": 3})}


def test_encoder_outputs_follow_the_rows_as_output_and_as_tuple():
    states = torch.arange(8.0).view(4, 2, 1)
    as_output = split(encoder_outputs=BaseModelOutput(states, hidden_states=(states, states + 1)))["encoder_outputs"]
    assert isinstance(as_output, BaseModelOutput)
    assert torch.equal(as_output.last_hidden_state, states[ROWS])
    assert torch.equal(as_output.hidden_states[1], states[ROWS] + 1)
    as_tuple = split(encoder_outputs=(states,))["encoder_outputs"]
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], states[ROWS])


def test_a_wrong_number_of_rows_is_refused_by_name():
    kwargs = {"input_ids": torch.zeros(4, 3), "token_type_ids": torch.zeros(3, 3)}
    with pytest.raises(InputError, match=r"'token_type_ids' has 3 entries in a batch of 4 rows"):
        readings(nn.Identity(), kwargs, 4, NOT_ROWS)


def test_arguments_that_stay_whole_may_have_any_number_of_rows():
    kwargs = {"input_ids": torch.zeros(4, 3), "position_ids": torch.zeros(1, 3), "cache_position": torch.arange(3)}
    assert list(readings(nn.Identity(), kwargs, 4, NOT_ROWS)["rows"]) == ["input_ids"]


@pytest.mark.parametrize("name", INSEPARABLE)
def test_what_serves_one_expert_only_is_refused_for_several(name):
    with pytest.raises(InputError, match=f"'{name}' cannot serve the 3 experts this batch needs"):
        check_separable({"input_ids": torch.zeros(4, 3), name: object()}, groups=3)


@pytest.mark.parametrize("name", INSEPARABLE)
@pytest.mark.parametrize("value", [None, False])
def test_switched_off_it_is_no_obstacle(name, value):
    check_separable({"input_ids": torch.zeros(4, 3), name: value}, groups=3)


def test_rows_are_counted_on_the_named_inputs_first():
    kwargs = {"labels": torch.zeros(2), "input_ids": torch.zeros(5, 3), "pixel_values": torch.zeros(6, 3)}
    assert count_rows(kwargs, ("pixel_values", "input_ids")) == 6
    assert count_rows(kwargs, ("input_features", "input_ids")) == 5
    assert count_rows(kwargs, ("input_features",)) == 2
    assert count_rows({"encoder_outputs": (torch.zeros(7, 2),)}, ("input_ids",)) == 7
    assert count_rows({"encoder_outputs": BaseModelOutput(torch.zeros(8, 2))}, ("input_ids",)) == 8


def test_no_rows_at_all_is_an_error():
    with pytest.raises(InputError, match="No input says how many rows"):
        count_rows({"max_length": 5, "scale": torch.tensor(1.0)}, ("input_ids",))
