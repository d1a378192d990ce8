"""The vision suite: reading tasks, preparing images, and taking over the weights of the base."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification, TimmWrapperConfig, TimmWrapperModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import vision
from common import Task, split_validation

from retex_hf import RetexConfig, RetexModel


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one task of colour images whose two classes are dark and bright."""
    rng = np.random.default_rng(0)
    labels = {part: rng.integers(0, 2, count) for part, count in (("train", 40), ("test", 10))}
    arrays = {f"{part}_y": values for part, values in labels.items()}
    for part, values in labels.items():
        brightness = rng.integers(0, 50, (len(values), 32, 32, 3)) + 180 * values[:, None, None, None]
        arrays[f"{part}_x"] = brightness.astype(np.uint8)
    (tmp_path / "image").mkdir()
    np.savez(tmp_path / "image" / "elpv.npz", **arrays)
    (tmp_path / "image" / "elpv.json").write_text(json.dumps({"task": "elpv", "labels": ["dark", "bright"]}))
    monkeypatch.setenv("RETEX_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    network = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
    config = TimmWrapperConfig(
        architecture="tiny_vit_5m_224", model_args={"window_sizes": list(vision.WINDOWS), **network}
    )
    TimmWrapperModel(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_load_task(data: Path) -> None:
    task = vision.load_task("elpv")
    assert task.label_names == ["dark", "bright"]
    assert task.train_inputs.shape == (40, 32, 32, 3) and len(task.test_labels) == 10
    assert vision.available(vision.TASKS) == ["elpv"]
    with pytest.raises(SystemExit, match=r"mnist\.npz is missing: put the data of task 'mnist' there"):
        vision.load_task("mnist")


def test_collate_keeps_the_order_of_mixed_sizes() -> None:
    images = [np.full((16, 16), 51, np.uint8), np.zeros((32, 32, 3), np.uint8), np.full((28, 28), 204, np.uint8)]
    images[1][..., 2] = 255
    pixels = vision.collate(images)["pixel_values"]
    assert pixels.shape == (3, 3, 64, 64) and pixels.dtype == torch.float32
    for row, values in enumerate([(0.2, 0.2, 0.2), (0.0, 0.0, 1.0), (0.8, 0.8, 0.8)]):
        for channel, value in enumerate(values):
            expected = (value - vision.MEAN[channel]) / vision.STD[channel]
            torch.testing.assert_close(pixels[row, channel], torch.full((64, 64), expected))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("image_encoder.patch_embed.seq.2.bn.weight", "patch_embed.conv2.bn.weight"),
        ("image_encoder.layers.0.blocks.1.conv3.c.weight", "stages.0.blocks.1.conv3.conv.weight"),
        ("image_encoder.layers.1.downsample.conv1.c.weight", "stages.2.downsample.conv1.conv.weight"),
        ("image_encoder.layers.2.blocks.0.local_conv.c.weight", "stages.2.blocks.0.local_conv.conv.weight"),
        ("image_encoder.layers.2.blocks.0.mlp.fc1.bias", "stages.2.blocks.0.mlp.fc1.bias"),
        ("image_encoder.norm_head.bias", "head.norm.bias"),
        ("image_encoder.layers.1.blocks.0.attn.attention_bias_idxs", None),
        ("image_encoder.head.weight", None),
        ("image_encoder.neck.0.weight", None),
        ("mask_decoder.layers.0.weight", None),
    ],
)
def test_timm_name(name: str, expected: str | None) -> None:
    assert vision.timm_name(name) == expected


def test_narrow_biases_keep_their_offsets() -> None:
    # In a window of 3 the offset (dy, dx) has index 3 dy + dx, in a window of 2 it has index 2 dy + dx.
    wide = torch.arange(18.0).view(2, 9)
    assert vision.narrow_biases(wide, 2).tolist() == [[0, 1, 3, 4], [9, 10, 12, 13]]


def test_expert_of_a_task(data: Path, small_base: Path, tmp_path: Path) -> None:
    task = vision.load_task("elpv")
    vision.fine_tune_expert(small_base, task, tmp_path / "elpv")
    expert = AutoModelForImageClassification.from_pretrained(tmp_path / "elpv").eval()
    base = TimmWrapperModel.from_pretrained(small_base).state_dict()
    moved = 0
    for name, tensor in expert.state_dict().items():
        if "running_" in name:
            assert torch.equal(tensor, base[name]), name
        elif name in base and tensor.is_floating_point():
            moved += not torch.equal(tensor, base[name])
    assert moved > 50

    model = RetexModel.from_experts(
        small_base, {"elpv": tmp_path / "elpv", "same": tmp_path / "elpv"}, RetexConfig(rank="full"), progress=False
    )
    assert model.retex_config.labels["elpv"]["id2label"] == {"0": "dark", "1": "bright"}
    inputs = vision.collate(task.test_inputs)
    torch.testing.assert_close(model(**inputs, task="elpv").logits, expert(**inputs).logits)


def test_split_validation() -> None:
    inputs = np.arange(50).reshape(50, 1)
    task = Task("t", ["a"], inputs, list(range(50)), ["test"], [0])
    rest, validation = split_validation(task)
    assert len(rest.train_inputs) == 40 and len(validation.train_inputs) == 10
    assert sorted([*rest.train_labels, *validation.train_labels]) == list(range(50))
    assert rest.train_inputs[:, 0].tolist() == rest.train_labels and isinstance(rest.train_inputs, np.ndarray)
    assert validation.test_inputs[:, 0].tolist() == validation.test_labels == validation.train_labels
    assert rest.test_inputs == ["test"]
    texts = split_validation(Task("t", ["a"], [str(i) for i in range(50)], list(range(50)), [], []))
    assert texts[0].train_inputs == [str(i) for i in rest.train_labels]
    with pytest.raises(ValueError, match="t: a share of 1 of 50 training inputs leaves one part empty"):
        split_validation(task, 1)
