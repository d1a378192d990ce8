"""Odd numbers and odd inputs, each tried on every family, with the result or the refusal that odd_inputs.md states.

Nothing that has a value may be NaN, no warning may be given, and no error may escape that is not this library's own (or
the wrapped model's, for an input that the model itself cannot take).
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from . import odd_rows, odd_weights
from .oddities import CASES, Case, Subject, Wrong
from .tally import Tally

__all__ = ["CASES", "odd_rows", "odd_weights", "run"]

SEEDS = 5
EXECUTIONS = ("auto", "grouped", "mixed")


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Try every case on one family; in the long form on every family, with several seeds and every execution mode."""
    if size == "long":
        ways = [(number, execution) for number in range(seed, seed + SEEDS) for execution in EXECUTIONS]
        trials = [(case, family, *way) for case in CASES for family in case.families for way in ways]
    else:
        trials = [(case, family, seed, "auto") for case, family in one_family_each(CASES)]
    tally = Tally("odd inputs")
    for case, *subject in tqdm(trials, desc="Odd inputs", unit="trial", disable=not progress):
        problem = attempt(case, Subject(*subject))
        tally.add(case.outcome if problem is None else "wrong", problem)
    return [tally]


def one_family_each(cases: Sequence[Case]) -> list[tuple[Case, str]]:
    """Assign one family to each case, in rotation."""
    return [(case, case.families[number % len(case.families)]) for number, case in enumerate(cases)]


def attempt(case: Case, subject: Subject) -> str | None:
    """Return what is wrong with a case, and how to reproduce it."""
    where = f"{case.name} (family={subject.family!r}, seed={subject.seed}, execution={subject.execution!r})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            case.run(subject)
    except Wrong as wrong:
        return f"{where}: {wrong}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{where}: {type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return None
