"""PEFT's names mean what PEFT's users expect, or say what to do instead; nothing is taken and ignored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from helpers import MIXED, TASKS, assert_same, build_retex
from hubs import WRITE, serving
from peft import LoraModel, PeftModel
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin

from retex_hf import ConfigError, InputError, RetexError, RetexModel, TaskError
from retex_hf.model.peft_names import REFUSED, SAVING

PAGE = Path(__file__).parents[2] / "docs" / "peft.md"
TABLE = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
# Of tuners: how they find layers.
INTERNAL = {
    "get_model_config", "prefix", "subtract_mutated_init", "target_module_mapping", "tuner_layer_cls",
    "uses_shared_state",
}  # fmt: skip


@pytest.fixture(scope="module")
def bert():
    return build_retex("bert")


@pytest.fixture(scope="module")
def classifier():
    return build_retex("bert-classifier")


INPUTS = FAMILIES["bert"].inputs(len(MIXED))


def test_the_table_holds_every_public_name():
    known = set(dir(torch.nn.Module))
    names = {name for cls in (PeftModel, LoraModel, PeftAdapterMixin) for name in dir(cls) if not name.startswith("_")}
    assert names - known - INTERNAL <= TABLE.keys() <= names | {"active_adapter"}


@pytest.mark.parametrize("name", [name for name, kind in TABLE.items() if kind == "refused"])
def test_a_name_that_is_refused_says_what_to_do(bert, name):
    model, _ = bert
    assert not hasattr(RetexModel, name)
    with pytest.raises(AttributeError, match=re.escape(REFUSED[name])):
        getattr(model, name)


@pytest.mark.parametrize("name", [name for name, kind in TABLE.items() if kind == "ours"])
def test_a_name_that_is_ours_is_not_the_wrapped_models(bert, name):
    assert hasattr(RetexModel, name) or name == "generate"


def test_what_is_refused_is_in_the_table():
    assert REFUSED.keys() == {name for name, kind in TABLE.items() if kind == "refused"}


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_adapter_names_are_tasks_of_rows(bert):
    model, _ = bert
    assert_same(model(**INPUTS, adapter_names=MIXED), model(**INPUTS, task=MIXED), exact=True)
    assert model(**INPUTS, adapter_names=MIXED).routing.tasks == MIXED


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_base_is_the_merged_model(bert, execution):
    model, _ = bert
    model.execution = execution
    names = ["__base__" if task == "red" else task for task in MIXED]
    output = model(**INPUTS, adapter_names=names)
    rows = [row for row, name in enumerate(names) if name == "__base__"]
    with model.disable_adapter():
        merged = model(**INPUTS)
    assert output.routing.tasks == names
    torch.testing.assert_close(output.last_hidden_state[rows], merged.last_hidden_state[rows], rtol=1e-4, atol=1e-5)
    own = model(**INPUTS, task=MIXED).last_hidden_state
    others = [row for row in range(len(names)) if row not in rows]
    torch.testing.assert_close(output.last_hidden_state[others], own[others], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output.last_hidden_state[rows], own[rows], atol=1e-3)
    model.execution = "auto"


def test_adapter_names_generate():
    model, _ = build_retex("gpt2")
    inputs = FAMILIES["gpt2"].inputs(len(MIXED))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**inputs, adapter_names=MIXED, **options),
                       model.generate(**inputs, task=MIXED, **options))  # fmt: skip


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (MIXED[:2], "adapter_names has 2 entries, but the batch has 6 rows"),
        ("red", "must be a list with one task per row"),
        ([0] * 6, "must be a list with one task per row"),
        (["pink", *MIXED[1:]], "Unknown task 'pink'"),
    ],
)
def test_wrong_adapter_names_are_refused(bert, names, says):
    with pytest.raises(TaskError, match=says):
        bert[0](**INPUTS, adapter_names=names)


def test_adapter_names_and_task_are_one(bert):
    with pytest.raises(TaskError, match="give one of them"):
        bert[0](**INPUTS, adapter_names=MIXED, task="red")


def test_base_has_no_head(classifier):
    model, _ = classifier
    with pytest.raises(TaskError, match="'__base__' has no head of its own"):
        model(**INPUTS, adapter_names=["__base__", *MIXED[1:]])
    assert model(**INPUTS, adapter_names=MIXED).routing.tasks == MIXED


# ---- active tasks ----------------------------------------------------------------------------------------------------


def test_several_tasks_are_mixed_in_equal_parts(bert):
    model, _ = bert
    weights = torch.tensor([[0.5, 0, 0.5]]).expand(len(MIXED), -1)
    expected = model(**INPUTS, task=weights)
    model.set_adapter(["red", "blue"])
    assert model.active_adapter == model.active_adapters == ["red", "blue"]
    assert_same(model(**INPUTS), expected, exact=True)
    assert_same(model.merge_and_unload()(**INPUTS), expected, rtol=1e-4, atol=1e-5)
    assert_same(model.merge_and_unload(adapter_names=["red", "blue"])(**INPUTS), expected, rtol=1e-4, atol=1e-5)
    model.set_adapter(["green"])
    assert model.active_adapter == "green" and model.active_adapters == ["green"]
    model.set_adapter(None)
    assert model.active_adapter is None and model.active_adapters == TASKS
    with model.disable_adapter():
        assert model.active_adapters == [] and not model.has_active_enabled_adapter


@pytest.mark.parametrize("names", [[], ["red", "red"], ["red", "pink"], 3, ["red", 1]])
def test_wrong_tasks_cannot_be_pinned(bert, names):
    with pytest.raises(TaskError):
        bert[0].set_adapter(names)


def test_a_mixture_goes_with_its_tasks():
    model, _ = build_retex("bert")
    model.set_adapter(["red", "blue"])
    model.delete_adapter("blue")
    assert model.active_adapter is None and model.tasks == ["red", "green"]
    with pytest.raises(TaskError):
        model.delete_adapter(["green", "pink"])
    assert model.tasks == ["red", "green"]


def test_an_adapter_is_loaded_as_a_task(bert):
    model, experts = build_retex("bert")
    model.delete_adapter("blue")
    model.load_adapter(experts["blue"], "blue", check_base=False, progress=False)
    assert_same(model(**INPUTS, task="blue"), experts["blue"](**INPUTS), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"torch_device": "cpu"}, "load_adapter has no option 'torch_device': the task goes where the model is"),
        ({"is_trainable": True}, r"load_adapter has no option 'is_trainable': tasks share .*is_trainable=True\)"),
        ({"foo": 1}, r"load_adapter has no option 'foo': expected one of \['base', .*'tolerance'\]"),
    ],
)
def test_options_of_loading_are_refused_by_name(bert, options, says):
    model, experts = bert
    with pytest.raises(ConfigError, match=says):
        model.load_adapter(experts["blue"], "x", **options)
    assert model.tasks == TASKS


def test_a_task_is_pinned_when_it_is_loaded(bert, tmp_path):
    model, experts = bert
    model.save_pretrained(tmp_path / "a")
    loaded = RetexModel.from_pretrained(tmp_path / "a", adapter_name="green")
    assert loaded.active_adapter == "green"
    assert_same(loaded(**INPUTS), experts["green"](**INPUTS), rtol=1e-3, atol=1e-4)
    with pytest.raises(TaskError, match="Unknown task 'pink'"):
        RetexModel.from_pretrained(tmp_path / "a", adapter_name="pink")
    with pytest.raises(ConfigError, match="An artifact holds its own merged model"):
        RetexModel.from_pretrained(experts["green"], tmp_path / "a")


def test_a_task_is_frozen_or_not_as_all_are(bert, tmp_path):
    model, _ = bert
    model.save_pretrained(tmp_path / "a")
    for trainable in (False, True):
        loaded = RetexModel.from_pretrained(tmp_path / "a", is_trainable=trainable)
        loaded.set_adapter("red", inference_mode=not trainable)
        with pytest.raises(ConfigError, match=rf"share what is trained: .*is_trainable={not trainable}\)"):
            loaded.set_adapter("green", inference_mode=trainable)
        assert loaded.active_adapter == "red"


@pytest.mark.parametrize("name", ["tasks", "adapter_name"])
def test_tasks_that_are_named_in_another_way_are_refused(bert, name):
    model, _ = bert
    for call in (model, model.identify, model.predict):
        with pytest.raises(InputError, match=f"There is no argument '{name}': tasks are named by task="):
            call(**INPUTS, **{name: "red"})


def test_merging_has_no_progress_bar(bert):
    model, experts = bert
    expert = model.merge_and_unload("red", progressbar=False)
    assert_same(expert(**INPUTS), experts["red"](**INPUTS), rtol=1e-3, atol=1e-4)
    with pytest.raises(ConfigError, match="leave out progressbar=True"):
        model.merge_and_unload("red", progressbar=True)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["red", "pink"], r"^Unknown task 'pink'; the tasks are \['red', 'green', 'blue'\]\.$"),
        (["red", 3], r"^Unknown task 3; the tasks are \['red', 'green', 'blue'\]\.$"),
        (["red", "red"], r"^\['red', 'red'\] names a task twice\.$"),
        (TASKS, r"^\['red', 'green', 'blue'\] are all the tasks; a model of no tasks is the merged model itself\.$"),
        (None, r"^Expected a task or a list of tasks, not None; the tasks are \['red', 'green', 'blue'\]\.$"),
    ],
)
def test_wrong_tasks_are_not_deleted_and_neither_are_the_others(bert, names, says):
    model, _ = bert
    with pytest.raises(TaskError, match=says):
        model.delete_adapter(names)
    assert model.tasks == TASKS


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_selected_tasks_are_saved(bert, tmp_path):
    model, _ = bert
    model.save_pretrained(tmp_path / "a" / "b", selected_adapters=["blue", "red"])
    assert model.tasks == TASKS
    loaded = RetexModel.from_pretrained(tmp_path / "a", subfolder="b")
    assert loaded.tasks == ["red", "blue"]
    for task in loaded.tasks:
        assert_same(loaded(**INPUTS, task=task), model(**INPUTS, task=task), rtol=1e-4, atol=1e-5)
    with pytest.raises(TaskError, match="Unknown task 'pink'"):
        model.save_pretrained(tmp_path / "c", selected_adapters=["pink"])
    with pytest.raises(TaskError, match="Expected a list of tasks, not 3"):
        model.save_pretrained(tmp_path / "c", selected_adapters=3)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("subfolder", ["../x", "/etc", "none", ""])
def test_a_subfolder_lies_in_its_folder(bert, tmp_path, subfolder):
    bert[0].save_pretrained(tmp_path / "a")
    with pytest.raises(RetexError):
        RetexModel.from_pretrained(tmp_path / "a", subfolder=subfolder)


def test_options_of_saving_are_refused_or_obeyed(bert, tmp_path, monkeypatch):
    model, _ = bert
    with pytest.raises(ConfigError, match="always saved as safetensors"):
        model.save_pretrained(tmp_path / "a", safe_serialization=False)
    with pytest.raises(ConfigError, match="private is for push_to_hub=True"):
        model.save_pretrained(tmp_path / "a", private=True)
    for push in (False, True):
        with pytest.raises(ConfigError, match="save_pretrained has no option 'foo': expected one of"):
            model.save_pretrained(tmp_path / "a", foo=1, push_to_hub=push)
    for name in SAVING:
        with pytest.raises(ConfigError, match=f"save_pretrained has no option '{name}': "):
            model.save_pretrained(tmp_path / "a", **{name: "x"})
    assert not (tmp_path / "a").exists()
    with serving(tmp_path / "hub", monkeypatch) as hub:
        model.save_pretrained(tmp_path / "a", push_to_hub=True, repo_id="me/mine", token=WRITE)
        assert "retex_config.json" in hub.files("me/mine")
    assert RetexModel.from_pretrained(tmp_path / "a").tasks == TASKS


def test_a_merge_of_infinite_numbers_is_refused():
    model, _ = build_retex("bert")
    assert isinstance(model.merge_and_unload("red", safe_merge=True), torch.nn.Module)
    with torch.no_grad():
        model.get_base_model().embeddings.word_embeddings.weight[0, 0] = float("inf")
    model.expert_cache.clear()
    with pytest.raises(RetexError, match="holds NaN or infinite numbers"):
        model.merge_and_unload("red", safe_merge=True)


def test_the_merged_model_is_unloaded(bert):
    model, _ = bert
    with model.disable_adapter():
        assert_same(model.unload()(**INPUTS), model(**INPUTS), exact=True)
    assert model.unload() is not model.get_base_model()


@pytest.mark.parametrize("forward", ["none", "with gradients", "without"])
@pytest.mark.parametrize("name", ["bert", "bert-classifier"])
def test_training_mode_gives_the_same_plain_models(name, forward, tmp_path):
    model, _ = build_retex(name)
    expected = {task: model.recover(task) for task in TASKS}
    mixture, merged = model.merge_and_unload(adapter_names=TASKS[:2]).state_dict(), model.unload().state_dict()
    model.train()
    inputs = FAMILIES[name].inputs(len(MIXED))
    if forward == "with gradients":
        assert next(iter(model(**inputs, task=MIXED).values())).requires_grad
    elif forward == "without":
        with torch.no_grad():
            model(**inputs, task=MIXED)
    for task in TASKS:
        assert_same(model.recover(task), expected[task], exact=True)
        plain = model.merge_and_unload(task, safe_merge=True)
        assert_same(plain.state_dict(), expected[task], exact=True)
        assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in plain.parameters())
        assert not any(tensor.requires_grad for tensor in model.recover(task).values())
        assert model.export_lora(task, tmp_path / task).task == task
    assert_same(model.merge_and_unload(adapter_names=TASKS[:2]).state_dict(), mixture, exact=True)
    assert_same(model.unload().state_dict(), merged, exact=True)
    model.save_pretrained(tmp_path / "all")
    model.save_pretrained(tmp_path / "two", selected_adapters=TASKS[1:])
    assert all(part.training for part in model.get_base_model().modules())
    for folder, tasks in {"all": TASKS, "two": TASKS[1:]}.items():
        loaded = RetexModel.from_pretrained(tmp_path / folder)
        assert loaded.tasks == tasks
        for task in tasks:
            assert_same(loaded.recover(task), expected[task], rtol=1e-4, atol=1e-5)


def test_an_expert_of_a_model_in_training_is_that_of_this_moment():
    model, _ = build_retex("bert")
    model.train()
    before = model.recover("red")
    with torch.no_grad():
        model(**INPUTS, task="red")
        for parameter in model.recovery.parameters():
            parameter.mul_(1.5)
    changed = model.merge_and_unload("red").state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in changed.items())
    assert_same(model.eval().recover("red"), dict(changed), exact=True)


# ---- what the model says of itself -----------------------------------------------------------------------------------


def test_status_is_that_of_the_tasks(bert):
    model, _ = bert
    status = model.get_model_status()
    assert status.base_model_type == "BertModel" and status.available_adapters == TASKS
    assert status.active_adapters == TASKS and status.enabled and status.merged_adapters == []
    assert (status.trainable_params, status.total_params) == model.get_nb_trainable_parameters()
    assert status.num_adapter_layers == len(model.get_layer_status()) == len(list(model.recovery))
    model.set_adapter("red")
    assert {tuple(layer.active_adapters) for layer in model.get_layer_status()} == {("red",)}
    model.set_adapter(None)


# ---- nothing falls through -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resize_token_embeddings", "set_input_embeddings", "init_weights"])
def test_what_would_run_or_change_the_merged_model_alone_is_refused(bert, name):
    model, _ = bert
    with pytest.raises(RetexError, match=rf"'{name}' of BertModel does not take tasks"):
        getattr(model, name)(1)


def test_a_part_of_the_merged_model_is_not_a_part_of_this_one(bert):
    with pytest.raises(AttributeError, match=r"'encoder' is a part of the merged model.*get_base_model"):
        bert[0].encoder  # noqa: B018  (what is looked up is refused)


def test_what_only_reads_passes(bert):
    model, _ = bert
    assert model.num_parameters() == model.get_base_model().num_parameters()
    assert model.get_input_embeddings() is model.get_base_model().get_input_embeddings()
    assert model.config is model.get_base_model().config
