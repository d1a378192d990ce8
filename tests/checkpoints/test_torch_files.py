"""Files of `torch.save` are read as torch reads them, and what they cannot hold is refused before it takes memory."""

from __future__ import annotations

import struct
import time
import zipfile
from collections import Counter, OrderedDict
from io import BytesIO
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trust import torch_bytes
from trust.torch_bytes import Tensor

from retex_hf.checkpoints import open_source
from retex_hf.checkpoints.torch_files import read_torch_file
from retex_hf.errors import CheckpointError

ZIPPED = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(value: object, path: Path, zipped: bool) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def refuse(message: str, file: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_torch_file(file)
    assert "\n" not in str(caught.value)


def of_module() -> OrderedDict[str, torch.Tensor]:
    """With torch's own attribute `_metadata`."""
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()


def with_attribute() -> dict[str, torch.Tensor]:
    parameter = nn.Parameter(torch.randn(3))
    parameter.note = "x"
    return {"a": parameter, "b": nn.Parameter(torch.randn(2), requires_grad=False)}


def views() -> dict[str, torch.Tensor]:
    whole = torch.arange(4096.0).reshape(64, 64)
    return {
        "whole": whole, "tied": whole, "transposed": whole.T, "one axis more": torch.arange(5).expand(1, -1),
        "empty": torch.zeros(0, 3), "scalar": torch.tensor(3.5), "end": torch.arange(9.0)[4:],
    }  # fmt: skip


def dtypes() -> dict[str, torch.Tensor]:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    others = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    return {str(dtype): torch.arange(5).to(dtype) for dtype in (*floats, *others)}


def checkpoint() -> dict[str, object]:
    """As a training script writes it."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rest = {
        "epoch": 3,
        "seen": (1, 2.5, None, True, "x", -(2**70)),
        "count": Counter("aab"),
        "device": torch.device("cpu"),
    }
    return {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), **rest}


@ZIPPED
@pytest.mark.parametrize("make", [of_module, with_attribute, views, dtypes, checkpoint])
def test_reads_what_torch_reads(make, zipped, tmp_path):
    file = save(make(), tmp_path / "w.bin", zipped)
    expected = torch.load(file, weights_only=True)
    expected = expected.get("state_dict", expected)
    found = read_torch_file(file)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride())


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    count=st.integers(0, 12),
    said=st.integers(0, 13),
    offset=st.integers(0, 5),
    size=st.lists(st.integers(0, 4), max_size=3),
    steps=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    legacy=st.booleans(),
)
def test_a_tensor_shows_what_is_there_or_is_refused(count, said, offset, size, steps, legacy, tmp_path_factory):
    it = Tensor(numel=said, offset=offset, size=tuple(size), stride=tuple(steps[: len(size)]))
    data = struct.pack(f"<{count}f", *range(count))
    pickled = torch_bytes.program({"w": it}, legacy)
    file = tmp_path_factory.mktemp("torch") / "w.bin"
    if legacy:
        file.write_bytes(torch_bytes.legacy_file(pickled, {"0": data}, {"0": count}))
    else:
        file.write_bytes(torch_bytes.archive(pickled, {"0": data}))
    try:
        found = read_torch_file(file)["w"]
    except CheckpointError:
        numel = torch.Size(size).numel()
        last = offset + sum((axis - 1) * step for axis, step in zip(size, steps, strict=False))
        assert said > count or numel > said or (numel and last >= said) or (legacy and said != count)
    else:
        expected = torch.arange(float(count)).as_strided(size, steps[: len(size)], offset) if found.numel() else found
        assert found.shape == torch.Size(size)
        assert torch.equal(found, expected)


@ZIPPED
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            lambda: torch.zeros(1).expand(100_000, 20_000),
            r"has shape \(100000, 20000\), which is 2000000000 numbers, but",
        ),
        (lambda: torch.zeros(10).as_strided((6, 5), (1, 1)), "which is 30 numbers, but the file holds 10 for it"),
        (lambda: torch.ones(2, dtype=torch.complex64), "is in a 'torch.ComplexFloatStorage', which is not read"),
        (
            lambda: torch.ones(2, dtype=torch.uint16),
            "not a dense tensor of a supported dtype: the file has 'torch.uint16'",
        ),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), "the file has 'torch.float8_e4m3fn'"),
        (lambda: torch.eye(3).to_sparse(), "the file has 'torch._utils._rebuild_sparse_tensor'"),
        (
            lambda: torch.empty(10**6, 10**6, device="meta"),
            "the file has 'torch._utils._rebuild_meta_tensor_no_storage'",
        ),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "'torch._utils._rebuild_qtensor'"),
        (lambda: torch.imag(torch.ones(2, dtype=torch.complex64).conj()), "not a dense tensor of a supported dtype"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_plain_tensor_is_refused_by_name(tensor, message, zipped, tmp_path):
    refuse(
        rf"w\.bin: tensor 'odd' .*{message}", save({"fine": torch.ones(2), "odd": tensor()}, tmp_path / "w.bin", zipped)
    )


def test_a_bomb_by_strides_takes_no_memory(tmp_path):
    """Some 80 kB that asked for 51 GB."""
    tensors = {f"w{index}": Tensor(size=(80_000, 40_000), stride=(0, 0)) for index in range(4)}
    file = tmp_path / "w.bin"
    file.write_bytes(torch_bytes.archive(torch_bytes.program(tensors), {"0": bytes(80_000)}))
    before = psutil.Process().memory_info().rss
    with pytest.raises(CheckpointError, match=r"w\.bin: tensor 'w0' has shape .* but the file holds 20000 for it"):
        open_source(file, "expert 'red'")
    assert psutil.Process().memory_info().rss - before < 20e6


def test_bytes_that_are_used_again_and_again(tmp_path):
    file, data = tmp_path / "w.bin", {"0": bytes(400_000)}
    shifted = {f"w{index}": Tensor(numel=10**5, offset=index, size=(90_000,), stride=(1,)) for index in range(9)}
    file.write_bytes(torch_bytes.archive(torch_bytes.program(shifted), data))
    refuse(r"w\.bin has \d+ bytes, but its tensors have 3240000: they overlap", file)
    tied = {f"w{index}": Tensor(numel=10**5, size=(10**5,), stride=(1,)) for index in range(100)}
    file.write_bytes(torch_bytes.archive(torch_bytes.program(tied), data))
    refuse(r"w\.bin has \d+ bytes, but its tensors have 40000000: they overlap", file)
    file.write_bytes(torch_bytes.archive(torch_bytes.program(dict(list(tied.items())[:48])), data))
    assert len(read_torch_file(file)) == 48  # a model of one layer, 48 times


def test_a_compressed_archive_is_not_unpacked(tmp_path):
    file, pickled = tmp_path / "w.bin", torch_bytes.program({"w": Tensor(numel=10**8, size=(10**8,), stride=(1,))})
    file.write_bytes(torch_bytes.archive(pickled, {"0": bytes(4 * 10**8)}, compressed=True))
    assert file.stat().st_size < 1e6
    refuse(r"w\.bin cannot be read .*: its part 'archive/data.*' is compressed, which torch never does", file)


def test_two_parts_of_one_name(tmp_path):
    file, pickled = tmp_path / "w.bin", torch_bytes.program({"w": Tensor()})
    with pytest.warns(UserWarning, match="Duplicate name"):
        content = torch_bytes.archive(pickled, {"0": bytes(16)}, more=[("archive/data/0", bytes(16))])
    file.write_bytes(content)
    refuse(r"w\.bin cannot be read .*: two of its parts have one name", file)


def test_a_long_table_of_contents_is_not_read(tmp_path, monkeypatch):
    file = save({"w": torch.ones(1)}, tmp_path / "w.bin", True)
    content = bytearray(file.read_bytes())
    content[-22 + 12 : -22 + 16] = struct.pack("<L", 2**31)
    file.write_bytes(content.replace(b"PK\6\7", b"PK\0\0"))
    monkeypatch.setattr(zipfile, "ZipFile", None)  # it is not opened
    refuse(r"w\.bin cannot be read .*: its table of contents is too long", file)


def program(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


# Each value is a pair of the one before; as a key, the last takes 2^60 steps to be hashed.
DOUBLED = (
    torch_bytes.text("k")
    + b")q\x00"
    + b"".join(
        torch_bytes.text(f"k{n}") + b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60)
    )
)
# As a shape: `repr` of the first takes 2^60 steps, of the second more levels than there are.
SHARED = b")" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60))
DEEP = b")" + b"\x85" * 100_000


def shaped(size: bytes) -> bytes:
    """A tensor of which some instructions write the shape."""
    return torch_bytes.tensor(Tensor(size=())).replace(b"(t", size, 1)


HUGE = b"c__builtin__\nbytearray\n" + torch_bytes.number(10**12) + b"\x85R"
SYSTEM = b"cposix\nsystem\n" + torch_bytes.text("true") + b"\x85R"


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (program(b"}(" + DOUBLED + b"h\x3cNu"), "it has keys that are neither texts nor numbers"),
        (program(SYSTEM), "it also holds posix.system, which could run code"),
        (program(b"ctorch.hub\nload\n)R"), "it also holds torch.hub.load, which could run code"),
        (program(b"}(" + torch_bytes.text("w") + HUGE + b"u"), "tensor 'w' is not a dense .*__builtin__.bytearray"),
        (program(b"S'a'\n"), "it has the instruction STRING, which plain tensors do not need"),
        (program(b"\x8c\x01a\x93"), "it has the instruction SHORT_BINUNICODE"),
        (program(b"h\x05"), "it is damaged, or another kind of file"),
        (program(b""), "it is damaged, or another kind of file"),
        (program(b"K\x01K\x02b"), "it is damaged, or another kind of file"),
        (program(b"}(" + 2 * (torch_bytes.text("w") + b"N") + b"u"), "it holds 'w' twice"),
        (torch_bytes.program({"w": Tensor(size=(1,) * 65, stride=(1,) * 65)}), "tensor 'w' has an invalid shape"),
        (torch_bytes.program({"w": Tensor(size=(-1,), stride=(1,))}), "tensor 'w' has an invalid shape"),
        (torch_bytes.program({"w": Tensor(size=(0, 2**40, 2**40), stride=(1, 1, 1))}), "tensor 'w' has an invalid"),
        (torch_bytes.program({"w": shaped(SHARED)}), "it is damaged, or another kind of file"),
        (torch_bytes.program({"w": shaped(DEEP)}), "it is damaged, or another kind of file"),
        (torch_bytes.program({"w": shaped(b"(" + torch_bytes.text("2") + b"t")}), "it is damaged, or another kind"),
        (program(b"ccollections\nOrderedDict\n](K\x01K\x02K\x03\x87e\x85R"), "it is damaged, or another kind"),
        (torch_bytes.program({"w": Tensor(key="7")}), "tensor 'w' has shape .* but the file holds 0 for it"),
    ],
)  # fmt: skip
def test_programs_that_are_not_followed(pickled, message, tmp_path):
    file = tmp_path / "w.bin"
    file.write_bytes(torch_bytes.archive(pickled, {"0": bytes(16)}))
    refuse(rf"w\.bin.*{message}", file)


def test_a_long_program_is_not_followed(tmp_path):
    file = tmp_path / "w.bin"
    file.write_bytes(torch_bytes.archive(program(b"N" * 17_000_000), {}))
    refuse(r"it takes 17000003 bytes to describe its tensors; at most 16000000 are read", file)
    file.write_bytes(torch_bytes.archive(program(b"N" * 2_000_001), {}))
    refuse(r"it takes over 2000000 instructions to describe its tensors", file)


def test_pairs_that_are_made_into_dicts_again_and_again(tmp_path):
    """Some 3 MB that asked for 10^11 steps."""
    file, pair = tmp_path / "w.bin", b"](" + b"".join(torch_bytes.number(n) + b"N\x86" for n in range(300_000)) + b"e"
    again = b"ccollections\nOrderedDict\nq\x01" + pair + b"\x85q\x02R" + b"h\x01h\x02Rb" * 100_000
    file.write_bytes(torch_bytes.archive(program(again), {}))
    refuse(r"w\.bin cannot be read .*: it takes over 2000000 instructions", file)
    long = b"](](" + b"N" * 1_000_000 + b"eq\x00" + b"h\x00" * 100_000 + b"e"  # each pair is a long list
    file.write_bytes(torch_bytes.archive(program(b"ccollections\nOrderedDict\n" + long + b"\x85R"), {}))
    refuse(r"w\.bin cannot be read .*: it is damaged", file)


def test_numbers_of_one_hash_as_keys(tmp_path):
    """Some 1.3 MB that asked for 10^10 comparisons."""
    file, keys = tmp_path / "w.bin", [torch_bytes.number((n + 1) * (2**61 - 1)) + b"N" for n in range(100_000)]
    file.write_bytes(torch_bytes.archive(program(b"}(" + b"".join(keys) + b"u"), {}))
    start = time.perf_counter()
    assert len(read_torch_file(file)) == 100_000
    assert time.perf_counter() - start < 30


def misplaced(tensors: dict[str, Tensor], data: dict[str, bytes]) -> bytes:
    """An archive whose first storage begins at an odd place."""
    for blanks in range(2):
        content = torch_bytes.archive(torch_bytes.program(tensors) + b" " * blanks, data)
        with zipfile.ZipFile(BytesIO(content)) as archive:
            entry = archive.getinfo("archive/data/0")
            if (entry.header_offset + 30 + len(entry.filename)) % 2:
                return content
    raise AssertionError


def test_a_misplaced_storage_is_copied_once(tmp_path):
    file, numbers = tmp_path / "w.bin", struct.pack("<1000000f", *range(1_000_000))
    tensors = {f"w{count}": Tensor(numel=count, size=(1,), stride=(1,)) for count in range(1, 301)}
    tensors["last"] = Tensor(numel=10**6, offset=999_999, size=(1,), stride=(1,))
    tensors["byte"] = Tensor(kind="ByteStorage", numel=4 * 10**6, offset=7, size=(1,), stride=(1,))
    file.write_bytes(misplaced(tensors, {"0": numbers}))
    before = psutil.Process().memory_info().rss
    found = read_torch_file(file)
    assert psutil.Process().memory_info().rss - before < 50e6
    assert (found["w300"].item(), found["last"].item(), found["byte"].item()) == (0.0, 999_999.0, numbers[7])


def test_parts_that_share_bytes(tmp_path):
    file = tmp_path / "w.bin"
    content = torch_bytes.archive(torch_bytes.program({"w": Tensor()}), {"0": bytes(16), "1": bytes(16)})
    with zipfile.ZipFile(BytesIO(content)) as archive:
        first, second = (struct.pack("<L", archive.getinfo(f"archive/data/{key}").header_offset) for key in "01")
    directory = content.index(b"PK\1\2")
    file.write_bytes(content[:directory] + content[directory:].replace(second, first, 1))
    refuse(r"w\.bin cannot be read .*: two of its parts overlap", file)


def test_shards_that_hold_a_tensor_twice(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for number in (1, 2):
        save({"w": torch.ones(2)}, tmp_path / f"pytorch_model-{number}.bin", True)
    index = '{"weight_map": {"w": "pytorch_model-1.bin", "x": "pytorch_model-2.bin"}}'
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(
        CheckpointError, match=r"-2\.bin holds tensor 'w', which another file of the same weights holds"
    ):
        open_source(tmp_path, "expert 'red'")


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_names_have_an_end(suffix, tmp_path):
    file, tensors = tmp_path / f"w{suffix}", {"a" * 1001: torch.ones(1)}
    if suffix == ".bin":
        save(tensors, file, True)
    else:
        from safetensors.torch import save_file

        save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"w\{suffix} holds a tensor whose name has 1001 characters: 'aaa"):
        open_source(file, "expert 'red'")
