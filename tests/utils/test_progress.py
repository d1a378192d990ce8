"""Progress: a bar on a terminal, lines in a log, nothing for short work."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from families import TEXT
from helpers import make_experts
from tqdm.auto import tqdm
from transformers import BertConfig, BertModel

from retex_hf import RetexConfig, RetexModel
from retex_hf.recovery import work_sharing
from retex_hf.utils import progress
from retex_hf.utils.progress import Lines, remark, track, waiting


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    monkeypatch.setattr(progress, "_last_line", 0.0)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(capsys) -> list[str]:
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_a_line_says_what_how_far_and_how_long_still(clock, capsys):
    for _ in track(range(310), title="Solving", unit="tensor"):
        clock.now += 0.35
    said = lines(capsys)
    assert said[0] == "Solving: 29 of 310 tensors, 0:10 elapsed, about 1:38 left"  # 29 * 0.35 = 10.15
    assert said[1] == "Solving: 58 of 310 tensors, 0:20 elapsed, about 1:28 left"
    assert len(said) == 10  # of 108.5 seconds


def test_there_is_at_most_one_line_per_ten_seconds(clock, capsys):
    times, bar = [], track(total=20, title="Solving", unit="tensor")
    for _ in range(20):
        clock.now += 7
        bar.update()
        times += [clock.now] * len(lines(capsys))
    assert times == [1014 + 14 * number for number in range(10)]


def test_short_work_prints_nothing(clock, capsys):
    for _ in range(50):  # one job after the other
        for _ in track(range(9), title="Solving", unit="tensor"):
            clock.now += 1.1
    assert lines(capsys) == []


def test_without_progress_nothing_is_printed(clock, capsys):
    for _ in track(range(9), title="Solving", unit="tensor", progress=False):
        clock.now += 100
    assert lines(capsys) == []


def test_work_within_work_shares_the_lines(clock, capsys):
    for _ in track(range(2), title="Outer", unit="task"):
        for _ in track(range(11), title="Inner", unit="step"):
            clock.now += 1
    assert lines(capsys) == [
        "Inner: 10 of 11 steps, 0:10 elapsed, about 0:01 left",
        "Inner: 10 of 11 steps, 0:10 elapsed, about 0:01 left",
    ]


def test_what_an_earlier_run_did_does_not_count_for_the_estimate(clock, capsys):
    bar = track(title="Training", unit="step", initial=900, total=1000)
    clock.now += 20
    bar.set_postfix(loss="0.12", error="0.3", refresh=False)
    bar.update(20)
    assert lines(capsys)[-1] == "Training: 920 of 1000 steps, 0:20 elapsed, about 1:20 left (loss 0.12, error 0.3)"


@pytest.mark.parametrize(
    ("unit", "done", "total", "seconds", "expected"),
    [
        ("batch", 1, 3, 12, "It: 1 of 3 batches, 0:12 elapsed, about 0:24 left"),
        ("batch", 1, 1, 12, "It: 1 of 1 batch, 0:12 elapsed"),
        ("input", 7, None, 3725, "It: 7 inputs, 1:02:05 elapsed"),
        ("B", 1.2e9, 3.6e9, 30, "It: 1.2 of 3.6 GB, 0:30 elapsed, about 1:00 left"),
        ("B", 4e6, 5e6, 40, "It: 4.0 of 5.0 MB, 0:40 elapsed, about 0:10 left"),
        ("step", 0, 5, 10, "It: 0 of 5 steps, 0:10 elapsed"),
        ("step", 5, 5, 10, "It: 5 of 5 steps, 0:10 elapsed"),
        ("step", 1, 3601, 1, "It: 1 of 3601 steps, 0:01 elapsed, about 1:00:00 left"),
    ],
)
def test_units_and_times(unit, done, total, seconds, expected):
    work = Lines(None, "It", unit, total)
    work.done = done
    assert work.line(seconds) == expected


def test_items_come_through_and_generators_have_no_total(clock, capsys):
    found = []
    for item in track((letter for letter in "abc"), title="Predicting", unit="input"):
        found.append(item)
        clock.now += 6
    assert found == ["a", "b", "c"]
    assert lines(capsys) == ["Predicting: 2 inputs, 0:12 elapsed"]


def test_untrusted_names_are_escaped(clock, capsys):
    with track(title="a", unit="batch", total=2) as bar:
        bar.set_description("\x1b[2J\nmethod")
        clock.now += 10
        bar.update()
    assert lines(capsys) == [r"\x1b[2J\nmethod: 1 of 2 batches, 0:10 elapsed, about 0:10 left"]


def test_a_terminal_gets_tqdm(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = track(range(3), title="Solving", unit="tensor")
    assert isinstance(bar, tqdm)
    for _ in bar:
        clock.now += 100
    remark("Building it")
    said = sys.stderr.getvalue()
    assert "Solving: 100%" in said and "3/3" in said and "elapsed" not in said and "Building it\n" in said


def test_a_notebook_gets_tqdm(monkeypatch):
    monkeypatch.setattr(progress, "notebook_tqdm", object())
    assert isinstance(track(range(0), title="Solving", unit="tensor"), tqdm)


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [None, Full()])
def test_work_goes_on_where_nothing_can_be_printed(stream, clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in track(range(3), title="Solving", unit="tensor"):
        clock.now += 100
    remark("Building it")


def test_a_call_without_steps_says_how_long_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr(progress, "_last_line", 0.0)
    with pytest.raises(KeyError), waiting("Pushing to org/it"):
        progress.threading.Event().wait(0.5)
        raise KeyError
    said = lines(capsys)
    assert said and set(said) <= {"Pushing to org/it: 0:00 elapsed", "Pushing to org/it: 0:01 elapsed"}
    with waiting("Pushing to org/it"):
        pass
    assert lines(capsys) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_main_process_prints(rank, clock, monkeypatch, capsys):
    """With two processes, each works on its own half; the main one tells about its half."""
    monkeypatch.setattr(work_sharing, "broadcast_object_list", lambda values, from_process: [(0, [])])
    accelerator = SimpleNamespace(num_processes=2, process_index=rank)

    def work(key: str) -> int:
        clock.now += 4
        return 0

    context = work_sharing.BuildContext(accelerator)
    work_sharing.run_dealt(context, {f"w{number}": 1 for number in range(12)}, work, "Solving")
    expected = ["Solving: 3 of 6 tensors, 0:12 elapsed, about 0:12 left", "Solving: 6 of 6 tensors, 0:24 elapsed"]
    assert lines(capsys) == (expected if rank == 0 else [])


def test_a_long_build_tells_its_stages(clock, monkeypatch, capsys):
    """Every look at the clock takes 3 seconds."""

    def slow() -> float:
        clock.now += 3
        return clock.now

    monkeypatch.setattr(progress, "monotonic", slow)
    base = BertModel(BertConfig(**TEXT)).eval()
    experts = make_experts(base)
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=True)
    said = lines(capsys)
    assert any(line.startswith("Merging: ") for line in said) and any(line.startswith("Solving: ") for line in said)
    assert all(" of " in line and " elapsed" in line for line in said)
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False)
    assert lines(capsys) == []
