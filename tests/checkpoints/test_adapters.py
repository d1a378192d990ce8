"""Experts given as LoRA adapters build what the same experts build when peft has merged them first."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import writers
from families import FAMILIES, OPEN_CLIP_VIT, TEXT, VISION
from helpers import assert_same
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.errors import CheckpointError

TASKS = ["red", "green"]


@pytest.fixture(autouse=True)
def quiet():
    """peft warns of fan_in_fan_out, of ties and of embeddings that it saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapt(model: nn.Module, config: LoraConfig, seed: int) -> PeftModel:
    """A model with a trained adapter."""
    torch.manual_seed(seed)
    peft_model = get_peft_model(deepcopy(model), deepcopy(config))
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return peft_model.eval()


def save(peft_models: dict[str, PeftModel], path: Path) -> dict[str, Path]:
    for task, peft_model in peft_models.items():
        peft_model.save_pretrained(path / task)
    return {task: path / task for task in peft_models}


def merge(peft_models: dict[str, PeftModel]) -> dict[str, nn.Module]:
    return {task: deepcopy(peft_model).merge_and_unload() for task, peft_model in peft_models.items()}


def build(base: Any, experts: dict[str, Any], **options: Any) -> RetexModel:
    return RetexModel.from_experts(base, experts, RetexConfig(rank=4), progress=False, **options)


def assert_same_experts(actual: RetexModel, expected: RetexModel) -> None:
    assert type(actual.model) is type(expected.model)
    for task in expected.tasks:
        assert_same(actual.recover(task), expected.recover(task), rtol=1e-5, atol=1e-6)


def bert_and_classifier() -> tuple[nn.Module, nn.Module]:
    base = tf.BertModel(tf.BertConfig(**TEXT))
    classifier = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3))
    classifier.bert.load_state_dict(base.state_dict())
    return base, classifier


def vit_and_classifier() -> tuple[nn.Module, nn.Module]:
    classifier = tf.ViTForImageClassification(tf.ViTConfig(**VISION, num_labels=5))
    base = tf.ViTModel(tf.ViTConfig(**VISION))
    base.load_state_dict(classifier.vit.state_dict(), strict=False)
    return base, classifier


def own(name: str) -> tuple[nn.Module, nn.Module]:
    model = FAMILIES[name].make()
    return model, model


CASES = {
    "patterns, rslora, all biases, embeddings": (
        bert_and_classifier,
        LoraConfig(
            task_type="SEQ_CLS",
            r=4,
            lora_alpha=6,
            use_rslora=True,
            bias="all",
            target_modules=["query", "value", "dense", "word_embeddings"],
            rank_pattern={"layer.0.*query": 2, "word_embeddings": 3},
            alpha_pattern={"value": 16},
        ),
    ),
    "adapted biases, norms": (
        bert_and_classifier,
        LoraConfig(
            task_type="SEQ_CLS", bias="lora_only", target_modules=["query", "value"], modules_to_save=["LayerNorm"]
        ),
    ),
    "biases of factors": (
        bert_and_classifier,
        LoraConfig(task_type="SEQ_CLS", lora_bias=True, target_modules=["query", "dense"]),
    ),
    "Conv1D, embedding": (
        lambda: own("gpt2"),
        LoraConfig(task_type="CAUSAL_LM", r=3, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "wpe"]),
    ),
    "T5": (
        lambda: own("t5"),
        LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q", "v", "wo"], modules_to_save=["layer_norm"]),
    ),
    "convolution, head by class name": (
        vit_and_classifier,
        LoraConfig(r=4, target_modules=["q_proj", "projection"], modules_to_save=["classifier"]),
    ),
    "parameters": (
        lambda: own("mixtral"),
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
            rank_pattern={"experts.down_proj": 3, "gate.weight": 1},
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_as_merged_by_peft(case, tmp_path):
    make, config = CASES[case]
    base, model = make()
    adapters = {task: adapt(model, config, seed) for seed, task in enumerate(TASKS)}
    folders = save(adapters, tmp_path / "adapters")
    merged = merge(adapters)
    for task in TASKS:
        assert any(not torch.equal(a, b) for a, b in zip(merged[task].parameters(), model.parameters(), strict=True))
    writers.folder(base, tmp_path / "base")
    full = {task: writers.folder(expert, tmp_path / "full" / task) for task, expert in merged.items()}
    expected = build(tmp_path / "base", full)

    assert_same_experts(build(tmp_path / "base", folders), expected)
    assert_same_experts(build(tmp_path / "base", folders, output_dir=tmp_path / "retex"), expected)
    assert_same_experts(build(base, adapters), expected)
    mixed = build(tmp_path / "base", {"red": full["red"], "green": folders["green"]})
    assert_same_experts(mixed, expected)


def test_open_clip_attention(tmp_path):
    """peft adapts nn.MultiheadAttention as one layer, with factors for in_proj and out_proj."""
    base = FAMILIES["open_clip-vit"].make()
    config = LoraConfig(r=2, target_modules=["attn", "c_fc"])
    adapters = {task: adapt(base, config, seed) for seed, task in enumerate(TASKS)}
    folders = save(adapters, tmp_path)
    names = load_file(folders["red"] / "adapter_model.safetensors")
    assert any(name.endswith("attn.base_layer.out_proj.lora_A.weight") for name in names)
    expected = build(base, merge(adapters), model_config=OPEN_CLIP_VIT)
    assert_same_experts(build(base, folders, model_config=OPEN_CLIP_VIT), expected)
    saved = writers.open_clip_folder(base, tmp_path / "base", OPEN_CLIP_VIT, "open_clip_model.safetensors")
    assert_same_experts(build(saved, folders), expected)
    assert_same_experts(build(saved, {"red": folders["red"], "green": adapters["green"]}), expected)


def test_provenance_and_labels(tmp_path):
    base, classifier = bert_and_classifier()
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    folders = save({task: adapt(classifier, config, seed) for seed, task in enumerate(TASKS)}, tmp_path / "adapters")
    names = {"0": "no", "1": "maybe", "2": "yes"}
    (folders["green"] / "config.json").write_text(json.dumps({"id2label": names}), encoding="utf-8")
    writers.into_hub_cache(folders["red"], tmp_path / "cache", "org/red", "a" * 40)
    model = build(base, {"red": "org/red", "green": folders["green"]}, cache_dir=tmp_path / "cache")
    assert model.retex_config.experts == {
        "red": {"source": "hub", "id": "org/red", "revision": "a" * 40, "adapter": "lora"},
        "green": {"source": "local", "id": "green", "adapter": "lora"},
    }
    assert model.retex_config.labels["red"]["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert model.retex_config.labels["green"]["id2label"] == names


def test_heads_of_different_width(tmp_path):
    """The width is read off each adapter's head; the base's configuration knows nothing of it."""
    base, _ = bert_and_classifier()
    adapters = {}
    for width, task in ((2, "red"), (4, "green")):
        classifier = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=width))
        classifier.bert.load_state_dict(base.state_dict())
        adapters[task] = adapt(classifier, LoraConfig(task_type="SEQ_CLS", target_modules=["query"]), width)
    model = build(writers.folder(base, tmp_path / "base"), save(adapters, tmp_path))
    inputs = FAMILIES["bert"].inputs(3)
    for task, adapter in adapters.items():
        expected = adapter.merge_and_unload().eval()(**inputs).logits
        assert model(**inputs, task=task).logits.shape == expected.shape
        assert model.recover(task)["classifier.weight"].shape[0] == expected.shape[1]


def test_base_in_half_precision(tmp_path):
    """Factors are multiplied in float32 and the sum is rounded once, whatever the base is stored as."""
    base = FAMILIES["llama-untied"].make().bfloat16()
    adapter = adapt(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), 1)
    folder = save({"red": adapter}, tmp_path)["red"]
    model = build(writers.folder(base, tmp_path / "base"), {"red": folder})
    name = "model.layers.0.self_attn.q_proj"
    factors = load_file(folder / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_{part}.weight"].float() for part in "AB")
    expected = (base.state_dict()[f"{name}.weight"].float() + b @ a).bfloat16()
    assert torch.equal(model.model.state_dict()[f"{name}.weight"], expected)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
def test_tied_tensors_that_change_together(options, tmp_path):
    family = FAMILIES["llama-tied"]
    base, inputs = family.make(), family.inputs(3)
    options = {"target_modules": [], **options}
    options["target_modules"] = [*options["target_modules"], "q_proj"]
    adapter = adapt(base, LoraConfig(task_type="CAUSAL_LM", ensure_weight_tying=True, **options), 1)
    folder = save({"red": adapter}, tmp_path)["red"]
    expected = adapter(**inputs).logits
    assert not torch.allclose(expected, base(**inputs).logits, atol=1e-2)
    for expert in (folder, adapter):
        model = RetexModel.from_experts(
            base, {"red": expert}, RetexConfig(rank="full"), progress=False, check_base=False
        )
        torch.testing.assert_close(model(**inputs, task="red").logits, expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def base():
    return FAMILIES["bert"].make()


@pytest.fixture
def folder(base, tmp_path):
    config = LoraConfig(task_type="FEATURE_EXTRACTION", r=4, target_modules=["query"])
    return save({"red": adapt(base, config, 1)}, tmp_path)["red"]


def change(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    return folder


def refuse(message: str, base: Any, expert: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        build(base, {"red": expert})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"peft_type": "VERA"},
            "is a PEFT adapter of type VERA, and only LORA is read: merge it with peft's merge_and",
        ),
        ({"use_dora": True}, "is a LoRA adapter with use_dora, which is not read: merge it with peft's merge_and"),
        ({"layer_replication": [[0, 2]]}, "is a LoRA adapter with layer_replication, which is not read"),
        ({"trainable_token_indices": [1]}, "is a LoRA adapter with trainable_token_indices, which is not read"),
        ({"init_lora_weights": "pissa"}, "with init_lora_weights='pissa', for which the base was changed: merge"),
        ({"r": 8}, "factors of 'encoder.layer.0.attention.self.query' have shapes .* asks for rank 8"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "of task type SEQ_2_SEQ_LM, but transformers has no such class .* 'bert'"),
    ],
)
def test_settings_that_are_refused(base, folder, settings, message):
    refuse(f"^expert 'red' .*{message}", base, change(folder, **settings))


def test_other_kind_in_memory(base):
    config = PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    refuse("^expert 'red' is a PEFT adapter of type PREFIX_TUNING", base, get_peft_model(deepcopy(base), config))


def test_adapter_of_another_architecture(folder):
    change(folder, task_type=None, base_model_name_or_path="org/bert")
    message = (
        "is an adapter for 'encoder.*query.*which the model does not have: .*another .it was trained on 'org/bert'"
    )
    refuse(message, FAMILIES["gpt2"].make(), folder)


def test_adapter_of_another_width(folder):
    wider = tf.BertModel(tf.BertConfig(**TEXT | {"hidden_size": 32}))
    refuse(r"changes '.*query.weight' of shape \(16, 16\), but the base's has shape \(32, 32\)", wider, folder)


def test_factor_is_missing(base, folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.encoder.layer.1.attention.self.query.lora_B.weight"]
    save_file(tensors, file)
    refuse("lacks lora_B of 'encoder.layer.1.attention.self.query'", base, folder)


def test_head_is_missing(base, folder):
    refuse("lacks 2 tensor.s. of the model: 'classifier.weight'", base, change(folder, task_type="SEQ_CLS"))


def test_head_of_a_tied_model_of_its_own(tmp_path):
    base = FAMILIES["gpt2"].make()
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], modules_to_save=["lm_head"])
    message = "has a 'lm_head.weight' of its own, but no 'transformer.wte.weight', which is the same tensor"
    refuse(message, base, save({"red": adapt(base, config, 1)}, tmp_path)["red"])


@pytest.mark.parametrize("targets", [["wte", "lm_head"], ["wte"], ["lm_head"]], ids=str)
def test_tied_tensors_that_change_differently(targets, tmp_path):
    """Where one of them has factors, peft runs the other as in the base, and merges the change into both."""
    base = FAMILIES["gpt2"].make()
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets)
    adapter = save({"red": adapt(base, config, 1)}, tmp_path)["red"]
    refuse("'transformer.wte.weight' is tied to another in the model, and the adapter changes them diff", base, adapter)


def test_folder_of_several_adapters(base, folder, tmp_path):
    adapters = tmp_path / "several"
    for name in ("one", "two"):
        shutil.copytree(folder, adapters / name)
    refuse(r"several holds adapters in folders \['one', 'two'\]: give one, as a local folder", base, adapters)


def test_base_that_is_an_adapter(base, folder):
    with pytest.raises(
        CheckpointError, match=r"^the base .*red.* is a PEFT adapter; merge it into its base model first"
    ):
        build(folder, {"red": base})
    peft_model = adapt(base, LoraConfig(target_modules=["query"]), 1)
    with pytest.raises(CheckpointError, match=r"^the base is a PeftModel; merge it into its base model first"):
        build(peft_model, {"red": base})


def test_mixed_classes(base, folder):
    expert = tf.BertForSequenceClassification(tf.BertConfig(**TEXT))
    with pytest.raises(CheckpointError, match=r"is a BertForSeq.*, but expert 'red' is a BertModel: experts must"):
        build(base, {"red": folder, "green": expert})


def test_nothing_is_logged(base, folder, caplog):
    with caplog.at_level(logging.WARNING):
        build(base, {"red": folder})
    assert not caplog.records
