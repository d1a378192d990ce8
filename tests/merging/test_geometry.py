"""Model Stock, the Karcher mean and SCE against loops, and what each promises."""

from __future__ import annotations

import math

import pytest
import torch
from test_methods import SHAPES, TASKS, Tensors
from torch import Tensor

from retex_hf import CheckpointError, ConfigError
from retex_hf.merging import get_merger

METHODS = ["model_stock", "karcher", "sce"]


def plain_model_stock(base: Tensor, experts: list[Tensor]) -> Tensor:
    vectors = [(expert - base).double().flatten() for expert in experts]
    cosines = [
        (a @ b / (a.norm() * b.norm())).item() for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i < j
    ]
    cosine, count = max(0.0, sum(cosines) / len(cosines)), len(experts)
    ratio = count * cosine / (1 + (count - 1) * cosine)
    mean = sum(expert.double() for expert in experts) / count
    return (ratio * mean + (1 - ratio) * base.double()).float()


def plain_karcher(experts: list[Tensor], weights: list[float]) -> Tensor:
    """Gradient descent with the tensors themselves: a short step along the mean logarithm, very often."""
    flat = [expert.double().flatten() for expert in experts]
    total = sum(weights)
    directions = [vector / vector.norm() for vector in flat]
    mean = sum(w * u for w, u in zip(weights, directions, strict=True))
    mean /= mean.norm()
    for _ in range(400):
        tangent = torch.zeros_like(mean)
        for weight, direction in zip(weights, directions, strict=True):
            across = direction - (direction @ mean) * mean
            if across.norm() > 0:
                angle = math.atan2(across.norm(), direction @ mean)
                tangent += weight / total * angle * across / across.norm()
        mean = mean + 0.5 * tangent
        mean /= mean.norm()
    norm = sum(w * vector.norm() for w, vector in zip(weights, flat, strict=True)) / total
    return (norm * mean).float().view(experts[0].shape)


def plain_sce(base: Tensor, experts: list[Tensor], density: float) -> Tensor:
    vectors = [(expert - base).double().flatten().tolist() for expert in experts]
    count, size = len(vectors), base.numel()
    variances = []
    for column in zip(*vectors, strict=True):
        mean = sum(column) / count
        variances.append(sum((value - mean) ** 2 for value in column) / count)
    chosen = sorted(range(size), key=lambda index: -variances[index])[: max(1, round(density * size))]
    selected = [[value if index in chosen else 0.0 for index, value in enumerate(vector)] for vector in vectors]
    squares = [sum(value**2 for value in vector) for vector in selected]
    merged = base.double().flatten().tolist()
    for index in range(size):
        sign = sum(vector[index] for vector in selected)
        for vector, square in zip(selected, squares, strict=True):
            if vector[index] * sign > 0:
                merged[index] += square / sum(squares) * vector[index]
    return torch.tensor(merged).float().view(base.shape)


def drifted() -> Tensors:
    """Task vectors with a common part, so that angles between them are neither right nor zero."""
    tensors = Tensors()
    common = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors.experts = {
        task: {name: tensor + (1 + 0.3 * number) * common[name] for name, tensor in tensors.experts[task].items()}
        for number, task in enumerate(TASKS)
    }
    return tensors


def in_order(tensors: Tensors, name: str) -> list[Tensor]:
    return [tensors.experts[task][name] for task in tensors.tasks]


def merge_two(method: str, first: Tensor, second: Tensor, base: Tensor | None = None, **options) -> Tensor:
    merger = get_merger(method, options, Tensors(tasks=["x", "y"]))
    return merger("layer.weight", torch.zeros_like(first) if base is None else base, [first, second])


# ---- Model Stock -----------------------------------------------------------------------------------------------------


def test_model_stock_tensor_by_tensor():
    tensors = drifted()
    for name, tensor in tensors.merge("model_stock").items():
        wanted = plain_model_stock(tensors.base[name], in_order(tensors, name))
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)
        assert name == "scale" or not torch.allclose(tensor, torch.stack(in_order(tensors, name)).mean(0), atol=1e-2)


def test_model_stock_of_two_experts_at_sixty_degrees():
    """The paper's two-expert form: t = 2 cos / (1 + cos), here 2/3."""
    first = torch.tensor([2.0, 0.0])
    second = torch.tensor([0.5, math.sqrt(3) / 2])
    base = torch.tensor([10.0, -4.0])
    merged = merge_two("model_stock", base + first, base + second, base)
    torch.testing.assert_close(merged, base + 2 / 3 * (first + second) / 2)


@pytest.mark.parametrize("second", [[0.0, 3.0], [-1.0, 0.2], [-2.0, 0.0], [0.0, 0.0]])
def test_model_stock_stays_at_the_base_where_task_vectors_do_not_agree(second):
    """Orthogonal, against each other, opposite, or one of zeros."""
    base = torch.tensor([1.0, 2.0])
    merged = merge_two("model_stock", base + torch.tensor([2.0, 0.0]), base + torch.tensor(second), base)
    assert torch.equal(merged, base)


# ---- Karcher ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0, 1.0], [0.7, 2.0, 0.1, 1.0]])
def test_karcher_against_descent_on_the_sphere(weights):
    tensors = drifted()
    merged = tensors.merge("karcher", weights=weights)
    for name, tensor in merged.items():
        if name != "scale":
            wanted = plain_karcher(in_order(tensors, name), weights)
            torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-5)
    average = sum(w * t for w, t in zip(weights, in_order(tensors, "scale"), strict=True)) / sum(weights)
    torch.testing.assert_close(merged["scale"], average)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.9])
def test_karcher_of_two_is_the_point_of_their_arc(share):
    """Spherical interpolation: the direction at `share` of the angle, with the mean norm."""
    angle = 2.0
    first, second = 3 * torch.tensor([1.0, 0.0]), 5 * torch.tensor([math.cos(angle), math.sin(angle)])
    merged = merge_two("karcher", first, second, weights=[1 - share, share])
    norm = 3 * (1 - share) + 5 * share
    wanted = norm * torch.tensor([math.cos(share * angle), math.sin(share * angle)])
    torch.testing.assert_close(merged, wanted, rtol=1e-5, atol=1e-5)


def test_karcher_of_close_vectors_is_exact():
    """Of angles near zero, cosines know little; their mean must not suffer."""
    first = torch.randn(500)
    second = first + 1e-4 * torch.randn(500)
    torch.testing.assert_close(
        merge_two("karcher", first, second), plain_karcher([first, second], [1.0, 1.0]), rtol=1e-6, atol=1e-7
    )


def test_karcher_of_zeros():
    zero, vector = torch.zeros(4), torch.tensor([1.0, 2.0, 0.0, -1.0])
    assert torch.equal(merge_two("karcher", zero, zero), zero)
    # No direction, but half of the norm.
    torch.testing.assert_close(merge_two("karcher", zero, vector), vector / 2)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, 2.0], [-1.0, -2.0]], "points in directions that cancel"),
        ([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], "one that is opposite to the mean"),
    ],
)
def test_karcher_refuses_what_has_no_mean(vectors, message):
    experts = [torch.tensor(vector) for vector in vectors]
    merger = get_merger("karcher", {}, Tensors(tasks=TASKS[: len(vectors)]))
    with pytest.raises(CheckpointError, match=f"\"karcher\": tensor 'layer.bias' of the experts .*{message}"):
        merger("layer.bias", torch.zeros(2), experts)


def test_karcher_says_when_it_does_not_get_there():
    with pytest.raises(CheckpointError, match="has no mean after 1 steps: raise max_iterations or tolerance"):
        merge_two("karcher", torch.tensor([1.0, 0.0]), torch.tensor([-0.9, 0.4]), weights=[0.9, 0.1], max_iterations=1)


# ---- SCE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_sce_entry_by_entry(density):
    tensors = drifted()
    for name, tensor in tensors.merge("sce", density=density).items():
        wanted = plain_sce(tensors.base[name], in_order(tensors, name), density)
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-5)


def test_sce_by_hand():
    """Entry 0 varies least and is left; weights are 10:25; the minority of entry 2 is erased."""
    base = torch.tensor([1.0, 1.0, 1.0])
    merged = merge_two("sce", base + torch.tensor([9.0, 1.0, 3.0]), base + torch.tensor([9.0, 3.0, -4.0]), base,
                       density=0.67)  # fmt: skip
    torch.testing.assert_close(merged, base + torch.tensor([0.0, (10 * 1 + 25 * 3) / 35, 25 * -4 / 35]))


# ---- what all promise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tasks", [["x"], ["x", "y"], TASKS])
def test_equal_experts_or_one_merge_to_that_expert(method, tasks):
    tensors = Tensors(tasks=tasks)
    tensors.experts = dict.fromkeys(tasks, tensors.experts["x"])
    merged = tensors.merge(method)
    for name, tensor in tensors.experts["x"].items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_experts_that_equal_the_base_merge_to_the_base_to_the_bit(method):
    """A frozen tower costs no recovery."""
    tensors = Tensors(step=0.0)
    merged = tensors.merge(method)
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.base.items())


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_experts_does_not_matter(method):
    tensors = drifted()
    merged = tensors.merge(method)
    tensors.tasks = ["w", "y", "x", "z"]
    for name, tensor in tensors.merge(method).items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_merged_in_float32_and_inputs_are_left_alone(method):
    tensors = Tensors(torch.bfloat16)
    before = [tensors.vector(values).clone() for values in (tensors.base, *tensors.experts.values())]
    merged = tensors.merge(method)
    after = [tensors.vector(values) for values in (tensors.base, *tensors.experts.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(tensor.dtype == torch.float32 and tensor.shape == SHAPES[name] for name, tensor in merged.items())


@pytest.mark.parametrize("method", METHODS)
def test_tensors_without_entries(method):
    empty = torch.empty(0, 4)
    assert get_merger(method, {}, Tensors())("w", empty, [empty] * 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("karcher", {"max_iterations": 0}, "max_iterations must be an integer from 1 to 10000, not 0"),
        ("karcher", {"max_iterations": 2.0}, "max_iterations must be an integer from 1 to 10000, not 2.0"),
        ("karcher", {"tolerance": 1e-9}, r"tolerance must be in \[1e-7, 1\], not 1e-09"),
        ("karcher", {"tolerance": "small"}, "tolerance must be a number, not 'small'"),
        ("sce", {"density": 0.0}, r"density must be in \(0, 1\], not 0.0"),
        ("model_stock", {"scale": 1.0}, "method 'model_stock' has no option 'scale'"),
    ],
)
def test_bad_options_are_named(method, options, message):
    with pytest.raises(ConfigError, match=f"RetexConfig.merge: {message}"):
        Tensors().merge(method, **options)
