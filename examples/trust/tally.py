"""Counts of trials and their outcomes, shared by all trials in this folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """One kind of trial: how often each outcome occurred. `problems` are forbidden outcomes, one line each."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.outcomes.total()

    def add(self, outcome: str, problem: str | None = None) -> None:
        """Count one trial; `problem` says what went wrong, and how to reproduce it."""
        self.outcomes[outcome] += 1
        if problem is not None:
            self.problems.append(f"{self.name}: {problem}")
