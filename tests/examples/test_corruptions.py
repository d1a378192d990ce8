"""The corruptions of the benchmarks: what each does to an image, by value."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

from corruptions import KINDS, corrupt


@pytest.fixture(scope="module")
def natural() -> np.ndarray:
    """Colour images whose spectrum falls like that of photographs."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(32)[:, None], np.fft.fftfreq(32)[None, :])
    frequency[0, 0] = 1
    noise = np.fft.fft2(rng.standard_normal((8, 3, 32, 32))) / frequency**1.5
    images = np.moveaxis(np.fft.ifft2(noise).real, 1, 3)
    return (128 + 45 * images / images.std()).clip(0, 255).astype(np.uint8)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sqrt(np.mean((first.astype(float) - second.astype(float)) ** 2)))


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_more_severity_is_further_away(natural: np.ndarray, kind: str, grey: bool) -> None:
    images = natural[..., 0] if grey else natural
    corrupted = [corrupt(images, kind, severity, seed=0) for severity in range(1, 6)]
    assert all(result.dtype == np.uint8 and result.shape == images.shape for result in corrupted)
    distances = [distance(result, images) for result in corrupted]
    assert distances[0] > 0.5
    assert distances == sorted(distances)
    assert distances[4] > 1.2 * distances[0]


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_one_result(natural: np.ndarray, kind: str) -> None:
    before = natural.copy()
    first = corrupt(natural, kind, 3, seed=1)
    assert np.array_equal(first, corrupt(natural, kind, 3, seed=1))
    assert np.array_equal(first[:2], corrupt(natural[:2], kind, 3, seed=1)), "depends on the other images"
    assert np.array_equal(natural, before), "writes to its input"
    by_chance = not np.array_equal(first, corrupt(natural, kind, 3, seed=2))
    assert by_chance == (kind in ("motion", "impulse", "gaussian", "spatter"))


@pytest.mark.parametrize("kind", ["motion", "pixelate", "contrast", "jpeg"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 16, 16), (1, 32, 32, 3)])
def test_a_constant_image_stays(kind: str, shape: tuple[int, ...]) -> None:
    image = np.full(shape, 128, np.uint8)
    assert np.array_equal(corrupt(image, kind, 5, seed=0), image)


@pytest.mark.parametrize(("severity", "factor"), [(1, 0.75), (2, 0.5), (3, 0.4), (4, 0.3), (5, 0.15)])
def test_contrast_equation(natural: np.ndarray, severity: int, factor: float) -> None:
    expected = np.empty(natural.shape)
    for image, result in zip(natural.astype(float), expected, strict=True):
        for channel in range(3):
            mean = image[..., channel].mean()
            result[..., channel] = (image[..., channel] - mean) * factor + mean
    np.testing.assert_array_less(np.abs(corrupt(natural, "contrast", severity, seed=0) - expected), 0.5 + 1e-6)


def test_pixelate_by_value() -> None:
    # A scale of 0.75 makes three pixels of four; blown up again, each stands for the one under its centre.
    image = np.array([[0, 100, 200, 40]] * 4, np.uint8)[None]
    result = corrupt(image, "pixelate", 4, seed=0)
    assert len(np.unique(result[0], axis=1).T) == 3
    assert np.array_equal(result[0, 0], result[0, 3])


def test_impulse_share_and_values() -> None:
    image = np.full((20, 32, 32), 100, np.uint8)
    result = corrupt(image, "impulse", 5, seed=0)
    hit = result != 100
    assert set(np.unique(result)) == {0, 100, 255}
    assert hit.mean() == pytest.approx(0.07, abs=0.01)
    assert (result[hit] == 255).mean() == pytest.approx(0.5, abs=0.05)


def test_gaussian_deviation() -> None:
    image = np.full((20, 32, 32), 128, np.uint8)
    noise = corrupt(image, "gaussian", 3, seed=0) - 128.0
    assert noise.mean() == pytest.approx(0, abs=0.5)
    assert noise.std() == pytest.approx(0.08 * 255, rel=0.02)


def test_motion_leaves_the_direction_of_its_line(natural: np.ndarray) -> None:
    # All directions are nearer to horizontal than to vertical: horizontal differences shrink more.
    result = corrupt(natural, "motion", 5, seed=0).astype(float)
    horizontal = np.abs(np.diff(result, axis=2)).mean() / np.abs(np.diff(natural.astype(float), axis=2)).mean()
    vertical = np.abs(np.diff(result, axis=1)).mean() / np.abs(np.diff(natural.astype(float), axis=1)).mean()
    assert horizontal < 0.9 * vertical


def test_spatter_is_bright_then_dark() -> None:
    image = np.full((4, 32, 32, 3), 128, np.uint8)
    water = corrupt(image, "spatter", 3, seed=0).astype(int) - 128
    mud = corrupt(image, "spatter", 5, seed=0).astype(int) - 128
    assert water.min() == 0 and water[..., 2].max() > water[..., 0].max() > 50  # water is more blue than red
    assert mud.max() == 0 and mud.min() < -90
    assert (mud[..., 0] < -40).mean() == pytest.approx(0.32, abs=0.05)


def test_what_is_refused(natural: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no corruption 'fog'"):
        corrupt(natural, "fog", 1, seed=0)
    with pytest.raises(ValueError, match="from 1 to 5, not 6"):
        corrupt(natural, "jpeg", 6, seed=0)
    with pytest.raises(ValueError, match="must be uint8"):
        corrupt(natural / 255, "jpeg", 1, seed=0)
