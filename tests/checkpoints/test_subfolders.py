"""Experts in folders of one repository, `org/repo/subfolder`: checkpoints and adapters, through the real client."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import writers
from families import FAMILIES
from helpers import assert_same, perturb
from hubs import serving
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints import open_source
from retex_hf.errors import CheckpointError

REPO = "org/experts"


def adapted(base: nn.Module, config: Any, folder: Path) -> nn.Module:
    """Save an adapter with numbers of its own; return the model that it makes of the base."""
    model = get_peft_model(deepcopy(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.merge_and_unload()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository with a base, a checkpoint and two adapters, and what each of them is."""
    torch.manual_seed(0)
    base = FAMILIES["bert"].make()
    experts = {
        "full": perturb(base, 1),
        "lora": adapted(base, LoraConfig(target_modules=["query"], r=2), tmp_path / "files" / "adapters" / "lora"),
        "loha": adapted(base, LoHaConfig(target_modules=["query"], r=2), tmp_path / "files" / "adapters" / "loha"),
    }
    writers.folder(base, tmp_path / "files" / "base")
    writers.folder(experts["full"], tmp_path / "files" / "full")
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "hub", monkeypatch) as served:
        commit = served.put(REPO, tmp_path / "files")
        yield base, experts, commit


def test_build(hub, tmp_path):
    base, experts, commit = hub
    cache = str(tmp_path / "cache")
    specs = {"full": f"{REPO}/full", "lora": f"{REPO}/adapters/lora", "loha": f"hf-hub:{REPO}/adapters/loha@{commit}"}
    config = RetexConfig(rank="full")
    actual = RetexModel.from_experts(f"{REPO}/base", specs, config, progress=False, cache_dir=cache)
    expected = RetexModel.from_experts(base, experts, config, progress=False)
    for task in experts:
        assert_same(actual.recover(task), expected.recover(task), rtol=1e-4, atol=1e-5)
    assert actual.retex_config.base_model == {"source": "hub", "id": f"{REPO}/base", "revision": commit}
    assert actual.retex_config.experts == {
        "full": {"source": "hub", "id": f"{REPO}/full", "revision": commit},
        "lora": {"source": "hub", "id": f"{REPO}/adapters/lora", "revision": commit, "adapter": "lora"},
        "loha": {"source": "hub", "id": f"{REPO}/adapters/loha", "revision": commit, "adapter": "loha"},
    }


def test_nothing_else_is_fetched(hub, tmp_path):
    cache = tmp_path / "cache"
    open_source(f"{REPO}/adapters/lora", "expert", adapters=True, cache_dir=str(cache))
    fetched = {str(file.relative_to(next(cache.rglob("snapshots/*")))) for file in cache.rglob("snapshots/*/**/*.*")}
    assert fetched == {
        f"adapters/lora/{name}" for name in ("README.md", "adapter_config.json", "adapter_model.safetensors")
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{REPO}/missing", "expert 'red': the repository 'org/experts' has no folder 'missing'"),
        (f"{REPO}/full/deeper", "expert 'red': the repository 'org/experts' has no folder 'full/deeper'"),
        (
            f"{REPO}/adapters",
            r"holds adapters in folders \['loha', 'lora'\]: append the name of one, as in '.../loha'",
        ),
        (f"{REPO}/../full", "is not the name of a folder within a repository"),
        (f"{REPO}/f*", "is not the name of a folder within a repository"),
        ("files/base/missing", "expert 'red': files/base/missing does not exist"),
    ],
)
def test_names_that_are_refused(spec, message, hub, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_source(spec, "expert 'red'", adapters=True, cache_dir=str(tmp_path / "cache"))


def test_a_base_that_is_an_adapter(hub, tmp_path):
    with pytest.raises(CheckpointError, match=r"^the base .* is a PEFT adapter; merge it into its base model first"):
        open_source(f"{REPO}/adapters/lora", "the base", cache_dir=str(tmp_path / "cache"))
