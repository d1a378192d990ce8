"""AdaMerging: its gradient against autograd, its equation, and that learning does what it is for."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, images, tokens
from helpers import TASKS, make_experts
from test_methods import Tensors, flat
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification

from retex_hf import ConfigError, RetexError
from retex_hf.build.plan import load_expert_weights
from retex_hf.data.readout import Classifier, Generator, entropy
from retex_hf.merging.adamerging import coefficient_gradient, learn_coefficients, trimmed, write_body
from retex_hf.merging.expert_weights import ExpertWeights

LOGITS = Classifier().logits


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    torch.manual_seed(0)
    base = FAMILIES["bert-classifier"].make().eval()
    experts = make_experts(base, scale=2.0)
    for expert in experts.values():
        expert.classifier.weight.data.mul_(50)  # heads that are sure of something, as trained ones are
    return load_expert_weights(base, experts)


@pytest.fixture(scope="module")
def batches() -> dict[str, list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    return {task: [tokens(12), tokens(7)] for task in TASKS}


def merged_body(weights: ExpertWeights, coefficients: Tensor) -> dict[str, Tensor]:
    return {
        name: base + sum(c * vector for c, vector in zip(coefficients[:, column], weights.vectors[name], strict=True))
        for column, (name, base) in enumerate(weights.base.items())
    }


def mean_entropy(weights: ExpertWeights, batches, coefficients: Tensor, logits=LOGITS) -> Tensor:
    body = merged_body(weights, coefficients)
    per_task = [
        torch.cat([entropy(logits(weights.module(body, task), batch, task)) for batch in batches[task]]).mean()
        for task in weights.tasks
    ]
    return sum(per_task) / len(per_task)


def test_the_gradient_is_that_of_autograd_through_the_sum(weights, batches):
    coefficients = torch.rand(3, len(weights.base), requires_grad=True)
    mean_entropy(weights, batches, coefficients).backward()

    body = {name: torch.empty(base.shape, requires_grad=True) for name, base in weights.base.items()}
    write_body(body, weights.base, weights.vectors, coefficients.detach())
    for name, tensor in merged_body(weights, coefficients.detach()).items():
        torch.testing.assert_close(body[name].detach(), tensor, rtol=1e-5, atol=1e-5)
    for task in TASKS:
        module = weights.module(body, task)
        rows = sum(len(batch["input_ids"]) for batch in batches[task])
        for batch in batches[task]:
            (entropy(LOGITS(module, batch, task)).sum() / rows / 3).backward()
    found = coefficient_gradient(body, weights.vectors)
    assert found.abs().max() > 1e-3
    torch.testing.assert_close(found, coefficients.grad, rtol=1e-3, atol=1e-5)


def test_one_step_is_one_step_of_adam_on_that_gradient(weights, batches):
    reference = torch.full((3, len(weights.base)), 0.3, requires_grad=True)
    mean_entropy(weights, batches, reference).backward()
    torch.optim.Adam([reference], lr=0.02).step()
    found = learn_coefficients(weights, LOGITS, batches, steps=1, learning_rate=0.02, rows_per_task=100, progress=False)
    # Adam's first step is the sign of the gradient: where that is rounding error, its sign is too.
    clear = reference.grad.abs() > 1e-5
    assert clear.float().mean() > 0.5
    torch.testing.assert_close(found[clear], reference.detach()[clear], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"trimmed_density": 0.2}], ids=["plain", "trimmed"])
def test_learning_lowers_the_entropy_and_stays_within_bounds(weights, batches, options):
    start = torch.full((3, len(weights.base)), 0.3)
    found = learn_coefficients(
        weights, LOGITS, batches, steps=20, learning_rate=0.05, rows_per_task=8, progress=False, **options
    )
    assert found.min() >= 0 and found.max() <= 1
    assert (found == 0).any() or (found == 1).any()  # some coefficient has met its bound
    if options:
        weights = ExpertWeights(
            weights.model, weights.base, trimmed(weights.vectors, 0.2), weights.heads, weights.labels
        )
    with torch.no_grad():
        assert mean_entropy(weights, batches, found) < 0.9 * mean_entropy(weights, batches, start)


def test_a_coefficient_comes_back_from_its_bound(weights, batches):
    """Clamped inside the loss, a coefficient outside the bounds would get no gradient any more."""
    found = learn_coefficients(
        weights, LOGITS, batches, steps=5, learning_rate=0.05, rows_per_task=100, start=1.5, progress=False
    )
    assert found.max() <= 1
    assert ((found > 0) & (found < 1)).any()


def test_the_seed_decides(weights, batches):
    def learn(seed):
        return learn_coefficients(
            weights, LOGITS, batches, steps=4, learning_rate=0.02, rows_per_task=3, progress=False, seed=seed
        )

    assert torch.equal(learn(0), learn(0))
    assert not torch.equal(learn(0), learn(1))


def test_the_coefficients_kept_are_those_that_a_check_rates_best(weights, batches):
    options = {"learning_rate": 0.02, "rows_per_task": 3, "progress": False}
    after = {n: learn_coefficients(weights, LOGITS, batches, steps=n, **options) for n in (0, 2, 4, 5)}
    for ratings, kept in (([1, 3, 2, 3], 2), ([1, 2, 3, 4], 5), ([2, 1, 1, 2], 0)):
        bodies = []

        def rate(body, ratings=ratings, bodies=bodies):
            bodies.append({name: tensor.detach().clone() for name, tensor in body.items()})
            return float(ratings[len(bodies) - 1])

        found = learn_coefficients(weights, LOGITS, batches, steps=5, check=rate, check_every=2, **options)
        assert torch.equal(found, after[kept])
        for body, coefficients in zip(bodies, after.values(), strict=True):
            for name, tensor in merged_body(weights, coefficients).items():
                torch.testing.assert_close(body[name], tensor, rtol=1e-5, atol=1e-5)


def test_weights_are_left_alone(weights, batches):
    tensors = [*weights.base.values(), *weights.vectors.values()]
    before = [tensor.clone() for tensor in tensors]
    learn_coefficients(weights, LOGITS, batches, steps=2, rows_per_task=4, trimmed_density=0.5, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_rows_come_from_as_few_batches_as_hold_them(weights):
    calls = []

    def logits(module, inputs, task):
        calls.append((task, len(inputs["input_ids"])))
        return LOGITS(module, inputs, task)

    batches = {task: [tokens(5) for _ in range(4)] for task in TASKS}
    learn_coefficients(weights, logits, batches, steps=1, rows_per_task=7, progress=False)
    assert calls == [(task, rows) for task in TASKS for rows in (5, 2)]


def test_statistics_of_batch_normalisation_are_averaged():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    base = ResNetForImageClassification(config).eval()
    weights = load_expert_weights(base, make_experts(base))
    batches = {task: [images(4)] for task in TASKS}
    found = learn_coefficients(weights, LOGITS, batches, steps=2, learning_rate=0.05, progress=False)
    running = torch.tensor(["running" in name for name in weights.base])
    assert running.any()
    torch.testing.assert_close(found[:, running], torch.full((3, int(running.sum())), 1 / 3))
    assert (found[:, ~running] != 0.3).all()


def test_generators_are_read_at_their_first_word():
    base = FAMILIES["t5"].make().eval()
    weights = load_expert_weights(base, make_experts(base))
    logits = Generator(tokenizer=None).logits
    batches = {task: [tokens(8)] for task in TASKS}
    found = learn_coefficients(weights, logits, batches, steps=8, learning_rate=0.1, progress=False)
    with torch.no_grad():
        start = mean_entropy(weights, batches, torch.full_like(found, 0.3), logits)
        assert mean_entropy(weights, batches, found, logits) < start


def test_an_entropy_that_is_not_finite_is_named(weights, batches):
    def logits(module, inputs, task):
        return LOGITS(module, inputs, task) * (float("nan") if task == "green" else 1)

    with pytest.raises(RetexError, match="the entropy of task 'green' is not finite"):
        learn_coefficients(weights, logits, batches, steps=1, progress=False)


# ---- the merge itself ------------------------------------------------------------------------------------------------


def some_coefficients(tensors: Tensors) -> dict[str, dict[str, float]]:
    return {task: {name: torch.rand(()).item() for name in tensors.names} for task in tensors.tasks}


@pytest.mark.parametrize("trim", [False, True])
def test_merging_is_a_sum_of_scaled_task_vectors(trim):
    tensors = Tensors()
    coefficients = some_coefficients(tensors)
    merged = tensors.merge("adamerging", coefficients=coefficients, trim=trim, density=0.3)
    flat(tensors, merged)
    base = tensors.vector(tensors.base)
    limits = {}
    for task in tensors.tasks:
        magnitudes = (tensors.vector(tensors.experts[task]) - base).abs().sort(descending=True).values
        limits[task] = magnitudes[round(0.3 * len(magnitudes)) - 1] if trim else 0
    for name in tensors.names:
        expected = tensors.base[name].clone()
        for task in tensors.tasks:
            vector = tensors.experts[task][name] - tensors.base[name]
            expected += coefficients[task][name] * vector * (vector.abs() >= limits[task])
        torch.testing.assert_close(merged[name], expected)


def test_coefficients_of_one_value_are_task_arithmetic():
    tensors = Tensors()
    coefficients = {task: dict.fromkeys(tensors.names, 0.3) for task in tensors.tasks}
    merged = flat(tensors, tensors.merge("adamerging", coefficients=coefficients))
    torch.testing.assert_close(merged, tensors.vector(tensors.merge("task_arithmetic", scale=0.3)))


def change(**changes):
    def apply(coefficients):
        for path, value in changes.items():
            if path == "task":
                del coefficients[value]
            elif path == "lacking":
                del coefficients["y"][value]
            else:
                coefficients["y"] = value if path == "values" else {**coefficients["y"], **value}

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(task="x"), r"coefficients must be a dict with an entry per task \['x', 'y', 'z', 'w'\]"),
        (change(lacking="a.bias"), "of task 'y' must have one number per merged tensor; 'a.bias' is missing"),
        (change(extra={"b": 1.0}), "of task 'y' must have one number per merged tensor; 'b' is none of them"),
        (change(values=[0.3]), "of task 'y' must have one number per merged tensor"),
        (change(extra={"scale": 1.5}), r"the coefficient of 'scale' for task 'y' must be in \[0, 1\], not 1.5"),
        (change(extra={"scale": "x"}), "the coefficient of 'scale' for task 'y' must be a number, not 'x'"),
    ],
)
def test_bad_coefficients_are_named(spoil, message):
    tensors = Tensors()
    coefficients = some_coefficients(tensors)
    spoil(coefficients)
    with pytest.raises(ConfigError, match=f"RetexConfig.merge: .*{message}"):
        tensors.merge("adamerging", coefficients=coefficients)


def test_trim_is_true_or_false():
    with pytest.raises(ConfigError, match="trim must be True or False, not 'tensor'"):
        Tensors().merge("adamerging", coefficients={}, trim="tensor")
