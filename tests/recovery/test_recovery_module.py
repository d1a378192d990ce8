"""The module: reading one task, mixing tasks, names, dtypes."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from torch import nn

from retex_hf.recovery import RecoveryModule, plan_layout, solve

TASKS = 4
SHAPES = {
    "encoder.layer.0.weight": (12, 10),
    "encoder.experts": (3, 8, 6),
    "patch.weight": (8, 2, 3, 3),
    "norm.bias": (9,),
    "logit_scale": (),
    "whole.weight": (5, 4),
}
LAYOUTS = {name: plan_layout(shape, "full" if name == "whole.weight" else 2, TASKS) for name, shape in SHAPES.items()}
PARTS = {name: ("weight", "bias") if name == "whole.weight" else ("weight", "bias", "shared") for name in SHAPES}
MIXTURE = torch.tensor([0.5, 0.0, 0.2, 0.3])


def solutions() -> dict:
    return {name: solve([torch.randn(SHAPES[name]) for _ in range(TASKS)], LAYOUTS[name]) for name in SHAPES}


def trained_like(embedding_dim: int | None = None) -> RecoveryModule:
    """A module with biases, dense embeddings and nothing left at zero."""
    module = RecoveryModule.initialised(LAYOUTS, TASKS, embedding_dim)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def one_hot(task: int) -> torch.Tensor:
    return torch.eye(TASKS)[task]


def test_the_cases_cover_all_kinds():
    assert {layout.kind for layout in LAYOUTS.values()} == {"matrix", "vector", "whole"}


@pytest.mark.parametrize("embedding_dim", [None, TASKS, TASKS + 5])
@pytest.mark.parametrize("grad", [False, True])
def test_closed_form_module_gives_back_the_factors_product(embedding_dim, grad):
    solved = solutions()
    module = RecoveryModule.from_solutions(solved, TASKS, embedding_dim)
    assert module.task_embedding.shape == (TASKS, embedding_dim or TASKS)
    assert module.num_tasks == TASKS
    with torch.set_grad_enabled(grad):
        for task in range(TASKS):
            offsets = module(one_hot(task))
            for name, solution in solved.items():
                expected = solution.layout.offset(solution.generated[task], solution.shared)
                assert offsets[name].shape == SHAPES[name]
                torch.testing.assert_close(offsets[name], expected, rtol=1e-6, atol=1e-6)


def test_stored_numbers_count_factors_and_embedding():
    module = RecoveryModule.from_solutions(solutions(), TASKS)
    factors = sum(layout.stored_numbers(TASKS) for layout in LAYOUTS.values())
    assert module.stored_numbers() == factors + TASKS * TASKS


@pytest.mark.parametrize("weights", [MIXTURE, torch.tensor([2.0, -1.0, 0.5, 0.0])])
def test_closed_form_offset_is_linear_in_the_weights(weights):
    module = RecoveryModule.from_solutions(solutions(), TASKS, TASKS + 2)
    with torch.no_grad():
        each = [module(one_hot(task)) for task in range(TASKS)]
        mixed = module(weights)
    expected = {name: sum(w * offsets[name] for w, offsets in zip(weights, each, strict=True)) for name in module}
    assert_same(mixed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("embedding_dim", [None, 2, 9])
def test_with_bias_a_mixture_interpolates_the_offsets(embedding_dim):
    module = trained_like(embedding_dim)
    assert all(module[name].bias is not None for name in module)
    with torch.no_grad():
        each = [module(one_hot(task)) for task in range(TASKS)]
        mixed = module(MIXTURE)
    expected = {name: sum(w * offsets[name] for w, offsets in zip(MIXTURE, each, strict=True)) for name in module}
    assert_same(mixed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [*torch.eye(TASKS), MIXTURE, torch.zeros(TASKS)], ids=str)
def test_reading_only_the_rows_that_count_equals_the_full_product(weights):
    module = RecoveryModule.from_solutions(solutions(), TASKS)
    with torch.no_grad():
        read = module(weights)
    multiplied = {name: offset.detach() for name, offset in module(weights).items()}
    assert_same(read, multiplied, rtol=1e-6, atol=1e-6)


def test_reading_one_task_touches_no_other():
    module = RecoveryModule.from_solutions(solutions(), TASKS)
    with torch.no_grad():
        expected = module(one_hot(2))
        for name in module:
            module[name].weight[[0, 1, 3]] = float("nan")
        assert_same(module(one_hot(2)), expected, exact=True)


def test_training_starts_with_the_merged_model_and_reaches_every_parameter():
    module = RecoveryModule.initialised(LAYOUTS, TASKS, 6)
    assert module.task_embedding.shape == (TASKS, 6)
    offsets = module(MIXTURE)
    for name, offset in offsets.items():
        assert module[name].weight.shape == (6, torch.Size(LAYOUTS[name].generated_shape).numel())
        assert torch.equal(offset, torch.zeros(SHAPES[name]))
    with torch.no_grad():
        for name in module:
            if "shared" in PARTS[name]:
                module[name].shared.fill_(1.0)
    sum((offset - 1).square().sum() for offset in module(MIXTURE).values()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_names_are_the_parameters_names():
    module = RecoveryModule.from_solutions(solutions(), TASKS)
    assert list(module) == list(SHAPES)
    assert len(module) == len(SHAPES)
    assert "norm.bias" in module
    assert "norm" not in module
    assert module["patch.weight"].layout == LAYOUTS["patch.weight"]


def test_state_dict_names_and_round_trip():
    module = trained_like()
    state = module.state_dict()
    expected = {f"generators.{name.replace('.', '/')}.{part}" for name, parts in PARTS.items() for part in parts}
    assert set(state) == {"task_embedding", *expected}
    other = RecoveryModule.initialised(LAYOUTS, TASKS)
    other.load_state_dict(state)
    assert_same(other(MIXTURE), module(MIXTURE), exact=True)
    closed = RecoveryModule.from_solutions({"norm.bias": solutions()["norm.bias"]}, TASKS)
    assert set(closed.state_dict()) == {"task_embedding", "generators.norm/bias.weight", "generators.norm/bias.shared"}


@pytest.mark.parametrize(
    "cast",
    [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda module: module.to(torch.float16)],
    ids=["half", "bfloat16", "double", "to"],
)
def test_casting_the_model_leaves_the_recovery_in_float32(cast):
    holder = nn.ModuleDict({"recovery": trained_like(), "model": nn.Linear(2, 2)})
    before = {name: tensor.clone() for name, tensor in holder["recovery"].state_dict().items()}
    cast(holder)
    assert holder["model"].weight.dtype != torch.float32
    assert_same(dict(holder["recovery"].state_dict()), before, exact=True)
    assert all(parameter.dtype == torch.float32 for parameter in holder["recovery"].parameters())


def test_device_moves_are_kept():
    module = trained_like().to("meta", torch.float16)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in module.parameters())
