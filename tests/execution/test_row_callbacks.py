"""Callbacks of `generate` follow their rows: group by group, in one pass, and when one pass has to be given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import FAMILIES
from helpers import MIXED, build_retex
from torch import Tensor

from retex_hf.execution import RowCallback
from retex_hf.execution.mixed import MixedModel, MixedUnsupported
from retex_hf.routing import Routing

LENGTHS = [3, 1, 5, 2, 4, 1]


class Record(RowCallback):
    """Records the tokens of every row of the batch, and ends each after a number of its own."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.routings: list[Routing] = []

    def routed(self, routing: Routing) -> None:
        self.routings.append(routing)

    def of_rows(self, rows: Tensor | None) -> Callable[..., Tensor]:
        numbers = list(range(len(LENGTHS))) if rows is None else rows.tolist()
        self.tokens |= {number: [] for number in numbers}

        def read(input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
            for number, token in zip(numbers, input_ids[:, -1].tolist(), strict=True):
                self.tokens[number].append(token)
            return torch.tensor([len(self.tokens[number]) >= LENGTHS[number] for number in numbers])

        return read

    def texts(self) -> list[list[int]]:
        return [self.tokens[row][:length] for row, length in enumerate(LENGTHS)]


class OnlyToken(RowCallback):
    """A logits processor: every row of the batch gets a token of its own."""

    def of_rows(self, rows: Tensor | None) -> Callable[..., Tensor]:
        wanted = torch.arange(6) + 20 if rows is None else rows + 20

        def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -torch.inf).scatter(1, wanted.unsqueeze(1), 0.0)

        return choose


def case(execution: str = "auto"):
    model, _ = build_retex("gpt2")
    model.execution = execution
    inputs = FAMILIES["gpt2"].inputs(6)
    return model, {"input_ids": inputs["input_ids"].clamp(min=3), "attention_mask": torch.ones(6, 8, dtype=torch.long)}


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_rows_are_followed_and_end_each_for_itself(execution):
    model, inputs = case(execution)
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=5, eos_token_id=[], task=MIXED)
    record = Record()
    model.generate(**inputs, do_sample=False, max_new_tokens=5, eos_token_id=[], task=MIXED, stopping_criteria=[record])
    assert record.texts() == [row[8 : 8 + length].tolist() for row, length in zip(whole, LENGTHS, strict=True)]
    assert [routing.tasks for routing in record.routings] == [MIXED]
    # Rows of a group run until its longest one ends, and no longer.
    longest = {task: max(n for n, own in zip(LENGTHS, MIXED, strict=True) if own == task) for task in MIXED}
    steps = [longest[task] if execution == "grouped" else 5 for task in MIXED]
    assert [len(record.tokens[row]) for row in range(6)] == steps


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_processors_see_their_own_rows(execution):
    model, inputs = case(execution)
    output = model.generate(**inputs, max_new_tokens=2, logits_processor=[OnlyToken()], task=MIXED)
    assert output[:, 8].tolist() == [20 + row for row in range(6)]


def test_one_task_and_the_merged_model_take_them_too():
    model, inputs = case()
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": []}
    for task in ("red", None):
        record = Record()
        if task is None:
            with model.disable_adapter():
                model.generate(**inputs, **options, stopping_criteria=[record])
                whole = model.generate(**inputs, **options)
        else:
            model.generate(**inputs, **options, task=task, stopping_criteria=[record])
            whole = model.generate(**inputs, **options, task=task)
        assert record.texts() == [row[8 : 8 + length].tolist() for row, length in zip(whole, LENGTHS, strict=True)]


def test_rows_begin_anew_if_one_pass_is_given_up(monkeypatch):
    model, inputs = case()
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=5, eos_token_id=[], task=MIXED)
    monkeypatch.setattr("retex_hf.execution.choice.grouped_cost", lambda *_: 1e18)
    run, failed = MixedModel.run, []

    def fail(self, *arguments):
        run(self, *arguments)
        failed.append(True)
        raise MixedUnsupported("something that the probe did not see")

    monkeypatch.setattr(MixedModel, "run", fail)
    record = Record()
    model.generate(**inputs, do_sample=False, max_new_tokens=5, eos_token_id=[], task=MIXED, stopping_criteria=[record])
    assert failed == [True]
    assert record.texts() == [row[8 : 8 + length].tolist() for row, length in zip(whole, LENGTHS, strict=True)]
