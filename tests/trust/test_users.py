"""Faults that root does not see: folders that may not be written, and what other users have left beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from trust.killed import Place, answers, build, digest, prepare_folders, sign, train
from users import NOBODY, another_user, as_nobody, give, reachable_folder

from retex_hf import RetexModel, WriteError
from retex_hf.errors import ArtifactError, CheckpointError
from retex_hf.utils.atomic_folder import interrupted_build, replacing, scratch_folder, workshop

ROOT = 0


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def rewrite(target: Path, text: str = "new") -> None:
    with replacing(target, ("own*",)) as new:
        (new / "own").write_text(text)


@pytest.fixture
def folder() -> Iterator[Path]:
    with reachable_folder() as made:
        yield made


@pytest.fixture
def target(folder) -> Path:
    """A folder of `nobody`, in one that has nothing else in it."""
    made = folder / "parent" / "target"
    made.mkdir(parents=True)
    (made / "own").write_text("old")
    (made / "notes").mkdir()
    (made / "notes" / "mine").write_text("kept")
    give(folder)
    return made


def test_a_read_only_folder_is_refused_and_works_again_when_it_is_not(target):
    before = content(target)
    target.chmod(0o555)
    with pytest.raises(WriteError, match=rf"^{target} cannot be written: Permission denied\.$"):
        as_nobody(rewrite, target)
    assert content(target) == before and os.listdir(target.parent) == ["target"]
    target.chmod(0o755)
    as_nobody(rewrite, target)
    assert content(target) == before | {"own": "new"} and os.listdir(target.parent) == ["target"]


def test_a_folder_beside_which_nothing_may_be_written_names_the_one_above(target):
    before = content(target)
    target.parent.chmod(0o555)
    with pytest.raises(WriteError, match=rf"^{target.parent} cannot be written: Permission denied\. \(A folder is"):
        as_nobody(rewrite, target)
    assert content(target) == before and os.listdir(target.parent) == ["target"]
    target.parent.chmod(0o755)
    as_nobody(rewrite, target)
    assert content(target)["own"] == "new" and os.listdir(target.parent) == ["target"]


def test_read_only_folders_inside_are_kept_and_leave_nothing_behind(target):
    (target / "notes").chmod(0o555)
    for text in ("new", "newer"):
        as_nobody(rewrite, target, text)
        assert content(target) == {"own": text, "notes/mine": "kept"}
        assert (target / "notes").stat().st_mode & 0o777 == 0o555
        assert os.listdir(target.parent) == ["target"]


def test_read_only_folders_that_a_kill_left_are_cleared_away(target):
    left = target.parent / f".target.{'0' * 16}.saving"
    (left / "new" / "notes").mkdir(parents=True)
    (left / "new" / "notes" / "file").write_text("half")
    give(left)
    for inner in (left / "new" / "notes", left / "new", left):
        inner.chmod(0o500)
    (left / "new" / "notes").chmod(0)
    as_nobody(rewrite, target)
    assert content(target)["own"] == "new" and os.listdir(target.parent) == ["target"]


def test_staging_folders_of_other_users_are_left_alone(target):
    theirs = [target.parent / f".target.{'0' * 16}.{kind}" for kind in ("saving", "building")]
    for place in theirs:
        (place / "new").mkdir(parents=True)
        (place / "new" / "file").write_text("theirs")
    as_nobody(rewrite, target)

    def build_it() -> list[str]:
        with workshop(target, {"of": "one"}, True) as place:
            return os.listdir(place)

    assert as_nobody(build_it) == ["build.json"]
    assert content(target)["own"] == "new"
    assert all(content(place) == {"new/file": "theirs"} for place in theirs)
    assert sorted(os.listdir(target.parent)) == sorted(["target", *(place.name for place in theirs)])


def test_a_lock_that_another_user_left_is_taken_over_or_named(target):
    lock = target.parent / ".target.saving.lock"
    lock.touch()
    lock.chmod(0o666)  # as they are made
    as_nobody(rewrite, target)
    assert content(target)["own"] == "new" and os.listdir(target.parent) == ["target"]
    lock.touch(0o600)
    with pytest.raises(WriteError, match=rf"^{lock} cannot be opened, to lock target: Permission denied\.$"):
        as_nobody(rewrite, target, "newer")
    assert content(target)["own"] == "new" and sorted(os.listdir(target.parent)) == [lock.name, "target"]


def test_a_folder_of_another_user_in_a_sticky_one_is_refused(target):
    give(target.parent, ROOT)
    target.parent.chmod(0o1777)
    target.chmod(0o777)
    before = content(target)
    with pytest.raises(WriteError, match=rf"^{target} cannot be written: Operation not permitted\.$"):
        as_nobody(rewrite, target)
    assert content(target) == before and os.listdir(target.parent) == ["target"]
    as_nobody(rewrite, target.parent / "mine")
    assert content(target.parent / "mine") == {"own": "new"}
    assert sorted(os.listdir(target.parent)) == ["mine", "target"]


def test_files_that_may_not_be_read_are_kept_or_named(target):
    (target / "notes" / "mine").chmod(0)
    as_nobody(rewrite, target)
    assert (target / "notes" / "mine").read_text() == "kept"
    secret = target / "notes" / "secret"
    secret.write_text("theirs")
    secret.chmod(0o600)
    linked = Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "0"
    if not linked:
        with pytest.raises(WriteError, match=rf"^{secret} is not readable, so it cannot be kept"):
            as_nobody(rewrite, target, "newer")
        assert content(target)["own"] == "new" and os.listdir(target.parent) == ["target"]


def test_temporary_folders_of_other_users_are_left_alone(folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    folder.chmod(0o1777)
    (folder / "try-theirs").mkdir()

    def scratch() -> None:
        with scratch_folder("try-") as place:
            (place / "file").write_text("1")

    as_nobody(scratch)
    assert os.listdir(folder) == ["try-theirs"]


def test_a_build_that_cannot_be_remembered_says_so_and_is_done(target, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", "/proc/nowhere")

    def build_it() -> tuple[str, bool]:
        with workshop(target, {"of": "one"}, True):
            return caplog.text, interrupted_build(target) is None

    said, forgotten = as_nobody(build_it)
    assert "so this build cannot be resumed if it is interrupted: set HF_HOME" in said and forgotten
    assert os.listdir(target.parent) == ["target"]


# ---- whole jobs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    with reachable_folder() as made:
        prepare_folders(made / "shared")
        warm = Place(made / "warm", made / "shared", made)
        shutil.copytree(warm.shared / "previous", warm.target)
        for job in JOBS.values():  # so that everything is imported
            job(warm)
        os.chdir("/")
        yield give(made) / "shared"


def load(place: Place) -> None:
    RetexModel.from_pretrained(place.target)


def save(place: Place) -> None:
    RetexModel.from_pretrained(place.shared / "other").save_pretrained(place.target)


JOBS = {"save": save, "sign": sign, "build": build, "load": load}


@pytest.fixture
def place(folder, shared, monkeypatch) -> Place:
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(folder / "assets"))
    made = Place(folder / "place", shared, folder)
    shutil.copytree(shared / "previous", made.target)
    give(folder)
    return made


@pytest.mark.parametrize("job", [name for name in JOBS if name != "load"])
@pytest.mark.parametrize("closed", ["target", "parent"])
def test_jobs_in_folders_that_may_not_be_written_change_nothing_and_work_afterwards(job, closed, place):
    refused_then_done(JOBS[job], closed, place, as_nobody)


def test_training_in_folders_that_may_not_be_written_changes_nothing_and_works_afterwards(place, shared):
    warm = Place(shared.parent / "trained", shared, shared.parent)
    warm.folder.mkdir(exist_ok=True)
    with another_user(train, warm, HF_ASSETS_CACHE=constants.HF_ASSETS_CACHE) as call:
        for closed in ("target", "parent"):
            shutil.rmtree(place.folder)
            shutil.copytree(shared / "previous", place.target)
            give(place.hub)
            refused_then_done(train, closed, place, call)


def refused_then_done(job: Callable[[Place], None], closed: str, place: Place, call: Callable[..., None]) -> None:
    before, where = digest(place.target), place.target if closed == "target" else place.folder
    where.chmod(0o555)
    with pytest.raises(WriteError, match=r"cannot be written: Permission denied\.") as caught:
        call(job, place)
    assert "\n" not in str(caught.value)
    assert digest(place.target) == before and os.listdir(place.folder) == ["artifact"]
    where.chmod(0o755)
    call(job, place)
    assert digest(place.target) != before
    assert not any((place.folder / "checkpoints").glob("*"))  # the folder that training was told to keep its state in
    assert set(os.listdir(place.folder)) - {"checkpoints"} == {"artifact"}
    assert answers(RetexModel.from_pretrained(place.target))


@pytest.mark.parametrize("name", ["", "model.safetensors", "retex_config.json", "config.json"])
def test_an_artifact_that_may_not_be_read_is_refused(name, place):
    (place.target / name).chmod(0)
    with pytest.raises(ArtifactError, match=rf"{name}.* cannot be (read|used): [Pp]ermission denied") as caught:
        as_nobody(load, place)
    assert "\n" not in str(caught.value)
    (place.target / name).chmod(0o755)
    as_nobody(load, place)


@pytest.mark.parametrize("name", ["", "model.safetensors", "config.json"])
def test_an_expert_that_may_not_be_read_is_refused(name, place):
    path = place.shared / "experts" / "red" / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        with pytest.raises(CheckpointError, match=r"[Pp]ermission denied") as caught:
            as_nobody(build, place)
        assert "\n" not in str(caught.value)
        assert os.listdir(place.folder) == ["artifact"]
    finally:
        path.chmod(mode)


def test_the_other_user_is_another_user():
    with reachable_folder():
        assert as_nobody(os.geteuid) == NOBODY
