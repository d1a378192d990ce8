"""The process whose children meet planted links. It has imported everything, so that a child starts its work at once.

`trust.links` starts it, and reads a line of JSON per trial. A job runs once, undisturbed, to record every name that it
writes, renames or removes. Then something is planted at one of these names, as a clone or an archive could contain it,
and the job runs again in a child, as root or as another user.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from local_hub import TOKEN
from tqdm import tqdm

from retex_hf import RetexError, RetexModel
from retex_hf.artifact.plots import save_figures
from retex_hf.utils.folder_handles import OpenFolder

from . import killed
from .killed import OWNER, Job, Place, answers, artifact_state, begin, end, folder_state

REFUSED, REPLACED, UNTOUCHED = "refused", "done, it was replaced", "done, it was left alone"
# Seconds after which a hanging child is killed.
LONGEST = 60
SECOND_NAME = "a second name of a file"
CANARY = b"nobody but me may read this"
# Names with a random part: an attacker could prepare another name of the same form.
RANDOM = {
    r"\.[0-9a-f]{16}\.(saving|building)": r".0000000000000000.\1",
    r"\btmp[a-z0-9_]{8}\b": "tmp00000000",
    r"\bretex-push-[a-z0-9_]{8}\b": "retex-push-00000000",
}
STAGED = re.compile(r"(.*?)\.([^/]+)\.0{16}\.saving/new(/.*)?")
# Python audit events that change the file system: positions of the names, and of their handles.
CHANGES = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.chmod": ((0, 2),),
    "os.truncate": ((0, None),),
    "shutil.rmtree": ((0, 1),),
}
# Files of the trials themselves, and the folder of Hugging Face's libraries, which may be a link.
OURS = ("log", "tmp", ".", "assets")


# ---- the jobs --------------------------------------------------------------------------------------------------------


def load(place: Place) -> None:
    RetexModel.from_pretrained(place.target)


def push(place: Place) -> None:
    RetexModel.from_pretrained(place.target).push_to_hub(f"{OWNER}/{place.repository}", token=TOKEN)


def save_in_two_renames(place: Place) -> None:
    OpenFolder.exchange = lambda *_: False  # as on systems that cannot exchange folders; the child ends with its job
    killed.save(place)


def figures(place: Place) -> None:
    save_figures(place.target, errors=RetexModel.from_pretrained(place.target).recovery_errors)


JOBS = {
    **{name: job for name, job in killed.JOBS.items() if name not in ("push", "push of a folder", "download")},
    "resumed build": Job(killed.build),
    "save in two renames": Job(save_in_two_renames),
    "push": Job(push, folder_state),
    "figures": Job(figures),
    "load": Job(load),
}
# A job that changes nothing itself may meet the leftovers of another one.
NAMES_OF = {"load": "save in two renames", "resumed build": "build", "push": "save"}
# In a prepared folder that is only removed, all names are equivalent.
PREPARED = re.compile(r"(.*/)?(\.[^/]+\.0{16}\.(saving|building)|retex-push-0{8})/[^/]+/.*")


# ---- planting --------------------------------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    current = os.getcwd()
    os.chdir(path.parent)  # the address of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(current)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"not precious")


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a folder": lambda path, precious: path.symlink_to(precious),
    "a relative link to a folder": lambda path, precious: path.symlink_to(os.path.relpath(precious, path.parent)),
    "a link to a file": lambda path, precious: path.symlink_to(precious / "file"),
    "a link to nothing": lambda path, precious: path.symlink_to(precious / "nothing"),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    SECOND_NAME: lambda path, precious: path.hardlink_to(precious / "file"),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a socket": lambda path, _: _socket(path),
    "a folder": lambda path, _: _folder(path),
}


def make_precious(folder: Path) -> None:
    """Make files that no job may touch, under names that staging folders and artifacts have."""
    for name in ("file", "old/file", "new/file", "artifact/file", "state/file", "README.md", "retex_config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(CANARY)


def plant(place: Place, name: str, form: str, precious: Path) -> Path:
    """Put something in place of whatever has a name; make the folders above it."""
    path = place.folder / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    PLANTS[form](path, precious)
    return path


# ---- state of the file system ----------------------------------------------------------------------------------------


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all entries below a folder, and the folder itself, without following links."""
    if not os.path.lexists(folder):
        return
    yield ".", folder.lstat()
    if stat.S_ISDIR(folder.lstat().st_mode):
        for where, folders, files in os.walk(folder):
            for name in (*folders, *files):
                path = Path(where, name)
                yield path.relative_to(folder).as_posix(), path.lstat()


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return kind, mode, owner and content of all entries."""
    found = {}
    for name, state in walk(folder):
        content = ""
        if stat.S_ISREG(state.st_mode):
            content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        elif stat.S_ISLNK(state.st_mode):
            content = os.readlink(folder / name)
        found[name] = (state.st_mode, state.st_uid, content)
    return found


def read_in(folder: Path, precious: Path) -> list[str]:
    """Return files below a folder with precious content, other than hard links to the precious file."""
    own = {state.st_ino for _, state in walk(precious)}
    return [
        name
        for name, state in walk(folder)
        if stat.S_ISREG(state.st_mode) and state.st_ino not in own and CANARY in (folder / name).read_bytes()
    ]


# ---- children --------------------------------------------------------------------------------------------------------


def run_child(job: Job, place: Place, user: int) -> int:
    """Run a job in a fork, as a user; return its exit status (2: refused; negative: the signal)."""
    child = os.fork()
    if not child:
        code = 1
        try:
            log = os.open(place.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            become(user)
            signal.alarm(LONGEST)
            tempfile.tempdir = str(place.folder / "tmp")
            names = _note_names(place.folder)
            try:
                job.run(place)
                found = sorted(names)
                _report(place).write_text(json.dumps({"answers": _answers(job, place), "names": found}))
                code = 0
            except RetexError as error:
                code = 2 if "\n" not in str(error) else 1
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answers(job: Job, place: Place) -> dict[str, str] | None:
    """Return the answers of an artifact; None where it is refused, which it may be for what was planted in it."""
    try:
        return answers(RetexModel.from_pretrained(place.target)) if job.state is artifact_state else {}
    except RetexError:
        return None


def _report(place: Place) -> Path:
    """Return the file of a child's report: beside its folder, where nothing is planted."""
    return place.folder.parent / "report.json"


def become(user: int) -> None:
    """Drop all privileges but those of a user."""
    if user != os.geteuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def give(folder: Path, user: int) -> None:
    """Change the owner of a folder and all its contents."""
    for name, _ in walk(folder):
        os.chown(folder / name, user, user, follow_symlinks=False)


def _note_names(folder: Path) -> set[str]:
    """Record every name below a folder that Python changes from now on."""
    names: set[str] = set()
    root = str(folder) + os.sep

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            found = [(path, None)] if isinstance(flags, int) and flags & killed.WRITING else []
        else:
            places = CHANGES.get(event, ())
            found = [(arguments[path], None if handle is None else arguments[handle]) for path, handle in places]
        for path, handle in found:
            if not isinstance(path, str | os.PathLike):
                continue
            within = os.readlink(f"/proc/self/fd/{handle}") if isinstance(handle, int) and handle >= 0 else ""
            whole = os.path.abspath(os.path.join(within, path))
            if whole.startswith(root):
                names.add(whole.removeprefix(root))

    sys.addaudithook(hook)
    return names


# ---- trials ----------------------------------------------------------------------------------------------------------


def names_of(job: Job, place: Place, user: int) -> list[str]:
    """Return every name that a job writes, renames or removes, with random parts replaced by prepared ones."""
    before = {name for name, _ in walk(place.folder)}
    code = run_child(job, place, user)
    if code:
        raise RuntimeError(f"the job ended with {code}: {(place.folder / 'log').read_text()[-2000:]}")
    noted = set(json.loads(_report(place).read_text())["names"])
    # Changes that do not pass through Python are seen afterwards.
    noted |= {name for name, _ in walk(place.folder)} - before
    found = set()
    for name in noted:
        for pattern, prepared in RANDOM.items():
            name = re.sub(pattern, prepared, name)
        found.add(name)
        if staged := STAGED.fullmatch(name):
            found.add(f"{staged[1]}{staged[2]}{staged[3] or ''}")
    return sorted(name for name in found - set(OURS) if not PREPARED.fullmatch(name))


class Grounds:
    """The setting of trials: a folder made anew for each, precious files beside it, and shared starting data."""

    def __init__(self, work: Path, hub: Path) -> None:
        self.work, self.hub, self.user = work, hub, os.geteuid()
        self.shared, self.precious = work / "shared", work / "precious"
        self.folder = work / "trial"
        # Records of begun builds are among the names, too.
        constants.HF_ASSETS_CACHE = str(self.folder / "assets")

    def begin(self, name: str) -> Place:
        job = JOBS[name]
        place = begin(job, self.folder, self.shared, self.hub)
        if name == "push":
            shutil.copytree(self.hub / OWNER / killed.TEMPLATE, self.hub / OWNER / place.repository)
        if name == "resumed build":
            killed.wait(killed.fork(job, place, at_change=self.middle))
        make_precious(self.precious)
        return place

    def be_of(self, user: int) -> None:
        """Run the jobs as a user, who may read the shared starting data."""
        self.user = user
        if user != os.geteuid():
            give(self.work, user)

    def give(self, place: Place) -> None:
        """Give everything that may be touched to the user who runs the jobs."""
        if self.user != os.geteuid():
            for folder in (place.folder, self.precious):
                give(folder, self.user)

    def warm(self, name: str) -> None:
        """Run a job here to complete late imports: another user may not be able to read Python's folder."""
        place = self.begin(name)
        current, exchange, tempfile.tempdir = os.getcwd(), OpenFolder.exchange, str(place.folder / "tmp")
        JOBS[name].run(place)
        os.chdir(current)
        OpenFolder.exchange = exchange
        self.end(place)

    def end(self, place: Place) -> None:
        end(place)
        shutil.rmtree(self.precious)

    def learn(self, name: str) -> tuple[list[str], dict[str, Any]]:
        """Return the names of a job, and the answers of its artifact afterwards."""
        place = self.begin(name)
        self.give(place)
        names = names_of(JOBS[name], place, self.user)
        found = json.loads(_report(place).read_text())["answers"]
        self.end(place)
        return names, found

    def prepare_resuming(self) -> None:
        """Find the middle of a build."""
        place = begin(JOBS["build"], self.folder, self.shared, self.hub)
        killed.wait(killed.fork(JOBS["build"], place))
        self.middle = int((place.folder / "changes").read_text()) // 2
        end(place)

    def trial(self, name: str, planted: str, form: str, expected: dict[str, Any]) -> str:
        """Plant something, run the job, and return the outcome. Raise if anything was touched."""
        place = self.begin(name)
        try:
            if name == "resumed build":
                left = [entry.name for entry in place.folder.glob(".artifact.*.building")]
                planted = planted.replace(".artifact.0000000000000000.building", left[0])
            path = plant(place, planted, form, self.precious)
            self.give(place)
            precious, target = snapshot(self.precious), snapshot(place.target)
            was = snapshot(path)
            code = run_child(JOBS[name], place, self.user)
            self._check(place, precious, form)
            said = (place.folder / "log").read_text().strip()[-1500:]
            if code == -signal.SIGALRM:
                raise AssertionError(f"hangs for {LONGEST} seconds: {said}")
            if code == 2:
                if snapshot(place.target) != target:
                    raise AssertionError(f"refused, but the target was changed: {said}")
                return REFUSED
            if code:
                raise AssertionError(f"ended with {code}: {said}")
            same = snapshot(path) == was
            found = json.loads(_report(place).read_text())["answers"]
            if found != expected and not (found is None and same):
                raise AssertionError(f"done, but the artifact is {'refused' if found is None else 'another one'}")
            return UNTOUCHED if same else REPLACED
        finally:
            self.end(place)

    def _check(self, place: Place, precious: dict[str, Any], form: str) -> None:
        after = snapshot(self.precious)
        if after != precious:
            differing = sorted(name for name in {*precious, *after} if precious.get(name) != after.get(name))
            raise AssertionError(f"what a link leads to was changed: {differing}")
        if form == SECOND_NAME:  # also a file of that folder, so it may be read
            return
        copies = read_in(place.folder, self.precious) + read_in(place.hub / OWNER / place.repository, self.precious)
        if copies:
            raise AssertionError(f"what a link leads to was read in: {copies}")


def draw(names: set[str], count: int | None, seed: str) -> list[tuple[str, str]]:
    """Draw what to plant where: `count` cases, two of three beside the target; None: everything, at every name."""
    cases = [(name, form) for name in sorted(names) for form in PLANTS]
    if count is None:
        return cases
    within = [case for case in cases if case[0].startswith("artifact/")]
    beside = [case for case in cases if case not in within]
    chosen = random.Random(seed)
    parts = ((beside, count - count // 3), (within, count // 3))
    return [case for cases, most in parts for case in chosen.sample(cases, min(most, len(cases)))]


def run(work: Path, hub: Path, plan: dict[str, int | None], users: list[int], seed: int) -> None:
    """Run all trials of a plan, `{job: trials}` (see `draw`), as every user, and print a line of JSON for each."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    grounds = Grounds(work, hub)
    if {"push", "export"} & set(plan):
        killed.prepare(grounds.shared)
    else:
        killed.prepare_folders(grounds.shared)
    if "resumed build" in plan:
        grounds.prepare_resuming()
    for user in users:
        grounds.be_of(user)
        kept = snapshot(grounds.shared)
        for name, count in plan.items():
            for planted, form, expected in _cases(grounds, name, count, seed):
                result: dict[str, Any] = {"job": name, "user": user, "problem": None}
                try:
                    result["outcome"] = grounds.trial(name, planted, form, expected)
                except Exception as error:
                    described = f"{form} at {planted}: {type(error).__name__}: {error}"
                    result |= {"outcome": "problem", "problem": described}
                print(json.dumps(result), flush=True)
        if snapshot(grounds.shared) != kept:
            raise RuntimeError("what all trials start from was changed by one of them")


def _cases(grounds: Grounds, name: str, count: int | None, seed: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what to plant where in the trials of a job, and its artifact's undisturbed answers."""
    used = dict.fromkeys((NAMES_OF.get(name, name), name))
    for one in used if grounds.user != os.geteuid() else ():
        grounds.warm(one)
    names: set[str] = set()
    for one in used:
        found, expected = grounds.learn(one)
        names |= set(found)
    for planted, form in draw(names, count, f"{seed} {name}"):
        yield planted, form, expected


if __name__ == "__main__":
    work_dir, hub_dir, chosen_plan, chosen_users, given_seed = sys.argv[1:]
    run(Path(work_dir), Path(hub_dir), json.loads(chosen_plan), json.loads(chosen_users), int(given_seed))
