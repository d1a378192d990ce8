"""The shape table of the method, the rank rule, and what factors cost."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from retex_hf.recovery import effective_rank, plan_layout

MANY = 8  # tasks; with so many, factors are cheaper than whole differences for all shapes below


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (1, 1, 7), (1, 7), (7, 1), (1, 1), (1, 7, 1, 1), (7, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("rank", [1, 256, "full"])
def test_vectors_are_a_generated_vector_times_a_shared_scalar(shape, rank):
    layout = plan_layout(shape, rank, MANY)
    assert layout.kind == "vector"
    assert layout.generated_shape == (prod(shape),)
    assert layout.shared_shape == ()
    generated = torch.randn(prod(shape))
    offset = layout.offset(generated, torch.tensor(3.0))
    assert offset.shape == shape
    assert torch.equal(offset.flatten(), 3.0 * generated)


@pytest.mark.parametrize(
    ("shape", "convolution", "matrices"),
    [
        ((24, 16), False, (1, 24, 16)),  # nn.Linear, embeddings
        ((16, 24), False, (1, 16, 24)),
        ((1, 24, 16), False, (1, 24, 16)),  # position embeddings of ViT
        ((24, 1, 16), False, (1, 24, 16)),
        ((24, 16, 1), False, (1, 24, 16)),
        ((24, 3, 5, 5), False, (1, 24, 75)),  # four axes are a convolution whatever module holds them
        ((24, 3, 5, 5), True, (1, 24, 75)),
        ((96, 1, 7, 7), True, (1, 96, 49)),  # depthwise
        ((24, 16, 1, 1), True, (1, 24, 16)),  # pointwise
        ((24, 8, 3), True, (1, 24, 24)),  # Conv1d
        ((24, 3, 2, 4, 4), True, (1, 24, 96)),  # Conv3d
        ((5, 24, 16), False, (5, 24, 16)),  # stacked experts of an MoE layer
        ((5, 1, 16), False, (1, 5, 16)),
        ((2, 3, 2, 24, 16), False, (12, 24, 16)),
    ],
    ids=str,
)
def test_matrices_are_a_generated_factor_times_a_shared_one(shape, convolution, matrices):
    batch, rows, columns = matrices
    rank = 2
    layout = plan_layout(shape, rank, MANY, convolution)
    assert layout.kind == "matrix"
    assert layout.stacked_shape == matrices
    assert layout.generated_shape == (batch, rows, rank)
    assert layout.shared_shape == (batch, rank, columns)
    generated, shared = torch.randn(batch, rows, rank), torch.randn(batch, rank, columns)
    offset = layout.offset(generated.flatten(), shared)
    expected = torch.stack([g @ s for g, s in zip(generated, shared, strict=True)]).reshape(shape)
    torch.testing.assert_close(offset, expected)
    assert plan_layout(shape, "full", MANY, convolution).kind == "whole"


def test_a_convolution_with_one_output_channel_is_a_vector():
    assert plan_layout((1, 8, 3), 2, MANY, convolution=True).kind == "vector"


@pytest.mark.parametrize(
    ("rank", "rows", "columns", "expected"),
    [
        (256, 768, 3072, 256),
        (15, 16, 24, 15),
        (16, 16, 24, 8),  # not below the smaller side: half of it
        (17, 16, 24, 8),
        (16, 24, 16, 8),
        (256, 7, 7, 3),
        (1, 2, 9, 1),
        (2, 2, 9, 1),
        (256, 2, 2, 1),
    ],
)
def test_rank_rule(rank, rows, columns, expected):
    assert effective_rank(rank, rows, columns) == expected
    assert plan_layout((rows, columns), rank, 10_000).rank == expected


@pytest.mark.parametrize(
    ("num_tasks", "rank", "kind"),
    # 10 x 10: whole costs 100 T numbers, factors 10 r T + 10 r.
    [(1, 4, "matrix"), (1, 5, "whole"), (2, 6, "matrix"), (2, 7, "whole"), (8, 8, "matrix"), (8, 9, "whole")],
)
def test_differences_are_stored_whole_where_that_costs_no_more(num_tasks, rank, kind):
    assert plan_layout((10, 10), rank, num_tasks).kind == kind


@pytest.mark.parametrize(("shape", "convolution"), [((10, 14), False), ((9, 2, 3), True), ((3, 6, 5), False)])
def test_the_cheaper_of_both_is_chosen_and_counted(shape, convolution):
    for rank, num_tasks in product(range(1, 12), range(1, 9)):
        layout = plan_layout(shape, rank, num_tasks, convolution)
        batch, rows, columns = (1, shape[0], prod(shape[1:])) if convolution else (prod(shape[:-2]), *shape[-2:])
        r = rank if rank < min(rows, columns) else min(rows, columns) // 2
        factors = batch * (num_tasks * rows * r + r * columns)
        assert layout.stored_numbers(num_tasks) == min(factors, num_tasks * prod(shape))


def test_vector_costs_one_number_per_entry_and_task_and_the_scalar():
    assert plan_layout((7,), 4, 3).stored_numbers(3) == 3 * 7 + 1


@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5), (6, 2, 3, 3)], ids=str)
def test_whole_is_the_offset_itself(shape):
    layout = plan_layout(shape, "full", 3)
    numbers = torch.randn(shape)
    assert layout.shared_shape is None
    assert layout.stored_numbers(3) == 3 * prod(shape)
    assert torch.equal(layout.offset(numbers.flatten(), None), numbers)
