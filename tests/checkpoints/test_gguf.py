"""A GGUF file is an expert: its tensors are what transformers makes of it, read one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from families import FAMILIES
from gguf_writer import make, write
from helpers import assert_same
from hubs import serving

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints import gguf_files
from retex_hf.errors import CheckpointError


def build(base: Any, expert: Any, **options: Any) -> RetexModel:
    config = RetexConfig(rank="full")
    return RetexModel.from_experts(base, {"red": expert}, config, progress=False, check_base=False, **options)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_plain_numbers_are_the_expert(kind, tmp_path):
    base, expert = make(kind), make(kind)
    file = write(expert, tmp_path / "expert.gguf", kind, "F32")
    assert_same(build(base, file).recover("red"), dict(expert.state_dict()), rtol=1e-5, atol=1e-6)
    assert_same(build(base, tmp_path).recover("red"), dict(expert.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_0", "F16"])
def test_quantised_numbers_are_what_transformers_reads(quantisation, tmp_path):
    base, expert = make(), make()
    file = write(expert, tmp_path / "expert.gguf", quantisation=quantisation)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    actual = build(base, file).recover("red")
    assert_same(actual, dict(loaded.state_dict()), rtol=1e-5, atol=1e-6)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert (actual[name] - expert.state_dict()[name]).abs().max() < (0.01 if quantisation != "Q4_0" else 0.02)
    if quantisation != "F16":
        assert not torch.equal(actual[name], expert.state_dict()[name])


def test_a_tied_output_layer(tmp_path):
    base, expert = (make(tie_word_embeddings=True) for _ in range(2))
    file = write(expert, tmp_path / "expert.gguf", quantisation="F32")
    actual = build(base, file).recover("red")
    assert_same(actual["model.embed_tokens.weight"], expert.state_dict()["lm_head.weight"], rtol=1e-5, atol=1e-6)


def test_a_file_of_a_repository(tmp_path, monkeypatch):
    base, expert = make(), make()
    with serving(tmp_path / "hub", monkeypatch) as hub:
        folder = tmp_path / "files"
        (folder / "q").mkdir(parents=True)
        write(expert, folder / "q" / "expert-f32.gguf", quantisation="F32")
        write(base, folder / "q" / "other.gguf", quantisation="F32")
        hub.put("org/experts", folder)
        model = build(base, "org/experts/q/expert-f32.gguf", cache_dir=str(tmp_path / "cache"))
        assert not list((tmp_path / "cache").rglob("other.gguf"))
        with pytest.raises(CheckpointError, match=r"the repository 'org/experts' has no file 'q/missing.gguf'"):
            build(base, "org/experts/q/missing.gguf", cache_dir=str(tmp_path / "cache"))
    assert_same(model.recover("red"), dict(expert.state_dict()), rtol=1e-5, atol=1e-6)
    assert model.retex_config.experts["red"]["id"] == "org/experts/q/expert-f32.gguf"


# ---- what is refused -------------------------------------------------------------------------------------------------


def refuse(message: str, base: Any, expert: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        build(base, expert)
    assert "\n" not in str(caught.value)


def test_other_models(tmp_path):
    file = write(make(), tmp_path / "expert.gguf")
    refuse("is a 'llama' model, but the base is a 'gpt2'", FAMILIES["gpt2"].make(), file)
    refuse("tensor '.*' has shape .*, but the (model|base) has", make(intermediate_size=64), file)
    refuse("lacks .* tensor.s. of the model", make(num_hidden_layers=3), file)


def test_a_base(tmp_path):
    file = write(make(), tmp_path / "base.gguf")
    refuse("Bare tensors do not say which model they belong to", file, file)


def test_blocks_that_transformers_does_not_know(tmp_path):
    model = make()
    file = write(model, tmp_path / "expert.gguf", quantisation="Q5_1")
    refuse(
        "expert.gguf is not a GGUF file that can be read: .* holds tensors of ggml type 7, which is not supported",
        model,
        file,
    )


def test_several_files(tmp_path):
    model = make()
    for name in ("a", "b"):
        write(model, tmp_path / f"{name}.gguf")
    refuse("holds 2 GGUF files: give one of them, such as .*a.gguf", model, tmp_path)


@pytest.mark.parametrize("length", [0, 3, 20, 200, 5000, -1])
def test_damaged_files(length, tmp_path):
    model = make()
    file = write(model, tmp_path / "expert.gguf")
    file.write_bytes(file.read_bytes()[:length])
    refuse("expert.gguf(' )?.*(is not a GGUF file that can be read|is not completely in the file)", model, file)


def test_without_the_package(tmp_path, monkeypatch):
    model = make()
    file = write(model, tmp_path / "expert.gguf")
    monkeypatch.setattr(gguf_files, "is_gguf_available", lambda: False)
    refuse(r"is a GGUF file, which needs the package gguf: pip install 'retex-hf\[gguf\]'", model, file)
