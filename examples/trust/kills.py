"""Loss of data when a process is killed: real processes, killed with SIGKILL at many moments of every job.

After a kill the folder must load, with all files and answers either of the old state or of the job's result. Leftovers
of the kill must not be taken for an artifact. The job, run again, must end as if nothing had happened, and leave
nothing else behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from local_hub import LocalHub
from tqdm.auto import tqdm

from .tally import Tally

# Kills per job, two thirds of them before a change to the file system. None: before every one of its changes.
SHORT = {
    "build": 4,
    "build, sign, change": 4,
    "training": 3,
    "save": 3,
    "add a task, save": 3,
    "delete a task, save": 3,
    "sign": 3,
    "push": 3,
    "push of a folder": 3,
}
LONG = dict.fromkeys((*SHORT, "card", "export", "download"))


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Kill every job, a few times (`size="short"`) or before every change to the file system (`"long"`)."""
    plan = {"short": SHORT, "long": LONG}[size]
    tallies = {name: Tally(f"kill: {name}") for name in plan}
    work, repositories, log = work_dir / "work", work_dir / "hub", work_dir / "log"
    work.mkdir(parents=True)
    with LocalHub(repositories) as hub, log.open("w", encoding="utf-8") as errors:
        environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(work_dir / "home"), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
        arguments = [str(work), str(repositories), json.dumps(plan), str(seed)]
        command = [sys.executable, "-m", "trust.killed", *arguments]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in tqdm(process.stdout, desc="Kills", unit="kill", disable=not progress):
                result = json.loads(line)
                tallies[result["job"]].add(result["outcome"], result["problem"])
    if process.returncode:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RuntimeError(f"The process whose children are killed has failed itself, see {log}: {last}.")
    return list(tallies.values())
