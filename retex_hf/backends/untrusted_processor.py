"""Run the image processor of an untrusted model after bounding the sizes in its settings.

A few numbers decide how large an image is made and into how many pieces it is cut. Processors name them in many ways,
and more of them with every release. So numbers are judged by what they are, not by a list of bad keys: none exceeds the
largest size that images are resized to, and together they ask for no more pixels than images may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from ..errors import ArtifactError, InputError, RetexError, brief, first_line
from ..utils.images import MOST_PIXELS

# The largest sides in real image processors are 2560 (Donut) and 3920 (Aria).
LARGEST = 4096
# Kind of a number, by the words of its keys; the first match wins.
SHARE, PIECES, GRID, SQUARE, SIZE, OTHER = "share", "pieces", "grid", "square", "size", "other"
KINDS = {
    # Share of an image that a crop keeps: the image is enlarged by its inverse first.
    SHARE: re.compile(r"pct|percent"),
    # Number of pieces that an image is cut into.
    PIECES: re.compile(r"patches|tiles|crops|slice|nums|frames|dynamic_hd"),
    # Size to which an image is resized before it is cut.
    GRID: re.compile(r"pinpoint|resolutions"),
    # Sizes within or beside a piece, and minimum sizes.
    SQUARE: re.compile(r"patch|(^|[._])min_|divisor|multiple|merge|mask|pool"),
    SIZE: re.compile(r"size|crop|edge|height|width|tile|resolution|pad(?!.*(token|val|mode))"),
    OTHER: re.compile(""),
}
LEAST_SHARE = 0.1
# Limit on how many areas of the smallest size fit into the largest: some processors cut one into the other.
MOST_CUT = 10_000
USUAL_SQUARE = 16 * 16


class CheckedProcessor:
    """An image processor that only accepts images from which it makes a batch in reasonable memory.

    Args:
        path: The file that its settings come from.
        settings: All its settings, with the defaults of its class.
        process: Function that makes a batch of images.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], process: Callable[[list[Image.Image]], dict[str, Any]]
    ) -> None:
        check_sizes(path, settings)
        self._path, self._process = path, process
        self._area = max(_areas(settings, SIZE), default=1) / min(_of_kind(settings, SHARE), default=1) ** 2

    def __call__(self, images: list[Image.Image]) -> dict[str, Any]:
        for number, image in enumerate(images, start=1):
            self._check_shape(number, image)
        try:
            return self._process(images)
        except RetexError:
            raise
        except Exception as error:  # odd settings may make a library raise anything; keep the cause
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ArtifactError(
                f"{self._path} describes an image processor that fails on images ({reason})."
            ) from error

    def _check_shape(self, number: int, image: Image.Image) -> None:
        """Refuse a very long and narrow image: enlarging its short side enlarges its long side too."""
        short, long = sorted(image.size)
        if short == 0 or self._area * long / short > MOST_PIXELS:
            raise InputError(
                f"Input {number} is an image of {image.width} x {image.height} pixels: expected one side to be at most "
                f"{max(1, int(MOST_PIXELS / self._area))} times as long as the other."
            )


def check_sizes(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse settings of an image processor that ask for more pixels than images may have."""
    for name, value in _numbers(settings):
        if not _is_reasonable(value, _kind(name)):
            kind = _kind(name)
            least = LEAST_SHARE if kind == SHARE else -LARGEST if kind == OTHER else "above 0"
            raise ArtifactError(
                f"{path} has {brief(value)} under {brief(name)}: expected a number, {least} to {LARGEST}."
            )
    squares = list(_areas(settings, SQUARE)) or [USUAL_SQUARE]
    wholes = list(_areas(settings, SIZE)) or squares
    cut = max(_areas(settings, GRID), default=1) / min(wholes)
    pixels = max([1, cut, *_of_kind(settings, PIECES)]) * max(wholes + squares)
    if pixels > MOST_PIXELS or max(wholes) / min(wholes) > MOST_CUT:
        raise ArtifactError(
            f"{path} makes up to {int(pixels)} pixels of an image, from pieces of {int(min(wholes))}: expected at most "
            f"{MOST_PIXELS}, and no size that has more than {MOST_CUT} times the pixels of another."
        )


def _is_reasonable(value: float, kind: str) -> bool:
    least = LEAST_SHARE if kind == SHARE else -LARGEST
    return least <= value <= LARGEST and (kind == OTHER or value > 0)


def _kind(name: str) -> str:
    return next(kind for kind, words in KINDS.items() if words.search(name))


def _of_kind(settings: Mapping[str, Any], kind: str) -> Iterator[float]:
    return (value for name, value in _numbers(settings) if _kind(name) == kind)


def _areas(settings: Mapping[str, Any], kind: str) -> Iterator[float]:
    """Yield the areas of squares with these sides: an upper bound for the product of any two of them."""
    return (value**2 for value in _of_kind(settings, kind))


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers, each with the path of keys that leads to it."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _numbers(entry, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value
