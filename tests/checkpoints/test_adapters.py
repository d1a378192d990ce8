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
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from torch import nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints.locate import open_source
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
        ({"use_qalora": True}, "is a LoRA adapter with use_qalora, which is not read: merge it with peft's merge_and"),
        ({"layer_replication": [[0, 2]]}, "is a LoRA adapter with layer_replication, which is not read"),
        ({"trainable_token_indices": [1]}, "lacks the tokens that trainable_token_indices of its configuration names"),
        ({"r": 8}, "factors of 'encoder.layer.0.attention.self.query' have shapes .* asks for rank 8"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "of task type SEQ_2_SEQ_LM, but transformers has no such class .* 'bert'"),
    ],
)
def test_settings_that_are_refused(base, folder, settings, message):
    refuse(f"^expert 'red' .*{message}", base, change(folder, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["value"]},
        {"target_modules": "(a+)+$"},
        {"target_modules": ".*[.]value"},
        {"exclude_modules": ["query"]},
        {"modules_to_save": ["query"]},
        {"layers_to_transform": 7},
        {"layers_to_transform": [0, 1], "layers_pattern": "blocks"},
    ],
    ids=str,
)
def test_tensors_that_peft_leaves_out(base, folder, settings):
    says = "holds 'base_model.model.encoder.layer.0.attention.self.query.lora_A.weight', but its configuration does not"
    refuse(says, base, change(folder, **settings))


@pytest.mark.parametrize("inner", [".base_layer", ".base_layer.base_layer"])
def test_tensors_within_what_peft_wraps(base, folder, inner):
    file = folder / "adapter_model.safetensors"
    save_file({key.replace(".query.", f".query{inner}."): tensor for key, tensor in load_file(file).items()}, file)
    refuse(f"query{inner}.lora_A.weight', but its configuration does not adapt that module", base, folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"target_modules": r".*\.layer\.[0-9]+\..*(query|key)"},
        {"target_modules": ["attention.self.query"], "exclude_modules": ["pooler.dense"]},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layer"]},
        {"modules_to_save": ["pooler"]},
    ],
    ids=str,
)
def test_tensors_that_peft_applies(base, folder, settings):
    source = open_source(change(folder, **settings), "red", adapters=True)
    assert source.modules.has("encoder.layer.0.attention.self.query", base)
    config = LoraConfig.from_pretrained(folder)
    if config.target_modules is not None and config.target_modules != "all-linear":
        assert check_target_module_exists(config, "encoder.layer.0.attention.self.query")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", 5), ("target_modules", {"a": 1}), ("exclude_modules", [5]), ("modules_to_save", "pooler"),
        ("modules_to_save", 5), ("layers_to_transform", "0"), ("layers_pattern", 3), ("bias", "x"), ("bias", 5),
    ],
)  # fmt: skip
def test_settings_that_peft_refuses(base, folder, key, value):
    refuse(f"{key} of its configuration must be ", base, change(folder, **{key: value}))


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
    refuse(
        r"several holds adapters in folders \['one', 'two'\]: append the name of one, as in '.../one'", base, adapters
    )


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


WHOLE = "must be a whole number above 0, and at most 2147483648, not "
INFINITE, NO_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[({"r": rank}, f"r of its configuration {WHOLE}") for rank in (0, -1, 2**31 + 1, 4.0, True, "4", None, [])],
        *[
            ({"lora_alpha": alpha}, r"lora_alpha of its configuration must be a number from 0 to 1e.30, not ")
            for alpha in (-1, 1e31, 1e308, 10**400, INFINITE, -INFINITE, NO_NUMBER, True, "8", None)
        ],
        *[
            ({"rank_pattern": {"query": rank}}, "rank_pattern .* gives 'query' the value .*, expected a whole number")
            for rank in (0, -2, 1.5, 10**400, True, None, NO_NUMBER)
        ],
        *[
            ({"alpha_pattern": {"query": alpha}}, "alpha_pattern .* gives 'query' the value .*, expected a number from")
            for alpha in (1e308, NO_NUMBER, "1", False)
        ],
        ({"rank_pattern": {"(?i)query": 2}}, "rank_pattern of its configuration has '.*i.query', which has a group"),
        ({"alpha_pattern": {"(?x:([^!]+) +)!": 2}}, "has a group that is not a plain one: expected names"),
        ({"use_rslora": "false"}, "use_rslora of its configuration must be true or false, not 'false'"),
        ({"target_parameters": [5]}, "must name what it adapts as text, not 5"),
        ({"auto_mapping": {"base_model_class": 5}}, "must name what it adapts as text, not 5"),
        ({"peft_type": {"a": "x" * 999}}, "is a PEFT adapter of type .{60}[.]{3}, which is not known here"),
    ],
)  # fmt: skip
def test_numbers_and_patterns_that_are_refused(base, folder, settings, message):
    refuse(f"^expert 'red' .*{message}", base, change(folder, **settings))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_dora": True, "init_lora_weights": "pissa"}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ],
)
def test_parameters_beside_what_peft_merges_by_layers(base, folder, settings, reason):
    says = f"is a LoRA adapter with {reason} and target_parameters, which are not read together: merge it with peft"
    refuse(says, base, change(folder, target_parameters=["query.weight"], **settings))


def test_patterns_that_took_forever(base, folder):
    """They are matched in no time now; the first that matches counts."""
    patterns = {".*.*.*.*!": 7, "(a|a)*(a|a)*!": 7, "([^!]+) +!": 7, ".*query": 4}
    expected = build(base, {"red": folder}).recover("red")
    change(folder, rank_pattern=patterns, alpha_pattern={key: 8 for key in patterns}, r=1, lora_alpha=1)
    assert_same(build(base, {"red": folder}).recover("red"), expected, rtol=1e-6, atol=1e-6)


QUERY = "base_model.model.encoder.layer.0.attention.self.query"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Other tensors in the adapter's file: `A` and `B` are factors of one layer, `name` moves them."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for part, tensor in changes.items():
        tensors[f"{QUERY}.lora_{part}.weight"] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (torch.ones(4, 16, dtype=torch.complex64), "has the unsupported dtype 'C64'"),
        (torch.ones(4, 16).to(torch.float8_e4m3fn), "has the unsupported dtype 'F8_E4M3'"),
        (torch.ones(4, 16, dtype=torch.uint16), "has the unsupported dtype 'U16'"),
        (torch.ones(4, 16, dtype=torch.int64), "has dtype torch.int64, expected floating point"),
        (torch.ones(4, 16, dtype=torch.bool), "has dtype torch.bool, expected floating point"),
        (torch.tensor(1.0), r"have shapes \(\) and"),
        (torch.ones(4), r"have shapes \(4,\) and"),
        (torch.ones(0, 16), r"have shapes \(0, 16\) and"),
        (torch.ones(4, 0), r"of shape .*, but the base's has shape \(16, 16\)"),
        (torch.ones(4, 16, 2), r"of shape .*, but the base's has shape \(16, 16\)"),
        (torch.full((4, 16), torch.nan), "holds NaN or infinite values"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")) + str(tuple(getattr(value, "shape", ()))),
)
def test_factors_that_are_refused(base, folder, factor, message):
    rewrite(folder, A=factor)
    refuse(f"encoder.layer.0.attention.self.query.*{message}", base, folder)


def test_a_second_factor_that_is_a_convolution(base, folder):
    rewrite(folder, B=torch.ones(16, 4, 2))
    refuse(r"have shapes \(4, 16\) and \(16, 4, 2\)", base, folder)


def test_a_product_without_room_in_float32(base, folder):
    rewrite(folder, A=torch.full((4, 16), 1e20), B=torch.full((16, 4), 1e20))
    refuse(
        "tensor 'encoder.layer.0.attention.self.query.weight' holds NaN or infinite", base, change(folder, lora_alpha=8)
    )


def test_names_of_adapters_that_took_forever(base, folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{QUERY}{'.base_layer' * 20_000}.x": torch.ones(1)}, file)
    refuse("adapter_model.safetensors holds a tensor whose name has 220055 characters", base, folder)
    many = {
        f"base_model.model.x{index}.lora_{part}": torch.ones(1)
        for index in range(5000)
        for part in ("A.weight", "B.bias")
    }
    save_file(tensors | many, file)
    refuse("lacks lora_B of 'x0'", base, folder)


@pytest.mark.parametrize("module", ["self", "other"], ids=["no parameter", "no module"])
def test_parameters_that_the_model_does_not_have(base, folder, module):
    file = folder / "adapter_model.safetensors"
    where = QUERY.replace("self.query", module)
    save_file({key.replace(QUERY, where): tensor for key, tensor in load_file(file).items() if QUERY in key}, file)
    says = f"is an adapter for 'encoder.layer.0.attention.{module}.weight', which the model does not have"
    refuse(says, base, change(folder, target_modules=[], target_parameters=[f"{module}.weight"]))


def test_a_class_that_is_none(base, folder):
    says = "^the adapter asks for 'AutoModel', which is not a model class of transformers"
    refuse(says, base, change(folder, auto_mapping={"base_model_class": "AutoModel"}))


def test_a_tensor_under_two_names(base, folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{QUERY.removeprefix('base_model.model.')}.lora_A.weight": torch.ones(4, 16)}, file)
    refuse("holds two tensors for 'lora_A.weight' of the model", base, folder)


def test_nothing_is_logged(base, folder, caplog):
    with caplog.at_level(logging.WARNING):
        build(base, {"red": folder})
    assert not caplog.records
