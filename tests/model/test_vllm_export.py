"""An artifact that has been exported for vLLM holds adapters that give its experts, and is still the artifact."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
import transformers as tf
from decoders import UNSERVED, saved_decoder, signed_decoder
from helpers import TASKS, build_retex
from peft import PeftModel
from safetensors.torch import load_file, save_file
from signed import make_tokenizer

from retex_hf import RetexModel, verify
from retex_hf.cli import main
from retex_hf.errors import ArtifactError, ConfigError, RetexError
from retex_hf.model.export.vllm import check_shapes
from retex_hf.serving.vllm.exported import read_exported

TEXTS = ["rose cherry ruby brick", "grass leaf moss lime", "sky sea denim indigo"]


@pytest.fixture(autouse=True)
def quiet():
    """peft warns of tied embeddings and of its own use of transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft")
        yield


def inputs() -> dict[str, torch.Tensor]:
    return dict(make_tokenizer()(TEXTS, padding=True, return_tensors="pt"))


def logits(model, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(), **kwargs).logits


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("qwen3", False), ("classifier", False)])
def test_adapters_give_the_experts(kind, tied, tmp_path):
    folder = tmp_path / "retex"
    model = saved_decoder(folder, kind, exclude=UNSERVED, model_options={"tie_word_embeddings": tied})
    exported = model.export_vllm(folder)
    assert all(found.left_out == {} for found in exported.adapters.values()) and "leaves out" not in str(exported)
    lora = exported.adapters["red"].lora
    assert "model.embed_tokens" in lora and ("lm_head" in lora) == (kind != "classifier")
    assert len(set(lora.values())) == 1 and lora["model.embed_tokens"] <= exported.max_rank
    merged_class = type(model.model)
    for width, task in enumerate(TASKS, start=2):
        options = {"num_labels": width, "ignore_mismatched_sizes": True} if kind == "classifier" else {}
        merged = merged_class.from_pretrained(folder, **options)
        expert = PeftModel.from_pretrained(merged, folder, subfolder=f"adapters/{task}").eval()
        torch.testing.assert_close(logits(expert), logits(model, task=task), rtol=1e-4, atol=1e-4)
    first, second = (logits(model, task=task)[..., :2] for task in ("red", "blue"))
    assert (first - second).abs().max() > 1e-3  # so that the test above can fail


def test_an_exported_artifact_is_still_the_artifact(tmp_path):
    folder = tmp_path / "retex"
    model = saved_decoder(folder)
    before = logits(model)
    model.export_vllm(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(folder / "model.safetensors"))
    described = json.loads((folder / "retex_vllm.json").read_text())
    assert described["dtype"] == "float32" and described["max_lora_rank"] == 8
    assert {task: found["folder"] for task, found in described["adapters"].items()} == {
        task: f"adapters/{task}" for task in TASKS
    }
    verify(folder, finite=True)
    assert torch.equal(logits(RetexModel.from_pretrained(folder)), before)
    plain = tf.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(plain.state_dict()["lm_head.weight"], model.model.state_dict()["lm_head.weight"])


def test_every_exported_file_is_recorded(tmp_path):
    folder = tmp_path / "retex"
    saved_decoder(folder).export_vllm(folder)
    for name in ("adapters/red/adapter_model.safetensors", "adapters/blue/adapter_config.json", "retex_vllm.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        with pytest.raises(ArtifactError, match=name.rpartition("/")[2]):
            verify(folder)
        (folder / name).write_bytes(content)
    verify(folder)
    for name in ("adapters/red/more.safetensors", "adapters/more/adapter_config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")
        for check in (verify, read_exported):
            with pytest.raises(ArtifactError, match=rf"{name} is no file of the export: remove it"):
                check(folder)
        (folder / name).unlink()
    (folder / "adapters" / "more").rmdir()
    verify(folder)
    (folder / "adapters" / "linked").symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match="adapters/linked is no file of the export"):
        verify(folder)


def test_norms_and_biases_are_named(tmp_path):
    folder = tmp_path / "retex"
    model = saved_decoder(folder, "qwen2")
    exported = model.export_vllm(folder)
    left = exported.adapters["red"].left_out
    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.weight"} <= set(left)
    assert "model.layers.0.self_attn.q_proj.weight" not in left
    assert 0 < exported.adapters["red"].left_out_share < 1
    assert f"leaves out {len(left)} tensors" in str(exported)


def test_a_copy_leaves_the_artifact_alone(tmp_path):
    folder, copy = tmp_path / "retex", tmp_path / "copy"
    model = saved_decoder(folder)
    before = sorted(file.name for file in folder.rglob("*"))
    model.export_vllm(folder, copy)
    assert sorted(file.name for file in folder.rglob("*")) == before
    verify(folder)
    verify(copy)
    assert (copy / "README.md").is_file() and (copy / "adapters" / "blue" / "adapter_config.json").is_file()
    assert torch.equal(logits(RetexModel.from_pretrained(copy)), logits(model))
    model.export_vllm(folder, copy)  # again, in its place
    verify(copy)


def test_a_save_removes_adapters_of_other_weights(tmp_path):
    folder = tmp_path / "retex"
    model = saved_decoder(folder)
    model.export_vllm(folder)
    model.save_description(folder)  # the same weights
    verify(folder)
    assert (folder / "adapters" / "red" / "adapter_model.safetensors").is_file()
    model.delete_task("red")
    model.save_pretrained(folder)
    verify(folder)
    assert not (folder / "adapters").exists() and not (folder / "retex_vllm.json").exists()
    (folder / "adapters").mkdir()
    (folder / "adapters" / "mine.txt").write_text("of the user")
    model.save_pretrained(folder)
    assert (folder / "adapters" / "mine.txt").is_file()
    with pytest.raises(ArtifactError, match="adapters is no export"):
        RetexModel.from_pretrained(folder).export_vllm(folder)


def test_wrong_shapes_are_refused(tmp_path):
    """vLLM loads a factor of half its width, and answers wrongly."""
    folder = tmp_path / "retex"
    model = saved_decoder(folder)
    model.export_vllm(folder)
    file = folder / "adapters" / "red" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    check_shapes(model.model, file, {})
    shutil.copy(file, tmp_path / "kept")
    for key, wrong in (
        (name, tensors[name][:, :16].contiguous()),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(8, 3)),
        ("base_model.model.lm_head.lora_B.weight", torch.zeros(5, 8)),
    ):
        save_file({**tensors, key: wrong}, file)
        with pytest.raises(ArtifactError, match=rf"{key}'? has shape"):
            check_shapes(model.model, file, {})


def test_refusals(tmp_path):
    folder = tmp_path / "retex"
    model = signed_decoder()
    model.save_pretrained(folder)
    with pytest.raises(ArtifactError, match="another model"):
        signed_decoder(rank=4).export_vllm(folder)
    model.routing = "soft"
    with pytest.raises(ConfigError, match="one adapter per prompt"):
        model.export_vllm(folder)
    model.routing = "hard"
    model.signatures = None
    with pytest.raises(RetexError, match="no signatures"):
        model.export_vllm(folder)
    gpt2, _ = build_retex("gpt2")
    gpt2.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="takes no LoRA adapters of GPT2LMHeadModel"):
        gpt2.export_vllm(tmp_path / "gpt2")
    wide = signed_decoder(
        rank="full", model_options={"hidden_size": 640, "intermediate_size": 640, "num_hidden_layers": 1}
    )
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match="rank 640, and vLLM takes at most 512"):
        wide.export_vllm(tmp_path / "wide")
    assert not (tmp_path / "wide" / "adapters").exists()


def test_command(tmp_path, capsys):
    folder = tmp_path / "retex"
    saved_decoder(folder, exclude=UNSERVED)
    assert main(["export", str(folder), "--all", "--for", "vllm"]) == 0
    assert "adapters of 3 tasks for vLLM" in capsys.readouterr().out
    assert main(["export", str(folder), "--all", "--for", "vllm", str(tmp_path / "copy")]) == 0
    verify(tmp_path / "copy")
    for wrong, message in (
        ([str(folder), "--all"], "go together"),
        ([str(folder), "red", "--for", "vllm"], "go together"),
        (["org/none", "--all", "--for", "vllm"], "is not a folder"),
        ([str(folder), "red"], "needs a task and a folder"),
    ):
        assert main(["export", *wrong]) == 2
        assert message in capsys.readouterr().err
