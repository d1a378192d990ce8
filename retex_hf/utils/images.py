"""Untrusted images, read within limits of bytes, pixels, memory and time."""

from __future__ import annotations

import atexit
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from threading import Event, Lock, Timer
from typing import IO

from PIL import Image

from ..errors import InputError
from . import image_decoder
from .image_decoder import ANSWER, DECODED, FORMATS, REQUEST, TOO_LARGE

# More than cameras and scanners produce; decoding takes about a gigabyte.
MOST_PIXELS = 100_000_000
MOST_BYTES = 500_000_000
SECONDS = 60.0
PART_BYTES = 1 << 20


class TooManyPixels(InputError):
    """An image has more pixels than allowed."""


class Unreadable(InputError):
    """A file is not an image, or is damaged."""


class TooSlow(Unreadable):
    """An image takes longer to decode than allowed."""


def read_image(
    source: str | Path | bytes, name: str, *, most_pixels: int = MOST_PIXELS, seconds: float | None = None
) -> Image.Image:
    """Decode an image and return it upright, as grey values (`L`) or `RGB`.

    Args:
        source: Path of a file, or the content of one.
        name: Name of the image in error messages.
        most_pixels: Largest number of pixels; a larger image is refused by its header, before anything is decoded.
        seconds: Longest time for decoding; default: `SECONDS`.
    """
    seconds = SECONDS if seconds is None else seconds
    if isinstance(source, bytes):
        return _read(BytesIO(source), len(source), name, most_pixels, seconds)
    try:
        state = os.stat(source)
        if not stat.S_ISREG(state.st_mode):  # a pipe would never end
            raise InputError(f"{name} is not a file.")
        with open(source, "rb") as file:
            return _read(file, state.st_size, name, most_pixels, seconds)
    except FileNotFoundError:
        raise InputError(f"{name} does not exist.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name} is not an image that can be read: {reason}.") from None


def _read(file: IO[bytes], size: int, name: str, most_pixels: int, seconds: float) -> Image.Image:
    if size > MOST_BYTES:
        raise InputError(f"{name} has {size} bytes; images of at most {MOST_BYTES} are read.")
    try:
        answered = _DECODER.ask(file, size, most_pixels, seconds)
    except TimeoutError:
        raise TooSlow(f"{name} takes longer to decode than {seconds:.0f} seconds, the limit for an image.") from None
    if answered is None:
        raise Unreadable(f"{name} is not an image that can be read: it is damaged, or not one of {', '.join(FORMATS)}.")
    if isinstance(answered, tuple):
        width, height = answered
        raise TooManyPixels(f"{name} has {width} x {height} pixels; at most {most_pixels} are read.")
    return answered


class _Decoder:
    """The decoder process, started on demand, and restarted after it has ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def forget(self) -> None:
        """Drop the process after a fork: it belongs to the parent."""
        self._lock, self._process = Lock(), None

    def stop(self) -> None:
        """Kill the process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(OSError):  # flushing the buffer to a process that is gone fails
                    pipe.close()
        self._process = None

    def ask(self, file: IO[bytes], size: int, most_pixels: int, seconds: float) -> Image.Image | tuple[int, int] | None:
        """Return an image, its size if that is too large, or None if it cannot be read.

        If the process takes longer than `seconds`, kill it and raise a TimeoutError.
        """
        with self._lock:
            process, late = self._running(), Event()
            given, answers = process.stdin, process.stdout
            assert given is not None and answers is not None

            def end() -> None:
                late.set()
                process.kill()

            watch = Timer(seconds, end)
            watch.daemon = True
            watch.start()
            try:
                given.write(REQUEST.pack(most_pixels, size))
                given.writelines(_parts(file, size))
                given.flush()
                status, width, height, bands = ANSWER.unpack(_take(answers, ANSWER.size))
                if status == TOO_LARGE:
                    return width, height
                if status != DECODED or width * height > most_pixels or bands not in (1, 3):
                    return None
                pixels = _take(answers, width * height * bands)
                return Image.frombuffer("L" if bands == 1 else "RGB", (width, height), pixels)
            except (OSError, EOFError):  # the process ended: a decoder crashed, or took too long
                self.stop()
                if late.is_set():
                    raise TimeoutError from None
                return None
            finally:
                watch.cancel()
                watch.join()  # it may be about to kill the process
                if late.is_set():
                    self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # -P: do not search the script's folder for modules, whose names could shadow the standard library's.
            command = [sys.executable, "-P", image_decoder.__file__]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._process


def _parts(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield exactly the announced number of bytes of a file; raise an EOFError if it has become shorter."""
    while size:
        data = file.read(min(PART_BYTES, size))
        if not data:
            raise EOFError
        size -= len(data)
        yield data


def _take(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


_DECODER = _Decoder()
atexit.register(_DECODER.stop)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_DECODER.forget)
