"""The queue: what runs together, what waits, what is refused, and what fails alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event as Flag
from threading import Thread

import pytest

from retex_hf.serving import batching
from retex_hf.serving.batching import Batcher
from retex_hf.serving.errors import ApiError
from retex_hf.serving.metrics import Metrics
from retex_hf.serving.rows import Decision, Done, Event, Failed, Routed, Row, Text
from retex_hf.serving.turns import Turns


class Trial:
    """A queue whose batches are recorded; the first waits until it is let go."""

    def __init__(self, run: Callable[[list[Row]], None] | None = None, **options: float) -> None:
        self.batches: list[list[object]] = []
        self.events: list[tuple[object, Event]] = []
        self.go = Flag()
        self._run = run
        given = {"rows": 4, "tokens": 100, "wait": 0.02, "queue": 8, "threads": 1, **options}
        self.batcher = Batcher(self.run, Metrics(), **given)

    def run(self, rows: list[Row]) -> None:
        self.batches.append([row.value for row in rows])
        assert self.go.wait(10)
        if self._run is not None:
            self._run(rows)
        for row in rows:
            row.send(Done(Decision("a"), row.value))

    def row(self, value: object, key: str = "k", size: int = 1) -> Row:
        return Row(value, "auto", key, size=size, listener=lambda row, event: self.events.append((row.value, event)))

    def submit(self, *rows: Row) -> None:
        self.batcher.submit(rows)

    def begun(self, count: int) -> None:
        """Wait until so many batches have begun."""
        end = time.monotonic() + 10
        while len(self.batches) < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    def finish(self) -> list[list[object]]:
        self.go.set()
        self.batcher.close()
        return self.batches


def test_rows_that_wait_run_together_by_key_in_order_of_arrival():
    trial = Trial()
    trial.submit(trial.row(0))
    trial.begun(1)
    trial.submit(*(trial.row(n, key="k" if n % 2 else "l") for n in range(1, 7)))
    assert trial.finish() == [[0], [1, 3, 5], [2, 4, 6]]
    assert [value for value, event in trial.events if isinstance(event, Done)] == [0, 1, 3, 5, 2, 4, 6]


def test_a_batch_has_at_most_so_many_rows_and_padded_tokens():
    trial = Trial(rows=3, tokens=20)
    trial.submit(trial.row(0))
    trial.begun(1)
    trial.submit(*(trial.row(n) for n in range(1, 5)), trial.row("long", size=8), trial.row("longer", size=50))
    assert trial.finish() == [[0], [1, 2, 3], [4, "long"], ["longer"]]


def test_the_first_row_waits_for_others():
    trial = Trial(wait=0.3)
    trial.go.set()
    trial.submit(trial.row(0))
    time.sleep(0.05)
    trial.submit(trial.row(1))
    trial.begun(1)
    assert trial.finish() == [[0, 1]]


def test_a_full_batch_does_not_wait():
    trial = Trial(wait=60.0)
    trial.go.set()
    trial.submit(*(trial.row(n) for n in range(4)))
    trial.begun(1)
    assert trial.finish() == [[0, 1, 2, 3]]


def test_rows_do_not_wait_for_the_end_of_a_long_batch_where_another_thread_is_free(monkeypatch):
    monkeypatch.setattr(batching, "PATIENCE", 0.05)
    trial = Trial(threads=2)
    trial.submit(trial.row(0))
    trial.begun(1)
    trial.submit(trial.row(1))
    trial.begun(2)  # while the first batch runs
    assert trial.finish() == [[0], [1]]


def test_rows_beyond_the_queue_are_refused_all_of_them():
    trial = Trial(queue=3)
    trial.submit(trial.row(0))
    trial.begun(1)
    trial.submit(trial.row(1), trial.row(2))
    with pytest.raises(ApiError, match=r"^2 rows wait already, and at most 3 may: try again later.$") as refused:
        trial.submit(trial.row(3), trial.row(4))
    assert refused.value.status == 429 and int(refused.value.headers["retry-after"]) >= 1
    with pytest.raises(ApiError, match="The request has 4 rows; at most 3 can wait") as refused:
        trial.submit(*(trial.row(n) for n in range(4)))
    assert refused.value.status == 400
    trial.submit(trial.row(5))
    assert trial.finish() == [[0], [1, 2, 5]]


def test_rows_that_nobody_waits_for_are_dropped():
    trial = Trial()
    rows = [trial.row(n) for n in range(3)]
    trial.submit(rows[0])
    trial.begun(1)
    trial.submit(*rows[1:])
    trial.batcher.cancel(rows[:2])
    assert trial.finish() == [[0], [2]]
    assert [value for value, _ in trial.events] == [2]


def test_a_row_that_cannot_run_fails_alone():
    def run(rows: list[Row]) -> None:
        if any(row.value == "bad" for row in rows):
            raise ValueError("bad")

    trial = Trial(run)
    trial.submit(trial.row(0), trial.row("bad"), trial.row(2))
    assert trial.finish() == [[0, "bad", 2], [0], ["bad"], [2]]
    answers = {value: type(event) for value, event in trial.events}
    assert answers == {0: Done, "bad": Failed, 2: Done}


def test_a_row_whose_text_has_begun_fails_with_its_batch():
    def run(rows: list[Row]) -> None:
        for row in rows:
            row.send(Routed(Decision("a")))
        rows[0].send(Text("once"))
        if len(rows) > 1:
            raise ValueError("out of memory")

    trial = Trial(run)
    trial.submit(trial.row(0), trial.row(1))
    assert trial.finish() == [[0, 1], [1]]
    kinds = [(value, type(event)) for value, event in trial.events]
    assert kinds == [(0, Routed), (1, Routed), (0, Text), (0, Failed), (1, Text), (1, Done)]


def test_closing_finishes_what_waits_and_refuses_what_comes():
    trial = Trial(wait=60.0)
    trial.submit(trial.row(0))
    trial.go.set()
    trial.batcher.close()
    assert trial.batches == [[0]]
    with pytest.raises(ApiError, match="shutting down"):
        trial.submit(trial.row(1))


def test_turns_are_taken_in_order_and_handed_on():
    turns, steps = Turns(), []

    def work(name: str) -> None:
        with turns:
            for _ in range(3):
                steps.append(name)
                turns.hand_on()

    with turns:
        threads = [Thread(target=work, args=(name,)) for name in "ab"]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            while turns._given < number + 1:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert "".join(steps) == "ababab"


def test_a_batch_is_no_wider_than_the_model_takes():
    """All rows run for as long as the longest answer, on prompts as wide as the longest: each may fit, both not."""
    trial = Trial(tokens=10_000, width=128)

    def row(value: str, prompt: int, answer: int) -> Row:
        return Row(value, "auto", "k", size=prompt + answer, tokens=prompt)

    trial.submit(trial.row("first"))
    trial.begun(1)
    trial.submit(row("long prompt", 110, 5), row("long answer", 3, 120), row("short", 3, 5))
    assert trial.finish() == [["first"], ["long prompt", "short"], ["long answer"]]


def test_tokens_of_a_batch_count_padding():
    trial = Trial(tokens=120)
    rows = [Row(value, "auto", "k", size=42, tokens=tokens) for value, tokens in (("a", 40), ("b", 2))]
    trial.submit(trial.row("first"))
    trial.begun(1)
    trial.submit(*rows)  # 40 tokens of prompt and 40 of answer, twice
    assert trial.finish() == [["first"], ["a"], ["b"]]


def test_rows_of_very_different_lengths_run_apart():
    trial = Trial(rows=8, tokens=10**6)
    trial.submit(trial.row("first"))
    trial.begun(1)
    for name, size in (("a", 10), ("long", 500), ("b", 12), ("longer", 900), ("c", 9)):
        trial.submit(trial.row(name, size=size))
    # 500 tokens beside 10 would be 49 % padding, but beside 10 and 12 it would be 65 %.
    assert trial.finish() == [["first"], ["a", "long", "longer"], ["b", "c"]]
    trial = Trial(rows=8, tokens=10**6)
    trial.submit(trial.row("first"))
    trial.begun(1)
    for name, size in (("a", 10), ("b", 12), ("c", 9), ("long", 500), ("d", 60)):
        trial.submit(trial.row(name, size=size))
    assert trial.finish() == [["first"], ["a", "b", "c", "d"], ["long"]]
