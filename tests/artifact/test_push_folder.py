"""`retex push`: a saved folder is verified and uploaded as it is, through the real Hub client."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import assert_same, build_retex, edit_json
from hubs import READ, WRITE, serving
from huggingface_hub import CommitOperationAdd, HfApi
from trust.subjects import make_artifact, make_tokenizer, mixed_batch

from retex_hf import ArtifactError, RetexModel
from retex_hf.artifact.hub import RecordedAdd
from retex_hf.artifact.schema import read_description, read_manifest
from retex_hf.cli import main
from retex_hf.workflows.sharing import push_folder

REPO = "org/retex-bert"
WEIGHTS = ["model.safetensors", "retex_recovery.safetensors"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving(tmp_path / "hub", monkeypatch) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_artifact(tmp_path / "artifact")


@pytest.fixture
def quick(monkeypatch):
    """Cards without their figures, which take most of the time of a push."""
    monkeypatch.setattr("retex_hf.artifact.card.writing.DRAWN", {})


def content(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def recorded(folder: Path) -> set[str]:
    return {*read_manifest(folder, read_description(folder)[1]), "retex_config.json"}


@torch.no_grad()
def test_a_folder_is_uploaded_byte_by_byte(hub, folder, tmp_path, monkeypatch):
    before, times = content(folder), {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    with monkeypatch.context() as patch:
        for name in ("save_file", "save_torch_state_dict"):
            patch.setattr(f"retex_hf.artifact.writing.{name}", None)  # nothing is written anew
        patch.setattr("retex_hf.backends.hf_transformers.load", None)  # and nothing loaded
        info = push_folder(folder, REPO, private=True, token=WRITE, commit_message="first")
    assert hub.messages(REPO) == ["initial commit", "first"]
    assert info.oid == hub.repository(REPO).resolve("main")
    files = hub.files(REPO)
    assert set(files) == {*recorded(folder), "README.md", "figures/errors.png", ".gitattributes"}
    assert {name: files[name] for name in recorded(folder)} == {name: before[name] for name in recorded(folder)}
    assert f'RetexModel.from_pretrained("{REPO}")' in files["README.md"].decode()
    assert not any(str(tmp_path).encode() in data or WRITE.encode() in data for data in files.values())
    assert content(folder) == before
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == times
    inputs = mixed_batch(make_tokenizer())
    loaded = RetexModel.from_pretrained(REPO, cache_dir=tmp_path / "cache", token=READ)
    assert_same(loaded(**inputs), RetexModel.from_pretrained(folder)(**inputs), exact=True)


def test_weights_are_not_copied(hub, quick, folder, monkeypatch):
    sent = {}
    commit = HfApi.create_commit

    def note(self, repo_id, operations, **options):
        added = [operation for operation in operations if isinstance(operation, CommitOperationAdd)]
        sent.update({operation.path_in_repo: operation.path_or_fileobj for operation in added})
        return commit(self, repo_id, operations, **options)

    monkeypatch.setattr(HfApi, "create_commit", note)
    push_folder(folder, REPO, token=WRITE)
    assert {name: sent[name] for name in WEIGHTS} == {name: str(folder / name) for name in WEIGHTS}


def test_nothing_but_the_artifact_is_uploaded(hub, quick, folder):
    others = {"notes.txt": "mine", ".env": "PASSWORD=word", "figures/photo.png": "private", "data/rows.csv": "1"}
    for name, text in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    push_folder(folder, REPO, token=WRITE)
    assert set(hub.files(REPO)) == {*recorded(folder), "README.md", ".gitattributes"}


def test_an_earlier_artifact_is_replaced_and_other_files_stay(hub, quick, folder):
    RetexModel.from_pretrained(folder).push_to_hub(REPO, token=WRITE, max_shard_size="10KB")
    shards = {name for name in hub.files(REPO) if "-of-" in name or name.endswith(".index.json")}
    assert len(shards) > 4
    own = {"notes.txt": b"mine", "figures/photo.png": b"a picture"}
    hub.put(REPO, own)
    push_folder(folder, REPO, token=WRITE)
    files = hub.files(REPO)
    assert not shards & set(files)
    assert own.items() <= files.items()
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_what_a_person_wrote_on_the_card_is_kept(hub, quick, folder):
    push_folder(folder, REPO, token=WRITE)
    card = folder / "README.md"
    said = "Say here what the model is for"
    card.write_text(card.read_text().replace(said, "It sorts mail. It"))
    push_folder(folder, REPO, token=WRITE)
    text = hub.files(REPO)["README.md"].decode()
    assert "It sorts mail." in text and said not in text
    hub.put(REPO, {"README.md": text.replace("It sorts mail.", "It sorts post.").encode()})
    push_folder(folder, REPO, token=WRITE)
    assert "It sorts post." in hub.files(REPO)["README.md"].decode()
    assert "It sorts mail." in card.read_text()


@pytest.mark.parametrize("family", ["bert-classifier", "roberta", "clip", "vit", "llama-tied", "t5", "open_clip-vit"])
def test_the_card_is_that_of_the_loaded_model(hub, quick, tmp_path, family):
    model, _ = build_retex(family)
    model.save_pretrained(tmp_path / "artifact")
    push_folder(tmp_path / "artifact", REPO, token=WRITE, revision="folder")
    RetexModel.from_pretrained(tmp_path / "artifact").push_to_hub(REPO, token=WRITE, revision="model")
    cards = [hub.files(REPO, revision)["README.md"].decode() for revision in ("folder", "model")]
    assert cards[0] == cards[1]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("name", [*WEIGHTS, "config.json", "tokenizer.json", "retex_config.json"])
def test_a_changed_file_is_refused_before_the_hub_is_asked(hub, folder, name):
    if name == "retex_config.json":
        edit_json(folder / name, temperature=3.0)
    else:
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"\0", b"\1", 1) + b" ")
    with pytest.raises(ArtifactError, match=f"{name} is not"):
        push_folder(folder, REPO, token=WRITE)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.model", "retex_rows.safetensors"])
def test_a_file_that_would_be_read_with_it_is_refused(hub, folder, name):
    assert name not in recorded(folder)
    (folder / name).write_bytes(b"{}")
    with pytest.raises(ArtifactError, match="does not list"):
        push_folder(folder, REPO, token=WRITE)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        ("verified", "config.json"),
        *((moment, name) for moment in ("verified", "announced", "transferred", "sent") for name in WEIGHTS),
    ],
)
def test_a_file_that_changes_meanwhile_is_never_committed(hub, quick, folder, monkeypatch, moment, name):
    hub.put(REPO, {"notes.txt": b"mine"})
    files = hub.files(REPO)
    create, transfer = HfApi.create_repo, HfApi.preupload_lfs_files

    def change_and_create(*args, **options):
        change(folder / name)
        return create(*args, **options)

    def change_and_transfer(*args, **options):
        change(folder / name)
        return transfer(*args, **options)

    def transfer_and_change(*args, **options):
        transfer(*args, **options)
        change(folder / name)

    def do_not_check(operation):
        if operation.name == name:
            change(folder / name)

    if moment == "verified":
        monkeypatch.setattr(HfApi, "create_repo", change_and_create)
    elif moment == "announced":
        monkeypatch.setattr(HfApi, "preupload_lfs_files", change_and_transfer)
    elif moment == "transferred":
        monkeypatch.setattr(HfApi, "preupload_lfs_files", transfer_and_change)
    else:
        monkeypatch.setattr(RecordedAdd, "check_sent", do_not_check)
    with pytest.raises(ArtifactError, match=f"{name} is not the file that retex_config.json records"):
        push_folder(folder, REPO, token=WRITE)
    assert hub.files(REPO) == files


def test_a_folder_saved_anew_while_it_is_read_is_refused(hub, folder, tmp_path, monkeypatch):
    other = make_artifact(tmp_path / "other", rank=2)
    read = push_folder.__globals__["read_side_files"]

    def replace(place: Path) -> dict[str, bytes]:
        found = read(place)
        (folder / "retex_config.json").write_bytes((other / "retex_config.json").read_bytes())
        return found

    monkeypatch.setattr("retex_hf.workflows.sharing.read_side_files", replace)
    with pytest.raises(ArtifactError, match="was saved again while it was read"):
        push_folder(folder, REPO, token=WRITE)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md"])
def test_links_to_elsewhere_are_not_followed(hub, folder, tmp_path, name):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="is a link to"):
        push_folder(folder, REPO, token=WRITE)
    assert not any("/commit/" in str(request) for request in hub.requests)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_sends_files_as_they_are_unless_told_a_size(hub, quick, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", WRITE)
    model = RetexModel.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = {name for name in recorded(folder) if name.startswith("model-")}
    assert len(shards) > 1
    assert main(["push", str(folder), REPO, "--commit-message", "as it is"]) == 0
    assert capsys.readouterr().out.strip().startswith(f"{hub.endpoint}/{REPO}/commit/")
    assert shards <= set(hub.files(REPO))
    assert main(["push", str(folder), REPO, "--max-shard-size", "5GB"]) == 0
    assert not shards & set(hub.files(REPO)) and "model.safetensors" in hub.files(REPO)
    assert hub.messages(REPO) == ["initial commit", "as it is", "Upload ReTeX model"]
