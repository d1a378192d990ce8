"""Inputs of no task: random token sequences, and images and sounds as varied as data are, of nothing in particular.

`signatures="weights"` compares the responses of updates with those to these inputs, because some updates respond more
than others to everything. The more these vary as real inputs do, the better: images are smooth or rough, grey or
coloured, full of shapes, or of a few strokes on an empty ground; tokens are as common as those of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.input_forms import InputForm, Tokens

LENGTHS = (8, 16, 32, 64)
ROWS = 64
"""Rows of a batch; there is a batch per length of `LENGTHS`, and as many of signals."""
# The share of the token of rank r is 1 / (r + RARE). Tokenizers number tokens roughly by how common they are.
RARE = 100
# Scenes are drawn at most so many pixels wide, and scaled.
CANVAS = 64
# Signals stay in the range that preprocessing gives pixels.
LOWEST, HIGHEST = -2.1, 2.6
Draw = torch.Generator


def synthetic_batches(
    form: InputForm, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of inputs of some form; the same ones for the same seed. Signals are of the dtype.

    >>> from retex_hf.backends.input_forms import Tokens
    >>> [tuple(batch["input_ids"].shape) for batch in synthetic_batches(Tokens("input_ids", 100, longest=20))]
    [(64, 8), (64, 16), (64, 20), (64, 20)]
    """
    draw = torch.Generator().manual_seed(seed)
    for number, length in enumerate(LENGTHS):
        if isinstance(form, Tokens):
            yield {form.name: tokens(form, length, draw).to(device)}
        else:
            shape = (ROWS, *form.shape)
            signal = SCENES[number](shape, draw) if form.smooth == 2 else noise(shape, form.smooth, draw)
            yield {form.name: signal.to(device, dtype)}


def like(form: InputForm, inputs: Mapping[str, Any]) -> InputForm:
    """Return the form of images of the size of given ones: a configuration may say another one, or none."""
    given = inputs.get(form.name)
    if isinstance(form, Tokens) or form.smooth != 2 or not isinstance(given, Tensor):
        return form
    return replace(form, shape=tuple(given.shape[1:])) if given.ndim == len(form.shape) + 1 else form


def tokens(form: Tokens, length: int, draw: Draw) -> Tensor:
    """Return sequences (rows, length) of independent tokens that are as common as in a text."""
    allowed = torch.tensor([token for token in range(form.size) if token not in form.reserved])
    length = length if form.longest is None else min(length, form.longest)
    common = 1 / (torch.arange(len(allowed)) + RARE)
    found = torch.multinomial(common, ROWS * length, replacement=True, generator=draw)
    return allowed[found].view(ROWS, length)


def noise(shape: tuple[int, ...], smooth: int, draw: Draw) -> Tensor:
    """Return noise of mean 0 and deviation 1 in every row, whose amplitudes fall with the frequency along the last
    `smooth` axes: in every row with another power of it, from 0.5 (rough) to 2.

    >>> import torch
    >>> found = noise((4, 3, 32, 32), 2, torch.Generator().manual_seed(0))
    >>> bool((found[..., 1:] - found[..., :-1]).abs().mean() < 0.7)  # about 1.1 for independent numbers
    True
    """
    axes = list(range(-smooth, 0))
    white = torch.randn(shape, generator=draw)
    power = _uniform(shape, draw, 0.5, 2.0)
    frequencies = torch.meshgrid(*(torch.fft.fftfreq(shape[axis]) * shape[axis] for axis in axes), indexing="ij")
    distance = torch.stack(frequencies).square().sum(0).sqrt().clamp(min=1)
    return _standard(torch.fft.ifftn(torch.fft.fftn(white, dim=axes) / distance**power, dim=axes).real, 1e-6)


def _textures(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return _lit(noise(shape, 2, draw), draw)


def _many_shapes(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return _scenes(shape, draw, partial(_add_shapes, fewest=20, most=80, spread=1.0))


def _few_shapes(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return _scenes(shape, draw, partial(_add_shapes, fewest=1, most=8, spread=0.5))


def _strokes(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return _scenes(shape, draw, _add_strokes)


SCENES = (_textures, _many_shapes, _few_shapes, _strokes)


def _scenes(shape: tuple[int, ...], draw: Draw, add: Callable[[Tensor, Tensor, Draw], Tensor]) -> Tensor:
    """Return images (rows, ..., channels, height, width) of things on a ground of one colour, half of them textured."""
    colours = math.prod(shape[1:-2])
    size = (min(shape[-2], CANVAS), min(shape[-1], CANVAS))
    places = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, side) for side in size), indexing="ij"))
    found = torch.stack(
        [add(torch.randn(colours, 1, 1, generator=draw).expand(-1, *size), places, draw) for _ in range(shape[0])]
    )
    found = F.interpolate(found, shape[-2:], mode="bilinear", antialias=True).view(shape)
    rough = _uniform(shape, draw, 0.0, 0.4) * _coin(shape, draw)
    return _lit(found + rough * noise(shape, 2, draw), draw)


def _add_shapes(image: Tensor, places: Tensor, draw: Draw, fewest: int, most: int, spread: float) -> Tensor:
    """Cover an image (channels, height, width) with ellipses, diamonds and boxes; some are hollow."""
    for _ in range(int(torch.randint(fewest, most, (1,), generator=draw))):
        centre = spread * _between(draw, 2, -1, 1)
        size, aspect = _between(draw, 2, -1, 1).exp() * torch.tensor([0.25, 1.0])
        angle = math.pi * float(torch.rand(1, generator=draw))
        x, y = places - centre.view(2, 1, 1)
        along = (x * math.cos(angle) + y * math.sin(angle)) / (size * aspect)
        across = (y * math.cos(angle) - x * math.sin(angle)) / (size / aspect)
        roundness = (2, 1, 8)[int(torch.randint(3, (1,), generator=draw))]
        distance = along.abs() ** roundness + across.abs() ** roundness
        hollow = 0.6 if float(torch.rand(1, generator=draw)) < 0.3 else -1.0
        covered = (distance < 1) & (distance > hollow)
        image = torch.where(covered, torch.randn(len(image), 1, 1, generator=draw), image)
    return image


def _add_strokes(image: Tensor, places: Tensor, draw: Draw) -> Tensor:
    """Draw a few bent lines of one colour and width on an image (channels, height, width)."""
    distance = torch.full(image.shape[1:], torch.inf)
    for _ in range(int(torch.randint(1, 5, (1,), generator=draw))):
        start = _between(draw, 2, -0.7, 0.7)
        for _ in range(int(torch.randint(2, 8, (1,), generator=draw))):
            end = (start + _between(draw, 2, -0.6, 0.6)).clamp(-0.8, 0.8)
            line, offset = (end - start).view(2, 1, 1), places - start.view(2, 1, 1)
            place = ((offset * line).sum(0) / line.square().sum().clamp(min=1e-6)).clamp(0, 1)
            distance = torch.minimum(distance, (offset - place * line).norm(dim=0))
            start = end
    ink = ((_between(draw, 1, 0.03, 0.2) - distance) / 0.02).sigmoid()
    return torch.lerp(image, torch.randn(len(image), 1, 1, generator=draw), ink)


def _lit(images: Tensor, draw: Draw) -> Tensor:
    """Give images (rows, ..., height, width) a saturation (half of them are grey), contrast, brightness and cast."""
    shape = images.shape
    saturation = _uniform(shape, draw, 0.0, 1.0) * _coin(shape, draw)
    grey = images.mean(-3, keepdim=True) * shape[-3] ** 0.5
    images = torch.lerp(grey.expand(shape), images, saturation)
    images = _standard(images, 0.1) * _uniform(shape, draw, 0.3, 1.5)
    cast = 0.3 * torch.randn(*shape[:-2], 1, 1, generator=draw) * (saturation > 0)
    brightness = torch.randn(len(images), *[1] * (images.ndim - 1), generator=draw)
    return (images + brightness + cast).clamp(LOWEST, HIGHEST)


def _standard(found: Tensor, least: float) -> Tensor:
    """Return every row at mean 0 and deviation 1; one of less deviation than the least stays fainter."""
    rows = found.flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True).clamp(min=least)
    return rows.view(found.shape)


def _uniform(shape: tuple[int, ...], draw: Draw, low: float, high: float) -> Tensor:
    """Return a number of every row, in the form that multiplies rows of a shape."""
    return low + (high - low) * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=draw)


def _coin(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return (_uniform(shape, draw, 0.0, 1.0) < 0.5).float()


def _between(draw: Draw, count: int, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=draw)
