"""Limits on the memory that an untrusted data file may take."""

from __future__ import annotations

from ..errors import EvaluationError

# Limit on the unpacked size: texts and tables unpack to ten to fifty times their size, zip bombs to a thousand times.
MOST_TIMES, ALWAYS_BYTES = 200, 100_000_000
MOST_ROWS = 100_000_000
# `datasets` and Arrow take time quadratic in the number of columns.
MOST_COLUMNS = 1000
CELL_BYTES = 8


def most_unpacked(size: int) -> int:
    """Return how many bytes a file of this size may unpack to."""
    return max(ALWAYS_BYTES, MOST_TIMES * size)


def check_columns(where: str, columns: int) -> None:
    """Refuse a table that is too wide."""
    if columns > MOST_COLUMNS:
        raise EvaluationError(f"{where} has more than {MOST_COLUMNS} columns, which are not read.")


def check_cells(where: str, rows: int, columns: int, size: int) -> None:
    """Refuse a text of `size` bytes whose table is far larger: cells that a row omits still take memory in the
    table."""
    if rows * columns * CELL_BYTES > most_unpacked(size):
        raise EvaluationError(f"{where} becomes a table of more than {MOST_TIMES} times its size.")
