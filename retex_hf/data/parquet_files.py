"""Check untrusted parquet files by what they hold: one stored value may appear in the table many times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import EvaluationError, first_line
from .data_files import check_no_archive
from .data_limits import MOST_ROWS, MOST_TIMES, check_columns, most_unpacked

MAGIC = b"PAR1"
# Rows of a batch; fewer where rows may be so long that a batch would take more than these bytes.
BATCH, BATCH_BYTES = 1024, 1_000_000_000
# Dtype of the offsets at which values of variable length end.
OFFSETS = {pa.string(): np.int32, pa.binary(): np.int32, pa.large_string(): np.int64, pa.large_binary(): np.int64}


def check_parquet(path: Path, where: str) -> None:
    """Refuse a file that is not parquet, is also an archive, or whose tables are far larger than the file.

    The sizes that the file states cannot be trusted, so the values are counted; texts stay in their dictionaries
    meanwhile.
    """
    most = most_unpacked(path.stat().st_size)
    try:
        with path.open("rb") as stream:
            starts = stream.read(len(MAGIC))
        found = pq.read_metadata(path)
        groups = [found.row_group(number) for number in range(found.num_row_groups)]
    except Exception as error:  # Arrow may raise anything on a broken file
        raise EvaluationError(f"{where} cannot be read ({first_line(error)}).") from None
    if starts != MAGIC:  # readers check only the end of a file; the beginning could be anything
        raise EvaluationError(f"{where} does not begin as a parquet file does.")
    check_no_archive(path, where)
    check_columns(where, found.num_columns)
    if found.num_rows > MOST_ROWS:
        raise EvaluationError(f"{where} has {found.num_rows} rows; at most {MOST_ROWS} are read.")
    declared = sum(max(group.total_byte_size, _least_bytes(group)) for group in groups)
    if declared > most or _table_bytes(path, where, most) > most:
        raise EvaluationError(f"{where} unpacks to more than {MOST_TIMES} times its size.")


def _least_bytes(group: pq.RowGroupMetaData) -> int:
    """Return a lower bound on a group's bytes: one bit for each value that it states."""
    return sum(group.column(number).num_values for number in range(group.num_columns)) // 8


def _table_bytes(path: Path, where: str, most: int) -> int:
    """Return how many bytes the tables of a file take, or a number above `most`."""
    try:
        total = 0
        with pq.ParquetFile(path) as file:
            texts, longest = _texts(file), max(1, _longest(file))
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(max(1, min(BATCH, BATCH_BYTES // longest)), use_threads=False):
                total += sum(map(array_bytes, batch.columns))
                if total > most:
                    break
        return total
    except Exception as error:  # Arrow may raise anything on a broken file
        raise EvaluationError(f"{where} cannot be read ({first_line(error)}).") from None


def _texts(file: pq.ParquetFile) -> list[str]:
    """Return the columns of texts and bytes that Arrow can read as dictionaries, so that a batch is no larger than in
    the file."""
    leaves = [file.schema.column(number) for number in range(file.metadata.num_columns)]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.path == leaf.name]


def _longest(file: pq.ParquetFile) -> int:
    """Return an upper bound on the length of a value in other columns: a fixed length, or the size of its
    dictionary."""
    texts, longest = _texts(file), 0
    for column in range(file.metadata.num_columns):
        leaf = file.schema.column(column)
        if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
            longest = max(longest, leaf.length)
        elif leaf.physical_type == "BYTE_ARRAY" and leaf.path not in texts:
            for group in range(file.metadata.num_row_groups):
                chunk = file.metadata.row_group(group).column(column)
                longest = max(longest, chunk.total_uncompressed_size if chunk.has_dictionary_page else 0)
    return longest


def array_bytes(array: pa.Array) -> int:
    """Return how many bytes an array takes once its dictionaries are expanded.

    >>> import pyarrow as pa
    >>> from retex_hf.data.parquet_files import array_bytes
    >>> array_bytes(pa.array(["a" * 100] * 9 + [None]).dictionary_encode())
    940
    """
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return array_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        indices = array.indices.drop_null().to_numpy(zero_copy_only=False)
        return 4 * len(array) + int(_lengths(array.dictionary, indices).sum())
    if pa.types.is_struct(kind):
        return len(array) // 8 + sum(map(array_bytes, array.flatten()))
    if pa.types.is_map(kind):
        return 4 * len(array) + array_bytes(array.keys) + array_bytes(array.items)
    if pa.types.is_nested(kind):
        return 4 * len(array) + array_bytes(array.flatten())
    return array.nbytes


def _lengths(dictionary: pa.Array, indices: np.ndarray) -> np.ndarray:
    """Return the lengths of the dictionary values at these indices; the dictionary may be far larger than the
    indices."""
    if not len(indices) or dictionary.type not in OFFSETS:
        return np.full(len(indices), dictionary.nbytes // max(1, len(dictionary)))
    ends = np.frombuffer(dictionary.buffers()[1], OFFSETS[dictionary.type])[dictionary.offset :]
    return ends[indices + 1].astype(np.int64) - ends[indices]
