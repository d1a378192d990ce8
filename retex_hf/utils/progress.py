"""Progress of long work: a bar of tqdm on a terminal or in a notebook, otherwise a line now and then for the log."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

# The second one warns in notebooks, unless the first, which silences that, is imported before.
from tqdm.auto import tqdm
from tqdm.autonotebook import tqdm as notebook_tqdm
from tqdm.std import tqdm as std_tqdm

from .terminal import visible

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 10.0
# Work that most often takes less shows a bar after so long only.
SECONDS_WITHOUT_BAR = 2.0

_lock = threading.RLock()
_last_line = -SECONDS_BETWEEN_LINES  # of all work, so that nested work does not print more lines


class Lines:
    """The part of tqdm's interface that is used here, printing lines on standard error instead of a bar.

    The first line comes after `SECONDS_BETWEEN_LINES` of work, so short work prints none.
    """

    def __init__(
        self, items: Iterable[Any] | None, title: str, unit: str, total: float | None = None, initial: float = 0
    ) -> None:
        if total is None and isinstance(items, Sized):
            total = len(items)
        self.items, self.title, self.unit, self.total = items, title, unit, total
        self.initial = self.done = initial
        self.notes = ""
        self.start = monotonic()

    def __iter__(self) -> Iterator[Any]:
        assert self.items is not None  # work without items calls `update`
        for item in self.items:
            yield item
            self.update()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, count: float = 1) -> None:
        """Count finished items, and print a line if one is due."""
        with _lock:
            self.done += count
            _print_if_due(self.start, self.line)

    def set_description(self, title: str) -> None:
        self.title = title

    def set_postfix(self, refresh: bool = False, **values: Any) -> None:
        self.notes = ", ".join(f"{name} {value}" for name, value in values.items())

    def close(self) -> None:
        """Do nothing: there is no bar to remove."""

    def line(self, seconds: float) -> str:
        """Return the line after these seconds of work.

        >>> from retex_hf.utils.progress import Lines
        >>> work = Lines(None, "Solving", "tensor", total=310)
        >>> work.done = 120
        >>> work.line(42)
        'Solving: 120 of 310 tensors, 0:42 elapsed, about 1:06 left'
        """
        text = f"{self.title}: {_amount(self.done, self.total, self.unit)}, {_clock(seconds)} elapsed"
        now_done = self.done - self.initial
        if self.total is not None and now_done > 0 and self.done < self.total:
            text += f", about {_clock(seconds * (self.total - self.done) / now_done)} left"
        return f"{text} ({self.notes})" if self.notes else text


def track(
    items: Iterable[Item] | None = None,
    *,
    title: str,
    unit: str,
    progress: bool = True,
    total: float | None = None,
    initial: float = 0,
    delay: float = 0,
    leave: bool = True,
) -> Any:
    """Return an iterator over `items` that shows how far the work is; without `items`, call `update` on the result.

    Args:
        items: The items to work on.
        title: What is done, such as "Solving".
        unit: The name of one item, in the singular; "B" for bytes.
        progress: Show anything at all. Where several processes share the work, pass True in the main process only.
        total: How many items there are; default: `len(items)`, if that is known.
        initial: How many were finished by an earlier run; they do not count for the estimate of the time left.
        delay: Seconds before a bar is shown.
        leave: Leave a finished bar on the terminal.
    """
    if progress and not shows_bars():
        return Lines(items, title, unit, total, initial)
    return tqdm(
        items,
        desc=title,
        unit=unit,
        unit_scale=unit == "B",
        total=total,
        initial=initial,
        delay=delay,
        leave=leave,
        disable=not progress,
    )


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Print how long a call takes that does not tell how far it is; only where `track` prints lines.

    Args:
        title: What is done, such as "Pushing".
    """
    if shows_bars():
        yield
        return
    start, ended = monotonic(), threading.Event()

    def print_lines() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            _print_if_due(start, lambda seconds: f"{title}: {_clock(seconds)} elapsed")

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def remark(text: str, *, in_logs: bool = False) -> None:
    """Print a text above the bars; where there are none, only what belongs into a log (`in_logs`)."""
    if shows_bars():
        tqdm.write(visible(text, keep="\n"), file=sys.stderr)
    elif in_logs:
        with suppress(OSError, ValueError, AttributeError):  # as of lines of progress
            print(visible(text, keep="\n"), file=sys.stderr, flush=True)


def shows_bars() -> bool:
    """Return whether standard error is a terminal, or the output a notebook."""
    if notebook_tqdm is not std_tqdm:
        return True
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no standard error, or it is closed
        return False


def _print_if_due(start: float, line: Callable[[float], str]) -> None:
    """Print a line about work that started at `start`, unless the work or the last line is too recent."""
    global _last_line
    with _lock:
        now = monotonic()
        if now - max(start, _last_line) < SECONDS_BETWEEN_LINES:
            return
        _last_line = now
        # Work must not fail because nobody can read about it.
        with suppress(OSError, ValueError, AttributeError):
            print(visible(line(now - start)), file=sys.stderr, flush=True)


def _amount(done: float, total: float | None, unit: str) -> str:
    if unit == "B":
        whole = done if total is None else total
        size, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if whole >= pair[0]), (1e3, "kB"))
        counts = [f"{number / size:.1f}" for number in (done, total) if number is not None]
        return f"{' of '.join(counts)} {name}"
    counts = [str(number) for number in (done, total) if number is not None]
    plural = unit if (done if total is None else total) == 1 else unit + ("es" if unit.endswith("ch") else "s")
    return f"{' of '.join(counts)} {plural}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
