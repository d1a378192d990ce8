"""Sizes are those of the files, whether they are counted in memory or on disk."""

from __future__ import annotations

import pytest
from helpers import build_retex
from safetensors.torch import load_file
from signed import signed_classifier

from retex_hf.artifact.sizes import BODY, HEADS, RECOVERY, SIGNATURES, bytes_of, bytes_of_experts, sizes_of
from retex_hf.workflows.inspection import inspect_artifact


def test_sizes_are_those_of_the_files_and_of_the_experts(tmp_path):
    model = signed_classifier()
    model.save_pretrained(tmp_path)
    files = {file.name: bytes_of(load_file(file).values()) for file in tmp_path.glob("*.safetensors")}
    merged = load_file(tmp_path / "model.safetensors")
    head = bytes_of(tensor for name, tensor in merged.items() if name.startswith("classifier"))
    sizes = sizes_of(model.parts())
    assert sizes == {
        BODY: files["model.safetensors"] - head,
        RECOVERY: files["retex_recovery.safetensors"],
        HEADS: files["retex_heads.safetensors"],
        SIGNATURES: files["retex_signatures.safetensors"],
    }
    wholes = [model.merge_and_unload(task).state_dict().values() for task in model.tasks]
    assert bytes_of_experts(sizes, len(model.tasks)) == sum(bytes_of(tensors) for tensors in wholes)


@pytest.mark.parametrize("family", ["t5", "gpt2", "resnet", "open_clip-vit"])
def test_an_artifact_is_counted_alike_on_disk_and_in_memory(family, tmp_path):
    model, _ = build_retex(family, rank=4, recovery_dtype="int8")
    model.save_pretrained(tmp_path)
    found = inspect_artifact(tmp_path, progress=False)["storage_bytes"]
    sizes = sizes_of(model.parts())
    integers = 8 * sum(
        tensor.dtype.itemsize == 8 and not tensor.is_floating_point() for tensor in model.model.buffers()
    )
    assert found.pop(BODY) == sizes.pop(BODY) + integers  # counters of batch normalisation are in the file
    assert found == sizes
