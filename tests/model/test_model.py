"""PEFT's verbs, loading, and what passes through to the wrapped model."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import shutil
from pathlib import Path

import pytest
import torch
from families import FAMILIES, TEXT, tokens
from helpers import TASKS, assert_same, make_experts
from torch import nn
from transformers import BertConfig, BertModel, GenerationConfig

import retex_hf
from retex_hf import ConfigError, HubError, RetexConfig, RetexModel, TaskError, TrainingConfig


@pytest.fixture
def base() -> BertModel:
    return BertModel(BertConfig(**TEXT)).eval()


@pytest.fixture
def model(base) -> RetexModel:
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=3), progress=False)
    model.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
    return model


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(retex_hf.__path__, "retex_hf.")])
def test_documented_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_trainable_parameters_are_those_of_the_recovery(model, capsys):
    stored = sum(p.numel() for p in model.recovery.parameters())
    merged = sum(p.numel() for p in model.get_base_model().parameters())
    assert model.get_nb_trainable_parameters() == (stored, stored + merged)
    model.print_trainable_parameters()
    percent = 100 * stored / (stored + merged)
    expected = f"trainable params: {stored:,d} || all params: {stored + merged:,d} || trainable%: {percent:.4f}"
    assert capsys.readouterr().out.strip() == expected


def test_generation_config_can_be_assigned():
    family = FAMILIES["gpt2"]
    base = family.make().eval()
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=3), progress=False)
    prompt = torch.randint(3, 40, (2, 4))
    for length in (2, 5):
        model.generation_config = GenerationConfig(max_new_tokens=length, pad_token_id=0, eos_token_id=None)
        assert model.generate(prompt, task=["red", "blue"]).shape == (2, 4 + length)
    assert model.generate(max_new_tokens=3, bos_token_id=1, task="red").shape == (1, 4)


@torch.no_grad()
def test_a_bare_tensor_is_the_main_input():
    family = FAMILIES["clip"]
    base = family.make().eval()
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=3), progress=False)
    images = torch.randn(8, 3, 32, 32)
    model.fit_signatures({task: images for task in TASKS}, progress=False)
    assert torch.equal(model.identify(images).residuals, model.identify(pixel_values=images).residuals)


@torch.no_grad()
def test_merge_and_unload_is_an_independent_plain_model(model, tmp_path):
    inputs = tokens(4)
    expected = model(**inputs, task="green")
    plain = model.merge_and_unload("green")
    assert type(plain) is BertModel
    plain.save_pretrained(tmp_path / "expert")
    assert_same(BertModel.from_pretrained(tmp_path / "expert").eval()(**inputs), expected, exact=True)
    for tensor in plain.state_dict().values():
        tensor.zero_()
    assert_same(model(**inputs, task="green"), expected, exact=True)


def test_merge_and_unload_needs_a_task(model):
    with pytest.raises(TaskError, match="red"):
        model.merge_and_unload()
    model.set_adapter("red")
    assert_same(dict(model.merge_and_unload().state_dict()), model.recover("red"), exact=True)


def test_recover_gives_copies(model):
    before = model.recover("red")
    for tensor in model.recover("red").values():
        tensor.zero_()
    assert_same(model.recover("red"), before, exact=True)


def test_a_state_dict_replaces_what_was_recovered_before(model):
    inputs = tokens(3)
    expected = {task: model(**inputs, task=task).last_hidden_state for task in TASKS}
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.recovery.parameters():
        parameter.data.zero_()
    model.load_state_dict(model.state_dict())
    assert not torch.allclose(model(**inputs, task="red").last_hidden_state, expected["red"], atol=1e-3)
    nn.ModuleDict({"wrapped": model}).load_state_dict({f"wrapped.{name}": tensor for name, tensor in saved.items()})
    for task in TASKS:
        assert torch.equal(model(**inputs, task=task).last_hidden_state, expected[task])


def test_unknown_tasks_are_named_with_the_known_ones(model):
    for call in (model.recover, model.merge_and_unload, model.set_adapter):
        with pytest.raises(TaskError, match=r"'purple'.*\['red', 'green', 'blue'\]"):
            call("purple")


def test_everything_else_is_the_wrapped_model(model, base):
    assert model.config is model.get_base_model().config
    assert model.num_parameters() == base.num_parameters()
    assert model.get_input_embeddings() is model.get_base_model().get_input_embeddings()
    assert model.device == torch.device("cpu")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing


def test_loaded_models_are_frozen_and_in_evaluation_mode(model, tmp_path):
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    assert not loaded.training and not loaded.model.training
    assert loaded.get_nb_trainable_parameters()[0] == 0
    trainable = RetexModel.from_pretrained(tmp_path / "artifact", is_trainable=True)
    assert trainable.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()
    assert not any(p.requires_grad for p in trainable.model.parameters())


@torch.no_grad()
def test_dtype_casts_the_model_and_not_the_recovery(model, tmp_path):
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact", dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.recovery.task_embedding.dtype == torch.float32
    output = loaded(**tokens(4), task="red").last_hidden_state
    assert output.dtype == torch.bfloat16 and output.isfinite().all()


def put_in_cache(folder: Path, cache: Path, repo_id: str, revision: str) -> None:
    """Lay out a folder as the Hub client caches a download."""
    home = cache / f"models--{repo_id.replace('/', '--')}"
    shutil.copytree(folder, home / "snapshots" / revision)
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(revision)


@torch.no_grad()
def test_a_hub_id_loads_from_the_cache(model, tmp_path):
    model.save_pretrained(tmp_path / "artifact")
    put_in_cache(tmp_path / "artifact", tmp_path / "cache", "org/retex-bert", "a" * 40)
    inputs = tokens(6)
    for options in ({}, {"revision": "a" * 40}, {"local_files_only": True}):
        loaded = RetexModel.from_pretrained("org/retex-bert", cache_dir=tmp_path / "cache", **options)
        assert_same(loaded(**inputs), model(**inputs), exact=True)
    with pytest.raises(HubError, match="org/missing"):
        RetexModel.from_pretrained("org/missing", cache_dir=tmp_path / "cache")


def test_a_finished_merge_can_be_given_by_path(base, tmp_path):
    experts = make_experts(base)
    average = RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False)
    average.get_base_model().save_pretrained(tmp_path / "merged")
    given = RetexModel.from_experts(base, experts, RetexConfig(rank=3, merge=str(tmp_path / "merged")), progress=False)
    assert given.retex_config.merge == "merged"  # a path of this machine would be published
    assert_same(dict(given.model.state_dict()), dict(average.model.state_dict()), exact=True)
    assert_same(dict(given.recovery.state_dict()), dict(average.recovery.state_dict()), exact=True)


@pytest.mark.parametrize("merge", ["average", "task_arithmetic", "ties", {"method": "ties", "trim": "tensor"}])
def test_experts_come_back_whatever_the_merge(base, merge):
    experts = make_experts(base)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full", merge=merge), progress=False)
    for task, expert in experts.items():
        assert_same(model.recover(task), dict(expert.state_dict()), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_excluded_parameters_stay_merged(base):
    config = RetexConfig(rank="full", exclude=["embeddings", "*.bias"])
    model = RetexModel.from_experts(base, make_experts(base), config, progress=False)
    merged, recovered = model.get_base_model().state_dict(), model.recover("red")
    for name in merged:
        excluded = name.startswith("embeddings.") or name.endswith(".bias")
        assert torch.equal(merged[name], recovered[name]) == excluded, name


def test_frozen_parameters_cost_nothing(base):
    experts = make_experts(base)
    for expert in experts.values():
        expert.embeddings.load_state_dict(base.embeddings.state_dict())
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False)
    assert not any(name.startswith("embeddings.") for name in model.recovery)


@torch.no_grad()
def test_low_precision_experts_come_back_exactly(base):
    base = base.to(torch.bfloat16)
    experts = {task: expert.to(torch.bfloat16) for task, expert in make_experts(base.float()).items()}
    model = RetexModel.from_experts(base.to(torch.bfloat16), experts, RetexConfig(rank="full"), progress=False)
    assert model.dtype == torch.bfloat16
    for task, expert in experts.items():
        assert_same(model.recover(task), dict(expert.state_dict()), exact=True)


def test_one_task_is_enough(base):
    expert = make_experts(base)["red"]
    model = RetexModel.from_experts(base, {"only": expert}, RetexConfig(rank=3), progress=False)
    assert len(model.recovery) == 0  # the average of one expert is that expert
    model.fit_signatures({"only": [tokens(8)]}, progress=False)
    assert model(**tokens(4)).routing.tasks == ["only"] * 4


def test_provenance_is_kept(base, tmp_path):
    base.save_pretrained(tmp_path / "base")
    model = RetexModel.from_experts(tmp_path / "base", make_experts(base), RetexConfig(rank=3), progress=False)
    assert model.retex_config.base_model == {"source": "local", "id": "base"}
    assert model.retex_config.experts["red"]["source"] == "memory"


def test_building_leaves_base_and_experts_alone(base):
    experts = make_experts(base)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    red = {name: tensor.clone() for name, tensor in experts["red"].state_dict().items()}
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False)
    assert_same(dict(base.state_dict()), before, exact=True)
    assert_same(dict(experts["red"].state_dict()), red, exact=True)


def test_an_open_clip_module_needs_its_configuration():
    family = FAMILIES["open_clip-vit"]
    base = family.make().eval()
    with pytest.raises(retex_hf.CheckpointError, match="model_config="):
        RetexModel.from_experts(base, make_experts(base), progress=False)


def test_wrong_options_are_refused(base):
    experts = make_experts(base)
    with pytest.raises(ConfigError, match="solver"):
        RetexModel.from_experts(base, experts, solver="magic")
    with pytest.raises(ConfigError, match="expert_cache"):
        RetexModel.from_experts(base, experts, expert_cache="lots", progress=False)
    with pytest.raises(ConfigError, match="training= is for"):
        RetexModel.from_experts(base, experts, training=TrainingConfig())
    with pytest.raises(ConfigError, match="merge"):
        RetexModel.from_experts(base, experts, RetexConfig(merge={"method": "nope"}))
    with pytest.raises(ConfigError, match=r"must be one of .* or a checkpoint, not 'averge'"):
        RetexModel.from_experts(base, experts, RetexConfig(merge="averge"))


def test_the_recovery_can_be_trained_through_the_experts(base):
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=3), progress=False)
    inputs = tokens(6)
    names = ["red", "green", "red", "red", "green", "red"]

    def loss() -> torch.Tensor:
        return model(**inputs, task=names).last_hidden_state.square().mean()

    model.train()
    model.model.eval()  # no dropout, so that losses can be compared
    model.model.training = True
    optimizer = torch.optim.SGD(model.recovery.parameters(), lr=1e-3)
    before = loss()
    before.backward()
    name = "encoder.layer.0.output.dense.weight"
    gradient = model.recovery[name].weight.grad
    assert gradient[0].any() and gradient[1].any() and not gradient[2].any()  # blue took no part
    expected = sum(p.grad.square().sum() for p in model.recovery.parameters() if p.grad is not None)
    optimizer.step()
    # To first order, a step of size lr against the gradient lowers the loss by lr times its squared norm.
    assert (before - loss()).item() == pytest.approx(1e-3 * expected.item(), rel=0.1)
    trained = loss().item()
    model.eval()
    assert loss().item() == pytest.approx(trained, rel=1e-5)  # no stale expert from before the step
    assert not any(p.grad is not None for p in model.model.parameters())
