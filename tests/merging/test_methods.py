"""The merge methods against plain implementations on whole vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retex_hf import ConfigError
from retex_hf.merging import get_merger

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "conv.weight": (3, 2, 3, 3), "scale": ()}
TASKS = ["x", "y", "z", "w"]


class Tensors:
    """A `TaskTensors` in memory; counts what is read."""

    def __init__(self, dtype: torch.dtype = torch.float32, step: float = 1.0, tasks: list[str] = TASKS) -> None:
        self.tasks, self.names = list(tasks), list(SHAPES)
        self.base = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
        self.experts = {
            task: {name: (self.base[name] + step * torch.randn(shape)).to(dtype) for name, shape in SHAPES.items()}
            for task in self.tasks
        }

    def read_base(self, name: str) -> Tensor:
        return self.base[name]

    def read_expert(self, task: str, name: str) -> Tensor:
        return self.experts[task][name]

    def merge(self, method: str, **options) -> dict[str, Tensor]:
        merger = get_merger(method, options, self)
        return {n: merger(n, self.base[n], [self.experts[t][n] for t in self.tasks]) for n in self.names}

    def vector(self, tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in self.names]).float()


def flat(tensors: Tensors, merged: dict[str, Tensor]) -> Tensor:
    assert {name: tuple(tensor.shape) for name, tensor in merged.items()} == SHAPES
    assert all(tensor.dtype == torch.float32 for tensor in merged.values())
    return tensors.vector(merged)


def test_average_is_the_mean():
    tensors = Tensors()
    expected = torch.stack([tensors.vector(tensors.experts[task]) for task in TASKS]).mean(0)
    torch.testing.assert_close(flat(tensors, tensors.merge("average")), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_average_of_equal_tensors_is_that_tensor_to_the_bit(dtype, count):
    tensor = torch.randn(50, 40).to(dtype)
    tensors = Tensors(tasks=[f"task {number}" for number in range(count)])
    merged = get_merger("average", {}, tensors)("w", tensor, [tensor] * count)
    assert torch.equal(merged, tensor.float())


def test_average_of_half_precision_does_not_overflow():
    tensor = torch.full((3,), 6e4, dtype=torch.float16)
    merged = get_merger("average", {}, Tensors())("w", tensor, [tensor] * 4)
    assert torch.equal(merged, tensor.float())


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"scale": 1}, {"scale": -0.5}, {"scale": 0}])
def test_task_arithmetic_adds_the_task_vectors(options):
    tensors = Tensors()
    base = tensors.vector(tensors.base)
    expected = base.clone()
    for task in TASKS:
        expected += options.get("scale", 0.3) * (tensors.vector(tensors.experts[task]) - base)
    torch.testing.assert_close(flat(tensors, tensors.merge("task_arithmetic", **options)), expected)


def plain_ties(base: Tensor, experts: list[Tensor], density: float, scale: float) -> Tensor:
    """TIES entry by entry, as its paper puts it in words."""
    vectors = torch.stack([expert - base for expert in experts]).double()
    kept = max(1, round(density * vectors.shape[1]))
    for vector in vectors:
        vector[vector.abs() < vector.abs().topk(kept).values[-1]] = 0
    merged = base.double().clone()
    for entry, column in enumerate(vectors.T.tolist()):
        positive = sum(value for value in column if value > 0)
        negative = -sum(value for value in column if value < 0)
        if positive != negative:
            agreeing = [value for value in column if (value > 0 if positive > negative else value < 0)]
            merged[entry] += scale * sum(agreeing) / len(agreeing)
    return merged.float()


@pytest.mark.parametrize("density", [0.01, 0.2, 0.5, 0.9, 1, 1.0])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_ties_over_the_whole_vector(density, scale):
    tensors = Tensors()
    base = tensors.vector(tensors.base)
    expected = plain_ties(base, [tensors.vector(tensors.experts[task]) for task in TASKS], density, scale)
    merged = tensors.merge("ties", density=density, scale=scale)
    torch.testing.assert_close(flat(tensors, merged), expected)


@pytest.mark.parametrize("density", [0.01, 0.2, 1.0])
def test_ties_per_tensor(density):
    tensors = Tensors()
    merged = tensors.merge("ties", density=density, scale=0.7, trim="tensor")
    for name in SHAPES:
        experts = [tensors.experts[task][name].flatten() for task in TASKS]
        expected = plain_ties(tensors.base[name].flatten(), experts, density, 0.7)
        torch.testing.assert_close(merged[name], expected.reshape(SHAPES[name]))


def test_ties_defaults_are_the_papers():
    tensors = Tensors()
    assert torch.equal(
        tensors.vector(tensors.merge("ties")),
        tensors.vector(tensors.merge("ties", density=0.2, scale=1.0, trim="vector")),
    )
    assert not torch.equal(tensors.vector(tensors.merge("ties")), tensors.vector(tensors.merge("ties", trim="tensor")))


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties"])
def test_experts_that_equal_the_base_merge_to_the_base(method):
    tensors = Tensors(step=0.0)
    assert torch.equal(flat(tensors, tensors.merge(method)), tensors.vector(tensors.base))


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties"])
def test_inputs_are_left_alone_and_half_precision_is_merged_in_float32(method):
    tensors = Tensors(torch.bfloat16)
    before = [tensors.vector(values).clone() for values in (tensors.base, *tensors.experts.values())]
    merged = flat(tensors, tensors.merge(method))
    after = [tensors.vector(values) for values in (tensors.base, *tensors.experts.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(merged, merged.bfloat16().float())


def test_ties_with_nothing_to_merge_prepares_nothing():
    tensors = Tensors()
    tensors.names = []
    assert tensors.merge("ties") == {}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ties", {"density": 0}, r"density must be in \(0, 1\], not 0"),
        ("ties", {"density": 1.1}, r"density must be in \(0, 1\], not 1.1"),
        ("ties", {"density": "0.2"}, "density must be a number, not '0.2'"),
        ("ties", {"density": float("nan")}, "density must be a number, not nan"),
        ("ties", {"scale": None}, "scale must be a number, not None"),
        ("ties", {"trim": "layer"}, 'trim must be "vector" or "tensor", not \'layer\''),
        ("task_arithmetic", {"scale": "0.3"}, "scale must be a number, not '0.3'"),
    ],
)
def test_bad_option_value_is_named(method, options, message):
    with pytest.raises(ConfigError, match=f"RetexConfig.merge: {message}"):
        Tensors().merge(method, **options)
