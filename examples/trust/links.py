"""Is anything touched that a link leads to? Links, pipes, sockets and folders, planted where jobs write and remove.

Every name that a job writes, renames or removes is learned by watching it. At each of them something is planted that a
clone or an archive could bring, and the job is done, as root and as another user. It must be refused in one sentence,
with the target as it was, or be done, with the right answers. Nothing that a link leads to may be changed, removed or
read in; nothing may hang.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local_hub import LocalHub
from tqdm.auto import tqdm

from .tally import Tally

OTHER_USER = 65534  # nobody
# Trials per job. None: everything that can be planted, at every name.
SHORT = {"build": 4, "resumed build": 2, "save": 6, "sign": 3, "card": 3, "load": 4}
ALL = (
    *SHORT, "build, sign, change", "training", "add a task, save", "delete a task, save", "export", "figures", "push",
    "save in two renames",
)  # fmt: skip
LONG = dict.fromkeys(ALL)


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Plant at a few names (`size="short"`), or at all of them (`"long"`); as this user, and by root as another one."""
    plan = {"short": SHORT, "long": LONG}[size]
    users = {"": os.geteuid()} | ({", as another user": OTHER_USER} if os.geteuid() == 0 else {})
    return [tally for words, user in users.items() for tally in _run_as(work_dir, user, words, plan, seed, progress)]


def _run_as(
    work_dir: Path, user: int, words: str, plan: dict[str, int | None], seed: int, progress: bool
) -> list[Tally]:
    tallies = {name: Tally(f"links: {name}{words}") for name in plan}
    log = work_dir / f"log-{user}"
    work_dir.mkdir(parents=True, exist_ok=True)
    with _reachable(user) as place, LocalHub(place / "hub") as hub, log.open("w", encoding="utf-8") as errors:
        environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
        arguments = [str(place / "work"), str(place / "hub"), json.dumps(plan), str(user), str(seed)]
        command = [sys.executable, "-m", "trust.planted", *arguments]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in tqdm(process.stdout, desc=f"Links{words}", unit="trial", disable=not progress):
                result = json.loads(line)
                problem = None if result["problem"] is None else f"{result['problem']}, seed {seed}"
                tallies[result["job"]].add(result["outcome"], problem)
    if process.returncode:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RuntimeError(f"The process whose children meet links has failed itself, see {log}: {last}.")
    return list(tallies.values())


@contextmanager
def _reachable(user: int) -> Iterator[Path]:
    """A temporary folder that another user can enter, too; those of tests are closed."""
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        (place / "work").mkdir()
        os.chown(place / "work", user, -1)
        yield place
    finally:
        shutil.rmtree(place)
