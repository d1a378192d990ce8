"""Real processes whose standard streams are closed, full, binary, or of an encoding that lacks most characters."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from classifiers import make_classifiers

from retex_hf.cli import main

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full and a shell")
RETEX = f"{sys.executable} -m retex_hf.cli"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    place = make_classifiers(tmp_path_factory.mktemp("place"), {"low": 2, "high": 3})
    sources = [f"--expert={task}={place / 'experts' / task}" for task in ("low", "high")]
    sources += [f"--data={task}={place / 'data' / task}" for task in ("low", "high")]
    assert (
        main(["build", "--base", str(place / "base"), *sources, "--rank=4", "--output-dir", f"{place}/artifact"]) == 0
    )
    (place / "noise").write_bytes(bytes(range(1, 256)) * 4)
    deep = "[" * 200_000
    (place / "deep.jsonl").write_text('{"text": "w1", "label": 0}\n' + deep + "\n")
    (place / "within.jsonl").write_text('{"text": ' + deep + "]" * 200_000 + "}\n")
    (place / "behind.jsonl").write_text('{"text": "w1\n' + deep + "\n")  # a text that goes on in the next line
    (place / "packed.jsonl.gz").write_bytes(gzip.compress(f'{{"text": {deep}'.encode()))
    (place / "bomb.jsonl.gz").write_bytes(gzip.compress(b" " * 150_000_000, 9))
    (place / "archive.jsonl").write_bytes(gzip.compress(b'{"text": "w1"}\n'))
    for name in ("latin.jsonl", "latin.csv", "latin.txt", "latin.json", "latin.yaml"):
        (place / name).write_bytes(b'{"text": "na\xefve"}\n')
    return place


def shell(command: str, place: Path, **environment: str) -> subprocess.CompletedProcess:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        ["bash", "-c", command], env=given, cwd=place, capture_output=True, text=True, timeout=120, encoding="utf-8"
    )


FULL = {
    "overview": "--help",
    "version": "--version",
    "answers": "predict artifact --text w1",
}


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_behind_standard_output_is_one_sentence(case, place):
    done = shell(f"{RETEX} {FULL[case]} >/dev/full", place)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("retex") and "No space left on device" in done.stderr


def test_closed_streams_are_no_traceback(place):
    done = shell(f"{RETEX} inspect artifact >&-", place)
    assert done.returncode == 2
    assert done.stderr == "retex inspect: standard output is closed: there is nowhere to put results.\n"
    assert shell(f"{RETEX} inspect artifact >&- 2>&-", place).returncode == 2
    done = shell(f"{RETEX} dance 2>&-", place)
    assert (done.returncode, done.stdout) == (2, "")  # what is wrong is not said among the results
    done = shell(f"{RETEX} predict artifact <&-", place)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_binary_standard_input_is_one_sentence(place):
    done = shell(f"{RETEX} predict artifact - <noise", place, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 2
    assert done.stderr == "retex predict: standard input is not text in UTF-8 (line 2).\n"


def test_texts_are_utf_8_whatever_the_locale_says(place):
    asked = f"printf 'naïve 😀 w1\\n' | {RETEX} predict artifact - --format jsonl"
    done = shell(asked, place, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert json.loads(done.stdout)["input"] == "naïve 😀 w1"


DEEP = "it is nested too deeply: at most 64 levels are read."
FILES = {
    "predict artifact deep.jsonl": "deep.jsonl, line 2 is not valid JSON: it is nested too deeply.",
    "predict artifact latin.jsonl": "latin.jsonl is not text in UTF-8 (line 1).",
    "predict artifact latin.txt": "latin.txt is not text in UTF-8 (line 1).",
    "predict artifact --text w1 --classes latin.json": "latin.json is not text in UTF-8.",
    "build latin.yaml": "latin.yaml is not text in UTF-8.",
    **{
        f"sign artifact --data low={name} --data high=data/high": says
        for name, says in {
            "deep.jsonl": f"deep.jsonl cannot be read as JSON: {DEEP}",
            "within.jsonl": f"within.jsonl cannot be read as JSON: {DEEP}",
            "behind.jsonl": f"behind.jsonl cannot be read as JSON: {DEEP}",
            "packed.jsonl.gz": f"packed.jsonl.gz cannot be read as JSON: {DEEP}",
            "bomb.jsonl.gz": "bomb.jsonl.gz unpacks to more than 200 times its size.",
            "archive.jsonl": "archive.jsonl is not text in UTF-8.",
            "latin.jsonl": "latin.jsonl is not text in UTF-8.",
            "latin.csv": "latin.csv is not text in UTF-8.",
            "latin.txt": "latin.txt is not text in UTF-8.",
        }.items()
    },
}


# One process for all: the first that ends it is the last that is seen.
EACH = """
import json, sys
from retex_hf.cli import main
for command in json.load(sys.stdin):
    print(main(command.split()), flush=True)
"""


def test_files_that_end_native_readers_are_one_sentence(place):
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EACH],
        input=json.dumps(list(FILES)),
        env=given,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == ["2"] * len(FILES)
    for said, expected in zip(done.stderr.splitlines(), FILES.values(), strict=True):
        assert said.startswith("retex ") and said.endswith(expected)
