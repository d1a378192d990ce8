"""A weight per expert: by task or in order, in every method where it means something."""

from __future__ import annotations

import pytest
import torch
from test_methods import TASKS, Tensors

from retex_hf import ConfigError
from retex_hf.cli.build import BuildOptions

WEIGHTS = {"x": 0.7, "y": 0.0, "z": 1.5, "w": 0.2}
# Methods that add up task vectors, and methods that take a mean.
ADDED = ["task_arithmetic", "dare_linear", "della_linear", "breadcrumbs"]
MEANS = ["average", "ties", "dare_ties", "della", "breadcrumbs_ties", "karcher"]


def merged(tensors: Tensors, method: str, **options) -> torch.Tensor:
    return tensors.vector(tensors.merge(method, **options))


def stack(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors.vector(tensors.base), torch.stack([tensors.vector(tensors.experts[task]) for task in TASKS])


def test_the_weighted_mean():
    tensors = Tensors()
    _, experts = stack(tensors)
    expected = sum(WEIGHTS[task] * expert for task, expert in zip(TASKS, experts, strict=True)) / sum(WEIGHTS.values())
    torch.testing.assert_close(merged(tensors, "average", weights=WEIGHTS), expected)


@pytest.mark.parametrize(("options", "scale"), [({}, 1.0), ({"scale": 0.5}, 0.5)])
def test_weighted_task_arithmetic_has_no_other_scale_unless_it_is_given(options, scale):
    tensors = Tensors()
    base, experts = stack(tensors)
    weights = {**WEIGHTS, "y": -0.4}  # forget it
    expected = base + scale * sum(weights[t] * (e - base) for t, e in zip(TASKS, experts, strict=True))
    torch.testing.assert_close(merged(tensors, "task_arithmetic", weights=weights, **options), expected)


def test_weighted_ties_votes_and_averages_by_weight():
    tensors = Tensors()
    base, experts = stack(tensors)
    expected = base.clone()
    votes_turned = 0
    for entry in range(len(base)):
        values = [(experts[i, entry] - base[entry]).item() for i in range(len(TASKS))]
        vote = sum(WEIGHTS[task] * value for task, value in zip(TASKS, values, strict=True))
        votes_turned += vote * sum(values) < 0
        agreeing = [(WEIGHTS[t], v) for t, v in zip(TASKS, values, strict=True) if v * vote > 0]
        total = sum(weight for weight, _ in agreeing)
        if total:
            expected[entry] += sum(weight * value for weight, value in agreeing) / total
    assert votes_turned  # else the election is not tested
    torch.testing.assert_close(merged(tensors, "ties", density=1.0, weights=WEIGHTS), expected)


@pytest.mark.parametrize("method", [*ADDED, *MEANS])
def test_list_and_mapping_are_the_same_and_the_order_of_a_mapping_is_not_looked_at(method):
    tensors = Tensors()
    by_task = merged(tensors, method, weights=WEIGHTS)
    assert torch.equal(by_task, merged(tensors, method, weights=[WEIGHTS[task] for task in TASKS]))
    assert torch.equal(by_task, merged(tensors, method, weights=dict(reversed(WEIGHTS.items()))))
    assert not torch.allclose(by_task, merged(tensors, method, weights=[1.0] * len(TASKS)), atol=1e-3)


@pytest.mark.parametrize("method", MEANS)
def test_of_a_mean_only_ratios_of_weights_count(method):
    tensors = Tensors()
    doubled = {task: 2 * weight for task, weight in WEIGHTS.items()}
    torch.testing.assert_close(merged(tensors, method, weights=WEIGHTS), merged(tensors, method, weights=doubled))
    torch.testing.assert_close(merged(tensors, method), merged(tensors, method, weights=[0.3] * len(TASKS)))


@pytest.mark.parametrize("method", ADDED)
def test_of_a_sum_weights_are_what_they_are(method):
    tensors = Tensors()
    equal = merged(tensors, method, weights=[0.4] * len(TASKS))
    torch.testing.assert_close(equal, merged(tensors, method, scale=0.4))


@pytest.mark.parametrize("method", [*ADDED, *MEANS])
def test_an_expert_of_weight_zero_has_no_say(method):
    tensors = Tensors()
    before = merged(tensors, method, weights=WEIGHTS)
    tensors.experts["y"] = {name: tensor + 100 for name, tensor in tensors.experts["y"].items()}
    torch.testing.assert_close(before, merged(tensors, method, weights=WEIGHTS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "dare_ties", "karcher"])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({**WEIGHTS, "paws": 1.0}, r"weights must have one number per task \['x', 'y', 'z', 'w'\], not \[.*'paws'\]"),
        ({"x": 1.0, "y": 1.0, "z": 1.0, "v": 1.0}, r"weights must have one number per task.*'v'\]"),
        ({"x": 1.0}, r"weights must have one number per task \['x', 'y', 'z', 'w'\], not \['x'\]"),
        ([1.0, 2.0], r"weights must have one number per task .*, not \[1.0, 2.0\]"),
        (0.5, "weights must have one number per task .*, not 0.5"),
        ({**WEIGHTS, "z": "1"}, "weights of task 'z' must be a number, not '1'"),
        ({**WEIGHTS, "z": float("inf")}, "weights of task 'z' must be a number, not inf"),
        ({**WEIGHTS, "z": True}, "weights of task 'z' must be a number, not True"),
    ],
)
def test_wrong_weights_are_refused(method, weights, message):
    with pytest.raises(ConfigError, match=f"RetexConfig.merge: {message}"):
        merged(Tensors(), method, weights=weights)


@pytest.mark.parametrize("method", MEANS)
@pytest.mark.parametrize("weights", [[1.0, -0.1, 1.0, 1.0], [0.0] * 4])
def test_weights_of_a_mean_are_not_negative_nor_all_zero(method, weights):
    with pytest.raises(ConfigError, match="weights of a mean must not be negative, nor all zero"):
        merged(Tensors(), method, weights=weights)


@pytest.mark.parametrize("method", ["sce", "model_stock", "consensus", "adamerging"])
def test_methods_that_find_their_own_weights_take_none(method):
    with pytest.raises(ConfigError, match=f"method '{method}' has no option 'weights'"):
        merged(Tensors(), method, weights=WEIGHTS)


def test_the_command_line_takes_weights_as_yaml():
    text = "{method: dare_ties, density: 0.4, seed: 3, weights: {x: 0.7, y: 1}}"
    options = BuildOptions.parser("retex build").parse_args(["--merge", text])
    assert options.merge == {"method": "dare_ties", "density": 0.4, "seed": 3, "weights": {"x": 0.7, "y": 1}}
