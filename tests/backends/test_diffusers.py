"""Models of diffusers: as objects and as folders, run by rows, saved so that diffusers opens them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import perturb

from retex_hf import RetexConfig, RetexModel, verify
from retex_hf.errors import CheckpointError

ROWS = ["a", "b", "a"]


def unet(diffusers):
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    return diffusers.UNet2DModel(**blocks, **sizes), {
        "sample": torch.randn(3, 3, 8, 8),
        "timestep": torch.tensor([1, 5, 9]),
    }


def conditioned(diffusers):
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"sample_size": 8, "block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4}
    model = diffusers.UNet2DConditionModel(**blocks, **sizes, cross_attention_dim=8, attention_head_dim=4)
    return model, {"sample": torch.randn(3, 4, 8, 8), "timestep": 7, "encoder_hidden_states": torch.randn(3, 5, 8)}


def autoencoder(diffusers):
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    return model, {"sample": torch.randn(3, 3, 8, 8)}


def transformer(diffusers):
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    labels = torch.tensor([1, 2, 3])
    return model, {"hidden_states": torch.randn(3, 4, 8, 8), "timestep": labels, "class_labels": labels}


@pytest.mark.parametrize("make", [unet, conditioned, autoencoder, transformer])
@torch.no_grad()
def test_rows_run_on_their_experts_and_diffusers_opens_the_artifact(make, tmp_path: Path):
    base, inputs = make(pytest.importorskip("diffusers"))
    experts = {task: perturb(base.eval(), seed, scale=0.05) for seed, task in enumerate("ab")}
    for name, model in {"base": base, **experts}.items():
        model.save_pretrained(tmp_path / name)
    folders = {task: tmp_path / task for task in experts}
    model = RetexModel.from_experts(tmp_path / "base", folders, RetexConfig(rank="full"), progress=False)
    output = model(**inputs, task=ROWS)
    for row, task in enumerate(ROWS):
        own = {key: value[row : row + 1] if torch.is_tensor(value) else value for key, value in inputs.items()}
        torch.testing.assert_close(output.sample[row : row + 1], experts[task](**own).sample, rtol=1e-3, atol=1e-4)
    assert torch.equal(model(**inputs, task=ROWS, return_dict=False)[0], output.sample)
    of_objects = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    assert torch.equal(of_objects(**inputs, task=ROWS).sample, output.sample)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(RetexModel.from_pretrained(tmp_path / "saved")(**inputs, task=ROWS).sample, output.sample)
    plain = type(base).from_pretrained(tmp_path / "saved")
    merged = model.unload().state_dict()
    assert plain.state_dict().keys() == merged.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in plain.state_dict().items())
    assert verify(tmp_path / "saved", finite=True).finite


@pytest.mark.parametrize("name", ["os", "StableDiffusionPipeline", "DDPMScheduler", "ModelMixin", "models", 3, "a.b"])
def test_no_other_class_is_taken_by_its_name(name, tmp_path: Path):
    pytest.importorskip("diffusers")
    folder = _folder(tmp_path, name)
    with pytest.raises(CheckpointError, match=r"not a model class of diffusers|plain word"):
        RetexModel.from_experts(folder, {"a": folder}, progress=False)


def test_without_diffusers_it_says_what_to_install(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    monkeypatch.setitem(__import__("sys").modules, "diffusers.models", None)
    folder = _folder(tmp_path, "UNet2DModel")
    with pytest.raises(CheckpointError, match="pip install diffusers"):
        RetexModel.from_experts(folder, {"a": folder}, progress=False)


def _folder(folder: Path, name) -> Path:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps({"_class_name": name, "_diffusers_version": "0.30.0"}))
    save_file({"conv_in.weight": torch.zeros(3, 3)}, folder / "diffusion_pytorch_model.safetensors")
    return folder
