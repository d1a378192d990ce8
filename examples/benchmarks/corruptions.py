"""Image corruptions: seven kinds of ImageNet-C (Hendrycks and Dietterich, 2019), rebuilt for images of 16 to 32 pixels.

`corrupt` is a pure function of the images, the kind, the severity and the seed. The severities are those of the
authors' CIFAR-10-C, whose images are as small as ours. One seed draws the same noise for all severities of a kind, so
that a higher severity is more of the same. Two kinds differ from the original: `motion` blurs along a line of whole
pixels, and its last three widths are distinct; `spatter` draws flat drops that cover a fixed share of the image.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
from PIL import Image

Corruption = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""Maps an image (H, W, C) in [0, 1], a severity from 0 to 4 and a random generator to an image, not yet clipped."""

WATER, MUD = (175 / 255, 238 / 255, 238 / 255), (63 / 255, 42 / 255, 20 / 255)
LUMINANCE = (0.299, 0.587, 0.114)


def corrupt(images: np.ndarray, kind: str, severity: int, seed: int) -> np.ndarray:
    """Corrupt uint8 images, grey (N, H, W) or RGB (N, H, W, 3), by one of `KINDS` with a severity from 1 to 5."""
    if kind not in KINDS:
        raise ValueError(f"There is no corruption {kind!r}; there are {', '.join(KINDS)}.")
    if severity not in range(1, 6):
        raise ValueError(f"The severity of a corruption must be from 1 to 5, not {severity!r}.")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise ValueError(
            f"Images must be uint8 of shape (N, H, W) or (N, H, W, 3), not {images.dtype} of shape {images.shape}."
        )
    result = np.empty_like(images)
    # Each image has its own generator, so that its corruption does not depend on the number of images.
    for i, chance in enumerate(np.random.default_rng(seed).spawn(len(images))):
        image = images[i].reshape(*images.shape[1:3], -1) / 255
        corrupted = KINDS[kind](image, severity - 1, chance)
        result[i] = np.rint(corrupted.clip(0, 1) * 255).reshape(images.shape[1:])
    return result


def motion(image: np.ndarray, severity: int, chance: np.random.Generator) -> np.ndarray:
    """Blur along a line of random direction, with the weights of one half of a Gaussian."""
    sigma = [1.0, 1.5, 2.0, 2.25, 2.5][severity]
    angle = math.radians(chance.uniform(-45, 45))
    steps = np.arange(math.ceil(4 * sigma) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    height, width, _ = image.shape
    blurred = np.zeros_like(image)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        rows = (np.arange(height) + round(step * math.sin(angle))).clip(0, height - 1)
        columns = (np.arange(width) + round(step * math.cos(angle))).clip(0, width - 1)
        blurred += weight * image[rows][:, columns]
    return blurred


def impulse(image: np.ndarray, severity: int, chance: np.random.Generator) -> np.ndarray:
    """Set a share of the values to 0 or 1 (salt and pepper)."""
    share = [0.01, 0.02, 0.03, 0.05, 0.07][severity]
    drawn, salt = chance.random(image.shape), chance.random(image.shape) < 0.5
    return np.where(drawn < share, salt, image)


def gaussian(image: np.ndarray, severity: int, chance: np.random.Generator) -> np.ndarray:
    """Add independent normal noise to every value."""
    return image + [0.04, 0.06, 0.08, 0.09, 0.10][severity] * chance.standard_normal(image.shape)


def pixelate(image: np.ndarray, severity: int, chance: np.random.Generator) -> np.ndarray:
    """Reduce the resolution and scale up again, each pixel the mean of those it covers."""
    scale = [0.95, 0.9, 0.85, 0.75, 0.65][severity]
    height, width, _ = image.shape
    small = int(width * scale), int(height * scale)

    def resized(channel: np.ndarray) -> np.ndarray:
        shrunk = Image.fromarray(channel.astype(np.float32)).resize(small, Image.Resampling.BOX)
        return np.asarray(shrunk.resize((width, height), Image.Resampling.BOX))

    return np.stack([resized(channel) for channel in np.moveaxis(image, 2, 0)], axis=2)


def spatter(image: np.ndarray, severity: int, chance: np.random.Generator) -> np.ndarray:
    """Draw drops on the lens: bright water up to severity 3, dark mud above."""
    share = [0.03, 0.06, 0.10, 0.22, 0.32][severity]
    field = blur(chance.standard_normal(image.shape[:2]), sigma=0.8)
    drops = blur((field > np.quantile(field, 1 - share)).astype(float), sigma=0.5)[:, :, None]
    liquid = np.array(WATER if severity < 3 else MUD)
    if image.shape[2] == 1:
        liquid = liquid @ np.array(LUMINANCE)
    return image + 0.5 * drops * liquid if severity < 3 else image + drops * (liquid - image)


def contrast(image: np.ndarray, severity: int, chance: np.random.Generator) -> np.ndarray:
    """Move all values towards the mean of their channel."""
    mean = image.mean(axis=(0, 1))
    return mean + [0.75, 0.5, 0.4, 0.3, 0.15][severity] * (image - mean)


def jpeg(image: np.ndarray, severity: int, chance: np.random.Generator) -> np.ndarray:
    """Compress as JPEG of low quality."""
    pixels = np.rint(image * 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if image.shape[2] == 1 else pixels).save(
        file, "JPEG", quality=[80, 65, 58, 50, 40][severity]
    )
    return np.asarray(Image.open(file)).reshape(image.shape) / 255


def blur(field: np.ndarray, sigma: float) -> np.ndarray:
    """Convolve a two-dimensional field with a Gaussian; repeat its borders outwards."""
    radius = math.ceil(3 * sigma)
    kernel = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    for axis in (0, 1):
        padded = np.pad(field, [(radius, radius) if axis == other else (0, 0) for other in (0, 1)], mode="edge")
        field = np.apply_along_axis(np.convolve, axis, padded, kernel, mode="valid")
    return field


KINDS: dict[str, Corruption] = {
    function.__name__: function for function in (motion, impulse, gaussian, pixelate, spatter, contrast, jpeg)
}
