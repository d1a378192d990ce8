"""A task exported as a LoRA adapter, loaded by peft on the merged model, gives the recovered expert's outputs."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as tf
from families import FAMILIES, LLM, TEXT, VISION, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts, rows_of, take
from peft import PeftModel
from safetensors.torch import load_file
from signed import signed_classifier
from torch import nn

import retex_hf.model.export.lora.export
from retex_hf import RetexConfig, RetexModel
from retex_hf.errors import ArtifactError, ConfigError, RetexError, TaskError
from retex_hf.model.export.lora import LoraExport

# The ways peft can run in one batch: all but norms, positions and what has no module of its own.
IN_BATCHES = ["*LayerNorm*", "*layer_norm*", "*ln_*", "*position_embeddings*", "*token_type*", "*relative_*", "*wpe*"]


@pytest.fixture(autouse=True)
def quiet():
    """peft warns of fan_in_fan_out, of ties, and of layers without a bias."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft")
        yield


def image_classifier() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**VISION, num_labels=3))


def make(name: str) -> nn.Module:
    return (image_classifier() if name == "vit-classifier" else FAMILIES[name].make()).eval()


def inputs_of(name: str, rows: int = 6) -> dict[str, torch.Tensor]:
    return FAMILIES["vit" if name == "vit-classifier" else name].inputs(rows)


def build(name: str, **options: Any) -> RetexModel:
    base = make(name)
    family = FAMILIES.get(name)
    return build_from(base, make_experts(base), family and family.model_config, **{"rank": 3, **options})[0]


def export(model: RetexModel, path: Path, **options: Any) -> dict[str, LoraExport]:
    return {task: model.export_lora(task, path / task, **options) for task in model.tasks}


def load(model: RetexModel, path: Path) -> PeftModel:
    """The artifact as a plain model, with the adapters of all tasks."""
    model.save_pretrained(path / "retex")
    if isinstance(model.model, tf.PreTrainedModel):
        merged = type(model.model).from_pretrained(path / "retex")
    else:
        merged = open_clip.create_model(f"local-dir:{path / 'retex'}")
    first, *others = model.tasks
    peft_model = PeftModel.from_pretrained(merged, path / first, adapter_name=first)
    for task in others:
        peft_model.load_adapter(path / task, adapter_name=task)
    return peft_model.eval()


def assert_experts(peft_model: PeftModel, model: RetexModel, inputs: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for task in model.tasks:
            peft_model.set_adapter(task)
            assert_same(dict(peft_model(**inputs)), dict(model(**inputs, task=task)), rtol=1e-4, atol=1e-5)


# ---- all that peft can carry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lora", "saved"),
    [
        ("bert-classifier", "bert.encoder.layer.1.output.dense", "bert.encoder.layer.1.output.LayerNorm"),
        ("gpt2", "transformer.h.0.attn.c_attn", "transformer.h.0.ln_1"),
        ("t5", "decoder.block.1.layer.1.EncDecAttention.v", "decoder.final_layer_norm"),
        ("vit-classifier", "vit.layers.0.attention.q_proj", "vit.embeddings"),
        ("llama-tied", "lm_head", "model.norm"),
        ("resnet", "encoder.stages.1.layers.0.shortcut.convolution", "embedder.embedder.normalization"),
        ("whisper", "model.encoder.layers.0.fc1", "model.encoder.conv1"),
    ],
)
def test_outputs_of_experts(name, lora, saved, tmp_path):
    model = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exports = export(model, tmp_path)
    for found in exports.values():
        assert found.left_out == {} and found.left_out_share == 0
        assert lora in found.lora and saved in found.modules_to_save
        assert found.bytes > 0 and "Left out" not in str(found)
    inputs = inputs_of(name)
    peft_model = load(model, tmp_path)
    assert_experts(peft_model, model, inputs)
    # gpt2, llama and whisper have an embedding that is the output layer too, t5 even three.
    assert found.mergeable == (name in ("bert-classifier", "vit-classifier", "resnet"))
    assert found.mergeable == ("peft cannot merge it" not in str(found))
    if found.mergeable:
        merged = peft_model.merge_and_unload()
        assert_same(merged.state_dict(), model.recover(model.tasks[-1]), rtol=1e-4, atol=1e-5)
    first, second = (model(**inputs, task=task)[0] for task in model.tasks[:2])
    assert (first - second).abs().max() > 1e-3  # so that the test above can fail


@pytest.mark.parametrize(
    "options",
    [
        {"rank": "full"},
        {"recovery_dtype": "int8"},
        {"factor_order": "shared_first"},
        {"inner_rank": 2},
        {"share_layers": True},
        {"task_embedding_dim": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_variants_of_recovery(options, tmp_path):
    model = build("bert-classifier", **options)
    exports = export(model, tmp_path)
    if "inner_rank" in options:
        assert set(exports["red"].lora.values()) == {2}
    assert_experts(load(model, tmp_path), model, tokens(4))


def test_whole_differences_of_low_rank(tmp_path):
    """A difference that is stored whole is exported at the rank that it has."""
    base = make("bert")
    experts = make_experts(base, low_rank=True)
    model, _ = build_from(base, experts, rank="full")
    found = export(model, tmp_path)["red"]
    # The three experts move within the same three directions.
    assert max(found.lora.values()) == 3
    assert_experts(load(model, tmp_path), model, tokens(4))


def test_stacked_parameters(tmp_path):
    model = build("mixtral")
    found = export(model, tmp_path)["green"]
    assert "model.layers.1.mlp.experts.gate_up_proj" in found.target_parameters
    assert found.left_out == {}
    assert_experts(load(model, tmp_path), model, tokens(4))


def test_open_clip(tmp_path):
    """What peft cannot carry (parameters of the model itself) is named and warned of once; with it excluded, all is."""
    with pytest.warns(UserWarning, match="task 'red' does not carry 'logit_scale'") as caught:
        found = build("open_clip-vit").export_lora("red", tmp_path / "red")
    assert len(caught) == 1
    missing = ["logit_scale", "positional_embedding", "text_projection", "visual.class_embedding"]
    missing += ["visual.positional_embedding", "visual.proj"]
    assert list(found.left_out) == missing
    assert "visual.transformer.resblocks.0.attn" in found.modules_to_save

    model = build("open_clip-vit", exclude=missing)
    assert not export(model, tmp_path / "other")["red"].left_out
    peft_model, inputs = load(model, tmp_path / "other"), inputs_of("open_clip-vit")
    for task in model.tasks:
        peft_model.set_adapter(task)
        assert_same(peft_model(**inputs), model(**inputs, task=task), rtol=1e-4, atol=1e-5)


def test_generate(tmp_path):
    for name in ("t5", "gpt2"):
        model = build(name)
        export(model, tmp_path / name)
        peft_model = load(model, tmp_path / name)
        inputs = tokens(3)
        inputs["attention_mask"][:] = 1
        for task in model.tasks:
            peft_model.set_adapter(task)
            settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(
                peft_model.generate(**inputs, **settings), model.generate(**inputs, task=task, **settings)
            )


def test_fewer_numbers_decide_what_is_saved_whole(tmp_path):
    """Biases and embeddings cannot both have factors in peft: what costs less is stored whole."""
    config = {**LLM, "num_attention_heads": 2}
    for vocabulary, whole in ((8, "model.embed_tokens"), (400, "model.layers.0.self_attn.q_proj")):
        base = tf.Qwen2ForCausalLM(tf.Qwen2Config(**config | {"vocab_size": vocabulary})).eval()
        model, _ = build_from(base, make_experts(base), rank=3)
        found = export(model, tmp_path / str(vocabulary))["red"]
        assert whole in found.modules_to_save
        assert bool(found.bias) == (vocabulary == 8)
        inputs = {"input_ids": torch.randint(3, 8, (3, 5))}
        assert_experts(load(model, tmp_path / str(vocabulary)), model, inputs)


# ---- several tasks in one batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert-classifier", "gpt2", "t5"])
def test_mixed_batch(name, tmp_path):
    model = build(name, exclude=IN_BATCHES)
    assert all(found.left_out == {} for found in export(model, tmp_path, scope="batch").values())
    peft_model, inputs = load(model, tmp_path), inputs_of(name)
    with torch.no_grad():
        mixed = peft_model(**inputs, adapter_names=MIXED).logits
        for task in TASKS:
            rows = rows_of(task)
            expected = model(**take(inputs, rows), task=task).logits
            torch.testing.assert_close(mixed[rows], expected, rtol=1e-4, atol=1e-5)


def test_mixed_generate(tmp_path):
    model = build("t5", exclude=IN_BATCHES)
    export(model, tmp_path, scope="batch")
    peft_model, inputs = load(model, tmp_path), tokens(6)
    for beams in (1, 2):
        settings = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams}
        mixed = peft_model.generate(**inputs, adapter_names=MIXED, **settings)
        expected = model.generate(**inputs, task=MIXED, **settings)
        assert torch.equal(mixed, expected)


def test_what_stays_merged_in_batches(tmp_path):
    """Norms and positions are named; the rest is exact."""
    model = build("bert-classifier")
    found = export(model, tmp_path, scope="batch")["red"]
    assert "bert.embeddings.LayerNorm.weight" in found.left_out
    assert "bert.embeddings.position_embeddings.weight" in found.left_out
    assert not any("dense" in name or "word_embeddings" in name for name in found.left_out)
    kept = RetexModel(replace_recovery(model, found.left_out))
    inputs = tokens(6)
    with torch.no_grad():
        mixed = load(model, tmp_path)(**inputs, adapter_names=MIXED).logits
        for task in TASKS:
            rows = rows_of(task)
            expected = kept(**take(inputs, rows), task=task).logits
            torch.testing.assert_close(mixed[rows], expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("scope", ["all", "batch"])
def test_a_bias_with_two_names(scope, tmp_path):
    """The bias of BERT's output layer is its parent's too, which does not use it."""
    base = tf.BertForMaskedLM(tf.BertConfig(**TEXT)).eval()
    model, _ = build_from(base, make_experts(base), rank=3)
    found = export(model, tmp_path, scope=scope)["red"]
    assert not any("predictions.bias" in name or "decoder" in name for name in found.left_out)
    kept = RetexModel(replace_recovery(model, found.left_out))
    assert_experts(load(model, tmp_path), kept, tokens(6))


def replace_recovery(model: RetexModel, merged: Any) -> Any:
    """The parts of a model that leaves some parameters merged."""
    parts = model.parts()
    return replace(parts, recovery=parts.recovery.without(merged))


@torch.no_grad()
def test_names_that_peft_does_not_tell_apart(tmp_path):
    """peft would store the norms inside layers that are stored whole once more, with the last one of their name."""
    model = build("convnext")
    with pytest.warns(UserWarning, match="does not carry 'layernorm.bias', 'layernorm.weight', which peft cannot"):
        exports = export(model, tmp_path)
    found = exports["red"]
    assert list(found.left_out) == ["layernorm.bias", "layernorm.weight"]
    assert "encoder.stages.0.layers.0" in found.modules_to_save
    kept = RetexModel(replace_recovery(model, found.left_out))
    assert_experts(load(model, tmp_path), kept, inputs_of("convnext"))


@torch.no_grad()
def test_layers_that_could_all_be_stored_whole(tmp_path):
    """Every layer of BEiT has a parameter of its own. peft takes no adapter that stores modules and adapts none."""
    base = tf.BeitForImageClassification(tf.BeitConfig(**VISION, num_labels=3)).eval()
    model, _ = build_from(base, make_experts(base), rank=3)
    with pytest.warns(UserWarning, match="'beit.layers.0.lambda_1'"):
        found = export(model, tmp_path)["red"]
    assert all("lambda" in name or "token" in name for name in found.left_out)
    assert "beit.layers.0.attention.q_proj" in found.lora
    kept = RetexModel(replace_recovery(model, found.left_out))
    assert_experts(load(model, tmp_path), kept, FAMILIES["vit"].inputs(4))


# ---- linear layers alone ---------------------------------------------------------------------------------------------


def test_linear_layers_alone(tmp_path):
    model = build("llama-untied", rank=10, exclude=["*embed_tokens*"])
    found = export(model, tmp_path, scope="linear")["red"]
    others = [name for name in model.recovery if "norm" in name or "lm_head" in name]
    assert list(found.left_out) == sorted(others)
    # The rank rule gives the narrow key and value layers a smaller rank; servers know one rank only.
    assert min(model.recovery[f"{name}.weight"].layout.rank for name in found.lora) == 4
    assert set(found.lora.values()) == {10}
    settings = json.loads((tmp_path / "red" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["r"], settings["lora_alpha"], settings["bias"]) == (10, 10, "none")
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    assert settings["modules_to_save"] is None and not settings["lora_bias"] and not settings["target_parameters"]
    tensors = load_file(tmp_path / "red" / "adapter_model.safetensors")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in tensors)

    merged = model.model.state_dict()
    embedding = model.recovery.embed(torch.eye(3)[0])
    offsets = {name: model.recovery.offset(name, embedding) for name in model.recovery}
    for name, size in found.left_out.items():
        assert size == pytest.approx((offsets[name].norm() / merged[name].norm()).item(), rel=1e-4)
    total = sum(offset.square().sum() for offset in offsets.values())
    left = sum(offsets[name].square().sum() for name in others)
    assert found.left_out_share == pytest.approx((left / total).sqrt().item(), rel=1e-4)
    assert f"{len(others)} tensors, {found.left_out_share:.2%} of the difference" in str(found)
    assert_experts(load(model, tmp_path), RetexModel(replace_recovery(model, others)), tokens(4))


def test_linear_layers_are_all_there_is(tmp_path):
    model = build("llama-untied", exclude=["*embed*", "lm_head*", "*norm*"])
    assert all(found.left_out == {} for found in export(model, tmp_path, scope="linear").values())
    assert_experts(load(model, tmp_path), model, tokens(4))


def test_head_without_its_layers(tmp_path):
    """A classifier's linear layers without its head: nothing that a server would refuse."""
    model = build("bert-classifier")
    found = export(model, tmp_path, scope="linear")["green"]
    assert {"classifier.weight", "classifier.bias"} <= set(found.left_out)
    assert found.modules_to_save == [] and found.bias == []
    assert load(model, tmp_path).active_adapter == "red"


# ---- heads, round trip, files ----------------------------------------------------------------------------------------


def test_heads_of_different_width(tmp_path):
    base = tf.BertModel(tf.BertConfig(**TEXT))
    experts = {}
    for width, task in ((3, "red"), (5, "green")):
        expert = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=width)).eval()
        expert.bert.load_state_dict(base.state_dict())
        experts[task] = expert
    model, _ = build_from(base, experts)
    model.save_pretrained(tmp_path / "retex")
    exports = export(model, tmp_path)
    assert exports["red"].modules_to_save == ["classifier"] and len(exports["red"].lora) == 1
    assert exports["red"].num_outputs is None
    assert exports["green"].num_outputs == 5
    assert "num_labels=5, ignore_mismatched_sizes=True" in str(exports["green"])
    merged = tf.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "retex", num_labels=5, ignore_mismatched_sizes=True
    )
    inputs = tokens(3)
    with torch.no_grad():
        actual = PeftModel.from_pretrained(merged, tmp_path / "green").eval()(**inputs).logits
    torch.testing.assert_close(actual, model(**inputs, task="green").logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert-classifier", "gpt2", "mixtral"])
def test_round_trip(name, tmp_path):
    """The exports of all tasks, on the merged model as their base, are the experts again."""
    model = build(name)
    model.save_pretrained(tmp_path / "retex")
    exports = export(model, tmp_path)
    again = RetexModel.from_experts(
        tmp_path / "retex",
        {task: found.folder for task, found in exports.items()},
        RetexConfig(rank="full"),
        progress=False,
    )
    for task in TASKS:
        assert_same(again.recover(task), model.recover(task), rtol=1e-4, atol=1e-5)


def test_name_of_the_base(tmp_path):
    def named(model: RetexModel) -> str | None:
        model.export_lora("red", tmp_path / "red")
        return json.loads((tmp_path / "red" / "adapter_config.json").read_text(encoding="utf-8"))[
            "base_model_name_or_path"
        ]

    model = build("bert-classifier")
    assert named(model) is None
    model.save_pretrained(tmp_path / "retex")
    assert named(RetexModel.from_pretrained(tmp_path / "retex")) == str(tmp_path / "retex")
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    model.save_pretrained(snapshot)
    assert named(RetexModel.from_pretrained(snapshot)) == "org/name"


def test_what_is_refused(tmp_path):
    model = build("bert-classifier")
    with pytest.raises(TaskError, match="'purple'"):
        model.export_lora("purple", tmp_path / "red")
    with pytest.raises(ConfigError, match=r"scope must be one of \['all', 'batch', 'linear', 'vllm'\], not 'some'"):
        model.export_lora("red", tmp_path / "red", scope="some")
    model.save_pretrained(tmp_path / "retex")
    with pytest.raises(ArtifactError, match=r"retex holds other files and no adapter: expected a new folder"):
        model.export_lora("red", tmp_path / "retex")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"file is a file; expected a folder"):
        model.export_lora("red", tmp_path / "file")
    with pytest.raises(ConfigError, match="An affine recovery scales the merged weights, which no LoRA adapter can"):
        build("bert-classifier", recovery="affine").export_lora("red", tmp_path / "red")
    model.model.bert.pooler.dense.to("meta")
    with pytest.raises(
        RetexError, match=r"quantised or offloaded .its 'bert.pooler.dense.\w+' is.: load it as it is stored"
    ):
        model.export_lora("red", tmp_path / "red")
    assert not (tmp_path / "red").exists()


def test_written_whole_or_not_at_all(tmp_path, monkeypatch):
    model = build("bert-classifier")
    model.export_lora("red", tmp_path / "red")
    (tmp_path / "red" / "notes.txt").write_text("mine", encoding="utf-8")
    before = (tmp_path / "red" / "adapter_model.safetensors").read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(retex_hf.model.export.lora.export, "save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            model.export_lora("green", tmp_path / "red")
    assert (tmp_path / "red" / "adapter_model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["red"]
    model.export_lora("green", tmp_path / "red")
    assert (tmp_path / "red" / "adapter_model.safetensors").read_bytes() != before
    assert (tmp_path / "red" / "notes.txt").read_text(encoding="utf-8") == "mine"


# ---- all tasks in memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tied", "bert-classifier", "gpt2", "t5", "vit-classifier"])
def test_to_peft_gives_the_experts(name):
    model = build(name)
    peft_model, inputs = model.to_peft(), inputs_of(name)
    assert isinstance(peft_model, PeftModel) and peft_model.active_adapter == "red"
    assert not any(parameter.requires_grad for parameter in peft_model.parameters()) and not peft_model.training
    assert_experts(peft_model, model, inputs)
    with torch.no_grad(), peft_model.disable_adapter():
        merged = peft_model(**inputs)
    with torch.no_grad():
        assert_same(dict(merged), dict(model.model(**inputs)), rtol=1e-4, atol=1e-5)
    first, second = (model(**inputs, task=task)[0] for task in model.tasks[:2])
    assert (first - second).abs().max() > 1e-3


def test_to_peft_with_heads_of_different_width():
    """peft cannot load such adapters from files; in memory each has a head of its own width."""
    model = signed_classifier()
    peft_model = model.to_peft()
    inputs = {"input_ids": torch.randint(4, 28, (3, 5))}
    widths = []
    with torch.no_grad():
        for task in model.tasks:
            peft_model.set_adapter(task)
            found = peft_model(**inputs).logits
            torch.testing.assert_close(found, model(**inputs, task=task).logits, rtol=1e-4, atol=1e-5)
            widths.append(found.shape[1])
    assert len(set(widths)) == 3


def test_to_peft_of_a_budget_that_tasks_spend_on_different_layers():
    """peft takes adapters into one model only if they treat every module alike."""
    model, _ = build_retex("bert-classifier", storage="1%")
    changed = [model.recovery[name].layout.left for name in model.recovery]
    assert any(len({bool(of_task) for of_task in left}) > 1 for left in changed)
    assert_experts(model.to_peft(), model, inputs_of("bert-classifier"))


def test_to_peft_of_some_tasks_and_scopes():
    model = build("llama-untied")
    peft_model = model.to_peft(["blue"], scope="linear")
    assert list(peft_model.peft_config) == ["blue"]
    assert not any("norm" in name and "lora" in name for name, _ in peft_model.named_parameters())
    own = build("llama-untied", exclude=["*norm*", "*embed*", "lm_head*"]).to_peft(scope="batch")
    names = [name for name, _ in own.named_parameters() if "lora_A.red" in name]
    assert names and not any("embed" in name or "lm_head" in name for name in names)
    with pytest.raises(TaskError, match="at least one task"):
        model.to_peft([])
    with pytest.raises(TaskError, match="nothing"):
        model.to_peft(["nothing"])
    with pytest.raises(ConfigError, match="affine recovery"):
        build("llama-untied", recovery="affine").to_peft()
    renamed = signed_classifier({"red": "v1.red"})
    with pytest.raises(ConfigError, match="dot in the name"):
        renamed.to_peft()
