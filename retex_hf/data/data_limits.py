"""How much is made of a data file of a stranger."""

from __future__ import annotations

from ..errors import EvaluationError

# How much larger a file may be unpacked: texts and tables become ten to fifty times as large, bombs a thousand times.
MOST_TIMES, ALWAYS_BYTES = 200, 100_000_000
MOST_ROWS = 100_000_000
# `datasets` and Arrow take time that grows with the square of them.
MOST_COLUMNS = 1000
CELL_BYTES = 8


def most_unpacked(size: int) -> int:
    """How many bytes may be made of so many."""
    return max(ALWAYS_BYTES, MOST_TIMES * size)


def check_columns(where: str, columns: int) -> None:
    """Refuse a table that is too wide."""
    if columns > MOST_COLUMNS:
        raise EvaluationError(f"{where} has more than {MOST_COLUMNS} columns, which are not read.")


def check_cells(where: str, rows: int, columns: int, size: int) -> None:
    """Refuse a text of `size` bytes whose table is far larger: a cell that a row leaves out is a cell of the table."""
    if rows * columns * CELL_BYTES > most_unpacked(size):
        raise EvaluationError(f"{where} becomes a table of more than {MOST_TIMES} times its size.")
