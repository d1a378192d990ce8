"""A task joins a recovery whose other experts are gone: least squares, growth, storage; and a task leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from retex_hf.recovery import OffsetGenerator, RecoveryModule, ScaleGenerator, plan_layout, solve
from retex_hf.recovery.growth import (
    add_to_recovery,
    empty_generator,
    extend_generator,
    missing_directions,
    pseudo_inverse,
    remove_from_recovery,
    row_basis,
)

TASKS, SHAPE = 3, (14, 10)
ORDERS = ("generated_first", "shared_first")
DTYPES = ("float32", "bfloat16", "float16", "int8")


def solved(shape=SHAPE, rank=3, dtype="float32", seed=0, **options) -> OffsetGenerator:
    """The generator of random differences of a few tasks."""
    generator = torch.Generator().manual_seed(seed)
    differences = [torch.randn(shape, generator=generator) for _ in range(TASKS)]
    layout = plan_layout(shape, rank, 20, **options)  # so many tasks that factors are worth it
    return RecoveryModule.from_solutions({"w": solve(differences, layout)}, TASKS)["w"].stored_as(dtype)


def trained(shape=SHAPE, rank=3, **options) -> OffsetGenerator:
    """A generator with a bias and factors that are not orthonormal, as training leaves them."""
    generator = OffsetGenerator.initialised(plan_layout(shape, rank, 20, **options), TASKS)
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter)
    return generator


def offsets(generator: OffsetGenerator, tasks: int = TASKS) -> list[torch.Tensor]:
    """The offsets of the first tasks, with embeddings that are not one-hot."""
    embeddings = torch.randn(tasks, tasks, generator=torch.Generator().manual_seed(5))
    rows = len(generator.weight)
    return [generator(torch.nn.functional.pad(e, (0, rows - tasks))).detach() for e in embeddings]


def new_offset(generator: OffsetGenerator) -> torch.Tensor:
    return generator(torch.eye(len(generator.weight))[-1]).detach()


def as_rows(tensor: torch.Tensor, layout) -> torch.Tensor:
    """A batch of matrices whose rows the shared factor spans."""
    stack = tensor.double().reshape(layout.stacked_shape)
    return stack.mT if layout.order == "shared_first" else stack


def acting(generator: OffsetGenerator) -> torch.Tensor:
    shared, inner = generator.factor("shared").detach().double(), generator.factor("inner")
    first = generator.layout.order == "generated_first"
    if inner is not None:
        shared = inner.detach().double() @ shared if first else shared @ inner.detach().double()
    return shared if first else shared.mT


CASES = {
    "plain": {},
    "reversed": {"order": "shared_first"},
    "inner": {"inner_rank": 2},
    "inner-reversed": {"inner_rank": 2, "order": "shared_first"},
    "batched": {"shape": (3, 9, 8)},
    "convolution": {"shape": (12, 3, 2, 2), "convolution": True},
}


@pytest.mark.parametrize("make", [solved, trained])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_without_growth_the_new_row_is_the_least_squares_optimum(options, make):
    generator = make(**options)
    layout = generator.layout
    assert layout.kind == "matrix"
    merged, difference = torch.randn(layout.shape), torch.randn(layout.shape)
    extension = extend_generator(generator, [merged + difference], [merged], 1.0)
    assert extension.grown == 0 and not extension.made_whole
    factor, target = acting(generator), as_rows(difference, layout)
    optimum = target @ torch.linalg.pinv(factor) @ factor
    found = as_rows(new_offset(extension.generator), layout)
    torch.testing.assert_close(found, optimum, rtol=1e-4, atol=1e-5)
    best = (found - target).square().sum()
    for _ in range(5):
        other = (target @ torch.linalg.pinv(factor) + 0.1 * torch.randn(*target.shape[:2], factor.shape[1])) @ factor
        assert (other - target).square().sum() > best
    assert extension.errors[0] == pytest.approx((best / difference.double().square().sum()).sqrt().item(), rel=1e-4)


def test_a_shared_factor_of_lower_rank_than_its_rows():
    generator = solved(rank=4)
    with torch.no_grad():
        generator.shared[0, 2] = 0
        generator.shared[0, 3] = generator.shared[0, 1] * 2
    difference = torch.randn(SHAPE)
    extension = extend_generator(generator, [difference], [torch.zeros(SHAPE)], 1.0)
    factor = acting(generator)[0]
    optimum = difference.double() @ torch.linalg.pinv(factor) @ factor
    torch.testing.assert_close(new_offset(extension.generator).double(), optimum, rtol=1e-4, atol=1e-5)
    assert extension.generator.weight[-1].abs().max() < 10  # the pseudo-inverse, not a solution of any size


@pytest.mark.parametrize("tolerance", [0.7, 0.4, 0.1])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_growth_is_the_smallest_that_reaches_the_tolerance(options, tolerance):
    generator = solved(**options)
    layout = generator.layout
    decay = 0.8 ** torch.arange(layout.columns)
    merged, difference = torch.randn(layout.shape), torch.randn(layout.stacked_shape) * decay
    difference = difference.reshape(layout.shape)
    extension = extend_generator(generator, [merged + difference], [merged], tolerance, dtype="float32")
    factor, target = acting(generator), as_rows(difference, layout)
    left = target - target @ torch.linalg.pinv(factor) @ factor
    values = torch.linalg.svdvals(left).square().sum(0)
    energy = target.square().sum()
    reached = [(values[k:].sum() / energy).sqrt().item() for k in range(len(values) + 1)]
    smallest = next(k for k, error in enumerate(reached) if error <= tolerance)
    if extension.made_whole:
        inner = None if layout.inner_rank is None else layout.inner_rank + smallest
        grown, rows = replace(layout, rank=layout.rank + smallest, inner_rank=inner), TASKS + 1
        assert grown.stored_numbers(rows) >= layout.whole().stored_numbers(rows)
        return
    assert extension.grown == smallest
    assert extension.generator.layout.rank == layout.rank + smallest
    assert extension.errors[0] == pytest.approx(reached[smallest], abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_the_other_tasks_keep_their_numbers(options, dtype):
    generator = solved(dtype=dtype, **options)
    layout = generator.layout
    before = offsets(generator)
    difference = torch.randn(layout.shape)
    for tolerance in (1.0, 0.5):
        extension = extend_generator(generator, [difference], [torch.zeros(layout.shape)], tolerance, dtype=dtype)
        assert (extension.grown > 0) == (tolerance < 1) or extension.made_whole
        extended = extension.generator
        assert {p.dtype for p in extended.parameters()} == {p.dtype for p in generator.parameters()}
        for old, new in zip(before, offsets(extended), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)
        if not extension.made_whole:
            rank = layout.shared_shape[-1 if layout.order == "shared_first" else -2]
            kept = extended.factor("shared")
            kept = kept[..., :rank] if layout.order == "shared_first" else kept[:, :rank]
            assert torch.equal(kept, generator.factor("shared"))
        assert extension.errors[0] <= tolerance + 0.05  # rounding comes on top


@pytest.mark.parametrize("bias", [False, True])
def test_exactly_is_exact_and_whole_where_that_costs_less(bias):
    generator = trained() if bias else solved()
    before = offsets(generator)
    merged, expert = torch.randn(SHAPE), torch.randn(SHAPE)
    extension = extend_generator(generator, [expert], [merged], 0.0)
    assert extension.made_whole and extension.generator.layout.kind == "whole"
    assert extension.errors[0] < 1e-6
    torch.testing.assert_close(merged + new_offset(extension.generator), expert, rtol=1e-5, atol=1e-5)
    for old, new in zip(before, offsets(extension.generator), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


def test_a_difference_of_low_rank_takes_so_much_more_rank():
    generator = solved((40, 40), rank=3)
    difference = torch.randn(40, 2) @ torch.randn(2, 40)
    extension = extend_generator(generator, [difference], [torch.zeros(40, 40)], 0.0)
    assert (extension.grown, extension.made_whole) == (2, False)
    assert extension.errors[0] < 1e-5
    again = extend_generator(extension.generator, [2 * difference], [torch.zeros(40, 40)], 0.0)
    assert again.grown == 0 and again.errors[0] < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("order", ORDERS)
def test_narrow_factors_are_never_rounded_again(order, dtype):
    generator = solved(dtype=dtype, order=order)
    difference = torch.randn(SHAPE)
    extension = extend_generator(generator, [difference], [torch.zeros(SHAPE)], 0.0, dtype=dtype)
    assert extension.grown > 0 and not extension.made_whole
    assert extension.errors[0] < 0.05
    for old, new in zip(offsets(generator), offsets(extension.generator), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


def test_int8_columns_beside_rows_of_very_different_scales():
    generator = solved(dtype="int8", order="shared_first", shape=(30, 20))
    with torch.no_grad():
        generator.shared[0, 4] = 0
        generator.shared_scale[0, 4] = 0
        generator.shared_scale[0, 7] *= 1e-3
    before = offsets(generator)
    difference = torch.randn(30, 20)
    plain = extend_generator(generator, [difference], [torch.zeros(30, 20)], 1.0, dtype="int8").errors[0]
    extension = extend_generator(generator, [difference], [torch.zeros(30, 20)], 0.5, dtype="int8")
    assert extension.errors[0] < 0.6 < plain
    for old, new in zip(before, offsets(extension.generator), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tolerance", [1.0, 0.3])
def test_layers_that_share_a_generator_are_solved_together(tolerance):
    generator = solved(rank=4)
    merged = [torch.randn(SHAPE) for _ in range(3)]
    common = torch.randn(SHAPE)
    experts = [base + common + 0.1 * torch.randn(SHAPE) for base in merged]
    extension = extend_generator(generator, experts, merged, tolerance)
    found = new_offset(extension.generator)
    mean = torch.stack([e - m for e, m in zip(experts, merged, strict=True)]).mean(0)
    factor = acting(extension.generator)[0] if not extension.made_whole else torch.eye(SHAPE[1]).double()
    torch.testing.assert_close(found.double(), mean.double() @ torch.linalg.pinv(factor) @ factor, rtol=1e-4, atol=1e-4)
    for error, expert, base in zip(extension.errors, experts, merged, strict=True):
        expected = (found - (expert - base)).norm() / (expert - base).norm()
        assert error == pytest.approx(expected.item(), rel=1e-4)
    assert (found - mean).norm() <= (tolerance + 1e-5) * mean.norm()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layers", [1, 2])
def test_gammas_and_factor_are_solved_together(order, layers):
    generator = solved((6, 5), rank=2, order=order)
    layout = generator.layout
    merged = [torch.randn(6, 5) for _ in range(layers)]
    experts = [0.8 * base + 0.3 * torch.randn(6, 5) for base in merged]
    extension = extend_generator(generator, experts, merged, 1.0, affine=True)
    # All unknowns (one gamma per layer, and G) in one linear least-squares problem.
    factor = acting(generator)[0]
    count = as_rows(merged[0], layout).shape[1]
    blocks = [torch.kron(torch.eye(count, dtype=torch.float64), factor.T.contiguous())] * layers
    gammas = torch.block_diag(*[as_rows(base, layout).reshape(-1, 1) for base in merged])
    system = torch.cat([gammas, torch.cat(blocks)], dim=1)
    right = torch.cat([as_rows(expert, layout).flatten() for expert in experts])
    best = torch.linalg.lstsq(system, right.unsqueeze(1), driver="gelsd").solution
    missed = (system @ best - right.unsqueeze(1)).square().sum()
    offset = new_offset(extension.generator)
    ours = sum(
        (gamma * base + offset - expert).double().square().sum()
        for gamma, base, expert in zip(extension.scales, merged, experts, strict=True)
    )
    assert ours.item() == pytest.approx(missed.item(), rel=1e-4)
    assert extension.scales == pytest.approx(best[:layers, 0].tolist(), rel=1e-3)


@pytest.mark.parametrize("affine", [False, True])
def test_a_parameter_as_merged_gets_no_offset_and_no_rank(affine):
    generator, merged = trained(), torch.randn(SHAPE)
    extension = extend_generator(generator, [merged.clone()], [merged], 0.0, affine=affine)
    assert (extension.grown, extension.scales, extension.errors) == (0, [1.0], [0.0])
    torch.testing.assert_close(new_offset(extension.generator), torch.zeros(SHAPE), rtol=0, atol=1e-5)


def test_a_vector_is_exact_whatever_its_scalar():
    layout = plan_layout((7,), 3, TASKS)
    weight, bias = torch.randn(TASKS, 7), torch.randn(7)
    expert, merged = torch.randn(7), torch.randn(7)
    for scalar in (1.0, -0.03, 0.0):
        generator = OffsetGenerator(layout, weight.clone(), bias.clone(), torch.tensor(scalar))
        extension = extend_generator(generator, [expert], [merged], 1.0)
        torch.testing.assert_close(merged + new_offset(extension.generator), expert, rtol=1e-4, atol=1e-5)
        for old, new in zip(offsets(generator), offsets(extension.generator), strict=True):
            torch.testing.assert_close(new, old)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_parameter_grows_from_nothing(order, dtype):
    layout = plan_layout((30, 20), 5, 20, order=order)
    generator = empty_generator(layout, TASKS, dtype)
    difference = torch.randn(30, 2) @ torch.randn(2, 20)
    extension = extend_generator(generator, [difference], [torch.zeros(30, 20)], 0.0, dtype=dtype)
    assert extension.generator.layout.rank >= 2
    assert extension.errors[0] < 0.02
    assert all(not offset.any() for offset in offsets(extension.generator))
    nothing = extend_generator(generator, [difference], [torch.zeros(30, 20)], 1.0, dtype=dtype)
    assert nothing.generator.layout.rank == 0


def test_missing_directions_and_pseudo_inverse_of_nothing_and_of_everything():
    nothing = torch.zeros(1, 0, 6, dtype=torch.float64)
    assert row_basis(nothing).shape == (1, 0, 6)
    assert pseudo_inverse(nothing).shape == (1, 6, 0)
    target = torch.randn(1, 4, 6)
    assert missing_directions(target, row_basis(nothing), 0.0).shape == (1, 4, 6)
    assert missing_directions(target, torch.eye(6, dtype=torch.float64).unsqueeze(0), 1e-9) is None


def recovery_of(names: dict[str, tuple[int, ...]], affine: bool = False) -> RecoveryModule:
    generators = {name: solved(shape, seed=index) for index, (name, shape) in enumerate(names.items())}
    scales = {name: ScaleGenerator(torch.randn(TASKS), torch.ones(())) for name in names} if affine else {}
    return RecoveryModule(torch.eye(TASKS), generators, scales)


@pytest.mark.parametrize("affine", [False, True])
def test_a_whole_recovery_with_one_more_task_and_without_it_again(affine):
    recovery = recovery_of({"a.weight": (14, 10), "b.weight": (20, 9)}, affine)
    tensors = {name: (torch.randn(shape), torch.randn(shape)) for name, shape in
               {"a.weight": (14, 10), "b.weight": (20, 9), "c.weight": (12, 8), "c.bias": (8,)}.items()}  # fmt: skip
    joining = {"c.weight": plan_layout((12, 8), 1, 4), "c.bias": plan_layout((8,), 1, 4)}
    tolerances = {"a.weight": 1.0, "b.weight": 0.6, "c.weight": 0.9, "c.bias": 0.9}
    grown, growth = add_to_recovery(recovery, tensors.__getitem__, tolerances, joining, affine=affine, progress=False)
    assert list(grown) == ["a.weight", "b.weight", "c.weight", "c.bias"]
    assert growth.joined == ["c.weight", "c.bias"] and list(growth.grown) == ["b.weight"]
    assert all(growth.errors[name] <= tolerance for name, tolerance in tolerances.items())
    assert torch.equal(grown.task_embedding, torch.eye(TASKS + 1))
    merged = {name: pair[1] for name, pair in tensors.items()}
    for task in range(TASKS):
        for name in grown:
            now = grown.recover(name, merged[name], torch.eye(TASKS + 1)[task])
            before = recovery.recover(name, merged[name], torch.eye(TASKS)[task]) if name in recovery else merged[name]
            torch.testing.assert_close(now, before, rtol=1e-6, atol=1e-6)
    for name, (expert, base) in tensors.items():
        missed = grown.recover(name, base, torch.eye(TASKS + 1)[-1]) - expert
        assert growth.errors[name] == pytest.approx((missed.norm() / (expert - base).norm()).item(), abs=1e-5)
    again = remove_from_recovery(grown, TASKS)
    assert list(again) == list(recovery)  # no other task has changed the rest
    for task in range(TASKS):
        for name in again:
            now = again.recover(name, merged[name], torch.eye(TASKS)[task])
            torch.testing.assert_close(now, recovery.recover(name, merged[name], torch.eye(TASKS)[task]))


@pytest.mark.parametrize("task", range(TASKS))
def test_a_task_leaves(task):
    recovery = recovery_of({"a.weight": (14, 10)})
    others = [index for index in range(TASKS) if index != task]
    smaller = remove_from_recovery(recovery, task)
    assert smaller.num_tasks == TASKS - 1
    assert torch.equal(smaller.task_embedding, torch.eye(TASKS - 1))
    for new, old in enumerate(others):
        found = smaller.offset("a.weight", smaller.task_embedding[new])
        assert torch.equal(found, recovery.offset("a.weight", recovery.task_embedding[old]))


def test_a_task_of_a_dense_embedding_leaves_its_generator_rows():
    generator = trained()
    embedding = torch.randn(4, TASKS)
    recovery = RecoveryModule(embedding, {"a": generator})
    smaller = remove_from_recovery(recovery, 1)
    assert torch.equal(smaller.task_embedding, embedding[[0, 2, 3]])
    assert torch.equal(smaller.offset("a", embedding[2]), recovery.offset("a", embedding[2]))


def test_a_recovery_stays_trainable_or_not():
    for trainable in (True, False):
        recovery = recovery_of({"a": (14, 10)}).requires_grad_(trainable)
        grown, _ = add_to_recovery(
            recovery, lambda _: (torch.randn(14, 10), torch.zeros(14, 10)), {"a": 0.9}, {}, progress=False
        )
        for module in (grown, remove_from_recovery(grown, 0)):
            assert {parameter.requires_grad for parameter in module.parameters()} == {trainable}
