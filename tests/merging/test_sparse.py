"""DARE, DELLA and Breadcrumbs against loops over entries, and what each promises."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest
import torch
from test_methods import SHAPES, TASKS, Tensors
from torch import Tensor

from retex_hf import ConfigError
from retex_hf.merging import get_merger
from retex_hf.merging.draws import Draws
from retex_hf.merging.sparse import ranked_probabilities

RANDOM = ["dare_linear", "dare_ties", "della", "della_linear"]
FIRST = [0.42796882431662575, 0.6500608885912861, 0.5124805335934866]  # of seed 0, below
PAIRS = {"dare_linear": "dare_ties", "della_linear": "della", "breadcrumbs": "breadcrumbs_ties"}


def uniforms(seed: int, task: str, name: str, count: int) -> list[float]:
    """The documented stream, one number at a time."""
    digest = hashlib.blake2b(json.dumps([seed, task, name]).encode(), digest_size=16).digest()
    source = np.random.Philox(key=int.from_bytes(digest, "little"))
    return [(int(source.random_raw()) >> 11) / 2**53 for _ in range(count)]


def dropped(vector: list[float], kept: list[float], drawn: list[float]) -> list[float]:
    return [v / k if u < k else 0.0 for v, k, u in zip(vector, kept, drawn, strict=True)]


def della_kept(shape: tuple[int, ...], vector: list[float], density: float, epsilon: float) -> list[float]:
    rows = shape[0] if len(shape) > 1 else 1
    width = len(vector) // rows
    kept = []
    for row in range(rows):
        part = [abs(value) for value in vector[row * width : (row + 1) * width]]
        for index, value in enumerate(part):
            rank = sum(other < value or (other == value and i < index) for i, other in enumerate(part))
            kept.append(density - epsilon / 2 + epsilon * rank / (width - 1) if width > 1 else density)
    return kept


def band(vector: list[float], density: float, gamma: float) -> list[float]:
    order = sorted(range(len(vector)), key=lambda index: -abs(vector[index]))
    masked = round(gamma * len(vector))
    chosen = set(order[masked : masked + max(1, round(density * len(vector)))])
    return [value if index in chosen else 0.0 for index, value in enumerate(vector)]


def plain_sum(columns: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*columns, strict=True)]


def plain_elected(vectors: list[list[float]]) -> list[float]:
    result = []
    for column in zip(*vectors, strict=True):
        vote = sum(column)
        agreeing = [value for value in column if value * vote > 0]
        result.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return result


def expected(tensors: Tensors, method: str, sparse, scale: float) -> dict[str, Tensor]:
    """`sparse(task, name, vector)` makes a flat list sparse; the rest is said by the method's form."""
    fuse = plain_sum if method in PAIRS else plain_elected
    merged = {}
    for name, base in tensors.base.items():
        vectors = [(tensors.experts[t][name] - base).double().flatten().tolist() for t in TASKS]
        fused = fuse([sparse(task, name, vector) for task, vector in zip(TASKS, vectors, strict=True)])
        merged[name] = (base.double() + scale * torch.tensor(fused, dtype=torch.float64).view(base.shape)).float()
    return merged


def compare(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize(("density", "seed"), [(0.5, 0), (0.1, 7)])
def test_dare_entry_by_entry(method, density, seed):
    tensors = Tensors()

    def sparse(task: str, name: str, vector: list[float]) -> list[float]:
        return dropped(vector, [density] * len(vector), uniforms(seed, task, name, len(vector)))

    actual = tensors.merge(method, density=density, seed=seed, scale=0.8)
    compare(actual, expected(tensors, method, sparse, 0.8))


@pytest.mark.parametrize("method", ["della", "della_linear"])
@pytest.mark.parametrize(("density", "epsilon"), [(0.5, 0.2), (0.3, 0.5), (0.6, 0)])
def test_della_entry_by_entry(method, density, epsilon):
    tensors = Tensors()

    def sparse(task: str, name: str, vector: list[float]) -> list[float]:
        kept = della_kept(SHAPES[name], vector, density, epsilon)
        return dropped(vector, kept, uniforms(3, task, name, len(vector)))

    actual = tensors.merge(method, density=density, epsilon=epsilon, seed=3, scale=1.0)
    compare(actual, expected(tensors, method, sparse, 1.0))


@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties"])
@pytest.mark.parametrize(("density", "gamma"), [(0.15, 0.01), (0.5, 0.3), (0.7, 0.3), (0.4, 0)])
def test_breadcrumbs_entry_by_entry(method, density, gamma):
    tensors = Tensors()
    actual = tensors.merge(method, density=density, gamma=gamma, scale=0.4)
    compare(actual, expected(tensors, method, lambda _t, _n, vector: band(vector, density, gamma), 0.4))


def test_breadcrumbs_masks_both_tails_in_every_tensor():
    tensors = Tensors(tasks=["x"])
    merged = tensors.merge("breadcrumbs", density=0.5, gamma=0.2, scale=1.0)
    for name in ("a.weight", "conv.weight"):
        vector = (tensors.experts["x"][name] - tensors.base[name]).abs().flatten()
        order = vector.argsort(descending=True)
        changed = (merged[name] != tensors.base[name]).flatten()
        size = len(vector)
        assert not changed[order[: round(0.2 * size)]].any()
        assert changed[order[round(0.2 * size) : round(0.2 * size) + round(0.5 * size)]].all()
        assert not changed[order[round(0.2 * size) + round(0.5 * size) :]].any()


@pytest.mark.parametrize(
    ("method", "options", "same"),
    [
        ("dare_linear", {}, "task_arithmetic"),
        ("della_linear", {"epsilon": 0}, "task_arithmetic"),
        ("breadcrumbs", {"gamma": 0}, "task_arithmetic"),
        ("dare_ties", {}, "ties"),
        ("della", {"epsilon": 0}, "ties"),
        ("breadcrumbs_ties", {"gamma": 0}, "ties"),
    ],
)
def test_density_one_is_the_method_without_masks(method, options, same):
    tensors = Tensors()
    dense = {"density": 1.0} if same == "ties" else {}
    compare(tensors.merge(method, density=1.0, **options), tensors.merge(same, **dense))


@pytest.mark.parametrize("method", ["dare_ties", "della", "breadcrumbs_ties"])
@pytest.mark.parametrize("tasks", [["x"], TASKS])
def test_at_density_one_equal_experts_or_one_merge_to_that_expert(method, tasks):
    tensors = Tensors(tasks=tasks)
    tensors.experts = dict.fromkeys(tasks, tensors.experts["x"])
    options = {"dare_ties": {}, "della": {"epsilon": 0}, "breadcrumbs_ties": {"gamma": 0}}[method]
    compare(tensors.merge(method, density=1.0, **options), tensors.experts["x"])


@pytest.mark.parametrize(("method", "options"), [("dare_linear", {}), ("della_linear", {"epsilon": 0.3})])
def test_the_expectation_of_a_sparse_vector_is_the_task_vector(method, options):
    """Means over seeds lie within five standard errors of it, entry by entry."""
    tensors = Tensors(tasks=["x"])
    count, density = 400, 0.4
    base, vector = tensors.vector(tensors.base), tensors.vector(tensors.experts["x"]) - tensors.vector(tensors.base)
    mean = torch.zeros_like(vector).double()
    for seed in range(count):
        merged = tensors.vector(tensors.merge(method, density=density, seed=seed, scale=1.0, **options))
        mean += (merged - base).double() / count
    least = density - options.get("epsilon", 0) / 2
    error = vector.double().abs() * ((1 / least - 1) / count) ** 0.5
    assert ((mean - vector).abs() <= 5 * error + 1e-6).all()


def test_the_share_that_is_kept_is_the_density_and_large_entries_are_kept_more_often():
    generator = torch.Generator().manual_seed(0)
    base = torch.zeros(64, 1000)
    vector = torch.randn(64, 1000, generator=generator)
    tensors = Tensors(tasks=["x"])
    kept = get_merger("della", {"density": 0.4, "epsilon": 0.4}, tensors)("w", base, [vector]) != 0
    assert abs(kept.float().mean() - 0.4) < 0.01
    by_rank = kept.gather(1, vector.abs().argsort(1)).float()
    assert abs(by_rank[:, :100].mean() - 0.22) < 0.02
    assert abs(by_rank[:, -100:].mean() - 0.58) < 0.02


def test_probabilities_by_rank():
    rows = torch.tensor([[0.1, -3.0, 2.0, 0.0], [1.0, 1.0, -1.0, 0.5]])
    found = ranked_probabilities(rows, 0.5, 0.3)
    wanted = torch.tensor([[0.45, 0.65, 0.55, 0.35], [0.45, 0.55, 0.65, 0.35]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    assert ranked_probabilities(torch.ones(3, 1), 0.7, 0.2).tolist() == [[0.7]] * 3


# ---- the same draws, however the work is cut up ----------------------------------------------------------------------


def test_draws_do_not_depend_on_the_pieces_they_are_taken_in():
    whole = Draws(5, "x", "w").take(torch.Size([100]))
    source = Draws(5, "x", "w")
    pieces = [source.take(torch.Size(shape)).flatten() for shape in ([1], [7, 2], [80], [5])]
    assert torch.equal(whole, torch.cat(pieces))
    assert whole.min() >= 0
    assert whole.max() < 1
    for other in (Draws(6, "x", "w"), Draws(5, "y", "w"), Draws(5, "x", "v")):
        assert not torch.equal(whole, other.take(torch.Size([100])))


def test_draws_are_fixed_for_all_machines():
    first = Draws(0, "task", "layer.weight").take(torch.Size([3])).tolist()
    assert first == uniforms(0, "task", "layer.weight", 3)
    assert first == pytest.approx(FIRST, abs=1e-15)


@pytest.mark.parametrize("method", RANDOM)
def test_a_seed_gives_the_same_bytes_in_any_order_of_tensors_and_number_of_threads(method):
    tensors = Tensors()
    merged = tensors.merge(method, seed=11)
    tensors.names = random.Random(0).sample(tensors.names, len(tensors.names))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = tensors.merge(method, seed=11)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(merged[name], again[name]) for name in merged)
    other = tensors.merge(method, seed=12)
    assert any(not torch.equal(merged[name], other[name]) for name in merged)


@pytest.mark.parametrize("method", [*PAIRS, *PAIRS.values()])
def test_the_order_of_experts_does_not_matter(method):
    tensors = Tensors()
    merged = tensors.merge(method)
    tensors.tasks = ["w", "y", "x", "z"]
    compare(tensors.merge(method), merged)


@pytest.mark.parametrize("method", [*PAIRS, *PAIRS.values()])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_half_precision_inputs_are_left_alone_and_equal_ones_merge_to_the_base(method, step):
    tensors = Tensors(torch.bfloat16, step=step)
    before = [tensors.vector(values).clone() for values in (tensors.base, *tensors.experts.values())]
    merged = tensors.merge(method)
    after = [tensors.vector(values) for values in (tensors.base, *tensors.experts.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(tensor.dtype == torch.float32 and tensor.shape == SHAPES[name] for name, tensor in merged.items())
    if step == 0:
        assert torch.equal(tensors.vector(merged), before[0])


@pytest.mark.parametrize("method", [*PAIRS, *PAIRS.values()])
def test_tensors_without_entries(method):
    empty = torch.empty(0, 4)
    assert get_merger(method, {}, Tensors())("w", empty, [empty] * 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dare_linear", {"density": 0}, r"density must be in \(0, 1\], not 0"),
        ("dare_ties", {"density": "half"}, "density must be a number, not 'half'"),
        ("dare_ties", {"scale": None}, "scale must be a number, not None"),
        ("dare_linear", {"seed": -1}, r"seed must be an integer from 0 to \d+, not -1"),
        ("della", {"seed": 1.0}, r"seed must be an integer from 0 to \d+, not 1.0"),
        ("dare_ties", {"seed": True}, r"seed must be an integer from 0 to \d+, not True"),
        ("della", {"epsilon": -0.1}, "epsilon must leave .* above 0 .* at most 1, but density is 0.5 and epsilon is"),
        ("della", {"density": 1.0}, "epsilon must leave .*, but density is 1.0 and epsilon is 0.2"),
        ("della_linear", {"density": 0.2, "epsilon": 0.4}, "epsilon must leave .* above 0"),
        ("della", {"epsilon": "a"}, "epsilon must be a number, not 'a'"),
        (
            "breadcrumbs",
            {"gamma": 0.9},
            "gamma must be at least 0 and leave room for density .*gamma is 0.9",
        ),
        ("breadcrumbs_ties", {"gamma": -0.1}, "gamma must be at least 0"),
        ("breadcrumbs", {"seed": 1}, ""),
    ],
)
def test_bad_options_are_named(method, options, message):
    with pytest.raises(ConfigError, match=f"RetexConfig.merge: {message}"):
        Tensors().merge(method, **options)
