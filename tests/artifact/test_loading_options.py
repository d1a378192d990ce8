"""Options of `from_pretrained` that go to the merged model's own library."""

from __future__ import annotations

import pytest
import torch
from families import ROWS, tokens
from helpers import MIXED, TASKS, assert_same, build_retex

from retex_hf import ArtifactError, RetexModel

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@torch.no_grad()
def test_weights_on_disk_run_in_one_pass(tmp_path):
    model, _ = build_retex("bert", rank=3)
    inputs = tokens(ROWS)
    model.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
    model.save_pretrained(tmp_path / "artifact")
    placed = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk", "pooler": "disk"}
    loaded = RetexModel.from_pretrained(
        tmp_path / "artifact", device_map=placed, offload_folder=str(tmp_path / "offloaded")
    )
    assert loaded.get_base_model().encoder.layer[1].output.dense.weight.is_meta
    assert_same(loaded(**inputs, task=MIXED), model(**inputs, task=MIXED), **CLOSE)
    assert_same(loaded(**inputs, task="red"), model(**inputs, task="red"), **CLOSE)
    routed = loaded(**inputs)
    assert routed.routing.tasks == model(**inputs).routing.tasks


@torch.no_grad()
def test_attention_is_chosen_as_in_transformers(tmp_path):
    model, _ = build_retex("bert", rank=3)
    model.save_pretrained(tmp_path)
    loaded = RetexModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"
    inputs = tokens(ROWS)
    assert_same(loaded(**inputs, task=MIXED), model(**inputs, task=MIXED), **CLOSE)


def test_open_clip_takes_none(tmp_path):
    model, _ = build_retex("open_clip-vit", rank=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="OpenCLIP model takes no 'offload_folder'"):
        RetexModel.from_pretrained(tmp_path, offload_folder="off")
