"""Files that are filled tensor by tensor: valid safetensors, aligned, and a journal of what is in them."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from retex_hf.checkpoints import TensorInfo, tensor_store
from retex_hf.checkpoints.sources import SAFETENSORS_DTYPES, open_files, weight_files
from retex_hf.checkpoints.tensor_store import FolderStore, create_file, data_offsets, encode_header, map_file

STEMS = {"model": ("model", 1000), "heads": ("retex_heads", None)}


def example_tensors() -> dict[str, torch.Tensor]:
    """One tensor of every dtype that files know, odd sizes, names that JSON escapes."""
    tensors = {}
    for index, dtype in enumerate(SAFETENSORS_DTYPES.values()):
        values = torch.arange(3 + 2 * index)
        tensors[f"größe.{index}"] = (values % 2 if dtype == torch.bool else values).to(dtype)
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), '"quoted"': torch.ones(2, 3)}


def infos_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def open_store(folder: Path) -> FolderStore:
    (folder / "artifact").mkdir(exist_ok=True)
    return FolderStore(folder / "artifact", folder, STEMS)


def test_filled_tensors_are_in_the_file_for_other_readers(tmp_path):
    tensors, path = example_tensors(), tmp_path / "x.safetensors"
    create_file(path, infos_of(tensors))
    for name, tensor in map_file(path, infos_of(tensors)).items():
        tensor.copy_(tensors[name])
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].float() if tensor.dtype.itemsize == 1 else found[name],
                           tensor.float() if tensor.dtype.itemsize == 1 else tensor), name  # fmt: skip
    with safe_open(path, framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_data_and_every_tensor_are_aligned(tmp_path):
    infos = infos_of(example_tensors())
    header, size = encode_header(infos)
    assert len(header) % 64 == 0
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    offsets = data_offsets(infos)
    assert all(start % infos[name].dtype.itemsize == 0 for name, (start, _) in offsets.items())
    spans = sorted(offsets.values())
    assert spans[0][0] == 0 and spans[-1][1] == size - len(header)
    assert all(left[1] == right[0] for left, right in pairwise(spans))


def test_a_file_of_the_same_form_keeps_its_contents_and_another_does_not(tmp_path):
    path, infos = tmp_path / "x.safetensors", {"a": TensorInfo((4,), torch.float32)}
    create_file(path, infos)
    map_file(path, infos)["a"].fill_(3)
    create_file(path, infos)
    assert torch.equal(load_file(path)["a"], torch.full((4,), 3.0))
    other = {"b": TensorInfo((4,), torch.float32)}
    create_file(path, other)
    assert torch.equal(load_file(path)["b"], torch.zeros(4))


def test_large_parts_are_sharded_with_an_index_and_others_are_not(tmp_path):
    infos = {f"layer.{index}": TensorInfo((10, 10), torch.float32) for index in range(5)}
    files = open_store(tmp_path)
    for part in ("model", "heads"):
        for index, tensor in enumerate(files.allocate(part, infos, {"total_parameters": 500}).values()):
            tensor.fill_(index)
    folder = tmp_path / "artifact"
    assert {file.name for file in folder.iterdir()} == {
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.safetensors.index.json", "retex_heads.safetensors",
    }  # fmt: skip
    assert set(files.files) == set(folder.iterdir())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 500, "total_size": 2000}
    for stem in ("model", "retex_heads"):
        source = open_files(weight_files(folder, (stem,)), stem)
        assert list(source.infos) and all(source.read(f"layer.{i}").eq(i).all() for i in range(5))


def test_the_journal_tells_a_second_start_what_is_done(tmp_path):
    first = open_store(tmp_path)
    first.record("Merging", '["a"]', {"a": True})
    first.record("Solving", '["a"]', [0.1, 1e-300])
    assert open_store(tmp_path).finished("Merging") == {}  # nothing is written before the tensors are on the disk
    first.sync()
    second = open_store(tmp_path)
    assert second.finished("Merging") == {'["a"]': {"a": True}}
    assert second.finished("Solving") == {'["a"]': [0.1, 1e-300]}
    assert second.finished("Drawing") == {}


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    first = open_store(tmp_path)
    first.record("Merging", '["a"]', True)
    first.record("Merging", '["b"]', True)
    first.sync()
    journal = tmp_path / "journal-0.jsonl"
    journal.write_text(journal.read_text()[:-3])
    second = open_store(tmp_path)
    assert second.finished("Merging") == {'["a"]': True}
    second.record("Merging", '["b"]', False)
    second.sync()
    assert open_store(tmp_path).finished("Merging") == {'["a"]': True, '["b"]': False}


def test_tensors_reach_the_disk_before_their_lines(tmp_path, monkeypatch):
    files = open_store(tmp_path)
    files.allocate("heads", {"a": TensorInfo((2,), torch.float32)})
    synced = []
    monkeypatch.setattr(
        tensor_store.os, "fsync", lambda descriptor: synced.append((tmp_path / "journal-0.jsonl").exists())
    )
    monkeypatch.setattr(tensor_store, "SYNC_SECONDS", 0.0)
    files.record("Merging", '["a"]', True)
    assert synced == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_memory_and_files_give_the_same_tensors(tmp_path, dtype):
    infos = {"a": TensorInfo((2, 3), dtype), "b": TensorInfo((), dtype)}
    for tensors in (tensor_store.MemoryStore().allocate("heads", infos), open_store(tmp_path).allocate("heads", infos)):
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
            name: (info.shape, info.dtype) for name, info in infos.items()
        }
        assert all(tensor.is_contiguous() for tensor in tensors.values())
