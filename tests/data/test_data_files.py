"""Data files that lie about their size are refused before anything is allocated on their word."""

from __future__ import annotations

import gzip
import json
import random
import struct
import tarfile
import tracemalloc
import zipfile
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trust.bombs import lying, plain

from retex_hf.data.data_files import check_json
from retex_hf.data.datasets import load_inputs
from retex_hf.data.json_rows import Nesting
from retex_hf.data.parquet_files import check_parquet
from retex_hf.errors import EvaluationError, InputError
from retex_hf.evaluation import load_task
from retex_hf.utils.strict_files import MOST_LEVELS


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


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.list_(pa.string())], ids=str)
def test_a_value_that_stands_once_and_counts_often(tmp_path, kind):
    """Files of some kilobytes whose tables take two gigabytes; what they say of their size is true, and small."""
    value = pa.array([["x" * 100_000] if pa.types.is_list(kind) else "x" * 100_000]).cast(kind)
    path = tmp_path / "rows.parquet"
    with pq.ParquetWriter(path, pa.schema({"text": kind})) as writer:
        for _ in range(20):
            writer.write_table(pa.table({"text": value.take(pa.array([0] * 1000))}))
    assert path.stat().st_size < 1_000_000
    assert sum(pq.read_metadata(path).row_group(number).total_byte_size for number in range(20)) < 10_000_000
    tracker = pa.total_allocated_bytes()
    with pytest.raises(EvaluationError, match=r"rows\.parquet unpacks to more than 200 times its size"):
        load_inputs("a", path)
    assert pa.total_allocated_bytes() - tracker < 10_000_000


def test_numbers_that_stand_once_and_count_often(tmp_path):
    columns = {f"n{number}": pa.nulls(1_000_000, pa.int64()) for number in range(20)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(EvaluationError, match=r"rows\.parquet unpacks to more than 200 times its size"):
        load_inputs("a", tmp_path / "rows.parquet")


def test_tables_of_all_kinds_are_counted(tmp_path):
    table = pa.table(
        {
            "text": ["a", "b", None], "nothing": pa.nulls(3, pa.string()),
            "pair": [{"a": "x", "b": [1]}, None, {"a": None, "b": []}],
            "lists": [["a", None], [], None], "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
            "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)), "flag": [True, False, None], "label": [0, 1, 1],
            "three": pa.array([[1, 2, 3], None, [4, 5, 6]], pa.list_(pa.int64(), 3)),
            "coded": pa.array(["u", "v", "u"]).dictionary_encode(),
            "large": pa.array(["a", "b", None], pa.large_string()),
        }
    )  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2, dictionary_pagesize_limit=1)
    check_parquet(tmp_path / "rows.parquet", "it")


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
        b"{'descr': '<c16', 'fortran_order': False, 'shape': (), }\n",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2), }\n",
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
    with pytest.raises(EvaluationError, match="the image of row 1 is neither in the data nor a file"):
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
        check_json(tmp_path / "rows.jsonl", f"{tmp_path / 'rows.jsonl'}")


def tar(path: Path, name: str, content: bytes) -> Path:
    """An archive of ASCII alone: blanks stand where there are zeros in others."""
    content = content.ljust(-(-len(content) // 512) * 512)
    head = name.encode().ljust(100, b"x") + b"0000644 " + b"0000000 " * 2 + b"%011o %011o " % (len(content), 0)
    head = (head + b" " * 8 + b"0").ljust(257) + b"ustar  ".ljust(255)
    path.write_bytes(head[:148] + b"%06o  " % sum(head) + head[156:] + content)
    assert tarfile.is_tarfile(path)
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_an_archive_that_looks_like_text_is_not_unpacked(tmp_path, name, packed):
    """The quote in its name hides the brackets of what is in it."""
    path = tar(tmp_path / name, f'a".{name}', b'{"text":' + b"[" * 300_000 + b"]" * 300_000 + b"}")
    if packed:
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    message = "cannot be read as JSON: Expecting value" if "json" in name else r"is an archive \(tar\): unpack it"
    with pytest.raises(EvaluationError, match=f"{path.name} {message}"):
        load_inputs("a", path)


def test_an_archive_with_the_end_of_a_parquet_file(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for name, message in (("PAR1", r"is an archive \(tar\)"), ("a", "does not begin as a parquet file does")):
        path = tar(tmp_path / "rows.parquet", name, b"")
        path.write_bytes(path.read_bytes() + content)
        with pytest.raises(EvaluationError, match=rf"rows\.parquet {message}"):
            load_inputs("a", path)


@pytest.mark.parametrize("value", ["{}", "[{}]", "[\n  {},\n  {}\n]", "{}\n{}", "\ufeff{}", "\n{}\r\n{}\n\n", "{} {}"])
def test_json_is_read_value_after_value(tmp_path, value):
    row = '{\n "text": "é\\ud83d\\ude00", "more": [[], {"a": -9223372036854775808}, 1.5e3, true, null]}'
    (tmp_path / "rows.json").write_text(value.replace("{}", row), encoding="utf-8")
    check_json(tmp_path / "rows.json", "it")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "label": NaN}', "NaN is not a number in JSON"),
        ('[{"text": "a", "label": -Infinity}]', "-Infinity is not a number in JSON"),
        ('{"text": "a", "label": 1e999}', "the number 1e999 is too large"),
        (
            '{"text": "a"}\n{"text": "a", "label": 9223372036854775808}',
            "the number 9223372036854775808 takes more than",
        ),
        ('{"text": "a", "label": ' + "1" * 5000 + "}", "the number 11111111111111111111 takes more than 64 bits"),
        ('{"text": "a", "text": "b"}', "the key 'text' appears twice"),
        ('{"text": "\\ud800"}', "it holds half a character"),
        (
            '{"text": "a"}\n"' + "[" * 300 + "\n" + "[" * 300,
            r"Invalid control character at \(row 1\)|it is nested too deeply",
        ),
        ('{"text": "a"}\nx', r"Expecting value \(row 1\)"),
        ('[{"text": "a"} {"text": "b"}]', "Expecting ',' or ']'"),
        ('[{"text": "a"}', "Expecting ',' or ']'"),
        ('[{"text": "a"},', "Expecting value"),
        ('{"text": "a"', "Expecting ',' delimiter"),
        ("{" + ", ".join(f'"k{number}": 1' for number in range(1001)) + "}", "it has more than 1000 columns"),
        ("\n".join(f'{{"k{number}": [{{"a": 1}}]}}' for number in range(501)), "it has more than 1000 columns"),
    ],
)
def test_json_is_read_strictly(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(EvaluationError, match=rf"rows\.jsonl cannot be read as JSON: ({message})") as caught:
        load_inputs("a", tmp_path / "rows.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "text" + ",a" * 1000,
        "text\nb" + ",1" * 1000,
        '\n \r"te\nxt"' + ",a" * 1000,
        'a"b\n"' + "\n,," * 9 + '"' + ",1" * 1000,
    ],
)
def test_wide_tables_are_refused(tmp_path, text):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(EvaluationError, match=r"rows\.csv has more than 1000 columns"):
        load_inputs("a", tmp_path / "rows.csv")


def test_commas_within_texts_are_no_columns(tmp_path):
    texts = ["a, " * 2000 + '"b"\n' + "c, " * 700_000, '5" d', "x"]
    pd.DataFrame({"text": texts, "label": [0, 1, 0]}).to_csv(tmp_path / "rows.csv", index=False)
    assert list(load_task("a", tmp_path / "rows.csv").inputs) == texts


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_cells_that_rows_leave_out_count(tmp_path, name):
    """Two bytes for a row of a thousand cells."""
    keys = [f"k{number}" for number in range(999)]
    text = ",".join(keys) + "\n1" * 20_000 if "csv" in name else json.dumps(dict.fromkeys(keys, 1)) + "\n{}" * 20_000
    (tmp_path / name).write_text(text)
    with pytest.raises(EvaluationError, match=f"{name} becomes a table of more than 200 times its size"):
        load_inputs("a", tmp_path / name)
