"""The table of bytes.py: a system at a size, its figures with intervals, and how rivals compare with ReTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from experiment import RETEX, lines_figure, markdown_table
from matplotlib.figure import Figure

from retex_hf.evaluation.bootstrap import Interval, interval, resampled_accuracies

# Forms of systems that leave the number of bits open.
FLOAT, ROUNDED = "float", "rounded"
FORMS = (ROUNDED, FLOAT)
FIGURES = ("normalised", "worst", "agreement")


@dataclass(frozen=True)
class Point:
    """One system at one size. `budget` and `share` (as it is stored) are shares of the experts' bytes; `width` is the
    number of bits, where a system leaves it open."""

    method: str
    width: str
    budget: float
    share: float
    error: float
    state: dict[str, Any]
    correct: dict[str, np.ndarray]
    agrees: dict[str, np.ndarray]

    @property
    def line(self) -> str:
        """Return the system and its form: points of one line differ in size."""
        return f"{self.method}, bfloat16" if self.width == FLOAT else self.method

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with a bit per row."""
        return {**vars(self), "correct": as_hex(self.correct), "agrees": as_hex(self.agrees)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Point:
        """Invert `as_dict`; further values are passed over."""
        rows = {part: from_digits(from_hex(values[part])) for part in ("correct", "agrees")}
        return cls(**{each.name: values[each.name] for each in fields(cls)} | rows)


def as_digits(rows: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return one digit per row.

    >>> as_digits({"a": np.array([True, False])})
    {'a': '10'}
    """
    return {task: "".join("1" if row else "0" for row in found) for task, found in rows.items()}


def as_hex(rows: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return one bit per row in hexadecimal digits, after a leading 1.

    >>> as_hex({"a": np.array([True, False, True, True])})
    {'a': '1b'}
    """
    return {task: f"{int('1' + digits, 2):x}" for task, digits in as_digits(rows).items()}


def from_digits(rows: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Invert `as_digits`."""
    return {task: np.array([digit == "1" for digit in digits]) for task, digits in rows.items()}


def from_hex(rows: Mapping[str, str]) -> dict[str, str]:
    """Return the digits of `as_hex`.

    >>> from_hex({"a": "1b"})
    {'a': '1011'}
    """
    return {task: f"{int(digits, 16):b}"[1:] for task, digits in rows.items()}


def by_task(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack the rows of several systems, task by task."""
    return {task: np.stack([one[task] for one in rows]) for task in rows[0]}


def figures(accuracies: np.ndarray, experts: np.ndarray, agreement: np.ndarray) -> dict[str, np.ndarray]:
    """Return the figures of systems from accuracies (..., tasks), those of the experts, and agreements.

    Tasks on which an expert has no row right (in a small sample) are left out.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(experts > 0, accuracies / experts, np.nan)
    return {
        "normalised": np.nanmean(ratios, -1),
        "worst": np.nanmin(ratios, -1),
        "agreement": agreement.mean(-1),
    }


def compare(point: Point, other: Point | None, experts: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, Any]:
    """Return a point's figures with intervals, and those of `other` (ReTeX at the same budget) minus them."""
    rows = [experts, point.correct, point.agrees]
    rows += [] if other is None else [other.correct, other.agrees]
    stacked = by_task(rows)
    drawn = resampled_accuracies(stacked, seed=seed)
    whole = np.stack([found.mean(1) for found in stacked.values()], -1)[None]

    def of(samples: np.ndarray, first: int) -> dict[str, np.ndarray]:
        return figures(samples[:, first], samples[:, 0], samples[:, first + 1])

    values, samples = of(whole, 1), of(drawn, 1)
    found: dict[str, Any] = {name: interval(values[name][0], samples[name]) for name in FIGURES}
    if other is not None:
        others, theirs = of(whole, 3), of(drawn, 3)
        found["lead"] = {
            name: interval(others[name][0] - values[name][0], theirs[name] - samples[name]) for name in FIGURES
        }
    return found


@dataclass(frozen=True)
class Row:
    """A system at a budget, and its figures."""

    point: Point
    results: dict[str, Any]


def tabulate(points: Sequence[Point], experts: Mapping[str, np.ndarray]) -> list[Row]:
    """Return the rows of the table, by budget, ReTeX first."""
    ours = {point.budget: point for point in points if point.method == RETEX}
    different = {(point.budget, point.line): point for point in points}
    order = sorted(different.values(), key=lambda point: (point.budget, point.method != RETEX))
    return [
        Row(point, compare(point, None if point.method == RETEX else ours.get(point.budget), experts))
        for point in order
    ]


def markdown(rows: Sequence[Row], title: str, weight_bytes: int = 4) -> str:
    """Format the summary and the table; the experts' weights have so many bytes each."""
    columns = ["method", "bits", "budget (%)", "added (%)", "bits per weight", "accuracy", "worst task", "agreement"]
    columns += ["error", f"{RETEX} minus this, accuracy", "worst task", "agreement"]
    lines = []
    for row in rows:
        point, lead = row.point, row.results.get("lead")
        cells: list[Any] = [point.method, {FLOAT: "16", "": ""}.get(point.width, point.width)]
        cells += [f"{100 * point.budget:.3g}", f"{100 * point.share:.3g}", f"{8 * weight_bytes * point.share:.2g}"]
        cells += [row.results[name].value for name in FIGURES] + [point.error]
        cells += [None if lead is None else in_points(lead[name]) for name in FIGURES]
        lines.append(cells)
    note = "Differences in points, with 95 % intervals, paired by rows. 16 bits are bfloat16."
    return f"# Bytes: {title}\n\n{summary(rows)}\n{note}\n\n{markdown_table(columns, lines)}"


def summary(rows: Sequence[Row]) -> str:
    """Format, for every figure, how often rivals are behind ReTeX at the same size, level, or ahead.

    Of the two forms of a rival only the rounded one counts, so that no rival counts twice.
    """
    lines = []
    for name in FIGURES:
        leads = [row.results["lead"][name] for row in rows if "lead" in row.results and row.point.width != FLOAT]
        behind, ahead = sum(lead.low > 0 for lead in leads), sum(lead.high < 0 for lead in leads)
        lines.append([name, behind, len(leads) - behind - ahead, ahead])
    columns = ["figure", "rivals behind", "level (zero is inside the interval)", "ahead"]
    return markdown_table(columns, lines)


def in_points(found: Interval) -> str:
    """Format a difference in percentage points.

    >>> in_points(Interval(0.0123, -0.002, 0.03))
    '+1.2 [-0.2, +3.0]'
    """
    value, low, high = (100 * number for number in (found.value, found.low, found.high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def figure(rows: Sequence[Row]) -> Figure:
    """Plot accuracy and agreement against bytes."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for title, name in (("normalised accuracy", "normalised"), ("agreement with the expert", "agreement")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.point.budget > 0:
                ends = lines.setdefault(row.point.line, [])
                ends.append((100 * row.point.share, row.results[name].value))
        panels[title] = {line: ([x for x, _ in ends], [y for _, y in ends]) for line, ends in lines.items()}
    return lines_figure(panels, "added bytes (% of the experts)", "mean over tasks", log_x=True)


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as plain values."""

    def plain(value: Any) -> Any:
        return vars(value) if isinstance(value, Interval) else {name: plain(one) for name, one in value.items()}

    return {**row.point.as_dict(), "figures": plain(row.results)}
