"""Decode images of strangers: a process of its own under a limit of memory, which `images.py` starts and asks.

A file of a few kilobytes can ask a decoder for gigabytes, by its pixels, or by a thousand tags of EXIF that all point
at the same bytes. Here that ends with an answer, or with the end of this process alone. Nothing but Pillow is imported.

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

try:
    import resource
except ModuleNotFoundError:  # Windows, where the limits of pixels and time must do
    resource = None

REQUEST, ANSWER = struct.Struct(">QQ"), struct.Struct(">BQQB")
DECODED, TOO_LARGE, UNREADABLE = range(3)
# Decoders for what people take pictures with; the others are attack surface, and that of EPS runs a program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Before the size is known, libwebp reserves two canvases. Then: what is decoded, turned, and converted, four bytes a
# pixel each, and the coefficients of a progressive JPEG.
BYTES_BEFORE, BYTES_AFTER, ROOM = 8, 24, 64 << 20
ROWS = 256


class _TooLarge(Exception):
    pass


def answer(data: bytes, most_pixels: int, out: BinaryIO) -> None:
    """Write the pixels of an image file, upright, as grey values or RGB; or why there are none."""
    try:
        image = _decode(data, most_pixels)
    except _TooLarge as error:
        out.write(ANSWER.pack(TOO_LARGE, *error.args, 0))
        return
    except Exception:  # whatever a decoder raises, MemoryError among it
        out.write(ANSWER.pack(UNREADABLE, 0, 0, 0))
        return
    out.write(ANSWER.pack(DECODED, *image.size, len(image.getbands())))
    for top in range(0, image.height, ROWS):
        out.write(image.crop((0, top, image.width, min(top + ROWS, image.height))).tobytes())


def _decode(data: bytes, most_pixels: int) -> Image.Image:
    used = _used()
    _limit(used + ROOM + len(data) + BYTES_BEFORE * most_pixels)
    _check_size(_webp_size(data), most_pixels)  # which Pillow cannot say without room for all of it
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        _check_size(image.size, most_pixels)  # known from the header, before anything is decoded
        size = image.width * image.height
        _limit(used + ROOM + len(data) + BYTES_BEFORE * most_pixels + BYTES_AFTER * size)
        ImageOps.exif_transpose(image, in_place=True)  # upright, as cameras note it
        return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _check_size(size: tuple[int, int], most_pixels: int) -> None:
    if size[0] * size[1] > most_pixels:
        raise _TooLarge(*size)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the width and height in the header of a WebP file; (0, 0) of any other file."""
    if data[:4] + data[8:12] != b"RIFFWEBP":
        return 0, 0
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _used() -> int:
    """Return how many bytes of addresses this process has; 0 where nothing says so, and nothing can be limited."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, AttributeError):
        return 0


def _limit(size: int) -> None:
    if _used():
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Answer requests until there are no more."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is the request's
    Image.init()
    warnings.simplefilter("ignore")
    given, out = sys.stdin.buffer, sys.stdout.buffer
    while request := given.read(REQUEST.size):
        most_pixels, length = REQUEST.unpack(request)
        answer(given.read(length), most_pixels, out)
        out.flush()


if __name__ == "__main__":
    main()
