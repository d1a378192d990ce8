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


def longest_first(length: Tensor) -> list[int]:
    sizes = length.tolist()
    return sorted(range(len(sizes)), key=lambda row: -sizes[row])


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class StackedByNumber(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = longest_first(length)
        y = self.body(torch.stack([x[row] for row in order]))
        return torch.stack([y[row] for row in inverse(order)])


class StackedByScalar(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = longest_first(length)
        y = self.body(torch.stack([x[row] for row in torch.tensor(order)]))
        return torch.stack([y[row] for row in torch.tensor(inverse(order))])


class SplitAndJoined(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = longest_first(length)
        rows = x.split(1)
        y = self.body(torch.cat([rows[row] for row in order])).unbind()
        return torch.stack([y[row] for row in inverse(order)])


class Narrowed(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = longest_first(length)
        y = self.body(torch.cat([x.narrow(0, row, 1) for row in order]))
        return torch.cat([y.narrow(0, row, 1) for row in inverse(order)])


class WrittenByNumber(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order, y = longest_first(length), torch.empty_like(x)
        for place, row in enumerate(order):
            y[place] = x[row]
        y, out = self.body(y), torch.empty_like(x)
        for place, row in enumerate(order):
            out[row] = y[place]
        return out


class JoinedWithoutPadding(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        sizes = length.tolist()
        y = self.body(torch.cat([row[:size] for row, size in zip(x, sizes, strict=True)]))
        return torch.stack([part.mean(0) for part in y.split(sizes)])


class Jagged(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        rows = [row[:size] for row, size in zip(x, length.tolist(), strict=True)]
        y = self.body(torch.nested.nested_tensor(rows, layout=torch.jagged).values())
        return torch.stack([part.mean(0) for part in y.split(length.tolist())])


class Repeated(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        y = self.body(x[:, 0].repeat_interleave(length, 0))
        return torch.stack([part.mean(0) for part in y.split(length.tolist())])


class SortedWhereNeeded(Layers):
    """Selects rows by their numbers always, and by length only where they are not in order."""

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        last, order = x[torch.arange(len(x)), length - 1], longest_first(length)
        y = x if order == sorted(order) else x[torch.tensor(order)]
        y = self.body(y)
        return (y if order == sorted(order) else y[torch.tensor(inverse(order))]).mean(1) + last


class SortedSecondAxis(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = torch.tensor(longest_first(length))
        y = self.body(x.transpose(0, 1)[:, order].transpose(0, 1))
        return y.transpose(0, 1)[:, order.argsort()].transpose(0, 1)


class SelectedSecondAxis(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length[None].argsort(dim=1, descending=True, stable=True)
        y = self.body(x.transpose(0, 1).index_select(1, order[0]).transpose(0, 1))
        return y.transpose(0, 1).index_select(1, order.argsort(dim=1)[0]).transpose(0, 1)


class Rolled(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        step = int(length.max() - length.min())
        return self.body(x.roll(step, 0)).roll(-step, 0)


class FlippedWhereNeeded(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return self.body(x.flip(0)).flip(0) if length[0] < length[-1] else self.body(x)


class LookedUp(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        y = self.body(nn.functional.embedding(order, x.flatten(1)).view_as(x))
        return nn.functional.embedding(order.argsort(), y.flatten(1)).view_as(x)


class Permutation(Layers):
    def matrix(self, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        return nn.functional.one_hot(order, len(length)).float()


class SummedByEinsum(Permutation):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        moved = self.matrix(length)
        return torch.einsum("ji,jtd->itd", moved, self.body(torch.einsum("ij,jtd->itd", moved, x)))


class SummedByProduct(Permutation):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        moved = self.matrix(length)
        return (moved.T @ self.body((moved @ x.flatten(1)).view_as(x)).flatten(1)).view_as(x)


class SummedByAddition(Permutation):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        moved, zero = self.matrix(length), torch.zeros(())
        y = self.body(torch.addmm(zero, moved, x.flatten(1)).view_as(x))
        return torch.addmm(zero, moved.T, y.flatten(1)).view_as(x)


class PastTheFrontDoor(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        y = self.body(torch.ops.aten.index.Tensor(x, [order]))
        return torch.ops.aten.index.Tensor(y, [order.argsort()])


@torch.jit.script
def select(x: Tensor, order: Tensor) -> Tensor:
    return x[order]


class Scripted(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        return select(self.body(select(x, order)), order.argsort())


class InNumpy(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = longest_first(length)
        y = self.body(torch.from_numpy(x.numpy()[order]))
        return torch.from_numpy(y.numpy()[inverse(order)])


class EvenThenOdd(Layers):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        y, out = self.body(torch.cat([x[::2], x[1::2]])), torch.empty_like(x)
        half = len(x[::2])
        out[::2], out[1::2] = y[:half], y[half:]
        return out


MOVING = [
    SortedByLength, SortedInPython, SelectedByLength, Gathered, Packed, PackedWhereNeeded, StackedByNumber,
    StackedByScalar, SplitAndJoined, Narrowed, WrittenByNumber, JoinedWithoutPadding, Jagged, Repeated,
    SortedWhereNeeded, SortedSecondAxis, SelectedSecondAxis, Rolled, FlippedWhereNeeded, LookedUp, SummedByEinsum,
    SummedByProduct, SummedByAddition, PastTheFrontDoor, Scripted, InNumpy, EvenThenOdd,
]  # fmt: skip
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
@pytest.mark.parametrize("first", LENGTHS)
@pytest.mark.parametrize("kind", MOVING)
def test_rows_that_move_keep_their_experts(kind, first):
    torch.manual_seed(0)
    base = kind().eval()
    model, _ = build_from(base, make_experts(base), expert_cache=0, rank=4)
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
    with pytest.raises(RetexError, match=r"cannot run in one pass: .* execution=\"auto\""):
        for lengths in LENGTHS.values():
            model(x, torch.tensor(lengths), task=MIXED)


class Cut(Layers):
    """Cuts a batch in pieces of four rows, which two probes of fewer rows and of more do in different ways."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(part.flatten(0, 1)).unflatten(0, (len(part), -1)) for part in x.split(4)])


class TimeFirst(Layers):
    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        return self.body(x.transpose(0, 1).reshape(length * rows, -1)).view(length, rows, -1).transpose(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("shapes", [[(6, 6), (8, 8), (6, 1)], [(6, 1), (6, 6)], [(4, 4), (12, 4)]], ids=str)
@pytest.mark.parametrize("kind", [Cut, TimeFirst])
def test_other_shapes_than_the_first(kind, shapes):
    base = kind().eval()
    model, _ = build_from(base, make_experts(base), expert_cache=0, rank=4)
    model.execution = "auto"
    for rows, length in shapes:
        x, tasks = torch.randn(rows, length, WIDTH), (MIXED * 2)[:rows]
        expected = torch.cat([model(x[row : row + 1], task=[task]) for row, task in enumerate(tasks)])
        assert_same(model(x, task=tasks), expected, **CLOSE)


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
