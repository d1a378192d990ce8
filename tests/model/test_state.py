"""The state of a model: frozen parts, swapped in one step, of which torch's modules are a view."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from helpers import assert_same, build_retex
from test_tasks import NEW, build, words
from torch import nn

from retex_hf import ConfigError, RetexConfig, RetexModel
from retex_hf.artifact.recipe_record import RecipeRecord
from retex_hf.artifact.state import MODULES, RetexParts
from retex_hf.model.edit_signatures import sign
from retex_hf.model.edit_tasks import add_task, delete_task, select_tasks
from retex_hf.utils.tensor_bank import TensorBank


def assert_one_state(model: RetexModel) -> None:
    """What calls use and what torch moves, saves and trains are the same objects."""
    parts = model.parts()
    assert list(model._modules) == list(MODULES)
    assert all(model._modules[name] is getattr(parts, name) for name in MODULES)


def values(parts: RetexParts) -> dict:
    """All tensors and plain values of parts, copied."""
    tensors = {
        f"{name}.{key}": tensor.clone()
        for name, module in parts.modules.items()
        for key, tensor in module.state_dict().items()
    }
    plain = {"config": parts.config.to_dict(), "errors": dict(parts.errors), "recipe": dict(parts.recipe or {})}
    return copy.deepcopy({**plain, "signatures": parts.signatures, "tensors": tensors})


def assert_unchanged(parts: RetexParts, before: dict) -> None:
    now = values(parts)
    assert all(now[key] == before[key] for key in ("config", "errors", "recipe"))
    assert now["tensors"].keys() == before["tensors"].keys()
    assert all(torch.equal(tensor, before["tensors"][name]) for name, tensor in now["tensors"].items())
    assert (now["signatures"] is None) == (before["signatures"] is None)


def references(tasks: list[str]) -> dict[str, list[dict]]:
    return {task: [words(task, 32)] for task in tasks}


def test_changes_are_functions_that_leave_their_parts_alone():
    model, expert, _ = build("bert-classifier", rank=3)
    parts = dataclasses.replace(model.parts(), recipe=RecipeRecord({"base": "b", "experts": {}}))
    before = values(parts)
    signed, _ = sign(parts, references(parts.config.tasks), progress=False)
    grown, _ = add_task(signed, NEW, expert, references=[words(NEW, 32)], progress=False)
    shrunk = delete_task(grown, "red")
    assert select_tasks(grown, [NEW]).config.tasks == [NEW]
    assert (parts.signatures, shrunk.config.tasks) == (None, ["green", NEW])
    assert signed.config.tasks == ["red", "green"] and grown.config.tasks == ["red", "green", NEW]
    assert_unchanged(parts, before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts.signatures = signed.signatures


def test_torch_sees_the_state_after_every_change():
    model, expert, _ = build("bert-classifier", rank=3)
    assert_one_state(model)
    model.fit_signatures(references(model.tasks), progress=False)
    model.add_task(NEW, expert, references=[words(NEW, 32)], progress=False)
    assert_one_state(model)
    model.delete_task("red")
    model.to(torch.float64).to(torch.float32)
    assert_one_state(model)
    assert set(model.state_dict()) == {f"{name}.{key}" for name, m in model._modules.items() for key in m.state_dict()}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_one_state(copied):
    model, _ = build_retex("bert-classifier", rank=3)
    twin = copied(model)
    assert_one_state(twin)
    inputs = words("red", 3)
    with torch.no_grad():
        assert_same(twin(**inputs, task="green"), model(**inputs, task="green"), exact=True)


@torch.no_grad()
def test_a_module_that_a_wrapper_replaces_is_the_one_that_runs():
    """Data parallelism and FSDP replace children by assigning them; experts of the old child are not reused."""
    model, _ = build_retex("bert-classifier", rank=3)
    inputs = words("red", 3)
    model(**inputs, task="red")  # now in the cache
    zeroed = copy.deepcopy(model.model)
    for parameter in zeroed.parameters():
        parameter.zero_()
    expected = RetexModel(dataclasses.replace(model.parts(), model=zeroed))(**inputs, task="red")
    model.model = zeroed
    assert_one_state(model)
    assert_same(model(**inputs, task="red"), expected, exact=True)


def test_the_size_of_the_cache_can_be_changed():
    model, _ = build_retex("bert", rank=3)
    model(input_ids=torch.ones(1, 4).long(), task="red")
    assert len(model.expert_cache) == 1
    model.expert_cache = "0MB"
    model(input_ids=torch.ones(1, 4).long(), task="red")
    assert len(model.expert_cache) == 0
    with pytest.raises(ConfigError, match="expert_cache must be a number of bytes or a size"):
        model.expert_cache = "large"


def test_groups_of_tensors_move_and_stay_distinct():
    bank = TensorBank({"a": {"w.x": torch.ones(2), "w.y": torch.zeros(1)}, "b": {}})
    assert dict(bank["a"]).keys() == {"w.x", "w.y"} and bank["b"] == {} and len(bank) == 2
    assert bank.to(torch.float16)["a"]["w.x"].dtype == torch.float16
    assert bank != TensorBank({"a": {}}) and len({bank, copy.deepcopy(bank)}) == 2
    assert list(bank.state_dict()) == ["tensor_0", "tensor_1"]
    assert isinstance(nn.ModuleList([bank])[0], TensorBank)


@torch.no_grad()
def test_what_a_model_hands_out_is_a_copy():
    model, _ = build_retex("bert-classifier", rank=3)
    inputs = words("red", 3)
    before, tasks = model(**inputs, task="green"), list(model.tasks)
    model.tasks.sort()
    model.retex_config.tasks.reverse()
    model.retex_config.labels.clear()
    model.routing = {"method": "hard"}
    model.routing["method"] = "nonsense"
    assert model.tasks == tasks and model.retex_config.labels.keys() == set(tasks)
    assert model.routing == {"method": "hard"}
    assert_same(model(**inputs, task="green"), before, exact=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.retex_config.temperature = 2.0
    model.recipe = RecipeRecord({"config": {"rank": 3}})
    model.recipe["config"]["rank"] = 4
    assert model.recipe["config"] == {"rank": 3}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("heads", {}),
        ("heads", TensorBank()),
        ("heads", None),
        ("rows", {}),
        ("pretrained", None),
        ("model", None),
        ("recovery", 5),
        ("signatures", 3),
        ("recipe", {"a": 1}),
        ("evaluation", []),
        ("recovery_errors", None),
        ("retex_config", {"rank": 3}),
        ("retex_config", RetexConfig()),
        ("expert_cache", None),
        ("execution", "both"),
    ],
)
def test_parts_of_the_wrong_kind_are_refused(part, value):
    model, _ = build_retex("bert-classifier", rank=3)
    before = model._state
    with pytest.raises(ConfigError, match=part):
        setattr(model, part, value)
    assert model._state is before
    assert_one_state(model)


def test_a_configuration_that_is_none_is_refused_before_the_work():
    with pytest.raises(ConfigError, match=r"config must be a RetexConfig, such as RetexConfig\(rank=64\), not"):
        RetexModel.from_experts("nowhere", {"a": "nowhere"}, {"rank": 4})
    with pytest.raises(ConfigError, match="expert_cache must be"):
        RetexModel.from_experts("nowhere", {"a": "nowhere"}, expert_cache="lots")
