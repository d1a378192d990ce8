"""Every form of checkpoint is read: the right values, one tensor at a time, and never by running code."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import psutil
import pytest
import torch
import writers
from families import FAMILIES, OPEN_CLIP_VIT
from helpers import TASKS, assert_same, make_experts
from safetensors.torch import save_file
from torch import nn

from retex_hf import CheckpointError, RetexConfig, RetexModel
from retex_hf.backends import library_of
from retex_hf.checkpoints import open_source, take_inventory
from retex_hf.checkpoints.sources import MemorySource, SafetensorsSource

FOLDERS = {
    "folder": writers.folder,
    "path as text": writers.text_path,
    "shards": writers.sharded,
    "bin": writers.bin_folder,
    "legacy bin": writers.legacy_bin_folder,
    "bin shards": writers.sharded_bin,
    "module": writers.module,
}
BARE = {
    "safetensors file": writers.safetensors_file,
    "bin file": writers.bin_file,
    "state dict": writers.state_dict,
}
OPEN_CLIP = {
    "open_clip folder": lambda model, path: str(
        writers.open_clip_folder(model, path, OPEN_CLIP_VIT, "open_clip_model.safetensors")
    ),
    "local-dir": lambda model, path: (
        "local-dir:" + str(writers.open_clip_folder(model, path, OPEN_CLIP_VIT, "open_clip_model.safetensors"))
    ),
    "open_clip bin": lambda model, path: writers.open_clip_folder(
        model, path, OPEN_CLIP_VIT, "open_clip_pytorch_model.bin"
    ),
}
COMMITS = {"main": "a" * 40, "v2": "b" * 40}


def make_suite(family: str) -> tuple[nn.Module, dict[str, nn.Module]]:
    torch.manual_seed(0)
    base = FAMILIES[family].make().eval()
    return base, make_experts(base)


@pytest.fixture(scope="module")
def bert():
    return make_suite("bert")


@pytest.fixture(scope="module")
def open_clip():
    return make_suite("open_clip-vit")


def assert_reads(spec, model: nn.Module) -> None:
    """Names, shapes and dtypes are announced, and the values are the model's, to the bit."""
    source = open_source(spec, "expert")
    entries, unexpected = library_of(model).align(model, source)
    assert unexpected == []
    expected = model.state_dict()
    assert set(entries) >= set(take_inventory(model).shapes)
    for name, (info, read) in entries.items():
        tensor = read()
        assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(tensor, expected[name]), name


def assert_recovers(base, specs: dict, experts: dict[str, nn.Module], **options) -> RetexModel:
    model = RetexModel.from_experts(base, specs, RetexConfig(rank="full"), progress=False, **options)
    for task in TASKS:
        assert_same(model.recover(task), dict(experts[task].state_dict()), rtol=1e-6, atol=1e-6)
    return model


@pytest.mark.parametrize("write", [*FOLDERS.values(), *BARE.values()], ids=[*FOLDERS, *BARE])
def test_transformers_checkpoint(bert, write, tmp_path):
    base, experts = bert
    specs = {task: write(expert, tmp_path / task) for task, expert in experts.items()}
    assert_reads(specs["red"], experts["red"])
    assert_recovers(write(base, tmp_path / "base") if write in FOLDERS.values() else base, specs, experts)


def test_every_expert_may_come_in_another_form(bert, tmp_path):
    base, experts = bert
    forms = {"red": writers.sharded, "green": writers.state_dict, "blue": writers.legacy_bin_folder}
    specs = {task: write(experts[task], tmp_path / task) for task, write in forms.items()}
    assert_recovers(writers.bin_folder(base, tmp_path / "base"), specs, experts)


@pytest.mark.parametrize("write", OPEN_CLIP.values(), ids=OPEN_CLIP)
def test_open_clip_folder(open_clip, write, tmp_path):
    base, experts = open_clip
    specs = {task: write(expert, tmp_path / task) for task, expert in experts.items()}
    assert_reads(specs["red"], experts["red"])
    assert_recovers(write(base, tmp_path / "base"), specs, experts)


@pytest.mark.parametrize("write", [writers.training_checkpoint, *BARE.values()], ids=["training checkpoint", *BARE])
def test_bare_open_clip_weights_on_a_base_folder(open_clip, write, tmp_path):
    base, experts = open_clip
    specs = {task: write(expert, tmp_path / task) for task, expert in experts.items()}
    assert_reads(specs["red"], experts["red"])
    assert_recovers(OPEN_CLIP["local-dir"](base, tmp_path / "base"), specs, experts)


def test_modules_and_state_dicts_are_left_as_they_were(bert):
    base, experts = bert
    before = {task: writers.tensors_of(model) for task, model in (("base", base), *experts.items())}
    specs = experts | {"red": experts["red"].state_dict()}
    assert_recovers(base, specs, experts)
    for task, model in (("base", base), *experts.items()):
        assert_same(dict(model.state_dict()), before[task], exact=True)
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.fixture
def hub_cache(bert, tmp_path):
    """Two revisions of `org/base`: the base, and an expert under the tag `v2`."""
    base, experts = bert
    writers.into_hub_cache(writers.folder(base, tmp_path / "base"), tmp_path / "hub", "org/base", COMMITS["main"])
    red = writers.bin_folder(experts["red"], tmp_path / "red")
    writers.into_hub_cache(red, tmp_path / "hub", "org/base", COMMITS["v2"], ref="v2")
    return str(tmp_path / "hub")


@pytest.mark.parametrize(
    ("spec", "revision", "task"),
    [
        ("org/base", "main", "base"),
        ("hf-hub:org/base", "main", "base"),
        ("org/base@v2", "v2", "red"),
        (f"org/base@{COMMITS['v2']}", "v2", "red"),
    ],
)
def test_hub_id_is_resolved_to_a_commit(bert, hub_cache, spec, revision, task):
    source = open_source(spec, "the base", cache_dir=hub_cache)
    assert source.provenance == {"source": "hub", "id": "org/base", "revision": COMMITS[revision]}
    model = bert[0] if task == "base" else bert[1][task]
    assert_same({name: source.read(name) for name in source.infos}, dict(model.state_dict()), exact=True)


def test_build_from_the_hub_keeps_the_provenance(bert, hub_cache):
    experts = bert[1]
    model = assert_recovers("org/base", experts | {"red": "org/base@v2"}, experts, cache_dir=hub_cache)
    config = model.retex_config
    assert config.base_model == {"source": "hub", "id": "org/base", "revision": COMMITS["main"]}
    assert config.experts["red"] == {"source": "hub", "id": "org/base", "revision": COMMITS["v2"]}
    assert config.experts["blue"] == {"source": "memory", "id": "BertModel"}


def test_provenance_of_local_files_does_not_tell_where_they_lie(bert, tmp_path):
    base, experts = bert
    specs = {
        "red": writers.folder(experts["red"], tmp_path / "red-expert"),
        "green": writers.bin_file(experts["green"], tmp_path / "green-expert"),
        "blue": experts["blue"].state_dict(),
    }
    model = assert_recovers(base, specs, experts)
    assert model.retex_config.experts == {
        "red": {"source": "local", "id": "red-expert"},
        "green": {"source": "local", "id": "green-expert.bin"},
        "blue": {"source": "memory", "id": "state_dict"},
    }


def test_provenance_of_a_module_is_where_it_was_loaded_from(bert, tmp_path):
    base, experts = bert
    loaded = type(base).from_pretrained(writers.folder(base, tmp_path / "my-base"))
    assert open_source(loaded, "the base").provenance == {"source": "memory", "id": "my-base"}
    loaded.config._name_or_path = "org/base"
    assert open_source(loaded, "the base").provenance == {"source": "memory", "id": "org/base"}
    assert open_source(experts["red"], "expert").provenance == {"source": "memory", "id": "BertModel"}


def test_a_folder_wins_over_a_hub_id_of_the_same_name(bert, hub_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writers.folder(bert[1]["blue"], Path("org") / "base")
    source = open_source("org/base", "the base", cache_dir=hub_cache)
    assert source.provenance == {"source": "local", "id": "base"}


@pytest.mark.parametrize("write", [writers.folder, writers.sharded], ids=["folder", "shards"])
def test_names_and_shapes_are_known_without_reading(bert, write, tmp_path, monkeypatch):
    base, experts = bert
    path = write(experts["red"], tmp_path / "red")

    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsSource, "read", refuse)
    source = open_source(path, "expert 'red'")
    entries, _ = library_of(base).align(base, source)
    assert {name: info.shape for name, (info, _) in entries.items()} == take_inventory(base).shapes


@pytest.mark.skipif(os.name == "nt", reason="needs sparse files")
def test_reading_one_tensor_of_a_large_file_costs_that_tensor(tmp_path):
    """Two gigabytes that nobody asked for stay on disk (where, being a hole in the file, they do not exist either)."""
    large, file = 2**29, tmp_path / "large.safetensors"
    header = {
        "large": {"dtype": "F32", "shape": [large], "data_offsets": [0, 4 * large]},
        "small": {"dtype": "F32", "shape": [3], "data_offsets": [4 * large, 4 * large + 12]},
    }
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.seek(4 * large, os.SEEK_CUR)
        stream.write(struct.pack("<3f", 1.0, 2.0, 3.0))
    process = psutil.Process()
    before = process.memory_info().rss
    source = open_source(file, "expert")
    assert source.infos["large"].shape == (large,)
    assert source.read("small").tolist() == [1.0, 2.0, 3.0]
    assert process.memory_info().rss - before < 100e6


def test_bin_files_are_mapped_not_loaded(tmp_path):
    tensors = {"large": torch.zeros(2**24), "small": torch.arange(3.0)}  # 64 MB
    torch.save(tensors, tmp_path / "weights.bin")
    del tensors
    process = psutil.Process()
    before = process.memory_info().rss
    source = open_source(tmp_path / "weights.bin", "expert")
    assert source.read("small").tolist() == [0.0, 1.0, 2.0]
    assert process.memory_info().rss - before < 16e6


def test_memory_source_reads_the_tensor_itself():
    tensor = torch.randn(3, requires_grad=True)
    source = open_source({"w": tensor}, "expert")
    assert isinstance(source, MemorySource)
    assert source.read("w").data_ptr() == tensor.data_ptr()
    assert not source.read("w").requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64])
def test_dtypes_are_known_without_reading(dtype, tmp_path):
    save_file({"w": torch.ones(2).to(dtype)}, tmp_path / "w.safetensors")
    source = open_source(tmp_path / "w.safetensors", "expert")
    assert source.infos["w"].dtype == source.read("w").dtype == dtype


UNREAD = [
    torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", UNREAD, ids=str)
@pytest.mark.parametrize("write", [save_file, torch.save, None], ids=["safetensors", "bin", "memory"])
def test_dtypes_that_are_not_read(write, dtype, tmp_path):
    spec = {"fine": torch.ones(2), "odd": torch.ones(2).to(dtype)}
    if write is not None:
        path = tmp_path / ("w.bin" if write is torch.save else "w.safetensors")
        write(spec, path)
        spec = path
    with pytest.raises(CheckpointError, match=r"tensor 'odd' (has the unsupported dtype|is not a dense|is in a)"):
        open_source(spec, "expert")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (lambda: torch.ones(2, 2, device="meta"), "is on the meta device: it has no numbers"),
        (lambda: torch.eye(2).to_sparse(), "has the layout torch.sparse_coo, expected a dense tensor"),
        (lambda: torch.eye(2).to_sparse_csr(), "has the layout torch.sparse_csr, expected a dense tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "has the layout nested, expected a dense"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "has the unsupported dtype torch.qint8",
        ),
    ],
)
def test_layouts_in_memory_that_are_not_read(tensor, says):
    with pytest.raises(CheckpointError, match=rf"^expert: tensor 'odd' {says}"):
        open_source({"fine": torch.ones(2), "odd": tensor()}, "expert")


def test_expanded_tensors_of_the_caller_are_read(bert):
    """They are the caller's own, and take no more than the caller has."""
    base, experts = bert
    name = "pooler.dense.weight"
    own = torch.randn(1, 16).expand(16, 16)
    expert = dict(experts["red"].state_dict()) | {name: own}
    model = RetexModel.from_experts(base, {"red": expert}, RetexConfig(rank="full"), check_base=False, progress=False)
    torch.testing.assert_close(model.recover("red")[name], own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("role", ["base", "expert"])
def test_weights_in_whole_numbers_are_refused(bert, role):
    base, experts = bert
    odd = dict(experts["red"].state_dict()) | {"pooler.dense.bias": torch.ones(16, dtype=torch.int64)}
    given = (odd, {"red": experts["red"]}) if role == "base" else (base, {"red": odd})
    with pytest.raises(CheckpointError, match=r"tensor 'pooler.dense.bias' has dtype torch.int64, expected floating"):
        RetexModel.from_experts(*given, progress=False)


class Bomb:
    """Unpickling it would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(bert, zipped, tmp_path):
    base, experts = bert
    trace, file = tmp_path / "ran", tmp_path / "bad.bin"
    weights = dict(experts["red"].state_dict()) | {"payload": Bomb(trace)}
    torch.save(weights, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"bad\.bin cannot be read as a file of plain tensors: .*run code"):
        RetexModel.from_experts(base, {"red": file}, progress=False)
    assert not trace.exists()
    torch.load(file, weights_only=False)  # the bomb is live
    assert trace.exists()
