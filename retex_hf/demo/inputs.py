"""Visitors' inputs, checked against limits before anything is computed, and converted for the predictor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from PIL import Image

from ..errors import InputError
from ..utils.image_decoder import FORMATS
from ..utils.images import TooManyPixels, TooSlow, Unreadable, read_image

MOST_INPUTS = 32
MOST_CHARACTERS = 10_000
MOST_MEGABYTES = 10
# For all images of a call together: some 15 bytes per pixel are held at once, from the file to the model's batch.
MOST_PIXELS = 32_000_000
# For decoding all of them: others wait meanwhile, and so many pixels take about a second.
MOST_SECONDS = 20.0


def read_texts(typed: str) -> list[str | tuple[str, str]]:
    """Read one input per non-empty line; a line with a tab is a pair of texts.

    >>> from retex_hf.demo.inputs import read_texts
    >>> read_texts("a question\\tits context\\n\\nanother\\tof these")
    [('a question', 'its context'), ('another', 'of these')]
    """
    # Not str.splitlines, which also splits at form feeds and other characters that texts from files contain.
    lines = [line for line in typed.replace("\r\n", "\n").split("\n") if line.strip()]
    _check_number(len(lines), "text", "Type at least one text.")
    texts: list[str | tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if len(line) > MOST_CHARACTERS:
            raise InputError(f"Text {number} has {len(line)} characters; the page takes at most {MOST_CHARACTERS}.")
        parts = [part.strip() for part in line.split("\t") if part.strip()]
        if len(parts) > 2:
            raise InputError(f"Text {number} has {len(parts)} parts between tabs; a pair of texts has two.")
        texts.append((parts[0], parts[1]) if len(parts) == 2 else parts[0])
    return texts


def read_images(paths: Sequence[str | Path]) -> list[Image.Image]:
    """Read image files as RGB, upright, in order."""
    _check_number(len(paths), "image", "Add at least one image.")
    read, left, end = [], MOST_PIXELS, monotonic() + MOST_SECONDS
    for number, path in enumerate(paths, start=1):
        try:
            if Path(path).stat().st_size > MOST_MEGABYTES * 1_000_000:
                raise InputError(f"Image {number} is larger than {MOST_MEGABYTES} MB.")
            image = read_image(path, f"Image {number}", most_pixels=left, seconds=max(0.0, end - monotonic()))
        except OSError:  # deleted in the meantime
            raise InputError(f"Image {number} is no longer here; add it again.") from None
        except TooManyPixels:
            limit = f"{MOST_PIXELS // 1_000_000} million pixels"
            raise InputError(f"With image {number} the images have more than {limit} together.") from None
        except TooSlow:
            limit = f"{MOST_SECONDS:.0f} seconds"
            raise InputError(f"With image {number} the images take more than {limit} to decode.") from None
        except Unreadable:
            raise InputError(f"Image {number} cannot be read; the page takes {', '.join(FORMATS)}.") from None
        read.append(image.convert("RGB"))
        left -= image.width * image.height
    return read


def _check_number(count: int, what: str, none: str) -> None:
    if count == 0:
        raise InputError(none)
    if count > MOST_INPUTS:
        raise InputError(f"There are {count} {what}s; the page takes at most {MOST_INPUTS} at once.")
