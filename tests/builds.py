"""Builds into folders, compared with builds in memory, and killed on the way."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import torch
from families import Family
from helpers import TASKS, make_experts
from safetensors.torch import load_file
from torch import nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.backends import library_of, openclip
from retex_hf.build.build import build_folder
from retex_hf.checkpoints import tensor_store


def save_family(family: Family, folder: Path) -> tuple[Path, dict[str, Path]]:
    base = family.make().eval()
    return save_models(base, make_experts(base), folder, family)


def save_models(
    base: nn.Module, experts: dict[str, nn.Module], folder: Path, family: Family | None = None
) -> tuple[Path, dict[str, Path]]:
    """Base and experts on disk, as their library writes them."""
    folders = {name: folder / name for name in ("base", *experts)}
    for name, model in {"base": base, **experts}.items():
        folders[name].mkdir(parents=True)
        if family is not None and family.model_config is not None:
            openclip.describe(model, family.model_config, None, None)
        library_of(model).save(model, folders[name], "5GB")
    return folders.pop("base"), folders


SHARDS = re.compile(r"\.safetensors(\.index\.json)?$")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whatever files they are in; the parts of an artifact apart."""
    found = {}
    for file in folder.glob("*.safetensors"):
        part = file.name.split(".")[0].split("-00")[0]
        found |= {f"{part}: {name}": tensor for name, tensor in load_file(file).items()}
    return found


def assert_same_artifact(ours: Path, expected: Path) -> None:
    """The same tensors to the bit, and the same texts; shards aside, the same files."""
    found, wanted = tensors_of(ours), tensors_of(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name
    texts = [
        {path.name: path.read_text() for path in folder.iterdir() if not SHARDS.search(path.name)}
        for folder in (ours, expected)
    ]
    for found in texts:
        found |= {name: json.loads(text) for name, text in found.items() if name.endswith(".json")}
        # The same tensors may lie in another order in a file, which then has another checksum.
        del found["retex_config.json"]["artifact"]["files"], found["retex_config.json"]["artifact"]["seal"]
        # A card calls its folder by name, and the digests of what names it differ with the name.
        card = found["README.md"].replace(ours.name, "NAME").replace(expected.name, "NAME")
        found["README.md"] = re.sub(r"<!-- (retex:usage|retex-written) \w+ -->", r"<!-- \1 -->", card)
    assert texts[0] == texts[1]


def check(base, experts, config: RetexConfig, folder: Path, **options) -> RetexModel:
    """Build into a folder and in memory, and compare."""
    RetexModel.from_experts(base, experts, config, progress=False, **options).save_pretrained(folder / "memory")
    model = RetexModel.from_experts(base, experts, config, progress=False, output_dir=folder / "disk", **options)
    assert_same_artifact(folder / "disk", folder / "memory")
    assert hidden(folder) == []
    return model


def hidden(folder: Path) -> list[str]:
    """What a build has left beside its target."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def kill_build(folder: Path, target: Path, stage: str, count: int, config: dict) -> None:
    """A build in a process of its own that dies after `count` pieces of a stage."""
    child = os.fork()  # faster by seconds than a new interpreter
    if child == 0:
        try:
            _build_and_die(folder, target, stage, count, config)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _build_and_die(folder: Path, target: Path, stage: str, count: int, config: dict) -> None:
    record, done = tensor_store.FolderStore.record, []

    def killing(self, name, key, facts):
        record(self, name, key, facts)
        done.append(name)
        if done.count(stage) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    tensor_store.FolderStore.record = killing
    tensor_store.SYNC_SECONDS = 0.0
    experts = {task: folder / task for task in TASKS}
    build_folder(folder / "base", experts, RetexConfig(**config), target, progress=False)
