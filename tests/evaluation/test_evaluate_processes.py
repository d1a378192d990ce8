"""Real processes: two of them, sharing the stream through accelerate, find the rows that one finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from accelerate import Accelerator
from evaluation_worker import SIZES, Neighbour
from helpers import launcher
from toys import toy_collate, toy_tasks

from retex_hf.evaluation import evaluate

SCRIPT = Path(__file__).with_name("evaluation_worker.py")


def test_two_processes_give_the_rows_of_one(tmp_path):
    command = [sys.executable, *launcher(2), str(SCRIPT), str(tmp_path)]
    paths = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    options = {"batch_size": 4, "progress": False}
    for sizes in SIZES:
        tasks = toy_tasks(sizes, classes=2)
        plain = evaluate(Neighbour(), tasks, toy_collate, **options)
        plain.save(tmp_path / "plain.json")
        one = evaluate(Neighbour(), tasks, toy_collate, accelerator=Accelerator(cpu=True), **options)
        one.save(tmp_path / "one.json")
        files = ["plain", "one", *(f"{len(sizes)}-tasks-{process}" for process in range(2))]
        assert len({(tmp_path / f"{file}.json").read_text() for file in files}) == 1
        # The method answers from the row before: batches cut otherwise would have given other rows.
        other = evaluate(Neighbour(), tasks, toy_collate, batch_size=2, progress=False)
        if len(sizes) == 3:
            assert [score.correct.tolist() for score in other.scores["known"].values()] != [
                score.correct.tolist() for score in plain.scores["known"].values()
            ]
