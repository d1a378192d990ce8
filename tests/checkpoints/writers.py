"""Models written to disk in every form that a checkpoint comes in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Writer = Callable[[nn.Module, Path], Any]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A state dict in which every name has memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def folder(model: nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    assert (path / "model.safetensors").is_file()
    return path


def text_path(model: nn.Module, path: Path) -> str:
    return str(folder(model, path))


def sharded(model: nn.Module, path: Path) -> Path:
    model.save_pretrained(path, max_shard_size="8KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def _bin_folder(model: nn.Module, path: Path) -> Path:
    path.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    return path


def bin_folder(model: nn.Module, path: Path) -> Path:
    torch.save(tensors_of(model), _bin_folder(model, path) / "pytorch_model.bin")
    return path


def legacy_bin_folder(model: nn.Module, path: Path) -> Path:
    """As torch before 1.6 wrote it, and as many checkpoints on the Hub still are."""
    file = _bin_folder(model, path) / "pytorch_model.bin"
    torch.save(tensors_of(model), file, _use_new_zipfile_serialization=False)
    return path


def sharded_bin(model: nn.Module, path: Path) -> Path:
    _bin_folder(model, path)
    tensors = tensors_of(model)
    weight_map = {name: f"pytorch_model-0000{index % 2 + 1}-of-00002.bin" for index, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


def safetensors_file(model: nn.Module, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".safetensors")
    save_file(tensors_of(model), file)
    return file


def bin_file(model: nn.Module, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".bin")
    torch.save(tensors_of(model), file)
    return file


def module(model: nn.Module, path: Path) -> nn.Module:
    return model


def state_dict(model: nn.Module, path: Path) -> dict[str, Tensor]:
    return model.state_dict()


def training_checkpoint(model: nn.Module, path: Path) -> Path:
    """What OpenCLIP's training script saves, from a distributed run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".pt")
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    weights = {f"module.{name}": tensor for name, tensor in tensors_of(model).items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": weights, "optimizer": optimizer}, file)
    return file


def open_clip_folder(model: nn.Module, path: Path, config: dict[str, Any], file: str) -> Path:
    path.mkdir(parents=True)
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    text = json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
    (path / "open_clip_config.json").write_text(text, encoding="utf-8")
    write = save_file if file.endswith(".safetensors") else torch.save
    write(tensors_of(model), path / file)
    return path


def into_hub_cache(path: Path, cache: Path, repo_id: str, commit: str, ref: str = "main") -> None:
    """Turn a folder into a snapshot in the layout of the Hub's cache: blobs, links to them, and a reference."""
    root = cache / f"models--{repo_id.replace('/', '--')}"
    for name in ("blobs", "refs", "snapshots"):
        (root / name).mkdir(parents=True, exist_ok=True)
    snapshot = root / "snapshots" / commit
    shutil.move(path, snapshot)
    for file in list(snapshot.iterdir()):
        blob = root / "blobs" / f"{commit[:8]}-{file.name}"
        shutil.move(file, blob)
        file.symlink_to(blob)
    (root / "refs" / ref).write_text(commit, encoding="utf-8")
