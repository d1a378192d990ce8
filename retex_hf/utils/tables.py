"""Text tables, as Markdown or aligned for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .terminal import visible


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the first column holds names, the others hold numbers.

    Args:
        header: One title per column.
        rows: Rows of one text per column.
        bold: (row, column) of the cells to highlight.
        groups: Titles over several columns, as (title, number of columns), for the terminal.
        words: Columns besides the first that hold words, and are left-aligned.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()
    groups: Sequence[tuple[str, int]] = ()
    words: Sequence[int] = ()

    def markdown(self) -> str:
        """Return the table as Markdown.

        >>> from retex_hf.utils.tables import Table
        >>> print(Table(["method", "accuracy"], [["a", "90.0"]], frozenset({(0, 1)})).markdown())
        | method | accuracy |
        |---|---:|
        | a | **90.0** |
        """
        rules = ["---" if self._is_words(place) else "---:" for place in range(len(self.header))]
        lines = [_markdown_row(self.header), "|" + "|".join(rules) + "|"]
        for number, row in enumerate(self.rows):
            cells = [f"**{cell}**" if (number, place) in self.bold else cell for place, cell in enumerate(row)]
            lines.append(_markdown_row(cells))
        return "\n".join(lines)

    def text(self) -> str:
        """Return the table with columns aligned by spaces; a star marks cells that are bold in Markdown.

        >>> from retex_hf.utils.tables import Table
        >>> print(Table(["method", "accuracy"], [["a", "90.0"]], frozenset({(0, 1)})).text())
        method  accuracy
        ----------------
        a          90.0*
        """
        starred = [
            [f"{visible(cell)}*" if (number, place) in self.bold else visible(cell) for place, cell in enumerate(row)]
            for number, row in enumerate(self.rows)
        ]
        header = [visible(title) for title in self.header]
        widths = [max(len(row[place]) for row in [header, *starred]) for place in range(len(header))]
        lines = [self._group_line(widths)] if self.groups else []
        lines += [self._aligned(header, widths), "-" * (sum(widths) + 2 * (len(widths) - 1))]
        return "\n".join(line.rstrip() for line in [*lines, *(self._aligned(row, widths) for row in starred)])

    def _is_words(self, place: int) -> bool:
        return place == 0 or place in self.words

    def _aligned(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        return "  ".join(
            cell.ljust(width) if self._is_words(place) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )

    def _group_line(self, widths: Sequence[int]) -> str:
        line, place = "", 0
        for title, count in self.groups:
            start = sum(widths[:place]) + 2 * place
            line = line.ljust(start) + title.center(sum(widths[place : place + count]) + 2 * (count - 1))
            place += count
        return line


def bold_best(
    values: Sequence[Sequence[float | None]], left_out: Sequence[int] = (), columns: Sequence[int] | None = None
) -> frozenset[tuple[int, int]]:
    """Return the (row, column) of the largest value of each column, with all ties.

    Args:
        values: Values by row; None where one is missing.
        left_out: Rows that do not compete.
        columns: Columns that have a best value; default: all.

    >>> from retex_hf.utils.tables import bold_best
    >>> sorted(bold_best([[None, 1.0], [None, 3.0], [None, 3.0]]))
    [(1, 1), (2, 1)]
    """
    best = set()
    for column in range(len(values[0])) if columns is None else columns:
        found = {
            row: value for row, of in enumerate(values) if row not in left_out and (value := of[column]) is not None
        }
        best |= {(row, column) for row, value in found.items() if value == max(found.values())}
    return frozenset(best)


def percent(share: float | None) -> str:
    """Format a share as a percentage with one decimal; None becomes an empty string.

    >>> from retex_hf.utils.tables import percent
    >>> percent(0.98765), percent(None)
    ('98.8', '')
    """
    return "" if share is None else f"{100 * share:.1f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
