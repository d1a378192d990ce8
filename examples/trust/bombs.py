"""Image files that are small on disk and large when decoded, by pixels, frames, tags and packed texts; and odd ones."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SIGNATURE = b"\x89PNG\r\n\x1a\n"
HUGE = 13_000


@dataclass(frozen=True)
class Picture:
    """A file, its name, and whether a page must refuse it."""

    name: str
    suffix: str
    data: bytes
    refused: bool


@cache
def pixel_bomb(side: int = HUGE, mode: int = 2) -> bytes:
    """Return a PNG with `side` pixels a side, all present: zeros compress well. `mode` is PNG's colour type."""
    bands = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[mode]
    packer, rows = zlib.compressobj(9), bytes(100 * (1 + bands * side))
    data = b"".join(packer.compress(rows) for _ in range(side // 100)) + packer.flush()
    palette = chunk(b"PLTE", bytes(3)) if mode == 3 else b""
    return SIGNATURE + _header(side, side, mode) + palette + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _header(width: int, height: int, mode: int = 2) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0))


def plain(kind: str, width: int = 24, height: int = 16, mode: str = "RGB", **options: object) -> bytes:
    """Return an ordinary image file."""
    shades = Image.linear_gradient("L").resize((width, height))
    buffer = BytesIO()
    Image.merge("RGB", (shades, shades, shades)).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def lying(kind: str, width: int, height: int) -> bytes:
    """Return an ordinary file whose header states another size."""
    data = bytearray(plain(kind))
    if kind == "PNG":
        return bytes(data).replace(bytes(data[8:33]), _header(width, height))
    if kind == "JPEG":
        place = data.index(b"\xff\xc0") + 5
        data[place : place + 4] = struct.pack(">HH", min(height, 65_535), min(width, 65_535))
    elif kind == "GIF":
        place = data.index(b",") + 5
        for start in (6, place):
            data[start : start + 4] = struct.pack("<HH", min(width, 65_535), min(height, 65_535))
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    elif kind == "WEBP":
        extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + _three(width - 1) + _three(height - 1)
        data = bytearray(b"RIFF" + struct.pack("<I", len(data) - 8 + len(extended)) + b"WEBP" + extended + data[12:])
    else:
        start = struct.unpack_from("<I", data, 4)[0]
        for entry in range(struct.unpack_from("<H", data, start)[0]):
            place = start + 2 + 12 * entry
            tag = struct.unpack_from("<H", data, place)[0]
            if tag in (256, 257):
                data[place + 2 : place + 12] = struct.pack("<HII", 4, 1, width if tag == 256 else height)
    return bytes(data)


def _three(number: int) -> bytes:
    return min(number, 2**24 - 1).to_bytes(3, "little")


def tags(count: int, size: int) -> bytes:
    """Return a TIFF directory with `count` tags, each of which claims nearly all of its bytes."""
    entries = b"".join(struct.pack("<HHII", 1000 + entry, 7, size - 8, 8) for entry in range(count))
    data = b"II*\0" + struct.pack("<IH", 8, count) + entries + bytes(4)
    return data + bytes(max(0, size - len(data)))


def tagged(kind: str, count: int, size: int) -> bytes:
    """Return an ordinary file with such tags as EXIF, or a TIFF file that consists of them."""
    exif = tags(count, size)
    if kind == "TIFF":
        return exif
    data = plain(kind)
    if kind == "PNG":
        return data[:33] + chunk(b"eXIf", exif) + data[33:]
    if kind == "WEBP":
        return plain(kind, exif=exif)
    parts = [b"Exif\0\0" + exif[start : start + 60_000] for start in range(0, len(exif), 60_000)]
    return data[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts) + data[20:]


def packed_text(name: bytes, megabytes: int, times: int = 1) -> bytes:
    """Return a PNG with texts or colour profiles that unpack to `megabytes` each, `times` times."""
    data = plain("PNG")
    packed = zlib.compress(bytes(megabytes * 1_000_000), 9)
    before = {b"zTXt": b"key\0\0", b"iTXt": b"key\0\1\0\0\0", b"iCCP": b"profile\0\0"}[name]
    return data[:33] + times * chunk(name, before + packed) + data[33:]


def frames(kind: str, count: int, side: int) -> bytes:
    """Return an animated image."""
    shades = Image.linear_gradient("L").resize((side, side))
    pages = [shades.rotate(number).convert("L" if kind == "GIF" else "RGB") for number in range(count)]
    buffer = BytesIO()
    pages[0].save(buffer, kind, save_all=True, append_images=pages[1:])
    return buffer.getvalue()


def scans(count: int, side: int) -> bytes:
    """Return a progressive JPEG that repeats its last scan: a few bytes each, but decoded over the whole image."""
    buffer = BytesIO()
    Image.new("L", (side, side), 128).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue().removesuffix(b"\xff\xd9")
    start = data.rindex(b"\xff\xda")
    return data + data[start:] * count + b"\xff\xd9"


def changed(data: bytes, draw: random.Random) -> bytes:
    """Return a file with some bytes changed, left out, or cut off."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 4, 32))):
        data[draw.randrange(min(len(data), draw.choice((64, len(data)))))] = draw.randrange(256)
    return bytes(data[: draw.choice((len(data), len(data), draw.randrange(1, len(data))))])


def pictures(size: str, seed: int) -> Iterator[Picture]:
    """Draw pictures of all kinds; the short form has enough to reach every limit once."""
    few = size == "short"
    for kind in FORMATS:
        suffix = "." + kind.lower()
        yield Picture(f"{kind}, ordinary", suffix, plain(kind), False)
        sides = (HUGE,) if few else (6_000, HUGE, 16_383, 30_000, 65_535, 1_000_000, 2**31 - 1)
        yield from (Picture(f"{kind}, says {side} a side", suffix, lying(kind, side, side), True) for side in sides)
        if kind in ("PNG", "JPEG", "WEBP", "TIFF"):
            # 4 MB of tags of 4 MB each are 80 GB; EXIF that claims less than the decoded image may pass.
            for count, length in (
                ((20_000, 4_000_000),) if few else ((5_000, 60_000), (20_000, 4_000_000), (60_000, 9_000_000))
            ):
                yield Picture(f"{kind}, {count} tags of {length} bytes", suffix, tagged(kind, count, length), False)
    yield Picture("PNG, all pixels", ".png", pixel_bomb(), True)
    for name in (b"zTXt",) if few else (b"zTXt", b"iTXt", b"iCCP"):
        for times in (1,) if few else (1, 50):
            yield Picture(f"PNG, {times} {name.decode()}", ".png", packed_text(name, 50, times), False)
    yield Picture("GIF, 40 frames", ".gif", frames("GIF", 40, 64), False)
    yield Picture("JPEG, 10000 scans", ".jpeg", scans(10_000, 256), False)
    yield Picture("an EPS under another name", ".png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", True)
    yield Picture("an SVG under another name", ".png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", True)
    if few:
        return
    for mode in (0, 3, 4, 6):
        yield Picture(f"PNG, all pixels, type {mode}", ".png", pixel_bomb(mode=mode), True)
    for kind, count in (("GIF", 400), ("WEBP", 100), ("TIFF", 100), ("PNG", 100)):
        yield Picture(f"{kind}, {count} frames", "." + kind.lower(), frames(kind, count, 256), False)
    for width, height in ((1, 10_000_000), (10_000_000, 1), (1, 40_000_000), (0, 0)):
        yield Picture(f"PNG, says {width} x {height}", ".png", lying("PNG", width, height), width * height > 32_000_000)
    draw = random.Random(seed)
    makers: list[Callable[[], bytes]] = [lambda kind=kind: plain(kind) for kind in FORMATS]
    for number in range(200):
        kind = FORMATS[number % len(FORMATS)]
        yield Picture(
            f"{kind}, change {number}", "." + kind.lower(), changed(makers[number % len(FORMATS)](), draw), False
        )
