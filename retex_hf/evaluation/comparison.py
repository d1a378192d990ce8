"""The figures of a report: means, ratios, spreads and intervals of methods evaluated on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import EvaluationError
from .bootstrap import Interval, interval, paired_difference, resampled_accuracies
from .metrics import normalised
from .run import MODES, Evaluation, TaskScore

DIGITS = 6
"""Decimals of figures: beyond these, sums of floats depend on the machine."""

FLOATS_PER_ROUNDED = 4
"""`added_rounded` counts 8 bits for every number of 32."""

Rows = dict[str, np.ndarray]


class Comparison:
    """Evaluations by method, checked to be comparable. The arguments are those of `Report`."""

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        individual: str | None,
        seed: int,
        *,
        reference: str | None,
        body_bytes: int | None,
        resamples: int,
        confidence: float,
    ) -> None:
        self.methods = _by_method(evaluations)
        self.tasks = {task: len(score.correct) for task, score in _first_scores(evaluations[0]).items()}
        for name, role in ((individual, "individual"), (reference, "reference")):
            if name is not None and name not in self.methods:
                raise EvaluationError(f"The {role} method {name!r} is not among the methods {list(self.methods)}.")
        self.individual, self.reference, self.seed = individual, reference, seed
        self.resamples, self.confidence = resamples, confidence
        self._individual = None if individual is None else self.methods[individual]
        if individual is not None:
            self._check_individual(individual)
        self.body_bytes: float | None = body_bytes
        if body_bytes is None and individual is not None:
            self.body_bytes = _storage(self.methods[individual]) / len(self.tasks)

    def modes(self) -> list[str]:
        """Return the modes in which any method was evaluated."""
        return [mode for mode in MODES if any(mode in runs[0].scores for runs in self.methods.values())]

    def difference(self, first: str, second: str, mode: str) -> Interval:
        """Return the first method's mean accuracy minus the second's in one mode, paired by rows."""
        for name in (first, second):
            if name not in self.methods or mode not in self.methods[name][0].scores:
                raise EvaluationError(f"There is no evaluation of {name!r} in mode {mode!r} to compare.")
        one, other = (_mean_rows(self.methods[name], mode, "correct") for name in (first, second))
        return paired_difference(one, other, resamples=self.resamples, confidence=self.confidence, seed=self.seed)

    def summarise(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        methods = {name: self._describe(name, runs) for name, runs in self.methods.items()}
        for mode in self.modes():
            for name, figures in self._figures(mode).items():
                methods[name]["modes"][mode] = figures
        return {
            "tasks": self.tasks,
            "individual": self.individual,
            "reference": self.reference,
            "bootstrap": {"seed": self.seed, "resamples": self.resamples, "confidence": self.confidence},
            "methods": methods,
        }

    def _describe(self, name: str, runs: Sequence[Evaluation]) -> dict[str, Any]:
        stored, body = _storage(runs), self.body_bytes
        shares: dict[str, float | None] = {"total": None, "added": None, "added_rounded": None}
        if body is not None:
            experts, added = body * len(self.tasks), stored - body
            packed = float(np.mean([run.packed_bytes for run in runs]))
            sizes = {"total": stored, "added": added, "added_rounded": packed + (added - packed) / FLOATS_PER_ROUNDED}
            shares = {name: round(size / experts, DIGITS) for name, size in sizes.items()}
        seeds = [run.seed for run in runs]
        states = runs[0].state if len(runs) == 1 else {str(run.seed): run.state for run in runs}
        return {"seeds": seeds, "storage_bytes": stored, "storage": shares, "state": states, "modes": {}}

    def _check_individual(self, name: str) -> None:
        for run in self.methods[name]:
            if "known" not in run.scores:
                raise EvaluationError(f"The individual method {name!r} was not evaluated with the task known.")
            for task, score in run.scores["known"].items():
                if not score.correct.any():
                    raise EvaluationError(
                        f"The individual expert of task {task!r} answers no row correctly, so it cannot normalise "
                        "others."
                    )

    def _experts(self, runs: Sequence[Evaluation]) -> Rows:
        """Return the rows of the individual experts that some runs are relative to: those of the same seeds where
        experts were evaluated under these (they may have been trained again), else all."""
        assert self._individual is not None  # callers check
        seeds = {run.seed for run in runs}
        same = [run for run in self._individual if run.seed in seeds]
        return _mean_rows(same if len(same) == len(seeds) else self._individual, "known", "correct")

    def _figures(self, mode: str) -> dict[str, dict[str, Any]]:
        """Return `{method: figures}` of one mode. Resample all methods together, so that they share the draws."""
        names = [name for name, runs in self.methods.items() if mode in runs[0].scores]
        rows = {name: _mean_rows(self.methods[name], mode, "correct") for name in names}
        identifying = [name for name in names if _has_identification(self.methods[name], mode)]
        found = {name: _mean_rows(self.methods[name], mode, "identified") for name in identifying}
        experts = {name: self._experts(self.methods[name]) for name in names} if self._individual else {}
        everything = [*rows.values(), *experts.values(), *found.values()]
        stacked = {task: np.stack([of[task] for of in everything]) for task in self.tasks}
        samples = resampled_accuracies(stacked, resamples=self.resamples, seed=self.seed)
        figures = {}
        for place, name in enumerate(names):
            spread = self._spread(name, mode)
            figures[name] = {"accuracy": self._figure(rows[name], samples[:, place], spread.get("accuracy"))}
            if name in experts:
                value = float(normalised(_shares(rows[name]), _shares(experts[name])))
                ratios = normalised(samples[:, place], samples[:, len(names) + place])
                figures[name]["normalised"] = _rounded(
                    interval(value, ratios, self.confidence), spread.get("normalised")
                )
            if name in found:
                mine = samples[:, len(everything) - len(found) + identifying.index(name)]
                figures[name]["identification"] = self._figure(found[name], mine, spread.get("identification"))
            if self.reference is not None and name != self.reference and self.reference in names:
                other = names.index(self.reference)
                value = _shares(rows[name]).mean() - _shares(rows[self.reference]).mean()
                drawn = (samples[:, place] - samples[:, other]).mean(-1)
                figures[name]["difference"] = _rounded(interval(value, drawn, self.confidence))
        return figures

    def _figure(self, rows: Rows, samples: np.ndarray, spread: float | None) -> dict[str, Any]:
        """Return the mean over tasks, and each task, with their intervals."""
        shares = _shares(rows)
        by_task = {
            task: _rounded(interval(shares[place], samples[:, place], self.confidence))
            for place, task in enumerate(self.tasks)
        }
        return {"mean": _rounded(interval(shares.mean(), samples.mean(-1), self.confidence), spread), "tasks": by_task}

    def _spread(self, name: str, mode: str) -> dict[str, float]:
        """Return standard deviations over the seeds of a method; empty where there is one seed."""
        runs = self.methods[name]
        if len(runs) == 1:
            return {}
        by_seed = [_shares(_mean_rows([run], mode, "correct")) for run in runs]
        spread = {"accuracy": np.std([shares.mean() for shares in by_seed], ddof=1)}
        if self._individual is not None:
            experts = [_shares(self._experts([run])) for run in runs]
            spread["normalised"] = np.std(list(map(normalised, by_seed, experts)), ddof=1)
        if _has_identification(runs, mode):
            found = [_shares(_mean_rows([run], mode, "identified")).mean() for run in runs]
            spread["identification"] = np.std(found, ddof=1)
        return {key: float(value) for key, value in spread.items()}


def _by_method(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Group evaluations by method; those of one method differ in their seeds, and all cover the same rows."""
    if not evaluations:
        raise EvaluationError("There are no evaluations to report.")
    methods: dict[str, list[Evaluation]] = {}
    rows = {task: len(score.correct) for task, score in _first_scores(evaluations[0]).items()}
    for run in evaluations:
        others = methods.setdefault(run.method, [])
        if any(other.seed == run.seed for other in others):
            raise EvaluationError(f"There are two evaluations of {run.method!r} with seed {run.seed}.")
        if others and list(others[0].scores) != list(run.scores):
            raise EvaluationError(f"{run.method!r} was evaluated in other modes with seed {run.seed} than before.")
        others.append(run)
        for mode, scores in run.scores.items():
            if {task: len(score.correct) for task, score in scores.items()} != rows:
                raise EvaluationError(
                    f"{run.method!r} in mode {mode!r} and {evaluations[0].method!r} were not given the same rows."
                )
    return methods


def _first_scores(evaluation: Evaluation) -> dict[str, TaskScore]:
    return next(iter(evaluation.scores.values()))


def _mean_rows(runs: Sequence[Evaluation], mode: str, kind: str) -> Rows:
    """Return, for each task, how often (over seeds) each row was right or identified."""
    tasks = runs[0].scores[mode]
    return {task: np.mean([getattr(run.scores[mode][task], kind) for run in runs], axis=0) for task in tasks}


def _has_identification(runs: Sequence[Evaluation], mode: str) -> bool:
    return all(score.identified is not None for run in runs for score in run.scores[mode].values())


def _shares(rows: Rows) -> np.ndarray:
    return np.array([right.mean() for right in rows.values()])


def _storage(runs: Sequence[Evaluation]) -> int:
    return round(np.mean([run.storage_bytes for run in runs]))


def _rounded(figure: Interval, spread: float | None = None) -> dict[str, float]:
    values = {"value": figure.value, "low": figure.low, "high": figure.high}
    if spread is not None:
        values["std"] = spread
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return {key: round(value, DIGITS) + 0.0 for key, value in values.items()}
