"""Hostile patterns, names, cards and metadata: each is answered correctly or refused, in bounded time.

Covers untrusted text that is matched or parsed: patterns of adapters (compared with Python's `re` on names that are
short enough for it), globs, cards of a megabyte, metadata of odd types, and nested JSON.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from retex_hf import RetexError
from retex_hf.artifact.card import sections
from retex_hf.checkpoints.patterns import Patterns
from retex_hf.config import RetexConfig, matches
from retex_hf.errors import ConfigError
from retex_hf.utils.strict_files import parse_json
from trust.bounded import Answer, Bounded
from trust.tally import Tally

# No case takes a tenth of that on an idle machine.
SECONDS, MEGABYTES, ROOM = 60.0, 400, 2 << 30

PIECES = (
    *"ab.0_-", r"\.", "*", "+", "?", "(", ")", "(?:", "|", "[ab]", "[^a]", "[a-b0]", "[]a]", "^", "$", "{1,2}", "{2}",
    "{,1}", "{1,}", "{", "}", r"\d", r"\w", r"\W", "*?", "+?", "(?i)", "(?x:", "(?=a)", "(?P<n>a)", r"\1", r"\b", r"\A",
    "[", "]", "a*", "(a|b)*", "(ab)+", ".*", "\n",
)  # fmt: skip
BOMBS = (
    "(?x:([^!]+) +)!", ".*.*.*.*!", ".*.*.*.*.*.*.*.*[!]", "(a*)*[b]", "(a|a)*[b]", "(a+)+[b]",
    "((a{1,30}){1,30}){1,2}", "((){9999}){9999}", "(.*a){20}[b]", "(a?){400}a{50}", "(" * 200 + "a" + ")" * 200,
    "a{9999}", "[a-z]*" * 80 + "[!]", "(|a)*(|a)*(|a)*[b]", "(" + "|".join("a" * n for n in range(1, 20)) + ")*[b]",
)  # fmt: skip
LONG_NAMES = (
    "a" * 1000, "a." * 500, "a" * 999 + "b", "a " * 500, ".base_layer" * 90, "!" * 1000, "0.a" * 333, "a\n" * 500,
)  # fmt: skip

# ---- questions -------------------------------------------------------------------------------------------------------


def _patterns(draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield random patterns on short names, whose answer `re` gives."""
    while True:
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 6)))
        names = ["".join(draw.choice("ab.0_\n") for _ in range(draw.randint(0, 7))) for _ in range(20)]
        yield "pattern", (text, names)


def _bombs(draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield patterns and names that take a backtracking matcher very long."""
    pairs = list(product(BOMBS, LONG_NAMES))
    draw.shuffle(pairs)
    yield from (("bomb", ([bomb], [name])) for bomb, name in pairs)
    while True:
        text = "".join(
            draw.choice((".*", "a*", "(a|b)*", "(a*)*", "[^!]+", "a?", "(.*a)", "{2}", "b", "!")) for _ in range(40)
        )
        yield "bomb", ([text] * draw.choice((1, 50)), [draw.choice(LONG_NAMES)] * draw.choice((1, 50)))


def _globs(draw: random.Random) -> Iterator[tuple[str, Any]]:
    while True:
        text = "".join(draw.choice(("*", "a", "b", "?", "*a", "*b*")) for _ in range(draw.choice((5, 12, 400))))
        name = "".join(draw.choice("ab.") for _ in range(draw.choice((6, 12, 900))))
        yield "glob", (text, name)


MARKS = (
    "<!--", "<!-- retex:a -->\n", "<!-- /retex:a -->\n", "<!-- retex:a 12345678 -->\n", "<!-- retex-metadata\n",
    "---\n", "<!-- retex-metadata a=b -->\n", "<!-- retex-written abc -->\n", "<!-- retex-written a ", "\n", " ", "\t",
    "\r", "`", "# a\n", "```\n", "|", "a" * 50, "<!-- retex:b -->\nmine\n<!-- /retex:b -->\n", "\n---", "-->", "&a ",
    "[", "{{", "é",
)  # fmt: skip
MEGABYTE = 1_000_000


def _cards(draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield cards of a megabyte, of one mark or of several."""
    yield from (("card", mark * (MEGABYTE // len(mark))) for mark in MARKS)
    while True:
        some = "".join(draw.choice(MARKS) for _ in range(draw.randint(2, 30)))
        yield "card", "# Mine\n" + some * draw.choice((1, 3, MEGABYTE // 2 // len(some)))


VALUES = (
    "5", "{a: b}", "[1, {2: x}]", "'x'", "null", "true", "2020-01-01", "2020-01-01T00:00:00Z", "!!binary aGk=",
    "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", ".inf", "0x" + "f" * 5000, "{1: a, b: c}", "{2020-01-01: a}",
    "{null: a, true: b, 1.5: c}", "[[[]]]", "''", "1e999", "0b" + "1" * 20000, '"\\ud800"', '"\\0"', '"a\\n---\\nb"',
    "{? {a: b} : c}", "{? [1, 2] : c}", "1:30:00", "1" + ":1" * 100_000, "[" * 100, "&a [*a]", "9" * 5000,
    "!!bool maybe", "!!python/name:os.system", '"\\U0010ffff"', "_1_", "=", "<<", "[" + "a," * 1_000 + "]",
    "&a x\nz: *a",
)  # fmt: skip
KEYS = (
    "language", "tags", "model-index", "license", "library_name", "base_model", "datasets", "metrics", "pipeline_tag",
    "5", "null", "true", "2020-01-01", "1.5", "'a b'", "'a=b'", "'-->'", '"a\\nb"', "!!binary aGk=", "''",
)  # fmt: skip
FRESH = {
    "library_name": "retex-hf", "tags": ["retex", "merge"], "license": "mit", "base_model": ["a/b"], "metrics": ["f1"],
    "model-index": [{"name": "x", "results": []}], "datasets": ["d"], "pipeline_tag": "text-classification",
}  # fmt: skip


def _metadata(draw: random.Random) -> Iterator[tuple[str, Any]]:
    pairs = list(product(KEYS, VALUES))
    draw.shuffle(pairs)
    yield from (("metadata", f"---\n{key}: {value}\n---\n# Hi\n") for key, value in pairs)


def _nested(draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield JSON of any depth, to be read by a thread with a small stack."""
    while True:
        levels = draw.choice((1, 10, 60, 64, 65, 100, 1000, 10_000, 1_000_000))
        start, end = draw.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ('["\\"]",', "]")))
        yield "json", (start, end, levels, draw.random() < 0.7)


# Number of questions of each kind in the short form, and in the long one.
KINDS: dict[str, tuple[Callable[[random.Random], Iterator[tuple[str, Any]]], int, int]] = {
    "random patterns of adapters": (_patterns, 60, 2000),
    "pattern bombs": (_bombs, 5, 300),
    "globs of configurations": (_globs, 40, 500),
    "cards of a megabyte": (_cards, 3, 200),
    "metadata of cards": (_metadata, 30, len(KEYS) * len(VALUES)),
    "nested JSON": (_nested, 15, 200),
}

# ---- answers ---------------------------------------------------------------------------------------------------------


def answer(question: tuple[str, Any]) -> Answer:
    kind, given = question
    return {"outcome": ANSWERS[kind](given)}


def _right(is_right: bool, what: str) -> str:
    if not is_right:
        raise AssertionError(what)
    return "right"


def _match(given: tuple[str, list[str]]) -> str:
    text, names = given
    values = Patterns({text: 1}, "here")
    for name in names:
        found = values.value(name, 0) == 1
        _right(found == (re.match(rf"(.*\.)?({text})$", name) is not None), f"{text!r} on {name!r} gives {found}")
    return "right"


def _match_bombs(given: tuple[list[str], list[str]]) -> str:
    texts, names = given
    values = Patterns({text + ("" if index == 0 else f"|{index}"): 1 for index, text in enumerate(texts)}, "here")
    for name in names:
        values.value(name, 0)
    return "answered"


def _glob(given: tuple[str, str]) -> str:
    """Compare a glob with a table of which part matches which."""
    text, name = given
    row = [True] + [False] * len(name)
    for char in text:
        if char == "*":
            for place in range(1, len(row)):
                row[place] = row[place] or row[place - 1]
        else:
            row = [False, *(row[place] and char in ("?", name[place]) for place in range(len(name)))]
    expected = row[-1] or name.startswith(f"{text}.")
    config = RetexConfig(exclude=[text])
    return _right(matches(name, config.exclude) == expected, f"{text!r} on {name!r}: expected {expected}")


GENERATED = "<!-- retex:a -->\ngenerated\n<!-- /retex:a -->\n"


def _card(card: str) -> str:
    sections.split(card, "README.md")  # only this call may refuse
    try:
        once = sections.update(card, FRESH, GENERATED, "README.md")
        twice = sections.update(once, FRESH, GENERATED, "README.md")
        sections.choose(once, card, "README.md")
    except RetexError as error:
        raise AssertionError(f"is refused late: {error}") from None
    written = sections.split(card, "README.md")[1].split().count("mine")
    return _right(twice.split().count("mine") == written, "what a person wrote is lost")


def _odd_metadata(card: str) -> str:
    before, *_ = sections.split(card, "README.md")
    _card(card)
    once = sections.update(card, FRESH, GENERATED, "README.md")
    _right(sections.update(once, FRESH, GENERATED, "README.md") == once, "changes at every update")
    after, *_ = sections.split(once, "README.md")
    for key, value in before.items():
        if isinstance(value, list) and isinstance(FRESH.get(key), list):
            after[key] = after[key][: len(value)]  # our values are appended to the user's
        _right(after.get(key) == value, f"{key!r} has become {str(after.get(key))[:100]}")
    return "right"


def _read_nested(given: tuple[str, str, int, bool]) -> str:
    start, end, levels, closed = given
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(
                parse_json(start * levels + "1" + end * (levels if closed else 0), "x", ConfigError, kind=None)
            )
        except BaseException as error:
            found.append(error)

    size = threading.stack_size(128 * 1024)
    thread = threading.Thread(target=read)
    threading.stack_size(size)
    thread.start()
    thread.join()
    (value,) = found
    if isinstance(value, BaseException):
        raise value
    return _right(closed and levels * sum(start.count(bracket) for bracket in "[{") <= 65, "is read, though too deep")


ANSWERS: dict[str, Callable[[Any], str]] = {
    "pattern": _match, "bomb": _match_bombs, "glob": _glob, "card": _card, "metadata": _odd_metadata,
    "json": _read_nested,
}  # fmt: skip


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Ask a number of questions of each kind."""
    tallies = []
    with Bounded(answer, seconds=SECONDS, room=ROOM) as process:
        for name, (make, short, long) in KINDS.items():
            tally, draw, count = Tally(name), random.Random(f"{name} {seed}"), short if size == "short" else long
            for question in tqdm(islice(make(draw), count), desc=name, total=count, disable=not progress):
                found = process.ask(question)
                problem = found.get("wrong")
                if problem is None and found["megabytes"] > MEGABYTES:
                    problem = f"takes {found['megabytes']} MB"
                outcome = "wrong" if problem else "refused" if "refusal" in found else found["outcome"]
                tally.add(outcome, problem and f"{str(question)[:300]}: {problem} (seed {seed})")
            tallies.append(tally)
    return tallies
