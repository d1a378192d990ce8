"""Outputs that are no rows: what says something of the whole batch is refused, whichever way the batch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from families import LLM, VOCAB
from torch import Tensor, nn

from retex_hf import InputError, RetexConfig, RetexModel

TASKS = ["t0", "t1", "t0", "t1"]


class Net(nn.Module):
    """A layer whose output is made into something else."""

    def __init__(self, read: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(x, self.layer(x))


def build(make: Callable[[], nn.Module], execution: str) -> RetexModel:
    experts = {"t0": make(), "t1": make()}
    options = {"check_base": False, "progress": False, "execution": execution}
    return RetexModel.from_experts(make(), experts, RetexConfig(rank="full"), **options)


OVER_ALL_ROWS = {
    "sum": lambda x, y: {"y": y, "value": y.sum().item()},
    "set": lambda x, y: {"y": y, "value": set(y.argmax(-1).tolist())},
    "length": lambda x, y: {"y": y, "value": len(x)},
    "in a tuple": lambda x, y: (y, len(x)),
    "any": lambda x, y: {"y": y, "value": (x[:, 0] > 1).any()},
    "count": lambda x, y: {"y": y, "value": (x[:, 0] > 1).sum()},
    "best row": lambda x, y: {"y": y, "value": y[:, 0].argmax()},
    "row before last": lambda x, y: torch.cat([y[:2], y[2:] + y[:-2]]),
}


@pytest.mark.parametrize("execution", ["auto", "grouped"])
@pytest.mark.parametrize("kind", OVER_ALL_ROWS)
def test_values_over_all_rows_are_refused(kind, execution):
    model = build(lambda: Net(OVER_ALL_ROWS[kind]), execution)
    x = torch.randn(4, 6)
    x[:, 0] = torch.tensor([0.0, 0.0, 0.0, 2.0])
    with pytest.raises(InputError, match="call once per task with task="):
        model(x, task=TASKS)


@pytest.mark.parametrize("execution", ["auto", "grouped"])
def test_values_that_no_row_changes_are_kept(execution):
    model = build(lambda: Net(lambda x, y: {"y": y, "width": y.shape[-1], "kind": "linear", "scale": 0.5}), execution)
    output = model(torch.randn(4, 6), task=TASKS)
    assert (output["width"], output["kind"], output["scale"]) == (5, "linear", 0.5)


@pytest.mark.parametrize("execution", ["auto", "grouped"])
def test_complex_rows_are_put_together(execution):
    model = build(lambda: Net(lambda x, y: torch.complex(y, -y)), execution)
    x = torch.randn(4, 6)
    found = model(x, task=TASKS)
    for row, task in enumerate(TASKS):
        torch.testing.assert_close(found[[row]], model.merge_and_unload(task)(x[[row]]))


class Gated(nn.Module):
    """Rows meet only where the gate is open; experts' gates may cancel out in the merged model."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(6, 5), nn.Parameter(torch.tensor([gate]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden + self.gate * hidden.mean(0)


@pytest.mark.parametrize("execution", ["auto", "grouped"])
def test_rows_that_meet_in_experts_only_are_refused(execution):
    experts = {"t0": Gated(0.5), "t1": Gated(-0.5)}
    options = {"check_base": False, "progress": False, "execution": execution}
    model = RetexModel.from_experts(Gated(0.0), experts, RetexConfig(rank="full"), **options)
    with pytest.raises(InputError, match="call once per task with task="):
        model(torch.randn(4, 6), task=TASKS)


def test_a_cache_that_is_asked_for_is_refused():
    config = tf.LlamaConfig(**LLM)
    base = tf.LlamaForCausalLM(config).eval()
    experts = {"t0": tf.LlamaForCausalLM(config), "t1": tf.LlamaForCausalLM(config)}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), check_base=False, progress=False)
    tokens = torch.randint(3, VOCAB, (2, 4))
    with pytest.raises(InputError, match="'use_cache' asks for a cache"):
        model(input_ids=tokens, task=["t0", "t1"], use_cache=True)
    assert model(input_ids=tokens, task="t0", use_cache=True).past_key_values is not None
    assert model(input_ids=tokens, task=["t0", "t1"]).logits.shape == (2, 4, VOCAB)
