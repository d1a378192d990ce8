"""The decoder process for untrusted images, under a memory limit; `images.py` starts it and sends it requests.

A file of a few kilobytes can make a decoder allocate gigabytes, through its pixels or through a thousand EXIF tags that
all point at the same bytes. Here that ends with an error answer, or with the end of this process alone. Nothing but
Pillow is imported.

A request on standard input is `REQUEST` (the most pixels, the length of the file) and the file. An answer on standard
output is `ANSWER` (status, width, height, bands) and the pixels.
"""

from __future__ import annotations

import struct
import sys
import warnings
from io import BytesIO
from typing import BinaryIO

from PIL import Image, ImageOps

REQUEST, ANSWER = struct.Struct(">QQ"), struct.Struct(">BQQB")
DECODED, TOO_LARGE, UNREADABLE = range(3)
# Common formats only; other decoders are attack surface, and that of EPS runs a program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Bytes per pixel. Before the size is known, libwebp reserves two canvases. Afterwards the decoded, the rotated and the
# converted image take four each, and the coefficients of a progressive JPEG take the rest.
BYTES_BEFORE, BYTES_AFTER, ROOM = 8, 24, 64 << 20
ROWS = 256


class _TooLarge(Exception):
    pass


def answer(data: bytes, most_pixels: int, out: BinaryIO) -> None:
    """Decode an image file and write its pixels, upright, as grey values or RGB; or write why that failed."""
    try:
        image = _decode(data, most_pixels)
    except _TooLarge as error:
        out.write(ANSWER.pack(TOO_LARGE, *error.args, 0))
        return
    except Exception:  # decoders raise anything, MemoryError included
        out.write(ANSWER.pack(UNREADABLE, 0, 0, 0))
        return
    out.write(ANSWER.pack(DECODED, *image.size, len(image.getbands())))
    for top in range(0, image.height, ROWS):
        out.write(image.crop((0, top, image.width, min(top + ROWS, image.height))).tobytes())


def _decode(data: bytes, most_pixels: int) -> Image.Image:
    used = _used()
    _limit(used + ROOM + len(data) + BYTES_BEFORE * most_pixels)
    _check_size(_webp_size(data), most_pixels)  # Pillow reserves memory for the whole image before it gives the size
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        _check_size(image.size, most_pixels)  # known from the header, before anything is decoded
        size = image.width * image.height
        _limit(used + ROOM + len(data) + BYTES_BEFORE * most_pixels + BYTES_AFTER * size)
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _check_size(size: tuple[int, int], most_pixels: int) -> None:
    if size[0] * size[1] > most_pixels:
        raise _TooLarge(*size)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the width and height in the header of a WebP file; (0, 0) for any other file."""
    if data[:4] + data[8:12] != b"RIFFWEBP":
        return 0, 0
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _used() -> int:
    """Return the size of this process's address space in bytes; 0 where that is unknown and cannot be limited."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ModuleNotFoundError):  # Windows has no `resource`: only pixels and time are limited
        return 0


def _limit(size: int) -> None:
    if _used():
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Answer requests until standard input ends."""
    Image.MAX_IMAGE_PIXELS = None  # each request has its own limit
    Image.init()
    warnings.simplefilter("ignore")
    given, out = sys.stdin.buffer, sys.stdout.buffer
    while request := given.read(REQUEST.size):
        most_pixels, length = REQUEST.unpack(request)
        answer(given.read(length), most_pixels, out)
        out.flush()


if __name__ == "__main__":
    main()
