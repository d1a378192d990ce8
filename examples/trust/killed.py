"""The process whose children are killed. It has imported everything, so that a child starts its work at once.

`trust.kills` starts it, and reads a line of JSON per kill. A child is a fork that does one job on a folder of its own.
It is killed at a random moment, or kills itself right before its n-th change to the file system. The state after a kill
is checked, then the job runs again to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure  # noqa: F401  (a push draws)
import torch
from local_hub import TOKEN, Repository
from tqdm import tqdm

from retex_hf import RetexConfig, RetexError, RetexModel, TrainingConfig
from retex_hf.artifact.recipe import Recipe
from retex_hf.workflows.from_recipe import make
from retex_hf.workflows.sharing import push_folder

from .subjects import batch, bert, make_model, make_tokenizer, mixed_batch, texts

PREVIOUS, NEW = "previous intact", "new complete"
OWNER, TEMPLATE = "me", "template"
# Python audit events that change the file system; "open" does for some modes.
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CARD = ("README.md", "figures")
# Partial downloads and metadata of the Hub's client, and the empty files with which it probes file modes and links.
LEFT_BY_THE_CLIENT = re.compile(
    r"cache/models--[^/]+/(blobs/([^/]+\.incomplete|tmp_[0-9a-f-]{36})|(refs|trees)/[^/]+\.tmp"
    r"|tmp[a-z0-9_]{8}(/dummy_file_(src|dst))?)"
)
# Seconds after which a hanging child is killed; a trial (two children, three checks) takes a few of them.
LONGEST = 120


@dataclass(frozen=True)
class Place:
    """The folder of one trial, and the data that all trials share."""

    folder: Path
    shared: Path
    hub: Path

    @property
    def target(self) -> Path:
        return self.folder / "artifact"

    @property
    def repository(self) -> str:
        return self.folder.name

    def expert(self, task: str) -> str:
        return str(self.shared / "experts" / task)


# ---- the jobs --------------------------------------------------------------------------------------------------------


def build(place: Place, **options: object) -> None:
    experts = {task: place.expert(task) for task in ("red", "green", "blue")}
    config = RetexConfig(rank=4, feature_layer=0)
    base = str(place.shared / "base")
    RetexModel.from_experts(base, experts, config, output_dir=place.target, progress=False, **options)


def train(place: Place) -> None:
    # The recipe in the artifact records this path, so it must be the same in all trials.
    os.chdir(place.folder)
    schedule = {"steps": 8, "warmup_steps": 2, "checkpoint_every": 2, "checkpoint_dir": "checkpoints"}
    build(place, solver="adam", training=TrainingConfig(learning_rate=1e-2, **schedule))


def recipe(place: Place) -> None:
    """Build, sign and add a task, as `retex build` does: three steps and one replacement."""
    texts_of = {task: str(place.shared / "texts" / f"{task}.txt") for task in ("red", "green", "blue")}
    added = {"add": "blue", "expert": place.expert("blue"), "data": {"blue": texts_of.pop("blue")}, "check_base": False}
    make(
        Recipe(
            base=str(place.shared / "base"),
            experts={task: place.expert(task) for task in texts_of},
            config={"rank": 4, "feature_layer": 0},
            data=texts_of,
            changes=[added],
            output_dir=str(place.target),
        ),
        progress=False,
    )


def save(place: Place) -> None:
    RetexModel.from_pretrained(place.shared / "other").save_pretrained(place.target)


def add_task(place: Place) -> None:
    model = RetexModel.from_pretrained(place.target)
    if "blue" not in model.tasks:
        references = [batch(make_tokenizer(), texts("blue", 24))]
        model.add_task("blue", place.expert("blue"), references=references, check_base=False, progress=False)
    model.save_pretrained(place.target)


def delete_task(place: Place) -> None:
    model = RetexModel.from_pretrained(place.target)
    if "green" in model.tasks:
        model.delete_task("green")
    model.save_pretrained(place.target)


def sign(place: Place) -> None:
    model = RetexModel.from_pretrained(place.target)
    tokenizer = make_tokenizer()
    model.fit_signatures({task: [batch(tokenizer, texts(task, 16, seed=7))] for task in model.tasks}, progress=False)
    model.save_description(place.target)


def card(place: Place) -> None:
    model = RetexModel.from_pretrained(place.shared / "previous")
    model.create_or_update_model_card(place.target)


def export(place: Place) -> None:
    RetexModel.from_pretrained(place.shared / "previous").export_lora("red", place.target)


def push(place: Place) -> None:
    model = RetexModel.from_pretrained(place.shared / "other")
    model.push_to_hub(f"{OWNER}/{place.repository}", token=TOKEN)


def push_of_a_folder(place: Place) -> None:
    """Push a folder, as `retex push` does."""
    push_folder(place.shared / "other", f"{OWNER}/{place.repository}", token=TOKEN)


def download(place: Place) -> None:
    RetexModel.from_pretrained(f"{OWNER}/{TEMPLATE}", cache_dir=str(place.folder / "cache"), token=TOKEN)


# ---- states before and after a job -----------------------------------------------------------------------------------


def digest(folder: Path, leave: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the hashes of all files of a folder."""
    found = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {
        name.as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in found.items()
        if name.parts[0] not in leave
    }


@torch.inference_mode()
def answers(model: RetexModel) -> dict[str, str]:
    """Return the answers of a model to a mixed batch, with the tasks given and unknown."""
    inputs = mixed_batch(make_tokenizer())
    found = {task: model(**inputs, task=task).logits for task in model.tasks}
    if model.signatures is not None:
        found |= {"routed": model(**inputs).logits, "residuals": model.identify(**inputs).residuals}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}


def artifact_state(place: Place) -> dict:
    """Load the folder, and return its answers and its files as its state."""
    return {"answers": answers(RetexModel.from_pretrained(place.target)), "files": digest(place.target)}


def folder_state(place: Place) -> dict:
    return digest(place.target)


def hub_state(place: Place) -> dict:
    """Return the contents of the repository's main branch, without the card, which names the repository."""
    files = Repository.open(place.hub / OWNER / place.repository).files("main")
    return {name: blob for name, blob in files.items() if name.split("/")[0] not in CARD}


def cache_state(place: Place) -> dict:
    """Return the state that loads without the Hub: all of it, or nothing."""
    options = {"cache_dir": str(place.folder / "cache"), "local_files_only": True}
    try:
        return answers(RetexModel.from_pretrained(f"{OWNER}/{TEMPLATE}", **options))
    except RetexError:
        return {}


@dataclass(frozen=True)
class Job:
    """A job: its function, the function that reads its state, and the shared folder that its target starts from."""

    run: Callable[[Place], None]
    state: Callable[[Place], dict] = artifact_state
    start: str | None = "previous"


JOBS = {
    "build": Job(build),
    "build, sign, change": Job(recipe),
    "training": Job(train),
    "save": Job(save),
    "add a task, save": Job(add_task),
    "delete a task, save": Job(delete_task),
    "sign": Job(sign),
    "card": Job(card),
    "export": Job(export, folder_state, "adapter"),
    "push": Job(push, hub_state, None),
    "push of a folder": Job(push_of_a_folder, hub_state, None),
    "download": Job(download, cache_state, None),
}


def prepare(shared: Path) -> None:
    """Prepare the data that trials start from, here and on the Hub."""
    prepare_folders(shared)
    model = RetexModel.from_pretrained(shared / "previous")
    model.export_lora("green", shared / "adapter")
    model.push_to_hub(f"{OWNER}/{TEMPLATE}", token=TOKEN)


def prepare_folders(shared: Path) -> None:
    """Make base, experts, texts of their tasks, an artifact of two tasks and another of three."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    base, experts = bert(tokenizer)
    for folder, model in {"base": base, **{f"experts/{task}": expert for task, expert in experts.items()}}.items():
        tokenizer.save_pretrained(shared / folder)
        model.save_pretrained(shared / folder)
    (shared / "texts").mkdir()
    for task in experts:
        (shared / "texts" / f"{task}.txt").write_text("\n".join(texts(task, 24)))
    for folder, model in {"previous": make_model(tasks=("red", "green")), "other": make_model(rank=3)}.items():
        tokenizer.save_pretrained(shared / folder)
        model.save_pretrained(shared / folder)


def begin(job: Job, folder: Path, shared: Path, hub: Path) -> Place:
    """Make a fresh folder for a trial."""
    (folder / "tmp").mkdir(parents=True)
    place = Place(folder, shared, hub)
    if job.start is not None:
        shutil.copytree(shared / job.start, place.target)
    if job.run in (push, push_of_a_folder):
        shutil.copytree(hub / OWNER / TEMPLATE, hub / OWNER / place.repository)
    return place


def end(place: Place) -> None:
    shutil.rmtree(place.folder)
    shutil.rmtree(place.hub / OWNER / place.repository, ignore_errors=True)


# ---- children --------------------------------------------------------------------------------------------------------


def fork(job: Job, place: Place, at_change: int | None = None) -> int:
    """Start a child; it kills itself before change number `at_change`, or else reports how many it made."""
    child = os.fork()
    if child:
        return child
    code = 1
    signal.alarm(LONGEST)  # a fork does not inherit the alarm
    try:
        log = os.open(place.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        tempfile.tempdir = str(place.folder / "tmp")
        changes = _count_changes(place, at_change)
        job.run(place)
        (place.folder / "changes").write_text(str(len(changes)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _count_changes(place: Place, at_change: int | None) -> list[str]:
    made: list[str] = []
    root = str(place.folder)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            # A name without a path is relative to an open folder.
            near = isinstance(path, str) and (os.path.abspath(path).startswith(root) or os.sep not in path)
            if not (near and flags & WRITING):
                return
        elif event not in CHANGES:
            return
        if len(made) == at_change:
            os.kill(os.getpid(), signal.SIGKILL)
        made.append(event)

    sys.addaudithook(hook)
    return made


def wait(child: int, seconds: float | None = None) -> int:
    """Wait for a child, or kill it after `seconds`; return its exit status (negative: the signal)."""
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGALRM:
        raise RuntimeError(f"the job hangs: it has not ended after {LONGEST} seconds")
    return code


# ---- trials ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """The undisturbed run of a job."""

    before: dict
    after: dict
    left: set[str]
    seconds: float
    changes: int


def undisturbed(job: Job, place: Place) -> Course:
    before = job.state(place)
    started = time.monotonic()
    _must_end(job, place)
    seconds = time.monotonic() - started
    changes = int((place.folder / "changes").read_text())
    return Course(before, job.state(place), _listing(place), seconds, changes)


def _must_end(job: Job, place: Place) -> None:
    code = wait(fork(job, place))
    if code:
        raise RuntimeError(f"the job ended with {code}: {(place.folder / 'log').read_text()[-2000:]}")


def _listing(place: Place) -> set[str]:
    """Return all files of a trial's folder, except those that a killed huggingface_hub leaves in its own cache."""
    names = {file.relative_to(place.folder).as_posix() for file in place.folder.rglob("*")}
    return {name for name in names if not LEFT_BY_THE_CLIENT.fullmatch(name)}


def trial(job: Job, place: Place, course: Course, *, seconds: float | None, at_change: int | None) -> str:
    """Kill a job once and return the state found afterwards. Raise if it is neither the old nor the new one."""
    child = fork(job, place, at_change)
    wait(child, seconds)
    state = job.state(place)
    if state not in (course.before, course.after):
        raise AssertionError(f"the state is neither the previous one nor the new one: {_listing(place)}")
    for config in place.folder.rglob(".*/**/retex_config.json"):
        _must_be_refused(config.parent)
    _must_end(job, place)
    if job.state(place) != course.after:
        raise AssertionError("the job, done again, does not give what it gives undisturbed")
    litter = _listing(place) ^ course.left
    if litter:
        raise AssertionError(f"the job, done again, leaves other files: {sorted(litter)}")
    return NEW if state == course.after else PREVIOUS


def _must_be_refused(folder: Path) -> None:
    try:
        RetexModel.from_pretrained(folder)
    except RetexError:
        return
    raise AssertionError(f"{folder} is taken for an artifact")


def moments(course: Course, kills: int | None, draw: random.Random) -> Iterator[dict]:
    """Yield moments to kill at: two of three before a file system change (None: before each), else at random."""
    changes = range(course.changes)
    chosen = changes if kills is None else sorted(draw.sample(changes, kills - kills // 3))
    for change in chosen:
        yield {"seconds": None, "at_change": change}
    for _ in range(len(changes) // 2 if kills is None else kills // 3):
        yield {"seconds": draw.uniform(0, course.seconds), "at_change": None}


def run(work: Path, hub: Path, plan: dict[str, int | None], seed: int) -> None:
    """Run all trials of a plan, `{job: kills}`, and print a line of JSON for each."""
    torch.set_num_threads(1)
    # Progress bars have a lock that forks share: a child killed while holding it would block its parent.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    shared = work / "shared"
    prepare(shared)
    for name, kills in plan.items():
        job = JOBS[name]
        draw = random.Random(f"{seed} {name}")
        place = begin(job, work / "undisturbed", shared, hub)
        course = undisturbed(job, place)
        end(place)
        for number, moment in enumerate(moments(course, kills, draw)):
            place = begin(job, work / f"trial-{number}", shared, hub)
            result: dict[str, str | None] = {"job": name, "problem": None}
            signal.alarm(4 * LONGEST)  # if anything hangs here, even below Python, end the process; `kills` reports it
            try:
                result["outcome"] = trial(job, place, course, **moment)
            except Exception as error:
                described = f"killed {json.dumps(moment)}, seed {seed}: {type(error).__name__}: {error}"
                result |= {"outcome": "problem", "problem": described}
            finally:
                end(place)
            print(json.dumps(result), flush=True)
    signal.alarm(0)


if __name__ == "__main__":
    work_dir, hub_dir, chosen, given_seed = sys.argv[1:]
    run(Path(work_dir), Path(hub_dir), json.loads(chosen), int(given_seed))
