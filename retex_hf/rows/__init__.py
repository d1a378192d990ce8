"""The mapping from entries of a model's inputs and outputs to the rows of a batch."""

from .ownership import ITEM_INPUTS, Owned, Reading, entries_of, pattern, readings
from .proof import Along, AlongItems, Entries, Place, Proof, Shared, leaves, prove, take
from .splitting import NOT_ROWS, TEXT_INPUTS, Splitter, count_rows, numbers_per_row

__all__ = [
    "ITEM_INPUTS",
    "NOT_ROWS",
    "TEXT_INPUTS",
    "Along",
    "AlongItems",
    "Entries",
    "Owned",
    "Place",
    "Proof",
    "Reading",
    "Shared",
    "Splitter",
    "count_rows",
    "entries_of",
    "leaves",
    "numbers_per_row",
    "pattern",
    "prove",
    "readings",
    "take",
]
