"""Merge methods by name: the built-in ones, and a user's own."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from helpers import TASKS, assert_same, make_experts

from retex_hf import ConfigError, RetexConfig, RetexModel, merge_methods, register_merge
from retex_hf.checkpoints import take_inventory
from retex_hf.merging import registry


@pytest.fixture(autouse=True)
def leave_the_registry_as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    base = FAMILIES["bert"].make().eval()
    return base, make_experts(base)


def merged(bert, merge) -> dict[str, torch.Tensor]:
    base, experts = bert
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full", merge=merge), progress=False)
    for task in TASKS:  # whatever the merge, recovery starts from it
        assert_same(model.recover(task), dict(experts[task].state_dict()), rtol=1e-5, atol=1e-5)
    return dict(model.get_base_model().state_dict())


def test_built_in_methods():
    assert merge_methods() == ["adamerging", "average", "consensus", "task_arithmetic", "ties"]


def test_a_function_of_one_parameter(bert):
    @register_merge("midpoint")
    def midpoint(base, experts, *, pull=0.5):
        return base + pull * (torch.stack(experts).mean(0) - base)

    assert "midpoint" in merge_methods()
    base, experts = bert[0].state_dict(), [expert.state_dict() for expert in bert[1].values()]
    for merge, pull in (("midpoint", 0.5), ({"method": "midpoint", "pull": 0.9}, 0.9)):
        actual = merged(bert, merge)
        expected = {name: (1 - pull) * base[name] + pull * sum(e[name] for e in experts) / 3 for name in base}
        assert_same(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_function_that_sees_everything_first(bert):
    base, experts = bert
    seen = {}

    @register_merge("largest step", prepare=True)
    def largest_step(tensors, *, scale=1.0):
        seen["tasks"], seen["names"] = list(tensors.tasks), list(tensors.names)
        steps = {
            task: sum((tensors.read_expert(task, n) - tensors.read_base(n)).square().sum() for n in tensors.names)
            for task in tensors.tasks
        }
        chosen = tensors.tasks.index(max(steps, key=steps.get))
        return lambda name, base, experts: base + scale * (experts[chosen] - base)

    actual = merged(bert, {"method": "largest step", "scale": 1.0})
    assert seen == {"tasks": TASKS, "names": list(take_inventory(base).shapes)}
    start = base.state_dict()
    largest = max(experts.values(), key=lambda e: sum((t - start[n]).square().sum() for n, t in e.state_dict().items()))
    assert_same(actual, dict(largest.state_dict()), rtol=1e-5, atol=1e-6)


def test_unknown_method_lists_the_known_ones(bert):
    with pytest.raises(ConfigError, match=r"must be one of \['adamerging', 'average',.*not 'averge'"):
        merged(bert, {"method": "averge"})


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        ({"method": "average", "scale": 1}, r"method 'average' has no option 'scale'; it takes \[\]"),
        ({"method": "ties", "densty": 0.1}, r"has no option 'densty'; it takes \['density', 'scale', 'trim'\]"),
    ],
)
def test_unknown_option_lists_the_known_ones(bert, merge, message):
    with pytest.raises(ConfigError, match=message):
        merged(bert, merge)


@pytest.mark.parametrize(
    ("result", "found"), [(lambda base: base.mean(), r"one of \(\)"), (lambda base: None, "a NoneType")]
)
def test_a_result_of_another_shape_is_refused(bert, result, found):
    """Copying it into the model would spread it over the whole tensor."""

    @register_merge("broken")
    def broken(base, experts):
        return result(base)

    message = rf"'broken' must return a tensor of shape \(40, 16\) for 'embeddings.word_embeddings.weight', not {found}"
    with pytest.raises(ConfigError, match=message):
        merged(bert, "broken")
