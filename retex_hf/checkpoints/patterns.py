"""Untrusted regular expressions for module names, matched in bounded time.

peft's `rank_pattern` and `alpha_pattern` are regular expressions. Python's matcher backtracks, and a pattern of twenty
characters can keep it busy for years. Here all alternatives are followed at once (a set of states, one step per
character), so a match takes at most the length of the pattern times the length of the name. Syntax that needs more than
that (references, lookaround, flags), or that nobody writes, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from ..errors import CheckpointError, brief

MOST_PATTERNS, MOST_CHARACTERS, MOST_STATES, MOST_LEVELS = 10_000, 2_000, 2_000, 20
# Limit for all names of an adapter together: a few seconds. A thousand modules with a pattern each take a tenth of it.
MOST_STEPS = 5_000_000
SYNTAX = "names, '.', classes of characters, '|', groups, '*', '+', '?', '{m,n}', '^', '$' and '\\b'"

CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
# Syntax that a later Python may read as a set operation.
SET_OPERATION = re.compile(r"\[|--|&&|~~|\|\|")
REPEAT = re.compile(r"[*+?]|\{([0-9]{0,4})(?:(,)([0-9]{0,4}))?\}")
SHORTHANDS = frozenset("dDwWsS")
WORD = re.compile(r"\w")

THEN, EITHER, REPEATED, STEP, START, END, BOUNDARY, FORK, ACCEPT = range(9)
ANCHORS = (START, END, BOUNDARY)
# A kind and its value: parts, a part with its least and greatest count, or an expression for one character.
Node = tuple[int, Any]
# A kind, a test of the next character (of a STEP), and the states that follow.
State = tuple[int, Callable[[str], Any] | None, tuple[int, ...]]
Default = TypeVar("Default")


class PatternError(ValueError):
    """A pattern has unsupported syntax, or takes too long."""


class Pattern:
    """A regular expression, matched as peft does: `re.match(rf"(.*\\.)?({text})$", name)`.

    >>> from retex_hf.checkpoints.patterns import Pattern
    >>> pattern = Pattern("layer.[0-9]+.*(query|key)")
    >>> [pattern.matches(name)[0] for name in ("h.layer.11.self.key", "layer.x.key", "my_layer.0.key")]
    [True, False, False]
    """

    def __init__(self, text: str) -> None:
        self._states: list[State] = [(ACCEPT, None, ())]
        self._pieces = 0
        node = _Parser(text).parse()
        self._first = self._add(node, 0)
        # A run of single characters at the end needs no backtracking, so Python's matcher is fast for it.
        ending = _ending(node)
        self._ending, self._length = re.compile("".join(ending)), len(ending)

    def matches(self, name: str, most_steps: int = MOST_STEPS) -> tuple[bool, int]:
        """Return whether a name matches, and the number of steps taken; refuse more than `most_steps` steps.

        Names are read from the end, where they differ, so that most patterns fail at once.
        """
        steps, broken = 1, name.find("\n")
        for end in [len(name), len(name) - 1] if name.endswith("\n") else [len(name)]:
            if end < self._length or self._ending.match(name, end - self._length) is None:
                continue
            states = {self._first}
            for place in range(end, -1, -1):
                states = self._closed(states, place, name)
                steps += 1 + len(states)
                if steps > most_steps:
                    raise PatternError("takes too long to match")
                # Before the pattern there is nothing, or peft's `.*\.`, which does not match across lines.
                if 0 in states and (place == 0 or (name[place - 1] == "." and not 0 <= broken < place - 1)):
                    return True, steps
                char = name[place - 1] if place else ""
                known = (self._states[state] for state in states)
                states = {after[0] for _, fits, after in known if char and fits is not None and fits(char)}
                if not states:
                    break
        return False, steps

    def _closed(self, states: set[int], place: int, name: str) -> set[int]:
        """Return the states that are reached without another character."""
        found, pending = set(), list(states)
        at_end = place == len(name) or (place == len(name) - 1 and name[place] == "\n")
        holds = {FORK: True, START: place == 0, END: at_end, BOUNDARY: _is_boundary(name, place)}
        while pending:
            state = pending.pop()
            if state in found:
                continue
            found.add(state)
            kind, _, after = self._states[state]
            if holds.get(kind, False):
                pending.extend(after)
        return found

    def _add(self, node: Node, after: int) -> int:
        """Add the states of a part that is followed, towards the start of a name, by the state `after`."""
        self._pieces += 1
        if self._pieces > MOST_STATES:
            raise PatternError("has too many repetitions")
        kind, value = node
        if kind == THEN:
            for part in value:
                after = self._add(part, after)
            return after
        if kind == EITHER:
            return self._new(FORK, None, *(self._add(part, after) for part in value))
        if kind == STEP:
            return self._new(STEP, _test(value), after)
        if kind != REPEATED:
            return self._new(kind, None, after)
        part, least, most = value
        if most is None:
            loop = self._new(FORK, None)
            self._states[loop] = (FORK, None, (self._add(part, loop), after))
            after = loop
        for _ in range(0 if most is None else most - least):
            after = self._new(FORK, None, self._add(part, after), after)
        for _ in range(least):
            after = self._add(part, after)
        return after

    def _new(self, kind: int, fits: Callable[[str], Any] | None, *after: int) -> int:
        self._states.append((kind, fits, after))
        return len(self._states) - 1


class Patterns:
    """The values in peft's `rank_pattern` or `alpha_pattern`: the first pattern that matches counts.

    `where` names the setting in messages.
    """

    def __init__(self, values: Mapping[str, float], where: str) -> None:
        self._where, self._left = where, MOST_STEPS
        if len(values) > MOST_PATTERNS:
            raise CheckpointError(f"{where} has {len(values)} patterns, expected {MOST_PATTERNS} at most.")
        self._patterns: list[tuple[str, Pattern, float]] = []
        for text, value in values.items():
            try:
                self._patterns.append((text, Pattern(text), value))
            except PatternError as error:
                raise CheckpointError(f"{where} has {brief(text)}, which {error}: expected {SYNTAX}.") from None

    def value(self, name: str, default: Default) -> float | Default:
        """Return the value of a module, or the default if no pattern matches its name."""
        for text, pattern, value in self._patterns:
            try:
                found, steps = pattern.matches(name, self._left)
            except PatternError as error:
                raise CheckpointError(f"{self._where} has {brief(text)}, which {error}: expected names.") from None
            self._left -= steps
            if found:
                return value
        return default


class _Parser:
    """A parser of patterns that refuses syntax outside of `SYNTAX`."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise PatternError(f"is longer than {MOST_CHARACTERS} characters")
        self._text, self._place, self._level = text, 0, 0

    def parse(self) -> Node:
        node = self._choices()
        if self._place < len(self._text):
            raise PatternError("closes a group that is not open")
        return node

    def _choices(self) -> Node:
        choices = [self._parts()]
        while self._take("|"):
            choices.append(self._parts())
        return choices[0] if len(choices) == 1 else (EITHER, choices)

    def _parts(self) -> Node:
        parts = []
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            parts.append(self._repeated(self._part()))
        return THEN, parts

    def _part(self) -> Node:
        if self._take("("):
            return self._group()
        if self._take("^"):
            return START, None
        if self._take("$"):
            return END, None
        if self._take("."):
            return STEP, "."
        if found := CLASS.match(self._text, self._place):
            self._place = found.end()
            return STEP, _checked_class(found[0])
        char = self._text[self._place]
        if char in "*+?{[":
            raise PatternError(f"has {char!r} where nothing can be repeated or chosen")
        self._place += 1
        if char != "\\":
            return STEP, re.escape(char)
        escaped = self._text[self._place : self._place + 1]
        self._place += 1
        if escaped == "b":
            return BOUNDARY, None
        if escaped in SHORTHANDS:
            return STEP, f"\\{escaped}"
        if not escaped or _is_special(escaped):
            raise PatternError(f"has '\\{escaped}'")
        return STEP, re.escape(escaped)

    def _group(self) -> Node:
        if self._take("?") and not self._take(":"):
            raise PatternError("has a group that is not a plain one")
        self._level += 1
        if self._level > MOST_LEVELS:
            raise PatternError("is nested too deeply")
        node = self._choices()
        if not self._take(")"):
            raise PatternError("has a group that is not closed")
        self._level -= 1
        return THEN, [node]  # wrapped, because a group can be repeated even if it holds an anchor

    def _repeated(self, node: Node) -> Node:
        found = REPEAT.match(self._text, self._place)
        if found is None:
            return node
        if node[0] in ANCHORS:
            raise PatternError("repeats an anchor")
        self._place = found.end()
        self._take("?")  # lazy repetition matches the same names
        if self._place < len(self._text) and self._text[self._place] in "*+?{":
            raise PatternError("repeats a repetition")
        if found[0] in "*+?":
            return REPEATED, (node, int(found[0] == "+"), 1 if found[0] == "?" else None)
        least = int(found[1] or 0)
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if found[0] == "{}" or (most is not None and most < least):
            raise PatternError(f"has {found[0]!r}")
        return REPEATED, (node, least, most)

    def _take(self, char: str) -> bool:
        taken = self._text.startswith(char, self._place)
        self._place += taken
        return taken


def _ending(node: Node) -> list[str]:
    """Return expressions for the single characters that every match ends with."""
    ending: list[str] = []
    for kind, value in reversed(node[1] if node[0] == THEN else ()):
        if kind != STEP:
            break
        ending.insert(0, value)
    return ending


def _is_boundary(name: str, place: int) -> bool:
    """Return whether a word begins or ends at a position of a name."""
    before, after = (WORD.match(char) is not None for char in (name[place - 1 : place], name[place : place + 1]))
    return before != after


@lru_cache(maxsize=1000)
def _test(expression: str) -> Callable[[str], Any]:
    """Return a test of one character."""
    return re.compile(expression).match


def _is_special(escaped: str) -> bool:
    """Return whether a character after a backslash is an ASCII letter or digit, and so has no literal meaning."""
    return escaped.isascii() and escaped.isalnum()


def _checked_class(text: str) -> str:
    """Return a character class; refuse one that Python cannot read, or may read differently in another version."""
    escaped = re.findall(r"\\(.)", text, re.DOTALL)
    plain = re.sub(r"\\.", "", text[1:-1], flags=re.DOTALL)
    if SET_OPERATION.search(plain) or any(_is_special(char) and char not in SHORTHANDS for char in escaped):
        raise PatternError(f"has the class {brief(text)}")
    try:
        re.compile(text)
    except re.error:
        raise PatternError(f"has the class {brief(text)}") from None
    return text
