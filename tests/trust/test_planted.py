"""What others have put where we write: links, pipes, prepared builds. None of it is followed or believed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from small_disks import small_disk
from trust import killed
from trust.killed import Place, answers, build, prepare_folders, recipe, train
from trust.subjects import make_artifact
from users import within

from retex_hf import ArtifactError, RetexModel, WriteError, verify
from retex_hf.artifact.plots import plot_errors, save_figures
from retex_hf.artifact.recipe import Recipe
from retex_hf.build import build as building
from retex_hf.checkpoints import tensor_store
from retex_hf.utils import atomic_folder, unfinished_builds
from retex_hf.utils.atomic_file import whole_file
from retex_hf.utils.atomic_folder import (
    emptied,
    heal,
    interrupted_build,
    keep_files,
    replacing,
    scratch_folder,
    workshop,
)
from retex_hf.utils.folder_handles import OpenFolder

PREPARED = "0" * 16


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def precious(tmp_path) -> Path:
    """A folder with the names that staging folders have."""
    folder = tmp_path / "precious"
    for name in ("file", "lock", "build.json", "old/file", "new/file", "artifact/file"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


@pytest.fixture
def target(tmp_path) -> Path:
    folder = tmp_path / "parent" / "target"
    folder.mkdir(parents=True)
    (folder / "own").write_text("old")
    return folder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    folder = make_artifact(tmp_path_factory.mktemp("original") / "artifact")
    RetexModel.from_pretrained(folder).save_description(folder)
    return folder


def rewrite(target: Path) -> None:
    with replacing(target, ("own*",)) as new:
        (new / "own").write_text("new")


# ---- staging folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".target.saving", f".target.{PREPARED}.saving"])
def test_a_link_beside_a_folder_is_not_followed_when_it_is_saved(name, target, precious):
    before = content(precious)
    (target.parent / name).symlink_to(precious)
    rewrite(target)
    assert content(target) == {"own": "new"}
    assert content(precious) == before
    assert (target.parent / name).is_symlink()


@pytest.mark.parametrize("name", [".target.saving", f".target.{PREPARED}.saving"])
def test_a_link_beside_a_folder_that_is_missing_is_not_followed_when_it_is_looked_for(name, target, precious):
    before = content(precious)
    shutil.rmtree(target)
    (target.parent / name).symlink_to(precious)
    heal(target)
    assert not target.exists() and content(precious) == before
    with pytest.raises(ArtifactError, match="does not exist"):
        RetexModel.from_pretrained(target)
    assert not target.exists() and content(precious) == before


def test_a_link_in_a_staging_folder_is_not_put_back(target, precious):
    before = content(precious)
    shutil.rmtree(target)
    place = target.parent / f".target.{PREPARED}.saving"
    place.mkdir()
    (place / "old").symlink_to(precious)
    heal(target)
    assert not os.path.lexists(target)
    rewrite(target)
    assert content(target) == {"own": "new"} and content(precious) == before
    assert os.listdir(target.parent) == ["target"]


def test_two_folders_that_could_be_put_back_are_refused(target):
    shutil.rmtree(target)
    for number in (1, 2):
        (target.parent / f".target.{number:016x}.saving" / "old").mkdir(parents=True)
    with pytest.raises(ArtifactError, match=r"target is missing, and both \.target\.0+1\.saving and \.target\.0+2\."):
        heal(target)
    assert not target.exists()


def test_what_a_kill_left_is_emptied_without_following_links(target, precious):
    before = content(precious)
    place = target.parent / f".target.{PREPARED}.saving"
    (place / "new").mkdir(parents=True)
    (place / "new" / "link").symlink_to(precious)
    (place / "file").hardlink_to(precious / "file")
    os.mkfifo(place / "new" / "pipe")
    with within(20):
        rewrite(target)
    assert content(precious) == before
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("job", [".target.saving.lock", ".target.building.lock"])
@pytest.mark.parametrize("kind", ["link", "loop", "pipe", "folder", "socket"])
def test_a_lock_that_is_no_file_is_refused(job, kind, target, precious, monkeypatch):
    lock = target.parent / job
    monkeypatch.chdir(target.parent)
    match kind:
        case "link":
            lock.symlink_to(precious / "file")
        case "loop":
            lock.symlink_to(lock)
        case "pipe":
            os.mkfifo(lock)
        case "folder":
            lock.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(lock.name)
    said = {"loop": "link"}.get(kind, kind)
    with within(20), pytest.raises(ArtifactError, match=rf"{lock.name} is a {said}, where a lock file belongs"):
        if "saving" in job:
            rewrite(target)
        else:
            with workshop(target, {}, True):
                pass
    assert content(target) == {"own": "old"} and content(precious)["file"] == "mine"
    assert sorted(os.listdir(target.parent)) == sorted(["target", job])


def test_a_target_that_is_a_link_is_refused(tmp_path, precious):
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        with pytest.raises(ArtifactError, match=f"{name} is a link to .*: expected the folder itself"):
            rewrite(tmp_path / name)
    with pytest.raises(ArtifactError, match="a part of its path is a file"):
        rewrite(tmp_path / "dangling" / "inner")
    assert not (tmp_path / "nothing").exists()
    rewrite(tmp_path / "link" / "inner")  # the way to a folder may lead over links
    assert content(precious / "inner") == {"own": "new"}


@pytest.mark.parametrize("name", [".x.saving", ".x.building", f".x.{PREPARED}.saving", ".x.saving/inner"])
def test_names_of_unfinished_folders_are_refused_when_saving(name, artifact, tmp_path):
    with pytest.raises(ArtifactError, match="has the name of a staging folder"):
        RetexModel.from_pretrained(artifact).save_pretrained(tmp_path / name)
    assert not any(path.name == "retex_config.json" for path in tmp_path.rglob("*"))


def test_temporary_folders_are_not_entered_by_links(tmp_path, precious, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = content(precious)
    (tmp_path / "try-link").symlink_to(precious)
    (tmp_path / "try-lock").mkdir()
    (tmp_path / "try-lock" / "lock").symlink_to(precious / "file")
    with scratch_folder("try-") as place:
        assert place.is_dir()
    assert content(precious) == before and not place.exists()


# ---- prepared builds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".target.building", f".target.{PREPARED}.building"])
def test_a_build_that_somebody_prepared_is_not_resumed(name, target):
    prepared = target.parent / name
    prepared.mkdir()
    (prepared / "build.json").write_text(json.dumps({"of": "one"}))
    (prepared / "journal-0.jsonl").write_text("all done")
    with workshop(target, {"of": "one"}, True) as place:
        assert place != prepared
        assert os.listdir(place) == ["build.json"]
    assert interrupted_build(target) is None


@pytest.mark.parametrize("name", [".target.building", f".target.{PREPARED}.building"])
def test_a_link_where_a_folder_is_built_is_not_followed(name, target, precious):
    before = content(precious)
    (target.parent / name).symlink_to(precious)
    with workshop(target, {"of": "one"}, True) as place:
        (place / "file").write_text("work")
    assert content(precious) == before


def interrupt(target: Path) -> Path:
    with pytest.raises(KeyboardInterrupt), workshop(target, {"of": "one"}, True) as place:
        (place / "work").write_text("half")
        raise KeyboardInterrupt
    return interrupted_build(target)


def test_a_build_that_ends_while_it_is_looked_for(target, monkeypatch):
    """Nobody waits for its lock only to look."""
    place = interrupt(target)
    listed = atomic_folder._stagings

    def ends(*arguments):
        found = listed(*arguments)
        shutil.rmtree(place)
        return found

    monkeypatch.setattr(atomic_folder, "_stagings", ends)
    assert interrupted_build(target) is None


def swap(folder: Path, precious: Path, inner: bool) -> None:
    """Put a link in the place of a staging folder that is in use, as whoever may write beside it can."""
    folder.rename(folder.with_name("moved"))
    if inner:
        folder.mkdir()
        (folder / "new").symlink_to(precious)
    else:
        folder.symlink_to(precious)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no paths to folders that are held open")
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_that_is_swapped_while_it_is_written_is_not_followed(inner, target, precious):
    before = content(precious)
    with replacing(target) as new:
        (staging,) = target.parent.glob(".target.*.saving")
        swap(staging, precious, inner)
        (new / "file").write_text("new")
        (new / "old").mkdir()
    assert content(precious) == before
    assert content(target) == {"own": "old", "file": "new"}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no paths to folders that are held open")
def test_a_build_that_is_swapped_while_it_goes_on_is_not_followed(target, precious):
    before = content(precious)
    with workshop(target, {"of": "one"}, True) as place:
        swap(target.parent / unfinished_builds.recall(target)[0], precious, False)
        emptied(place / "artifact")
        (place / "artifact" / "file").write_text("new")
    assert content(precious) == before


def test_a_target_that_becomes_a_link_is_not_read(target, precious):
    with pytest.raises(WriteError, match="target cannot be written"), replacing(target) as new:
        (new / "file").write_text("new")
        target.rename(target.with_name("moved"))
        target.symlink_to(precious)
    assert not list(target.parent.glob(".target.*"))
    assert content(target.with_name("moved")) == {"own": "old"}


def test_an_interrupted_build_of_ones_own_is_resumed(target):
    left = interrupt(target)
    with workshop(target, {"of": "one"}, True) as place:
        assert place.samefile(left) and (place / "work").read_text() == "half"
    assert os.listdir(target.parent) == ["target"]
    assert unfinished_builds.recall(target) is None


def test_another_folder_under_the_name_of_an_interrupted_build_is_not_resumed(target):
    left = interrupt(target)
    shutil.copytree(left, target.parent / "copy")
    shutil.rmtree(left)
    (target.parent / "copy").rename(left)
    with workshop(target, {"of": "one"}, True) as place:
        assert os.listdir(place) == ["build.json"]
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
@pytest.mark.parametrize("name", ["work", "journal-0.jsonl", "build.json"])
def test_an_interrupted_build_with_links_in_it_is_not_resumed(name, kind, target, precious):
    left, before = interrupt(target), content(precious)
    (left / name).unlink(missing_ok=True)
    match kind:
        case "link":
            (left / name).symlink_to(precious / "file")
        case "second name":
            (left / name).hardlink_to(precious / "file")
        case "pipe":
            os.mkfifo(left / name)
    with within(20), workshop(target, {"of": "one"}, True) as place:
        assert os.listdir(place) == ["build.json"] and place != left
    assert content(precious) == before and os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("change", ["link", "pipe", "open to others", "another's", "of another folder", "nonsense"])
def test_a_record_that_is_not_ones_own_is_not_believed(change, target, tmp_path):
    interrupt(target)
    record = unfinished_builds._record_of(target)
    match change:
        case "link":
            record.rename(tmp_path / "record")
            record.symlink_to(tmp_path / "record")
        case "pipe":
            record.unlink()
            os.mkfifo(record)
        case "open to others":
            record.chmod(0o666)
        case "another's":
            if os.geteuid() != 0:
                pytest.skip("only root gives files away")
            os.chown(record, 12345, 12345)
        case "of another folder":
            record.write_text(record.read_text().replace(str(target), str(target) + "-2"))
        case "nonsense":
            record.write_text("[" * 100_000)
    with within(20):
        assert interrupted_build(target) is None
    record.unlink()


@pytest.mark.parametrize("name", ["retex_hf", "retex_hf/builds"])
def test_records_are_not_written_behind_a_link(name, target, precious, tmp_path, monkeypatch, caplog):
    before = content(precious)
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    (tmp_path / "assets" / name).parent.mkdir(parents=True)
    (tmp_path / "assets" / name).symlink_to(precious)
    with workshop(target, {"of": "one"}, True):
        assert interrupted_build(target) is None
    assert f"{name} is a link" in caplog.text and "cannot be resumed" in caplog.text
    assert content(precious) == before and (tmp_path / "assets" / name).is_symlink()


def test_weights_of_a_prepared_build_do_not_reach_the_artifact(tmp_path, monkeypatch):
    """The whole of an interrupted build, with other weights, put where it was: as an archive would bring it."""
    prepare_folders(tmp_path / "shared")
    place = Place(tmp_path / "mine", tmp_path / "shared", tmp_path)
    place.folder.mkdir()
    build(place)
    expected = answers(RetexModel.from_pretrained(place.target))
    shutil.rmtree(place.target)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tensor_store, "SYNC_SECONDS", 0.0)
        patch.setattr(building.writing, "finish", stop)
        build(place)
    left = interrupted_build(place.target)
    assert "Solving" in (left / "journal-0.jsonl").read_text()
    shutil.copytree(left, tmp_path / "copy")
    shutil.rmtree(left)
    (tmp_path / "copy").rename(left)
    weights = left / "artifact" / "retex_recovery.safetensors"
    weights.write_bytes(weights.read_bytes()[:-400] + bytes(400))
    build(place)
    assert answers(RetexModel.from_pretrained(place.target)) == expected
    assert os.listdir(place.folder) == ["artifact"]


# ---- pipes and the like in a folder ----------------------------------------------------------------------------------


JOBS: dict[str, Callable[[Path], None]] = {
    "save": lambda folder: RetexModel.from_pretrained(folder).save_pretrained(folder),
    "description": lambda folder: RetexModel.from_pretrained(folder).save_description(folder),
    "card": lambda folder: RetexModel.from_pretrained(folder).create_or_update_model_card(folder),
}


@pytest.mark.parametrize("name", ["notes", "deep/notes", "figures/storage.png", "special_tokens_map.json"])
@pytest.mark.parametrize("job", JOBS)
def test_a_pipe_in_a_folder_is_named_and_not_waited_for(job, name, artifact, tmp_path):
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    names = sorted(os.listdir(folder))
    with within(60), pytest.raises(ArtifactError, match=rf"{name} is a pipe|{name} is not a file") as caught:
        JOBS[job](folder)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(folder)) == names and os.listdir(tmp_path) == ["artifact"]
    verify(folder)


@pytest.mark.parametrize("name", ["README.md", "figures/errors.png"])
def test_a_pipe_where_a_file_is_written_is_replaced(name, artifact, tmp_path):
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with within(60):
        RetexModel.from_pretrained(folder).create_or_update_model_card(folder)
    assert (folder / name).is_file() and os.listdir(tmp_path) == ["artifact"]


@pytest.mark.parametrize("name", ["model.safetensors", "retex_recovery.safetensors", "retex_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name, artifact, tmp_path):
    model = RetexModel.from_pretrained(artifact)
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with within(60):
        for job in (verify, RetexModel.from_pretrained, model.save_description):
            with pytest.raises(ArtifactError, match=rf"{name}.* is not a file|has no {name}"):
                job(folder)


def test_sockets_and_devices_are_not_kept(tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    monkeypatch.chdir(old)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    with pytest.raises(ArtifactError, match=r"old/socket is a socket, which is not part of a saved folder: remove it"):
        keep_files(old, new)
    (old / "socket").unlink()
    if os.geteuid() == 0:
        try:
            os.mknod(old / "device", 0o20600, os.makedev(1, 5))
        except OSError as error:
            pytest.skip(f"no devices can be made here: {error}")
        with pytest.raises(ArtifactError, match=r"old/device is a device"):
            keep_files(old, new)


def test_links_in_a_folder_are_kept_as_links(target, precious):
    (target / "folder").symlink_to(precious)
    (target / "loop").symlink_to("loop")
    rewrite(target)
    assert (target / "folder").readlink() == precious and (target / "loop").readlink() == Path("loop")
    assert content(target) == {"own": "new"}


def test_folders_that_are_nested_too_deeply_are_refused(tmp_path, monkeypatch, caplog):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    monkeypatch.chdir(old)
    for _ in range(1200):
        os.mkdir("x")
        os.chdir("x")
    try:
        with pytest.raises(ArtifactError, match="nested too deeply"):
            keep_files(old, new)
        with OpenFolder.open(tmp_path) as parent:
            atomic_folder._remove_or_warn(parent, "old")
        assert "old is left over, and could not be removed" in caplog.text
    finally:
        subprocess.run(["rm", "-r", old, new], check=True)


# ---- single files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [".file.partial.txt", "file.txt"])
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "dangling"])
def test_a_file_that_is_written_replaces_what_was_there(at, kind, tmp_path, precious):
    before, path = content(precious), tmp_path / "file.txt"
    match kind:
        case "link":
            (tmp_path / at).symlink_to(precious / "file")
        case "hard link":
            (tmp_path / at).hardlink_to(precious / "file")
        case "pipe":
            os.mkfifo(tmp_path / at)
        case "dangling":
            (tmp_path / at).symlink_to(precious / "nothing")
    with within(20), whole_file(path) as file:
        file.write_text("new")
    assert path.read_text() == "new" and not path.is_symlink()
    assert content(precious) == before
    assert sorted(os.listdir(tmp_path)) == ["file.txt", "precious"]


def test_a_folder_where_a_file_is_written_is_named(tmp_path):
    (tmp_path / ".file.partial.txt").mkdir()
    with pytest.raises(WriteError, match=r"file\.txt cannot be written: .*\.file\.partial\.txt is a folder"):
        whole_file(tmp_path / "file.txt").__enter__()
    (tmp_path / "figure.png").mkdir()
    with pytest.raises(WriteError, match=r"figure\.png cannot be written: Is a directory"):
        plot_errors({"a.weight": 0.5}, tmp_path / "figure.png")


def test_figures_are_not_drawn_behind_a_link(tmp_path, precious):
    before = content(precious)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "figures").symlink_to(precious)
    with pytest.raises(ArtifactError, match=r"figures is a link to"):
        save_figures(tmp_path / "out", errors={"a.weight": 0.5})
    assert content(precious) == before


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/state", "checkpoints/.state.saving.lock"])
def test_the_state_of_a_training_is_not_written_behind_a_link(name, tmp_path, precious, monkeypatch):
    before = content(precious)
    prepare_folders(tmp_path / "shared")
    place = Place(tmp_path / "mine", tmp_path / "shared", tmp_path)
    (place.folder / name).parent.mkdir(parents=True)
    (place.folder / name).symlink_to(precious)
    monkeypatch.chdir(place.folder)
    with pytest.raises(ArtifactError, match=rf"{name} is a link"):
        train(place)
    assert content(precious) == before and not place.target.exists()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_state_of_a_training_is_read_from_files_only(kind, tmp_path, monkeypatch):
    prepare_folders(tmp_path / "shared")
    place = Place(tmp_path / "mine", tmp_path / "shared", tmp_path)
    state = place.folder / "checkpoints" / "state"
    state.mkdir(parents=True)
    (state / "retex_progress.json").write_text("{}")
    if kind == "link":
        (state / "model.safetensors").symlink_to(tmp_path / "shared" / "base" / "model.safetensors")
    else:
        os.mkfifo(state / "model.safetensors")
    with within(60), pytest.raises(ArtifactError, match=rf"model\.safetensors is a {kind}: expected files and folders"):
        train(place)


# ---- whom a full disk is blamed on -----------------------------------------------------------------------------------


def test_a_full_disk_is_not_blamed_on_what_was_copied(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(bytes(200_000))
    with small_disk(tmp_path / "disk") as disk:
        disk.fill(leave=50_000)
        with (
            pytest.raises(WriteError, match=r"disk/target cannot be written: No space left on device\.$"),
            replacing(disk.folder / "target") as new,
        ):
            shutil.copyfile(source, new / "copy")
        disk.empty()
        assert disk.names() == set()


# ---- several steps, one replacement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["closed_form", "adam"])
def test_a_recipe_replaces_its_folder_once(solver, tmp_path, monkeypatch):
    """Built, signed, and with the tasks that were added since: or not at all."""
    prepare_folders(tmp_path / "shared")
    place = Place(tmp_path / "mine", tmp_path / "shared", tmp_path)
    shutil.copytree(place.shared / "previous", place.target)
    before, replaced = content_of_weights(place.target), []
    exchange = atomic_folder._exchange

    def noting(*arguments: object) -> None:
        replaced.append(content_of_weights(place.target))
        exchange(*arguments)

    monkeypatch.setattr(atomic_folder, "_exchange", noting)
    if solver == "adam":
        training = {"solver": "adam", "training": {"steps": 2, "warmup_steps": 0}}
        monkeypatch.setattr(killed, "Recipe", lambda **values: Recipe(**values, **training))
    recipe(place)
    assert replaced == [before]
    model = RetexModel.from_pretrained(place.target)
    assert model.tasks == ["red", "green", "blue"] and model.signatures is not None
    assert sorted(model.recipe["data"]) == ["green", "red"] and len(model.recipe["changes"]) == 1
    assert os.listdir(place.folder) == ["artifact"]


def content_of_weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.fixture(autouse=True)
def one_thread():
    assert torch.get_num_threads() == 1  # answers are compared bit by bit
