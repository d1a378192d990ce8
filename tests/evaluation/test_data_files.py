"""Data files that lie about their size are refused before anything is allocated on their word."""

from __future__ import annotations

import gzip
import json
import random
import struct
import tracemalloc
import zipfile
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trust.bombs import lying, plain

from retex_hf.errors import EvaluationError, InputError
from retex_hf.evaluation import load_task
from retex_hf.evaluation.data_files import Nesting, check_text
from retex_hf.evaluation.tasks import load_inputs
from retex_hf.reading import MOST_LEVELS


def depth_of(text: str) -> int:
    """The plain way, for JSON that is valid."""
    value, deepest = [(json.loads(text), 0)], 0
    while value:
        one, level = value.pop()
        if isinstance(one, (list, dict)):
            deepest = max(deepest, level + 1)
            value += [(part, level + 1) for part in (one.values() if isinstance(one, dict) else one)]
    return deepest


def test_depth_is_that_of_the_values_however_the_file_is_cut():
    draw = random.Random(0)

    def value(level: int):
        kind = draw.randrange(4)
        if level > 90 or kind == 0:
            return "".join(draw.choices('[]{}"\\\n a', k=draw.randrange(8)))
        if kind == 1:
            return {value(99): value(level + draw.choice((1, 1, 30))) for _ in range(draw.randrange(3))}
        return [value(level + 1) for _ in range(draw.randrange(1, 3))]

    for _ in range(300):
        text = json.dumps(value(0), indent=draw.choice((None, 2)))
        for _ in range(draw.choice((0, 0, 70))):
            text = f'{{"a": [{text}]}}' if draw.random() < 0.5 else f"[{text}]"
        data, nesting, found = text.encode(), Nesting(), 0
        while data:
            cut = draw.randrange(1, 9)
            found, data = max(found, nesting.add(data[:cut])), data[cut:]
        expected = depth_of(text)
        assert (found > MOST_LEVELS) == (expected > MOST_LEVELS)
        assert nesting.depth == 0


def test_brackets_within_texts_do_not_count(tmp_path):
    rows = [{"text": "[[[[{{{{" * 50, "label": 0}, {"text": '"[' * 300, "label": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_task("a", tmp_path / "rows.jsonl").inputs == [row["text"] for row in rows]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.parquet"])
def test_ordinary_files_are_read(tmp_path, name):
    table = pa.table({"text": ["ä" * 700_000, "b"] * 3, "label": [0, 1] * 3})
    buffer = BytesIO()
    if "parquet" in name:
        pq.write_table(table, buffer)
    elif "csv" in name:
        buffer.write(table.to_pandas().to_csv(index=False).encode())
    else:
        buffer.write("\n".join(json.dumps(row, ensure_ascii=False) for row in table.to_pylist()).encode())
    data = buffer.getvalue()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = load_task("a", tmp_path / name)
    assert (list(found.inputs), list(found.answers)) == (table["text"].to_pylist(), table["label"].to_pylist())


def test_files_that_unpack_to_far_more_are_refused(tmp_path):
    (tmp_path / "zeros.csv.gz").write_bytes(gzip.compress(b"text\n" + b"a" * 150_000_000, 9))
    table = pa.table({"text": pa.array(["a" * 1000]).take(pa.array([0] * 300_000))})
    pq.write_table(table, tmp_path / "zeros.parquet", compression="zstd", use_dictionary=False)
    for name in ("zeros.csv.gz", "zeros.parquet"):
        with pytest.raises(EvaluationError, match=f"{name} unpacks to more than 200 times its size"):
            load_inputs("a", tmp_path / name)


def npz(folder: Path, header: bytes | None = None, data: bytes = b"", **arrays: np.ndarray) -> Path:
    """An archive; with `header`, its array `test_x` says what that says."""
    path = folder / "data.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            buffer = BytesIO()
            np.save(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue())
        if header is not None:
            archive.writestr("test_x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000), }\n",
        b"{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000000,), }\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4, -1), }\n",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n",
        b"[" * 9000 + b"\n",
        b"no header\n",
    ],
)
def test_an_array_is_what_its_header_says_or_is_refused(tmp_path, header):
    path = npz(tmp_path, header, bytes(16))
    tracemalloc.start()
    with pytest.raises(EvaluationError, match=r"data\.npz cannot be read"):
        load_inputs("a", path, split="test")
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def test_ordinary_arrays_are_read_and_packed_zeros_are_not(tmp_path):
    pictures = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    path = npz(tmp_path, test_x=pictures, test_y=np.array([1, 0]))
    found = load_task("a", path)
    assert np.array_equal(found.inputs, pictures) and found.answers == [1, 0]
    path = npz(tmp_path, test_x=np.zeros(150_000_000, np.uint8))
    with pytest.raises(EvaluationError, match="unpacks to more than 200 times its size"):
        load_inputs("a", path, split="test")


def test_images_of_data_are_judged_by_their_pixels_and_come_from_no_address(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "test" / label).mkdir(parents=True)
        (tmp_path / "test" / label / "a.png").write_bytes(plain("PNG"))
    found = load_task("pets", tmp_path)
    assert [image.size for image in found.inputs] == [(24, 16)] * 2
    assert (found.answers, found.label_names) == ([0, 1], ["cat", "dog"])
    (tmp_path / "test" / "dog" / "a.png").write_bytes(lying("PNG", 13_000, 13_000))
    with pytest.raises(InputError, match=r"'pets': the image of row 1, .*a\.png, has 13000 x 13000 pixels; at most"):
        list(load_task("pets", tmp_path).inputs)

    cells = [{"bytes": plain("PNG"), "path": None}, {"bytes": None, "path": "http://127.0.0.1:1/a.png"}, None]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    table = pa.table({"image": cells, "label": [0, 1, 1]}, schema=features.arrow_schema)
    pq.write_table(table, tmp_path / "test.parquet")
    images = load_task("pets", tmp_path / "test.parquet").inputs
    assert images[0].size == (24, 16)
    with pytest.raises(EvaluationError, match="the image of row 1 is not in the data, and no file"):
        images[1]
    with pytest.raises(EvaluationError, match="row 2 has no image"):
        images[2]


def test_a_folder_that_only_looks_saved_is_one_sentence(tmp_path):
    (tmp_path / "state.json").write_text("[" * 100_000)
    with pytest.raises(EvaluationError, match="cannot be read"):
        load_inputs("a", tmp_path)


def test_archives_under_another_name_are_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "rows.jsonl", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "a"}')
    with pytest.raises(EvaluationError, match=r"rows\.jsonl is not text in UTF-8"):
        check_text(tmp_path / "rows.jsonl", f"{tmp_path / 'rows.jsonl'}", nested=True)
