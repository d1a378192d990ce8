"""Merge methods by name: the built-in ones, and a user's own."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES
from helpers import TASKS, assert_same, make_experts

from retex_hf import ConfigError, RetexConfig, RetexModel, merge_methods, register_merge
from retex_hf.checkpoints import take_inventory
from retex_hf.merging import get_merger, registry


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
    assert merge_methods() == [
        "adamerging",
        "average",
        "breadcrumbs",
        "breadcrumbs_ties",
        "consensus",
        "dare_linear",
        "dare_ties",
        "della",
        "della_linear",
        "karcher",
        "model_stock",
        "sce",
        "task_arithmetic",
        "ties",
    ]


def test_the_table_of_methods_has_them_all_with_their_options_and_defaults():
    text = (Path(__file__).parents[2] / "docs" / "merging.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| .* \| (mean|sum|none) \|$", text, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == merge_methods()
    for name, cell, weights in rows:
        options = registry._keyword_options(registry._METHODS[name].function)
        told = dict(re.findall(r"`(\w+)`(?: ([^,]+))?", cell))
        assert told.keys() == options.keys(), name
        assert ("weights" in options) == (weights != "none"), name
        for option, default in options.items():
            if default is None:  # weights, or the scale that depends on them
                assert told[option] == ("0.3" if option == "scale" else "")
            else:
                assert ast.literal_eval(told[option]) == default, (name, option)


@pytest.mark.parametrize(
    "merge",
    [
        {"method": "average", "weights": {"red": 0.2, "green": 1.5, "blue": 1}},
        {"method": "dare_ties", "density": 0.3, "seed": 4},
        {"method": "breadcrumbs", "weights": [0.5, 0.5, -0.2]},
        "model_stock",
        "sce",
        "karcher",
    ],
)
def test_a_model_is_merged_tensor_by_tensor_as_its_tensors_are(bert, merge):
    base, experts = bert[0].state_dict(), {task: expert.state_dict() for task, expert in bert[1].items()}
    names = list(take_inventory(bert[0]).shapes)
    tensors = SimpleNamespace(tasks=TASKS, names=names, read_base=base.get, read_expert=lambda t, n: experts[t][n])
    options = dict(merge) if isinstance(merge, dict) else {"method": merge}
    merger = get_merger(options.pop("method"), options, tensors)
    expected = {name: merger(name, base[name], [experts[task][name] for task in TASKS]) for name in names}
    actual = merged(bert, merge)
    assert_same({name: actual[name] for name in names}, expected, exact=True)


def test_a_misspelt_task_is_refused(bert):
    with pytest.raises(
        ConfigError, match=r"one number per task \['red', 'green', 'blue'\], not \['red', 'gren', 'blue'\]"
    ):
        merged(bert, {"method": "task_arithmetic", "weights": {"red": 1, "gren": 1, "blue": 1}})


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
        ({"method": "average", "scale": 1}, r"method 'average' has no option 'scale'; it takes \['weights'\]"),
        (
            {"method": "ties", "densty": 0.1},
            r"has no option 'densty'; it takes \['density', 'scale', 'trim', 'weights'\]",
        ),
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
