"""Files in the format of `torch.save`, written byte by byte, so that they can hold what torch never writes."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # magic number of legacy files
VERSION = b"\x80\x02M\xe9\x03."


@dataclass(frozen=True)
class Tensor:
    """Description of a tensor in a file: its storage (kind, key, claimed length), offset, shape, strides."""

    key: str = "0"
    kind: str = "FloatStorage"
    numel: int = 4
    offset: int = 0
    size: tuple[int, ...] = (2, 2)
    stride: tuple[int, ...] = (2, 1)
    rebuild: str = "torch._utils\n_rebuild_tensor_v2"
    module: str = "torch"


def text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    if 0 <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)


def numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(it: Tensor, legacy: bool = False) -> bytes:
    """Return the pickle instructions that rebuild a tensor."""
    storage = text("storage") + f"c{it.module}\n{it.kind}\n".encode() + text(it.key) + text("cpu") + number(it.numel)
    place = number(it.offset) + numbers(it.size) + numbers(it.stride) + b"\x89"
    hooks = b"ccollections\nOrderedDict\n)R"
    return f"c{it.rebuild}\n".encode() + b"((" + storage + (b"N" if legacy else b"") + b"tQ" + place + hooks + b"tR"


def program(tensors: Mapping[str, Tensor | bytes], legacy: bool = False) -> bytes:
    """Return a pickle of named tensors; bytes are inserted as instructions."""
    items = [text(name) + (it if isinstance(it, bytes) else tensor(it, legacy)) for name, it in tensors.items()]
    return b"\x80\x02}(" + b"".join(items) + b"u."


def archive(
    pickled: bytes, storages: Mapping[str, bytes], *, compressed: bool = False, more: Sequence[tuple[str, bytes]] = ()
) -> bytes:
    """Return a file in the format of torch since 1.6."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", b"3\n")
        for key, content in storages.items():
            file.writestr(f"archive/data/{key}", content)
        for name, content in more:
            file.writestr(name, content)
    return stream.getvalue()


def legacy_file(pickled: bytes, storages: Mapping[str, bytes], numels: Mapping[str, int]) -> bytes:
    """Return a file in the format of torch before 1.6; `numels` are the lengths written before each storage."""
    info = b"\x80\x02}(" + text("little_endian") + b"\x88" + text("protocol_version") + number(1001) + b"u."
    keys = b"\x80\x02](" + b"".join(map(text, storages)) + b"e."
    data = b"".join(struct.pack("<q", numels[key]) + content for key, content in storages.items())
    return MAGIC + VERSION + info + pickled + keys + data
