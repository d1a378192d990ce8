"""Folders change whole: exchanged in one step, healed where there is no such step, one writer at a time."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from small_disks import small_disk
from trust.subjects import make_artifact

from retex_hf import ArtifactError, RetexModel, WriteError
from retex_hf.utils import atomic_file, atomic_folder
from retex_hf.utils.atomic_file import whole_file
from retex_hf.utils.atomic_folder import (
    heal,
    interrupted_build,
    keep_files,
    remove,
    replacing,
    scratch_folder,
    workshop,
)
from retex_hf.utils.folder_handles import OpenFolder

HOLD = """
import sys, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def put(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): file.read_text() for file in sorted(folder.rglob("*")) if file.is_file()
    }


def rewrite(target: Path, text: str) -> None:
    with replacing(target, ("own*",)) as new:
        put(new, own=text)


@pytest.fixture
def target(tmp_path) -> Path:
    return put(tmp_path / "parent" / "target", own="old", own_too="old", foreign="mine")


def staging(target: Path, kind: str = "saving", number: int = 0) -> Path:
    """A staging folder as a kill would leave it."""
    place = target.parent / f".{target.name}.{number:016x}.{kind}"
    place.mkdir(parents=True)
    return place


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def can_exchange(request, monkeypatch) -> bool:
    """Whether the system can exchange folders; where it cannot, the second half of these tests is all there is."""
    if not request.param:
        monkeypatch.setattr(OpenFolder, "exchange", lambda *_: False)
    elif not sys.platform.startswith("linux"):
        pytest.skip("only Linux exchanges folders in one step")
    return request.param


@pytest.fixture
def held_elsewhere():
    """Let another process hold a lock."""
    started = []

    def hold(lock: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(lock)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


# ---- replacing -------------------------------------------------------------------------------------------------------


def test_folders_are_exchanged_in_one_step(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux exchanges folders in one step")
    one, other = put(tmp_path / "one", a="1"), put(tmp_path / "other", b="2")
    with OpenFolder.open(tmp_path) as parent:
        assert parent.exchange("one", parent, "other")
        assert (content(one), content(other)) == ({"b": "2"}, {"a": "1"})
        with pytest.raises(FileNotFoundError):
            parent.exchange("one", parent, "nowhere")


def test_a_folder_is_replaced_and_foreign_files_stay(target, can_exchange):
    put(target / "notes", day="1")
    (target / "link").symlink_to("foreign")
    rewrite(target, "new")
    assert content(target) == {"own": "new", "foreign": "mine", "link": "mine", "notes/day": "1"}
    assert (target / "link").is_symlink()
    assert list(target.parent.iterdir()) == [target]


def test_what_fails_changes_nothing(target, can_exchange):
    before = content(target)
    with pytest.raises(ZeroDivisionError), replacing(target, ("own*",)) as new:
        put(new, own="new")
        raise ZeroDivisionError
    assert content(target) == before
    assert list(target.parent.iterdir()) == [target]


def test_files_that_are_kept_are_not_copied(target):
    inode = (target / "foreign").stat().st_ino
    rewrite(target, "new")
    assert (target / "foreign").stat().st_ino == inode


def test_the_mode_of_a_folder_is_kept(target):
    target.chmod(0o770)
    rewrite(target, "new")
    assert target.stat().st_mode & 0o777 == 0o770


def test_all_is_on_the_disk_before_it_takes_its_place(target, monkeypatch):
    synced, when, exchange = set(), {}, OpenFolder.exchange
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    monkeypatch.setattr(OpenFolder, "exchange", lambda *a: when.update(before=set(synced)) or exchange(*a))
    with replacing(target, ("own*",)) as new:
        put(new / "deep", own="new")
    expected = {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert expected <= when["before"]
    assert target.parent.stat().st_ino in synced - when["before"]


@pytest.mark.parametrize(("code", "saved"), [(errno.EINVAL, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_a_disk_that_does_not_sync_is_used_and_one_that_fails_is_not(target, monkeypatch, code, saved):
    def fsync(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    if saved:
        rewrite(target, "new")
    else:
        with pytest.raises(WriteError, match="Input/output error"):
            rewrite(target, "new")
    assert content(target)["own"] == ("new" if saved else "old")


def test_a_folder_that_is_a_mounted_disk_is_refused(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(ArtifactError, match="is a mount point"):
            rewrite(disk.folder, "new")
        rewrite(disk.folder / "inside", "new")


# ---- killed between two renames --------------------------------------------------------------------------------------


def stop_between(monkeypatch, error: type[BaseException]) -> None:
    """Stop where the old folder is away and the new one not there yet."""
    monkeypatch.setattr(OpenFolder, "exchange", lambda *_: False)
    rename = OpenFolder.rename

    def stopping(self: OpenFolder, name: str, *arguments) -> None:
        if name == atomic_folder.NEW:
            raise error
        rename(self, name, *arguments)

    monkeypatch.setattr(OpenFolder, "rename", stopping)


def test_a_second_rename_that_fails_is_undone(target, monkeypatch):
    before = content(target)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        stop_between(patch, OSError)
        rewrite(target, "new")
    assert content(target) == before
    assert list(target.parent.iterdir()) == [target]


def test_the_next_writer_heals(target, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_between(patch, KeyboardInterrupt)
        rewrite(target, "new")
    assert not target.exists()
    rewrite(target, "newer")
    assert content(target) == {"own": "newer", "foreign": "mine"}
    assert list(target.parent.iterdir()) == [target]


def test_the_next_reader_heals(tmp_path, monkeypatch):
    target = make_artifact(tmp_path / "parent" / "artifact")
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_between(patch, KeyboardInterrupt)
        RetexModel.from_pretrained(target).save_pretrained(target)
    assert not target.exists()
    RetexModel.from_pretrained(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    assert list(target.parent.iterdir()) == [target]


def test_what_is_being_written_is_no_artifact(tmp_path):
    target = tmp_path / "artifact"
    original = make_artifact(tmp_path / "original")
    for place in (staging(target, "saving"), staging(target, "building")):
        shutil.copytree(original, place / "new")
        with pytest.raises(ArtifactError, match="is the staging folder of an artifact"):
            RetexModel.from_pretrained(place / "new")
    with pytest.raises(ArtifactError, match="does not exist"):
        RetexModel.from_pretrained(target)


# ---- one writer at a time --------------------------------------------------------------------------------------------


def test_what_a_kill_left_is_cleared_away(target, held_elsewhere):
    put(staging(target) / "new", own="half")
    held_elsewhere(target.parent / ".target.saving.lock").kill()
    rewrite(target, "new")
    assert content(target) == {"own": "new", "foreign": "mine"}
    assert list(target.parent.iterdir()) == [target]


def test_what_a_living_process_writes_is_left_alone(target, held_elsewhere, monkeypatch):
    half, before = put(staging(target) / "new", own="half"), content(target)
    monkeypatch.setattr(atomic_folder, "WAIT_SECONDS", 0.05)
    held_elsewhere(target.parent / ".target.saving.lock")
    with pytest.raises(ArtifactError, match="target is being saved by another process: wait for it, or stop it"):
        rewrite(target, "new")
    assert content(half) == {"own": "half"}
    assert content(target) == before


def test_writers_wait_for_each_other(target):
    """Each makes two files; a mixture of two writers would have two numbers."""
    failures = []

    def write(number: int) -> None:
        try:
            for _ in range(10):
                with replacing(target, ("own*",)) as new:
                    put(new, own=str(number))
                    put(new, own_too=str(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert (target / "foreign").read_text() == "mine"  # the folder is there at every moment
    for thread in threads:
        thread.join()
    assert not failures
    assert content(target)["own"] == content(target)["own_too"]
    assert list(target.parent.iterdir()) == [target]


def test_a_build_that_was_cleared_away_by_halves_is_not_resumed(target, monkeypatch):
    with pytest.raises(KeyboardInterrupt), workshop(target, {"of": "one"}, True) as place:
        put(place / "artifact", weights="half")
        put(place, **{"journal-0.jsonl": "all done"})
        raise KeyboardInterrupt

    left = interrupted_build(target)

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(OpenFolder, "remove", killed)
        with workshop(target, {"of": "another"}, True):
            pass
    assert (left / "artifact" / "weights").exists()
    with workshop(target, {"of": "one"}, True) as place:
        assert set(content(place)) == {"build.json"}
    assert list(target.parent.iterdir()) == [target]


def test_temporary_folders_that_a_kill_left_are_removed(tmp_path, held_elsewhere, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, alive, foreign = (put(tmp_path / name, file="1") for name in ("try-left", "try-alive", "other"))
    held_elsewhere(alive / "lock")
    with scratch_folder("try-") as place:
        put(place, file="2")
        assert {path.name for path in tmp_path.iterdir()} == {"try-alive", "other", place.name}
    assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"try-alive", foreign.name}


def test_temporary_folders_of_other_people_are_left_alone(tmp_path, monkeypatch):
    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root gives folders away")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    os.chown(put(tmp_path / "try-theirs", file="1"), 12345, 12345)
    (tmp_path / "try-link").symlink_to(put(tmp_path / "elsewhere", file="1"))
    with scratch_folder("try-"):
        pass
    assert content(tmp_path / "try-theirs") == content(tmp_path / "elsewhere") == {"file": "1"}


def test_a_temporary_folder_that_its_owner_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = OpenFolder.names
    monkeypatch.setattr(OpenFolder, "names", lambda folder: [*names(folder), "try-gone"])
    with scratch_folder("try-") as place:
        assert place.is_dir()


def test_a_temporary_folder_that_two_processes_remove_is_no_warning(tmp_path, monkeypatch, caplog):
    """Its lock lies within it: once that is removed, another process can make it anew before the folder is gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rmdir = os.rmdir

    def late(name, **given):
        (tmp_path / place.name / "lock").touch()
        rmdir(name, **given)

    with scratch_folder("try-") as place:
        monkeypatch.setattr(os, "rmdir", late)
    monkeypatch.setattr(os, "rmdir", rmdir)
    assert place.is_dir() and not caplog.records
    with scratch_folder("try-"):  # as the other process does
        assert not place.exists()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    with whole_file(path) as partial:
        partial.write_text("one")
    with pytest.raises(ZeroDivisionError), whole_file(path) as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert content(tmp_path) == {"deep/file.txt": "one"}


def test_a_folder_that_is_removed_is_gone_before_its_files_are(target, monkeypatch):
    before = content(target)

    def stop(folder: OpenFolder, name: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OpenFolder, "remove", stop)
        remove(target)
    assert not target.exists()
    heal(target)
    assert not target.exists()  # what is to be removed is not put back
    with replacing(target) as new:
        (new / "own").write_text("new")
    assert content(target) == {"own": "new"} != before
    assert os.listdir(target.parent) == ["target"]


def test_errors_of_other_places_are_not_blamed_on_the_folder(target):
    with pytest.raises(FileNotFoundError), replacing(target):
        (target.parent / "expert" / "weights").read_bytes()
    with pytest.raises(ConnectionError), replacing(target):
        raise ConnectionRefusedError(111, "Connection refused")
    with (
        pytest.raises(WriteError, match=r"target cannot be written: No such file or directory\."),
        replacing(target) as new,
    ):
        (new / "deep" / "file").write_text("")
    assert issubclass(WriteError, OSError)


def test_links_become_copies_where_there_are_none(target, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    new = tmp_path / "new"
    new.mkdir()
    keep_files(target, new, ("own*",))
    assert content(new) == {"foreign": "mine"}
    assert (new / "foreign").stat().st_ino != (target / "foreign").stat().st_ino


def test_a_link_in_a_folder_is_not_followed_when_it_is_synced(target):
    (target / "dangling").symlink_to("nowhere")
    atomic_file.sync(target)
