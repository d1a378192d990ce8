"""What was compared with its checksum is what is used, whatever happens to the files meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
from helpers import assert_same
from trust.subjects import make_artifact, make_model, make_tokenizer, mixed_batch

from retex_hf import ArtifactError, RetexModel, verify
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.checkpoints import manifest

INPUTS = mixed_batch(make_tokenizer())


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_artifact(tmp_path / "artifact")


def write_over(path: Path, data: bytes) -> None:
    """Change a file in place, as a careless copy does."""
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("name", ["model.safetensors", "retex_recovery.safetensors", "config.json"])
@torch.no_grad()
def test_a_file_changed_right_after_its_comparison_is_not_read_again(folder, monkeypatch, name):
    expected = RetexModel.from_pretrained(folder)(**INPUTS, task="red")
    compare = manifest.read_verified

    def compare_then_change(where: Path, file: str, record: manifest.FileRecord) -> bytes:
        data = compare(where, file, record)
        if file == name:
            write_over(where / file, bytes(len(data)))
        return data

    monkeypatch.setattr(manifest, "read_verified", compare_then_change)
    assert_same(RetexModel.from_pretrained(folder)(**INPUTS, task="red"), expected, exact=True)
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match=f"{name} is not the file"):
        RetexModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "retex_recovery.safetensors"])
@torch.no_grad()
def test_weights_that_change_in_place_are_refused_or_not_used(folder, name):
    expected = RetexModel.from_pretrained(folder)(**INPUTS, task="red")
    path, stop = folder / name, threading.Event()
    right = path.read_bytes()
    wrong = right[:-64] + bytes(64)

    def change() -> None:
        while not stop.is_set():
            write_over(path, wrong)
            stop.wait(0.002)
            write_over(path, right)
            stop.wait(0.002)

    thread = threading.Thread(target=change)
    thread.start()
    loaded = 0
    try:
        for _ in range(40):
            try:
                model = RetexModel.from_pretrained(folder)
            except ArtifactError:
                continue
            loaded += 1
            assert_same(model(**INPUTS, task="red"), expected, exact=True)
    finally:
        stop.set()
        thread.join()


@torch.no_grad()
def test_a_loaded_model_does_not_change_with_its_files(folder):
    model = RetexModel.from_pretrained(folder)
    expected = [model(**INPUTS, task=task) for task in model.tasks]
    fresh = RetexModel.from_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        write_over(file, bytes(file.stat().st_size))
        os.truncate(file, 0)  # mapped pages beyond the end would end the process
    for task, output in zip(model.tasks, expected, strict=True):
        assert_same(fresh(**INPUTS, task=task), output, exact=True)


def test_a_tokenizer_is_read_once(folder, monkeypatch):
    model = RetexModel.from_pretrained(folder)
    expected = load_preprocessor(folder, model.model)(["rose sky"])
    compare = manifest.read_verified

    def compare_then_change(where: Path, file: str, record: manifest.FileRecord) -> bytes:
        data = compare(where, file, record)
        write_over(where / file, b" " * len(data))
        return data

    monkeypatch.setattr(manifest, "read_verified", compare_then_change)
    again = load_preprocessor(folder, model.model)(["rose sky"])
    assert torch.equal(again["input_ids"], expected["input_ids"])


def _save_again_and_again(folder: Path, stop: multiprocessing.Event) -> None:
    torch.set_num_threads(1)
    models = [make_model(rank=rank) for rank in (2, 4)]
    while not stop.is_set():
        for model in models:
            model.save_pretrained(folder)


@torch.no_grad()
def test_readers_beside_a_writer_read_one_artifact_or_the_other(tmp_path):
    folder = tmp_path / "artifact"
    models = [make_model(rank=rank) for rank in (2, 4)]
    outputs = [model(**INPUTS, task="red").logits for model in models]
    models[0].save_pretrained(folder)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=_save_again_and_again, args=(folder, stop), daemon=True)
    problems: list[str] = []
    seen: set[int] = set()

    def read() -> None:
        for turn in range(40):
            try:
                logits = RetexModel.from_pretrained(folder, verify=turn % 2 == 0)(**INPUTS, task="red").logits
            except ArtifactError as error:
                if "times while it was read" not in str(error):
                    problems.append(repr(error))
                continue
            except Exception as error:
                problems.append(repr(error))
                continue
            alike = [index for index, output in enumerate(outputs) if torch.allclose(logits, output, atol=1e-4)]
            seen.update(alike)
            if len(alike) != 1:
                problems.append("a mixture of two artifacts")

    writer.start()
    readers = [threading.Thread(target=read) for _ in range(2)]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    finally:
        stop.set()
        writer.join(60)
    assert problems == []
    verify(folder)
    # transformers patches torch while it makes a model; threads that do so at once leave the patches behind.
    assert torch.nn.init.normal_(torch.zeros(8)).any()
    assert make_model().get_base_model().bert.embeddings.word_embeddings.weight.std() > 0
