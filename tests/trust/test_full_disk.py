"""A full disk, a read-only disk: one clear sentence, the artifact as it was, no litter, and the work goes on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hubs import WRITE, serving
from huggingface_hub import constants
from small_disks import SmallDisk, small_disk
from trust.killed import Place, answers, build, digest, prepare_folders, sign, train
from trust.subjects import batch, make_tokenizer, texts
from users import another_user, as_nobody, give, reachable_folder

from retex_hf import RetexError, RetexModel
from retex_hf.build import build as building
from retex_hf.cli import main
from retex_hf.model.export.checkpoint import export_checkpoint
from retex_hf.recovery import training as training_module

STEP, SCARCE = 48 * 1024, 16 * 1024


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    prepare_folders(folder)
    return folder


@pytest.fixture
def disk(tmp_path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.fixture
def place(disk, shared) -> Place:
    place = Place(disk.folder, shared, disk.folder / "hub")
    shutil.copytree(shared / "previous", place.target)
    return place


def change(place: Place, edit: Callable[[RetexModel], None]) -> None:
    """Load the artifact, change the model, and save it."""
    model = RetexModel.from_pretrained(place.target)
    edit(model)
    model.save_pretrained(place.target)


def add(model: RetexModel, place: Place) -> None:
    references = [batch(make_tokenizer(), texts("blue", 24))]
    model.add_task("blue", place.expert("blue"), references=references, check_base=False, progress=False)


def previous(place: Place) -> RetexModel:
    return RetexModel.from_pretrained(place.shared / "previous")


JOBS = {
    "save": lambda place: RetexModel.from_pretrained(place.shared / "other").save_pretrained(place.target),
    "add a task": lambda place: change(place, lambda model: add(model, place)),
    "delete a task": lambda place: change(place, lambda model: model.delete_task("green")),
    "sign": sign,
    "card": lambda place: previous(place).create_or_update_model_card(place.target),
    "export": lambda place: export_checkpoint(previous(place), "red", place.folder / "export"),
    "export as LoRA": lambda place: previous(place).export_lora("red", place.folder / "export"),
    "build": build,
    "training": train,
}
RESUMED = {"build": r"\.artifact\.[0-9a-f]{16}\.building", "training": "checkpoints"}


def state(folder: Path) -> tuple[dict, dict]:
    return answers(RetexModel.from_pretrained(folder)), digest(folder)


@pytest.mark.parametrize("job", JOBS)
def test_on_a_full_disk_nothing_is_lost_and_the_work_goes_on(job, disk, place, monkeypatch):
    fill_until_done(job, disk, place, monkeypatch, lambda do, *arguments: do(*arguments))


@pytest.mark.parametrize("job", ["save", "sign", "export", "build", "training"])
def test_on_a_full_disk_another_user_loses_nothing_either(job, monkeypatch):
    with reachable_folder() as folder, small_disk(folder / "disk") as disk:
        prepare_folders(folder / "shared")
        warm, place = (Place(made, folder / "shared", folder) for made in (folder / "warm", disk.folder))
        shutil.copytree(warm.shared / "previous", warm.target)
        shutil.copytree(place.shared / "previous", place.target)
        monkeypatch.chdir(warm.folder)
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(folder / "assets"))
        with ExitStack() as stack:
            if job == "training":
                call = stack.enter_context(another_user(do, job, warm, HF_ASSETS_CACHE=str(folder / "assets")))
            else:
                do(job, warm)  # so that everything is imported
                call = as_nobody
            give(folder)
            fill_until_done(job, disk, place, monkeypatch, call)


def do(job: str, place: Place) -> None:
    # The disk is full all of a sudden, not already when the build asks how much there is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "_check_disk", lambda *_: None)
        JOBS[job](place)


def fill_until_done(
    job: str, disk: SmallDisk, place: Place, monkeypatch: pytest.MonkeyPatch, call: Callable[..., None]
) -> None:
    """Do a job on a full disk, and with a little more room each time, until it is done."""
    monkeypatch.chdir(disk.folder)
    before, failures, leave = state(place.target), 0, 0
    while True:
        disk.fill(leave)
        try:
            call(do, job, place)
            break
        except RetexError as error:
            assert "\n" not in str(error)
            assert str(disk.folder) in str(error) or "checkpoints" in str(error)
            assert "cannot be written" in str(error)
        disk.empty()
        failures, leave = failures + 1, leave + STEP
        assert state(place.target) == before
        assert all(re.fullmatch(RESUMED.get(job, ""), name) for name in disk.names() - {"artifact"})
        assert len(disk.names()) <= 2
    assert failures
    disk.empty()
    after = place.folder / "export" if "export" in job else place.target
    assert disk.names() - {"checkpoints"} == {"artifact", after.name}
    assert not (disk.folder / "checkpoints").exists() or not list((disk.folder / "checkpoints").iterdir())
    found = digest(after)
    shutil.rmtree(after)
    if after == place.target:
        shutil.copytree(place.shared / "previous", after)
    do(job, place)
    assert digest(after) == found  # what it gives with all the room there is


def test_training_is_not_lost_where_its_result_cannot_be_written(place, monkeypatch):
    monkeypatch.chdir(place.folder)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(building.writing, "write", stop)
        train(place)
    with monkeypatch.context() as patch:
        patch.setattr(training_module, "_draw", stop)  # which every step does first
        train(place)
    assert len(RetexModel.from_pretrained(place.target).tasks) == 3
    assert not list((place.folder / "checkpoints").iterdir())


@pytest.mark.parametrize("job", JOBS)
def test_on_a_read_only_disk_nothing_is_changed(job, disk, place, monkeypatch):
    monkeypatch.chdir(disk.folder)
    before = state(place.target)
    with disk.read_only():
        with pytest.raises(RetexError, match=r"cannot be written: Read-only file system\.$"):
            JOBS[job](place)
        assert state(place.target) == before
    assert disk.names() == {"artifact"}


def test_a_build_that_cannot_fit_says_so_before_it_starts(disk, place):
    disk.fill(leave=SCARCE)
    with pytest.raises(RetexError, match=r"of disk, but .* has only"):
        build(place)
    assert disk.names() == {"artifact"}


@pytest.mark.parametrize("full", [True, False], ids=["full", "read-only"])
def test_commands_say_it_in_one_sentence(full, disk, place, capsys):
    artifact = str(place.target)
    before = state(place.target)
    commands = [["remove-task", artifact, "green"], ["export", artifact, "red", str(disk.folder / "export")]]

    def run_all() -> None:
        for command in commands:
            capsys.readouterr()
            assert main(command) == 2
            said = capsys.readouterr().err.strip().splitlines()
            where = command[-1] if command[0] == "export" else artifact
            reason = "No space left on device" if full else "Read-only file system"
            assert said[-1:] == [f"retex {command[0]}: {where} cannot be written: {reason}."]

    if full:
        disk.fill(leave=SCARCE)
        run_all()
    else:
        with disk.read_only():
            run_all()
    assert state(place.target) == before
    disk.empty()
    assert disk.names() == {"artifact"}


def test_a_push_without_room_for_it_leaves_the_repository_alone(disk, shared, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(disk.folder))
    model = RetexModel.from_pretrained(shared / "previous")
    with serving(tmp_path / "hub", monkeypatch) as hub:
        disk.fill(leave=SCARCE)
        with pytest.raises(RetexError, match=r"cannot be written: No space left on device\.$"):
            model.push_to_hub("me/mine", token=WRITE)
        assert set(hub.files("me/mine")) == {".gitattributes"}
        disk.empty()
        assert disk.names() == set()
        model.push_to_hub("me/mine", token=WRITE)
        assert "retex_config.json" in hub.files("me/mine")
    assert disk.names() == set()


def test_figures_and_results_say_it_too(disk):
    from retex_hf.artifact.plots import plot_errors

    disk.fill(leave=0)
    with pytest.raises(RetexError, match=r"errors\.png cannot be written: No space left on device\.$"):
        plot_errors({"a.weight": 0.5}, disk.folder / "errors.png")
    assert disk.names() == set()


@pytest.fixture(autouse=True)
def one_thread():
    assert torch.get_num_threads() == 1  # answers are compared bit by bit
