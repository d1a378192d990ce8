"""Images are decoded by a process of their own: the right pixels, or a sentence, and never this process's memory."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from trust.bombs import FORMATS, lying, pixel_bomb, plain, tagged

from retex_hf.errors import InputError
from retex_hf.utils import images
from retex_hf.utils.images import TooManyPixels, TooSlow, Unreadable, read_image

NOISE = np.random.default_rng(0).integers(0, 256, (23, 31, 4), dtype=np.uint8)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_pixels_are_those_that_pillow_reads(kind, mode):
    source = Image.fromarray(NOISE, "RGBA").convert("RGB" if mode in ("CMYK", "P") else "RGBA")
    source = Image.fromarray(NOISE[..., 0].astype(np.uint16) * 250) if mode == "I;16" else source.convert(mode)
    buffer = BytesIO()
    try:
        source.save(buffer, kind)
    except (OSError, ValueError):
        pytest.skip(f"{kind} has no mode {mode}")
    with Image.open(BytesIO(buffer.getvalue())) as opened:
        for wanted in ("RGB", "L"):  # what models take
            found = read_image(buffer.getvalue(), "x").convert(wanted)
            assert np.array_equal(np.asarray(found), np.asarray(opened.convert(wanted))), wanted


def test_images_are_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    source = Image.fromarray(NOISE[..., :3])
    source.save(tmp_path / "turned.png", exif=exif)
    found = read_image(tmp_path / "turned.png", "x")
    assert found.size == (23, 31)
    with Image.open(tmp_path / "turned.png") as opened:
        assert np.array_equal(np.asarray(found), np.asarray(ImageOps.exif_transpose(opened)))


@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_is_refused_by_its_header(kind):
    with pytest.raises(TooManyPixels) as error:
        read_image(lying(kind, 13_000, 13_000), "photo")
    assert str(error.value) == "photo has 13000 x 13000 pixels; at most 100000000 are read."
    assert read_image(plain(kind, 20, 30), "photo", most_pixels=600).size == (20, 30)
    with pytest.raises(TooManyPixels, match="photo has 20 x 30 pixels; at most 599 are read"):
        read_image(plain(kind, 20, 30), "photo", most_pixels=599)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited and read with /proc")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_tags_that_claim_the_same_bytes_cost_little(kind):
    """A file of 4 MB asks for 80 GB: its 20,000 tags hold all of it each."""
    with pytest.raises(Unreadable, match="photo is not an image that can be read"):
        read_image(tagged(kind, 20_000, 4_000_000), "photo", most_pixels=1_000_000)
    process = images._DECODER._process.pid
    peak = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 1_500_000  # kB, of all that was decoded in this file
    assert read_image(plain(kind), "photo").size == (24, 16)  # and it goes on


def test_a_decoder_that_ends_or_hangs_is_a_sentence(monkeypatch):
    read_image(plain("PNG"), "photo")
    first = images._DECODER._process
    first.kill()
    first.wait()
    assert read_image(plain("PNG"), "photo").size == (24, 16)
    assert images._DECODER._process is not first
    monkeypatch.setattr(images, "SECONDS", 0.2)
    with pytest.raises(TooSlow, match="photo takes longer to decode than 0 seconds"):
        read_image(pixel_bomb(9_000), "photo")  # which takes longer
    monkeypatch.undo()
    assert read_image(plain("PNG"), "photo").size == (24, 16)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    cases = {"pipe.png": "is not a file", "none.png": "does not exist", "eps.png": "not one of PNG, JPEG"}
    for name, says in cases.items():
        with pytest.raises(InputError, match=says):
            read_image(tmp_path / name, name)
    with pytest.raises(InputError, match="is not an image that can be read: embedded null byte"):
        read_image("a\0.png", "a")
