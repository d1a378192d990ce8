"""Hostile patterns, names, cards and metadata: the short form of the trial, and the cases that once took forever."""

from __future__ import annotations

import threading
import time

import pytest
from trust import matchers

from retex_hf import RetexConfig
from retex_hf.artifact.card import sections
from retex_hf.checkpoints.patterns import MOST_STEPS, Pattern, PatternError, Patterns
from retex_hf.errors import CheckpointError, ConfigError
from retex_hf.utils.strict_files import parse_json


@pytest.fixture(autouse=True)
def seconds():
    """Each of these is done in a moment; what went wrong before took minutes, or did not end."""
    start = time.process_time()
    yield
    assert time.process_time() - start < 20


def test_hostile_matchers_are_right_or_refused(tmp_path):
    tallies = matchers.run(tmp_path, progress=False)
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert {tally.name for tally in tallies} == set(matchers.KINDS)
    assert all(set(tally.outcomes) <= {"right", "answered", "refused"} for tally in tallies)


@pytest.mark.parametrize("name", ["a " * 500, "a" * 1000, ".base_layer" * 90, "x." * 400])
@pytest.mark.parametrize("text", [".*.*.*.*!", "([^!]+) +!", "(a+)+[!]", "(a|a)*[!]", "(.*.*)*[!]"])
def test_a_match_takes_as_many_steps_as_pattern_times_name(text, name):
    found, steps = Pattern(text).matches(name)
    assert not found
    assert steps <= 4 * (len(text) + 2) * (len(name) + 2)


def test_an_adapter_has_so_many_steps_and_no_more():
    values = Patterns({f"[!]{number}{'.*' * 200}": 2 for number in range(10)}, "rank_pattern of here")
    with pytest.raises(CheckpointError, match=r"^rank_pattern of here has '.*which takes too long to match: expected"):
        for number in range(1000):
            values.value(f"{number:0900}", 1)
    with pytest.raises(PatternError, match="takes too long"):
        Pattern("b(a*a*)*").matches("a" * 1000, MOST_STEPS // 1000)


def test_a_thousand_modules_with_a_pattern_each_are_no_bomb():
    names = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(250) for part in "qkvo"]
    values = Patterns({name: index for index, name in enumerate(names)}, "here")
    assert [values.value(name, -1) for name in names] == list(range(len(names)))


def test_globs_of_a_configuration_are_bounded():
    with pytest.raises(ConfigError, match=r"exclude must be a list of patterns .* at most 5000 of at most 1000 char"):
        RetexConfig(exclude=["a"] * 5001)
    with pytest.raises(ConfigError, match=r'heads must be "auto" or a list of patterns .* at most 1000 characters'):
        RetexConfig(heads=["*a" * 501])


@pytest.mark.parametrize(
    "mark",
    [
        "<!-- retex:a -->\n",
        "<!-- /retex:a -->\n",
        "<!-- retex-metadata\n",
        "<!-- retex-written a\n",
        "<!--",
        "`",
        "---\n",
    ],
)
def test_a_card_takes_time_with_its_length(mark):
    """60,000 openers took 25 seconds."""
    card = "# Mine\n" + mark * (1_000_000 // len(mark))
    text = sections.update(card, {"license": "mit"}, "<!-- retex:a -->\nours\n<!-- /retex:a -->\n", "README.md")
    assert "# Mine" in text and "ours" in text
    assert sections.choose(text, card, "README.md") is not None


@pytest.mark.parametrize("levels", [65, 1_000, 1_000_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_nested_json_in_a_thread_with_a_small_stack(start, end, levels):
    found = []

    def read() -> None:
        with pytest.raises(ConfigError, match=r"^here is not valid JSON: it is nested too deeply.$"):
            parse_json(start * levels + "1" + end * levels, "here", ConfigError, kind=None)
        found.append(True)

    size = threading.stack_size(128 * 1024)
    thread = threading.Thread(target=read)
    thread.start()
    threading.stack_size(size)
    thread.join()
    assert found == [True]
