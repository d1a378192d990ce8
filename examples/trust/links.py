"""Planted links, pipes, sockets and folders at names that jobs write and remove: the targets of links must stay
untouched.

Every name that a job writes, renames or removes is recorded by watching it. At each of them something is planted that a
clone or an archive could contain, and the job runs, as root and as another user. It must be refused in one sentence,
with the target unchanged, or succeed, with the right answers. Nothing that a link leads to may be changed, removed or
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

NOBODY = 65534
# Trials per job, two of three at names beside the target; another seed plants others. None: everything, at every name.
SHORT = {"build": 3, "save": 4, "load": 2}
LONG = dict.fromkeys(
    (
        *SHORT, "resumed build", "build, sign, change", "training", "save in two renames", "add a task, save",
        "delete a task, save", "sign", "card", "export", "figures", "push",
    ),
    12,
)  # fmt: skip


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Plant at a few names (`size="short"`) or at more (`"long"`); as this user, and as another one if this is root."""
    plan = {"short": SHORT, "long": LONG}[size]
    users = {os.geteuid(): ""} | ({NOBODY: ", as another user"} if os.geteuid() == 0 else {})
    tallies = {(name, user): Tally(f"links: {name}{words}") for user, words in users.items() for name in plan}
    log = work_dir / "log"
    work_dir.mkdir(parents=True, exist_ok=True)
    with _reachable() as place, LocalHub(place / "hub") as hub, log.open("w", encoding="utf-8") as errors:
        environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
        arguments = [str(place / "work"), str(place / "hub"), json.dumps(plan), json.dumps(list(users)), str(seed)]
        command = [sys.executable, "-m", "trust.planted", *arguments]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in tqdm(process.stdout, desc="Links", unit="trial", disable=not progress):
                result = json.loads(line)
                problem = None if result["problem"] is None else f"{result['problem']}, seed {seed}"
                tallies[result["job"], result["user"]].add(result["outcome"], problem)
    if process.returncode:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RuntimeError(f"The process whose children meet links has failed itself, see {log}: {last}.")
    return list(tallies.values())


@contextmanager
def _reachable() -> Iterator[Path]:
    """Yield a temporary folder that another user can enter too; those of tests are closed."""
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        (place / "work").mkdir()
        yield place
    finally:
        shutil.rmtree(place)
