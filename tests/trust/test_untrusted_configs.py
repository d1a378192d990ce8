"""Untrusted configurations reach a library without what it would resolve as code, a file, or a repository."""

from __future__ import annotations

import builtins
import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as tf
from checkpoints import writers
from families import FAMILIES
from helpers import assert_same, edit_json
from safetensors.torch import load_file, save_file
from trust import configurations
from trust.mutations import reseal
from trust.subjects import TASKS, bert, make_artifact, make_tokenizer, mixed_batch, moved, separate, texts

from retex_hf import CheckpointError, RetexConfig, RetexError, RetexModel
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.backends import config_limits, hf_transformers
from retex_hf.backends.untrusted_config import vet_transformers_config
from retex_hf.checkpoints import open_source

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
INPUTS = mixed_batch(make_tokenizer())
CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Evil: pass\n"


def composite(tokenizer: Any) -> tf.EncoderDecoderModel:
    """A model of two configurations within one."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 32, **SIZES}
    config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(tf.BertConfig(**sizes), tf.BertConfig(**sizes))
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    model = tf.EncoderDecoderModel(config).eval()
    separate(model, tokenizer)
    return model


@pytest.fixture
def places(tmp_path) -> dict[str, Path]:
    """A base, an expert and an artifact of a composite class, each with code and a tokenizer."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    base = composite(tokenizer)
    experts = {task: moved(base, seed) for seed, task in enumerate(TASKS, start=1)}
    folders = {name: tmp_path / name for name in ("base", "red", "artifact")}
    for folder in folders.values():
        tokenizer.save_pretrained(folder)
    base.save_pretrained(folders["base"])
    experts["red"].save_pretrained(folders["red"])
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=2), progress=False)
    model.fit_signatures({task: [dict(tokenizer(texts(task, 8), return_tensors="pt"))] for task in TASKS})
    model.save_pretrained(folders["artifact"])
    for folder in folders.values():
        (folder / "evil.py").write_text(CODE.format(marker=str(tmp_path / "marker")), encoding="utf-8")
    return folders


def name_code(places: dict[str, Path], kind: str, code: str) -> None:
    """Let the decoders' configurations name code."""
    for folder in places.values():
        names = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), code)
        edit_json(folder / "config.json", "decoder", auto_map=names, model_type=kind, _name_or_path=str(folder))
    reseal(places["artifact"])


@pytest.fixture(params=[("bert", "evil.Evil"), ("vit", "evil.Evil"), ("vit", "org/elsewhere--evil.Evil")], ids=str)
def nested_code(places, request) -> dict[str, Path]:
    """Their decoder's configuration names code, in the folder or on the Hub. Of `vit`, transformers has no decoder."""
    name_code(places, *request.param)
    return places


@pytest.fixture
def watched(monkeypatch) -> list[str]:
    """What was asked or contacted; every question is answered yes."""
    seen: list[str] = []

    def answer(*_: Any) -> str:
        seen.append("a question")
        return "yes"

    def refuse(*_: Any) -> None:
        seen.append("a request")
        raise ConnectionRefusedError

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return seen


# ---- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested_code", [("vit", "evil.Evil")], ids=str, indirect=True)
def test_code_of_a_nested_configuration_is_never_run_by_a_command(nested_code, tmp_path):
    """The command reads its inputs from where a question would be answered."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "retex_hf.cli", "predict", str(nested_code["artifact"]), "-", "--task", "red"],
        input="yes\nyes\nrose cherry\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert not (tmp_path / "marker").exists()
    assert "Do you wish" not in done.stdout + done.stderr
    assert done.returncode in (0, 2), done.stderr


@pytest.mark.parametrize("how", ["load", "verify=False", "build", "stream", "merge", "tokenizer", "export"])
def test_code_of_a_nested_configuration_is_never_run(nested_code, tmp_path, watched, how):
    base, red, artifact = (nested_code[name] for name in ("base", "red", "artifact"))
    build = partial(RetexModel.from_experts, base, {"red": red}, progress=False)
    with_output = {"output_dir": tmp_path / "built"}
    try:
        match how:
            case "load":
                RetexModel.from_pretrained(artifact)
            case "verify=False":
                RetexModel.from_pretrained(artifact, verify=False)
            case "build":
                build(RetexConfig(rank=2))
            case "stream":
                build(RetexConfig(rank=2), **with_output)
            case "merge":
                build(RetexConfig(rank=2, merge=str(red)))
            case "tokenizer":
                load_preprocessor(base, composite(make_tokenizer()))
            case "export":
                RetexModel.from_pretrained(artifact).export_lora("red", tmp_path / "lora")
    except RetexError as error:
        assert "\n" not in str(error)
    assert watched == []
    assert not (tmp_path / "marker").exists()


def test_transformers_would_ask(places, tmp_path, watched):
    """Why: its own loader of the same folder asks, and runs the code."""
    name_code(places, "vit", "evil.Evil")
    with pytest.raises(Exception, match=r"."):
        tf.EncoderDecoderModel.from_pretrained(places["base"], trust_remote_code=False)
    assert watched == ["a question"]
    assert (tmp_path / "marker").exists()


def test_code_is_left_out_of_what_is_saved(places, tmp_path):
    name_code(places, "bert", "evil.Evil")
    model = RetexModel.from_pretrained(places["artifact"])
    model.save_pretrained(tmp_path / "again")
    assert "auto_map" not in (tmp_path / "again" / "config.json").read_text(encoding="utf-8")


def test_nested_code_of_an_unknown_type_is_refused(places, watched):
    name_code(places, "evil", "evil.Evil")
    with pytest.raises(RetexError, match=r"config\.json"):
        RetexModel.from_pretrained(places["artifact"])
    with pytest.raises(RetexError, match=r"config\.json"):
        RetexModel.from_experts(places["base"], {"red": places["red"]}, progress=False)
    assert watched == []


# ---- names of files and repositories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("verify", [True, False])
@torch.no_grad()
def test_a_configuration_names_no_other_weights(tmp_path, link, verify):
    artifact = make_artifact(tmp_path / "artifact")
    expected = RetexModel.from_pretrained(artifact)(**INPUTS, task="red")
    other = {name: tensor + 1 for name, tensor in load_file(artifact / "model.safetensors").items()}
    save_file(other, tmp_path / "other.safetensors", metadata={"format": "pt"})
    if link:
        (artifact / "other.safetensors").symlink_to(tmp_path / "other.safetensors")
    else:
        save_file(other, artifact / "other.safetensors", metadata={"format": "pt"})
    edit_json(artifact / "config.json", transformers_weights="other.safetensors")
    reseal(artifact)
    assert_same(RetexModel.from_pretrained(artifact, verify=verify)(**INPUTS, task="red"), expected, exact=True)
    base, experts = bert(make_tokenizer())
    writers.folder(base, tmp_path / "base")
    edit_json(tmp_path / "base" / "config.json", transformers_weights="other.safetensors")
    built = RetexModel.from_experts(tmp_path / "base", experts, progress=False, check_base=False)
    assert_same(
        built(**INPUTS, task="red"), RetexModel.from_experts(base, experts, progress=False)(**INPUTS, task="red")
    )


BACKBONES = (
    "ConditionalDetrForObjectDetection", "DPTForDepthEstimation", "DabDetrForObjectDetection",
    "DeformableDetrForObjectDetection", "DetrForObjectDetection", "GroundingDinoForObjectDetection",
    "Mask2FormerForUniversalSegmentation", "RTDetrForObjectDetection", "TableTransformerForObjectDetection",
    "TvpForVideoGrounding", "UperNetForSemanticSegmentation", "VitMatteForImageMatting", "ZoeDepthForDepthEstimation",
)  # fmt: skip


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_is_never_looked_up(tmp_path, watched, name):
    values = {"architectures": [name], "backbone": "gpt2", "use_timm_backbone": False, "backbone_config": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="asks for backbone='gpt2', which is not one of timm's own architectures"):
        hf_transformers.plan(tmp_path, open_source(tmp_path / "model.safetensors", "the base"))
    values |= {"backbone": "resnet18", "backbone_kwargs": {"out_indices": [1]}}  # a name that is on the Hub too
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hf_transformers.plan(tmp_path, open_source(tmp_path / "model.safetensors", "the base"))
    assert watched == []


def timm_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    config = tf.TimmWrapperConfig(architecture="resnet10t", pretrained_cfg={"num_classes": 3}, num_labels=3)
    model = tf.TimmWrapperForImageClassification(config)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        {"checkpoint_path": "secret.pth"},
        {"pretrained_cfg": {"file": "secret.pth"}, "pretrained": True},
        {"pretrained_cfg_overlay": {"file": "secret.pth"}},
        {"pretrained_cfg": "org/repo"},
        {"cache_dir": "/tmp/elsewhere"},
    ],
)
def test_timm_reads_no_other_file(tmp_path, watched, arguments):
    folder = timm_folder(tmp_path / "base")
    source = open_source(folder, "the base")
    hf_transformers.plan(folder, source)
    loaded = json.loads(json.dumps(arguments).replace("secret.pth", str(tmp_path / "secret.pth")))
    torch.save({"state_dict": {}}, tmp_path / "secret.pth")
    edit_json(folder / "config.json", "model_args", **loaded)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hf_transformers.plan(folder, source)
    assert watched == []


def test_the_weights_of_timm_are_no_file_elsewhere(tmp_path):
    folder = timm_folder(tmp_path)
    edit_json(
        folder / "config.json", "pretrained_cfg", file="/etc/passwd", hf_hub_id="org/repo", url="http://localhost/x"
    )
    model = hf_transformers.plan(folder, open_source(folder, "the base"))
    assert not {"file", "hf_hub_id", "url"} & model.config.pretrained_cfg.keys()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"hidden_act": "/etc/passwd"}, "hidden_act='/etc/passwd'"),
        ({"text_config": {"model_type": "bert", "hidden_act": "a/b"}}, "hidden_act='a/b'"),
        ({"text_config": {"anything": ["org/repo"]}}, "lists 'org/repo' under 'anything'"),
        ({"configuration_files": ["config.4.0.json"]}, "configuration_files"),
        ({"backbone_config": {"backbone": "hf-hub:x"}}, "backbone='hf-hub:x'"),
        ({"vision_config": {"weights_file": "x"}}, "weights_file='x'"),
    ],
)
def test_a_value_that_a_class_reads_is_a_plain_word(values, says):
    with pytest.raises(CheckpointError, match=f"config.json .*{says}"):
        vet_transformers_config(values, Path("config.json"), tf.BertConfig)


def test_notes_are_left_out_and_words_are_kept():
    kept = {
        "hidden_act": "gelu_new", "torch_dtype": "torch.float16", "num_labels": 2, "id2label": {"0": "a/b", "1": "c:d"},
        "rope_scaling": {"type": "linear", "factor": 2.0}, "problem_type": "regression", "my_note": "hello",
        "transformers_version": "5.22.2", "task_specific_params": {"x": {"prefix": "translate a/b: "}},
    }  # fmt: skip
    notes = {
        "auto_map": {"AutoModel": "x.Y"}, "_name_or_path": "/home/me", "run": "https://here", "dataset": "imdb",
        "transformers_weights": "x.safetensors", "tags": ["a/b", "c"], "custom_generate": "org/repo",
    }  # fmt: skip
    vetted = vet_transformers_config(kept | notes, Path("config.json"), tf.BertConfig)
    assert vetted == kept | {"tags": []}


@pytest.mark.parametrize("name", ["PreTrainedModel", "BertPreTrainedModel", "AutoConfig", "os", "pipeline", "", "no.x"])
def test_an_architecture_is_a_model_class(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "bert"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="which is not a model class of transformers"):
        hf_transformers.plan(tmp_path, open_source(tmp_path / "model.safetensors", "the base"))


@pytest.mark.parametrize("value", [100_000, 10**9])
def test_constants_of_fnet_are_bounded(tmp_path, value):
    config = tf.FNetConfig(hidden_size=16, num_hidden_layers=1, intermediate_size=16, vocab_size=32)
    tf.FNetModel(config).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", tpu_short_seq_length=value, use_tpu_fourier_optimizations=True)
    with pytest.raises(CheckpointError, match="tpu_short_seq_length"):
        hf_transformers.plan(tmp_path, open_source(tmp_path, "the base"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"vision_cfg": {"timm_model_name": "gpt2"}}, "timm_model_name='gpt2'"),
        ({"vision_cfg": {"checkpoint_path": "/etc/passwd"}}, "checkpoint_path='/etc/passwd'"),
        ({"text_cfg": {"anything": "../x"}}, "anything='../x'"),
    ],
)
def test_open_clip_reads_no_other_file(tmp_path, watched, values, says):
    family = FAMILIES["open_clip-vit"]
    folder = tmp_path / "base"
    writers.open_clip_folder(family.make(), folder, family.model_config, "open_clip_model.safetensors")
    for tower, entries in values.items():
        edit_json(folder / "open_clip_config.json", "model_cfg", tower, **entries)
    with pytest.raises(CheckpointError, match=f"open_clip_config.json .*{says}"):
        RetexModel.from_experts(folder, {"red": folder}, progress=False)
    assert watched == []
    assert open_clip.list_models()  # OpenCLIP itself is as it was


# ---- generation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [{"num_beams": "many"}, {"max_new_tokens": -3}, {"cache_implementation": "org/x"}, {"num_beams": 0}]
)
def test_odd_generation_settings_are_refused(tmp_path, values):
    folder = make_artifact(tmp_path / "t5", "t5")
    edit_json(folder / "generation_config.json", **values)
    reseal(folder)
    with pytest.raises(RetexError, match=r"generation_config\.json"):
        RetexModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.PY", "tokenizer.sh", "tokenizer.pt", "vocab.py3", "x_tokenizer/tokenizer.pyw"]
)
def test_no_code_is_copied_beside_a_model(tmp_path, name):
    base, experts = bert(make_tokenizer())
    writers.folder(base, tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "base" / name).write_text("code")
    RetexModel.from_experts(tmp_path / "base", experts, progress=False, check_base=False).save_pretrained(
        tmp_path / "a"
    )
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert not (tmp_path / "a" / name).exists()


def test_a_model_that_takes_for_ever_to_make_is_refused(tmp_path, monkeypatch):
    """LeViT compares every pair of points of an image, in Python."""
    monkeypatch.setattr(config_limits, "HARMLESS_SECONDS", 2.0)
    values = {"architectures": ["LevitModel"], "model_type": "levit", "image_size": 8000}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json asks for a model that takes over 2 seconds to make"):
        hf_transformers.plan(tmp_path, open_source(tmp_path / "model.safetensors", "the base"))
    assert sum(range(1000)) == 499500  # nothing comes late


# ---- the trial, in its short form ------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the trial watches files with Linux's inotify")
def test_hostile_configurations_are_refused_or_harmless(tmp_path):
    tallies = configurations.run(tmp_path, progress=False)
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert sum(tally.tried for tally in tallies) >= 500
