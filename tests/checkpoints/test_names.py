"""Files under other names than the model's: prefixes, legacy names, fused experts, ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
import writers
from families import FAMILIES, TEXT
from helpers import TASKS, assert_same, make_experts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retex_hf import CheckpointError, RetexConfig, RetexModel
from retex_hf.backends import library_of
from retex_hf.checkpoints import Checkpoint, Inventory, TensorInfo, open_source, take_inventory
from retex_hf.checkpoints.sources import SafetensorsSource


def align(model: nn.Module, spec) -> tuple[Checkpoint, list[str]]:
    source = open_source(spec, "expert")
    entries, unexpected = library_of(model).align(model, source)
    return Checkpoint.from_entries(source.label, entries, take_inventory(model)), unexpected


def assert_aligned(model: nn.Module, spec) -> None:
    """All tensors of the model are there under its names, with its values."""
    checkpoint, unexpected = align(model, spec)
    assert unexpected == []
    expected = model.state_dict()
    for name, shape in take_inventory(model).shapes.items():
        assert checkpoint.shape(name) == shape
        assert torch.equal(checkpoint.read(name), expected[name]), name


@pytest.fixture(scope="module")
def mixtral():
    torch.manual_seed(0)
    base = FAMILIES["mixtral"].make().eval()
    return base, make_experts(base)


STACKED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def mixtral_folder(mixtral, tmp_path) -> Path:
    """transformers saves Mixtral's experts one by one, and stacks them in memory."""
    path = writers.folder(mixtral[1]["red"], tmp_path / "red")
    saved = set(load_file(path / "model.safetensors"))
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in saved
    assert STACKED not in saved
    assert STACKED in mixtral[0].state_dict()
    return path


def test_per_expert_tensors_become_the_stacked_ones(mixtral, mixtral_folder):
    assert_aligned(mixtral[1]["red"], mixtral_folder)
    per_expert = load_file(mixtral_folder / "model.safetensors")
    assert_aligned(mixtral[1]["red"], per_expert)
    torch.save(per_expert, mixtral_folder / "weights.bin")
    assert_aligned(mixtral[1]["red"], mixtral_folder / "weights.bin")


def test_stacked_tensors_are_read_only_when_asked_for(mixtral, mixtral_folder, monkeypatch):
    read = []
    original = SafetensorsSource.read
    monkeypatch.setattr(SafetensorsSource, "read", lambda self, name: read.append(name) or original(self, name))
    checkpoint, _ = align(mixtral[0], mixtral_folder)
    assert checkpoint.shape(STACKED) == tuple(mixtral[0].state_dict()[STACKED].shape)
    assert read == []
    checkpoint.read(STACKED)
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert sorted(read) == sorted(f"{prefix}.{index}.{part}.weight" for index in range(4) for part in ("w1", "w3"))


def test_build_from_per_expert_files(mixtral, tmp_path):
    base, experts = mixtral
    specs = {task: writers.sharded(expert, tmp_path / task) for task, expert in experts.items()}
    base_folder = writers.folder(base, tmp_path / "base")
    model = RetexModel.from_experts(base_folder, specs, RetexConfig(rank="full"), progress=False)
    for task in TASKS:
        assert_same(model.recover(task), dict(experts[task].state_dict()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            ("w1", "w2", "w3"),
            r"the 6 tensors .*gate_up_proj' have shape \(3, 48, 16\), but the model has \(4, 48, 16\)",
        ),
        (("w2",), r"the 3 tensors .*down_proj' have shape \(3, 16, 24\), but the model has \(4, 16, 24\)"),
        (("w1",), "the 7 tensors that make up '.*gate_up_proj' do not fit each other"),
    ],
)
def test_an_incomplete_stack_is_refused(mixtral, mixtral_folder, lost, message):
    """It must not pass for a tensor with another leading dimension, which would be a head."""
    tensors = load_file(mixtral_folder / "model.safetensors")
    kept = dict(tensors)
    for part in lost:
        del kept[f"model.layers.0.block_sparse_moe.experts.2.{part}.weight"]
    with pytest.raises(CheckpointError, match=f"^expert 'red': {message}"):
        RetexModel.from_experts(mixtral[0], mixtral[1] | {"red": kept}, progress=False)


@pytest.fixture(scope="module")
def bert() -> tf.BertModel:
    torch.manual_seed(0)
    return tf.BertModel(tf.BertConfig(**TEXT)).eval()


def classifier(bert: tf.BertModel, seed: int = 1) -> tf.BertForSequenceClassification:
    torch.manual_seed(seed)
    model = tf.BertForSequenceClassification(tf.BertConfig(**TEXT)).eval()
    model.bert.load_state_dict({name: t + 0.01 * torch.randn(t.shape) for name, t in bert.state_dict().items()})
    return model


@pytest.mark.parametrize("write", [writers.folder, writers.bin_folder, writers.state_dict])
def test_a_base_without_the_prefix_of_the_experts(bert, write, tmp_path):
    model = classifier(bert)
    checkpoint, unexpected = align(model, write(bert, tmp_path / "base"))
    assert unexpected == []
    assert {name for name in take_inventory(model).shapes if name not in checkpoint} == {
        "classifier.weight",
        "classifier.bias",
    }
    for name, tensor in bert.state_dict().items():
        assert torch.equal(checkpoint.read(f"bert.{name}"), tensor)


def test_an_expert_with_the_prefix_that_the_model_lacks(bert):
    expert = classifier(bert)
    checkpoint, unexpected = align(bert, expert.state_dict())
    assert sorted(unexpected) == ["classifier.bias", "classifier.weight"]
    for name, tensor in expert.bert.state_dict().items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_headless_base_and_classifier_experts_recover(bert, tmp_path):
    experts = {task: classifier(bert, seed) for seed, task in enumerate(TASKS)}
    specs = {task: writers.folder(expert, tmp_path / task) for task, expert in experts.items()}
    base = writers.folder(bert, tmp_path / "base")
    model = RetexModel.from_experts(base, specs, RetexConfig(rank="full"), progress=False)
    for task in TASKS:
        assert_same(model.recover(task), dict(experts[task].state_dict()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("write", [save_file, torch.save])
def test_legacy_names_of_layer_norm(bert, write, tmp_path):
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in bert.state_dict().items()
    }
    assert "embeddings.LayerNorm.gamma" in old
    file = tmp_path / ("old.safetensors" if write is save_file else "old.bin")
    write(old, file)
    assert_aligned(bert, file)


@pytest.mark.parametrize(
    ("family", "constants"),
    [
        ("bert", {"embeddings.position_ids": torch.arange(32)[None]}),
        ("clip", {"vision_model.embeddings.position_ids": torch.arange(17)[None]}),
        ("llama-tied", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        (
            "gpt2",
            {
                "transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32).bool(),
                "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
            },
        ),
    ],
)
def test_constants_that_older_versions_saved_are_ignored(family, constants):
    model = FAMILIES[family].make()
    assert not constants.keys() & model.state_dict().keys()
    assert_aligned(model, {**model.state_dict(), **constants})


# The model's tied names, the one it is known under first.
TIED = {
    "t5": ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "llama-tied": ("model.embed_tokens.weight", "lm_head.weight"),
    "roberta": ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
}


@pytest.mark.parametrize(("family", "names"), TIED.items())
def test_tied_tensors_are_seen_once(family, names):
    inventory = take_inventory(FAMILIES[family].make())
    assert set(inventory.aliases[names[0]]) == set(names)
    assert not set(names[1:]) & set(inventory.shapes)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in TIED.items() for name in names])
def test_any_of_the_tied_names_will_do(family, name):
    model = FAMILIES[family].make()
    others = set(TIED[family]) - {name}
    assert_aligned(model, {key: tensor for key, tensor in model.state_dict().items() if key not in others})


@pytest.mark.parametrize("family", TIED)
def test_a_file_may_hold_all_of_the_tied_names(family, tmp_path):
    model = FAMILIES[family].make()
    assert_aligned(model, writers.bin_file(model, tmp_path / "expert"))
    assert_aligned(model, writers.safetensors_file(model, tmp_path / "expert"))


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in TIED.items() for name in names])
def test_tied_names_with_different_values_are_refused(family, name, tmp_path):
    base = FAMILIES[family].make().eval()
    experts = make_experts(base)
    tensors = writers.tensors_of(experts["green"])
    tensors[name] += 1e-3
    torch.save(tensors, tmp_path / "green.bin")
    message = r"^expert 'green' \(.*green\.bin\): .* are tied in the model but differ"
    with pytest.raises(CheckpointError, match=message) as caught:
        RetexModel.from_experts(base, experts | {"green": tmp_path / "green.bin"}, progress=False)
    assert sum(tied in str(caught.value) for tied in TIED[family]) >= 2


def test_tied_names_are_compared_whichever_comes_first():
    inventory = Inventory({"leader": (2,)}, {"leader": ("follower", "leader")}, (), frozenset())

    def entry(tensor: Tensor):
        return TensorInfo((2,), tensor.dtype), lambda: tensor

    same = Checkpoint.from_entries("x", {"follower": entry(torch.ones(2)), "leader": entry(torch.ones(2))}, inventory)
    assert torch.equal(same.read("leader"), torch.ones(2))
    other = Checkpoint.from_entries("x", {"follower": entry(torch.ones(2)), "leader": entry(torch.zeros(2))}, inventory)
    with pytest.raises(CheckpointError, match="'leader' and 'follower' are tied"):
        other.read("leader")


def test_tied_experts_recover_with_the_tie(tmp_path):
    base = FAMILIES["t5"].make().eval()
    experts = make_experts(base)
    specs = {task: writers.bin_folder(expert, tmp_path / task) for task, expert in experts.items()}
    model = RetexModel.from_experts(base, specs, RetexConfig(rank="full"), progress=False)
    assert set(TIED["t5"]) & set(model.recovery) == {"shared.weight"}
    recovered = model.merge_and_unload("blue")
    assert recovered.lm_head.weight is recovered.shared.weight
    torch.testing.assert_close(recovered.lm_head.weight, experts["blue"].lm_head.weight, rtol=1e-6, atol=1e-6)
