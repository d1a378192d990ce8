"""Recipes: what they refuse, what they keep, and what a build writes down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from classifiers import make_encoders
from transformers import BertModel

from retex_hf import ConfigError, RetexConfig, RetexModel, TrainingConfig
from retex_hf.artifact.recipe import (
    Recipe,
    describe_build,
    use_threads,
)
from retex_hf.artifact.recipe_record import RecipeRecord
from retex_hf.workflows.from_recipe import differences, make


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return make_encoders(tmp_path_factory.mktemp("models"))


def test_defaults_are_not_written():
    recipe = Recipe(base="b", experts={"a": "e"}, config={"rank": 8}, output_dir="out", cpu=True)
    assert recipe.to_dict() == {
        "base": "b", "experts": {"a": "e"}, "config": {"rank": 8}, "output_dir": "out", "cpu": True,
    }  # fmt: skip
    assert recipe.stored() == {"base": "b", "experts": {"a": "e"}, "config": {"rank": 8}}


def test_a_build_of_folders_writes_down_its_recipe(folders):
    experts = {task: folders / task for task in ("red", "green")}
    config = RetexConfig(rank=3, merge={"method": "task_arithmetic", "scale": 0.1}, exclude=["*embeddings*"])
    model = RetexModel.from_experts(folders / "base", experts, config, progress=False)
    recipe = model.recipe
    assert recipe["base"] == str(folders / "base")
    assert recipe["experts"] == {task: str(path) for task, path in experts.items()}
    assert recipe["config"] == {
        "rank": 3, "weighting": "tasks", "merge": {"method": "task_arithmetic", "scale": 0.1},
        "exclude": ["*embeddings*"],
    }  # fmt: skip
    assert recipe["threads"] == torch.get_num_threads()
    # As YAML and back, the build is the same to the last bit.
    again = make(Recipe.from_dict(yaml.safe_load(yaml.safe_dump(dict(recipe), sort_keys=False))), progress=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert again.recipe == recipe


def test_training_is_repeated_too(folders):
    experts = {task: folders / task for task in ("red", "green")}
    training = TrainingConfig(steps=5, warmup_steps=1, learning_rate=1e-5, seed=3)
    model = RetexModel.from_experts(
        folders / "base", experts, RetexConfig(rank=3), solver="adam", training=training, progress=False
    )
    stored = yaml.safe_load(yaml.safe_dump(dict(model.recipe), sort_keys=False))
    assert stored["training"] == {"steps": 5, "warmup_steps": 1, "learning_rate": 1e-5, "seed": 3}
    again = make(Recipe.from_dict(stored), progress=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_what_is_in_memory_has_no_recipe(folders):
    base = BertModel.from_pretrained(folders / "base")
    model = RetexModel.from_experts(base, {"red": folders / "red"}, RetexConfig(rank=3), progress=False)
    assert model.recipe is None


def test_hub_sources_are_pinned_to_their_commit():
    revisions = {"org/base": "a" * 40, "org/red@main": "b" * 40, "local/red": None}
    experts = {"red": "org/red@main", "green": "local/red"}
    recipe = describe_build("org/base", experts, RetexConfig(), revisions=revisions)
    assert recipe.base == "org/base@" + "a" * 40
    assert recipe.experts == {"red": "org/red@" + "b" * 40, "green": "local/red"}


def test_other_versions_are_told():
    recipe = Recipe(base="b", experts={"a": "e"}, made_with={"torch": "0.4"}, unrecorded=["dance"])
    texts = differences(recipe)
    assert len(texts) == 2 and "dance" in texts[0] and "torch 0.4" in texts[1]


def test_threads_are_those_of_the_recipe_and_given_back():
    usual = torch.get_num_threads()
    with use_threads(usual + 1):
        assert torch.get_num_threads() == usual + 1
    assert torch.get_num_threads() == usual
    with pytest.raises(RuntimeError), use_threads(usual + 1):
        raise RuntimeError
    assert torch.get_num_threads() == usual


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "must hold keys and values"),
        ({"bases": "b"}, "has no key 'bases'"),
        ({"base": 3}, "'base' of the recipe must be a text, not 3"),
        ({"experts": ["a"]}, "'experts' of the recipe must hold names and texts"),
        ({"experts": {True: "a"}}, "must hold names and texts"),
        ({"config": {"rnak": 3}}, "'config' of the recipe has no key 'rnak'"),
        ({"config": {"tasks": ["a"]}}, "has no key 'tasks'"),
        ({"config": 3}, "'config' of the recipe must hold keys and values"),
        ({"max_length": "long"}, "must be a whole number"),
        ({"seed": True}, "must be a whole number"),
        ({"check_base": "no"}, "must be true or false"),
        ({"changes": {"add": "a"}}, "must be a list"),
    ],
)
def test_wrong_recipes_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.from_dict(values)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(), "needs a base and experts"),
        (Recipe(base="b", experts={"a": "e"}, data={"c": "d"}), "'c', which is not among the experts"),
        (Recipe(base="b", experts={"a": "e", "c": "e"}, data={"c": "d"}), "no source for the task 'a'"),
        (Recipe(base="b", experts={"a": "e"}, changes=[{"dance": 1}]), "an add, a remove or a sign"),
        (Recipe(base="b", experts={"a": "e"}, changes=[{"add": "x"}]), "must name its expert"),
        (Recipe(base="b", experts={"__base__": "e"}), "cannot be called '__base__'"),
        (
            Recipe(base="b", experts={"a": "e"}, changes=[{"add": "__base__", "expert": "e"}]),
            "cannot be called '__base__'",
        ),
        (Recipe(base="b", experts={"a": "e"}, threads=0), "threads must be a positive number"),
        (Recipe(base="b", experts={"a": "e"}, training={"steps": 3}), "nothing to train"),
    ],
)
def test_recipes_that_cannot_be_built_are_refused(recipe, message):
    with pytest.raises(ConfigError, match=message):
        make(recipe, progress=False)


def test_how_training_ran_is_kept_in_the_folder(folders, tmp_path):
    recipe = Recipe(
        base=str(folders / "base"),
        experts={task: str(folders / task) for task in ("red", "green")},
        config={"rank": 3},
        solver="adam",
        training={"steps": 2, "warmup_steps": 0},
        gradient_accumulation_steps=2,
        output_dir=str(tmp_path / "out"),
    )
    make(recipe, progress=False)
    stored = Recipe.read(tmp_path / "out" / "retex_recipe.yaml")
    assert (stored.solver, stored.gradient_accumulation_steps, stored.output_dir) == ("adam", 2, None)


@pytest.mark.parametrize("threads", [0, -1, 100_000, 10**30, True, "4", 2.0])
def test_threads_of_an_artifact_are_not_obeyed_beyond_reason(threads):
    usual = torch.get_num_threads()
    with (
        pytest.raises(ConfigError, match="threads must be a positive number of at most"),
        use_threads(threads),
    ):
        pass
    assert torch.get_num_threads() == usual


@pytest.mark.parametrize(
    "recipe",
    [
        {"changes": 3},
        {"changes": ["add"]},
        {"changes": [{"sign": 3}]},
        {"max_length": "long"},
        {"seed": []},
        {"input_column": {"a": 1}},
        {"data": "abc"},
        {"data": {"a": ["b"]}},
        {"experts": 3},
        {"experts": {"a": 3}},
        {"changes": [{"add": "a"}]},
        {"changes": [{"add": ["a"], "expert": "b"}]},
        {"base": ["a"]},
    ],
)
def test_an_untrusted_recipe_holds_what_it_must_or_is_refused(recipe):
    with pytest.raises(ConfigError, match="the artifact's recipe must"):
        record = RecipeRecord(recipe)
        (record.data_of(["a"]), record.references(), record.experts, record.base)


def test_a_record_is_read_only_and_notes_changes_in_new_records():
    built = RecipeRecord({"base": "b", "experts": {"a": "x"}, "data": {"a": "old"}, "unrecorded": ["cast"]})
    with pytest.raises(TypeError):
        built["base"] = "c"
    signed = built.signed_in_memory()
    assert signed.unrecorded == ["cast", "fit signatures on batches in memory"] and built.unrecorded == ["cast"]
    again = signed.signed_with({"data": {"a": "new"}, "max_length": 7})
    assert dict(again) == {
        "base": "b",
        "experts": {"a": "x"},
        "data": {"a": "new"},
        "max_length": 7,
        "unrecorded": ["cast"],
    }
    grown = again.with_task("c", "org/c@main", revision="f" * 40, signed_in_memory=True, tolerance=0.1)
    assert grown.changes == [{"add": "c", "expert": "org/c@" + "f" * 40, "tolerance": 0.1}]
    assert grown.unrecorded == ["cast", "sign task 'c' with batches in memory"]
    noted = grown.task_signed_with("c", {"data": {"c": "y"}})
    assert noted.unrecorded == ["cast"] and noted.data_of(["a", "c"]) == {"a": "new", "c": "y"}
    assert noted.experts == {"a": "x", "c": "org/c@" + "f" * 40}
    later = noted.signed_with({"data": {"a": "z", "c": "z"}}).signed_with({"data": {"a": "w", "c": "w"}, "seed": 3})
    assert [list(change) for change in later.changes] == [["add", "expert", "tolerance", "data"], ["sign"]]
    assert later.references() == {"seed": 3} and again.references() == {"max_length": 7}
    assert grown.changes[0].keys() == {"add", "expert", "tolerance"}
