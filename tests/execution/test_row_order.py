"""One pass is refused for models that move rows by what they contain, whatever the first batch looks like."""

from __future__ import annotations

import pytest
import torch
from families import tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts
from torch import Tensor, nn

from retex_hf import RetexError

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ROWS = len(MIXED)
WIDTH, LENGTH = 12, 5


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class SortedByLength(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        return self.body(x[order])[order.argsort()]


class SortedInPython(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        sizes = length.tolist()
        order = sorted(range(len(x)), key=lambda row: -sizes[row])
        out = torch.empty_like(x)
        out[torch.tensor(order)] = self.body(x[order])
        return out


class SelectedByLength(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        out = torch.zeros_like(x)
        return out.index_copy(0, order, self.body(torch.index_select(x, 0, order)))


class Gathered(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length.sort(descending=True, stable=True).indices
        index = order[:, None, None].expand_as(x)
        return torch.zeros_like(x).scatter(0, index, self.body(x.gather(0, index)))


class Packed(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < length[:, None]
        out = torch.zeros_like(x)
        out[mask] = self.body(x[mask])
        return out


class PackedWhereNeeded(Layers):
    """Runs rows of full length as they are: a probe of such rows does not see that others are packed."""

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < length[:, None]
        if mask.all():
            return self.body(x)
        out = torch.zeros_like(x)
        out[mask] = self.body(x.masked_select(mask[..., None]).view(-1, WIDTH))
        return out


MOVING = [SortedByLength, SortedInPython, SelectedByLength, Gathered, Packed, PackedWhereNeeded]
# In order of length; equal; in the first rows alone in order; in reverse. The totals are divisible by the rows.
LENGTHS = {
    "sorted": [5, 4, 4, 3, 1, 1],
    "equal": [5] * ROWS,
    "first rows": [5, 5, 1, 4, 2, 1],
    "reverse": [1, 1, 3, 4, 4, 5],
}


def separate(model, x, length):
    """The rows in one call each, which nothing can move."""
    parts = [model(x[row : row + 1], length[row : row + 1], task=[MIXED[row]]) for row in range(ROWS)]
    return torch.cat(parts)


@torch.no_grad()
@pytest.mark.parametrize("budget", [{"rank": 4}, {"storage": 0.5}], ids=["rank", "storage"])
@pytest.mark.parametrize("first", LENGTHS)
@pytest.mark.parametrize("kind", MOVING)
def test_rows_that_move_keep_their_experts(kind, first, budget):
    torch.manual_seed(0)
    base = kind().eval()
    model, _ = build_from(base, make_experts(base), expert_cache=0, **budget)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    model.execution = "auto"
    model(x, torch.tensor(LENGTHS[first]), task=MIXED)  # the probe sees these rows
    for lengths in LENGTHS.values():
        length = torch.tensor(lengths)
        assert_same(model(x, length, task=MIXED), separate(model, x, length), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("kind", MOVING)
def test_one_pass_of_rows_that_move_is_refused(kind):
    base = kind().eval()
    model, _ = build_from(base, make_experts(base), rank=4)
    model.execution = "mixed"
    x = torch.randn(ROWS, LENGTH, WIDTH)
    with pytest.raises(RetexError, match=r"cannot run in one pass: the model .* execution=\"auto\""):
        for lengths in LENGTHS.values():
            model(x, torch.tensor(lengths), task=MIXED)


class Picking(Layers):
    """Selects rows by what does not depend on them, as pooling at the last token does, and ids from a table."""

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        hidden = self.first(x)
        hidden[hidden > 3] = 3.0
        return self.second(hidden[rows, length - 1])


@torch.no_grad()
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_choice_within_rows_runs_in_one_pass(lengths):
    base = Picking().eval()
    model, _ = build_from(base, make_experts(base), rank=4)
    model.execution = "mixed"
    x, length = torch.randn(ROWS, LENGTH, WIDTH), torch.tensor(lengths)
    found = model(x, length, task=MIXED)
    assert_same(found, separate(model, x, length), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("padded", [[], [0], [ROWS - 1], [2, 3], list(range(ROWS))], ids=str)
@pytest.mark.parametrize("before", [None, "full", "padded"])
def test_padding_of_any_rows_runs_in_one_pass(padded, before):
    """T5 adds a mask to its position bias only where the mask hides something."""
    model, _ = build_retex("t5", rank=4)
    inputs = tokens(ROWS)
    mask = torch.ones_like(inputs["input_ids"])
    inputs |= {"decoder_input_ids": inputs["input_ids"][:, :2]}
    model.execution = "mixed"
    if before is not None:
        other = mask.clone()
        other[1, -1] = before == "full"
        model(**inputs | {"attention_mask": other}, task=MIXED)
    mask[padded, -1] = 0
    found = model(**inputs | {"attention_mask": mask}, task=MIXED).logits
    model.execution = "grouped"
    assert_same(found, model(**inputs | {"attention_mask": mask}, task=MIXED).logits, **CLOSE)
    assert len(set(MIXED)) == len(TASKS)
