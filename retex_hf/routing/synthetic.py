"""Inputs of no task: random token sequences, and noise with the spectrum of natural images and sounds.

Scores of `signatures="weights"` need a centre per task, because some updates respond more than others to everything.
These inputs give one without any data.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..backends.input_forms import InputForm, Tokens

LENGTHS = (8, 16, 32, 64)
ROWS = 32
"""Rows of a batch; there is a batch per length of `LENGTHS`, and as many of signals."""


def synthetic_batches(
    form: InputForm, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of inputs of some form; the same ones for the same seed. Signals are of the dtype.

    >>> from retex_hf.backends.input_forms import Tokens
    >>> [tuple(batch["input_ids"].shape) for batch in synthetic_batches(Tokens("input_ids", 100, longest=20))]
    [(32, 8), (32, 16), (32, 20), (32, 20)]
    """
    generator = torch.Generator().manual_seed(seed)
    for length in LENGTHS:
        if isinstance(form, Tokens):
            allowed = torch.tensor([token for token in range(form.size) if token not in form.reserved])
            shape = (ROWS, length if form.longest is None else min(length, form.longest))
            yield {form.name: allowed[torch.randint(len(allowed), shape, generator=generator)].to(device)}
        else:
            yield {form.name: noise((ROWS, *form.shape), form.smooth, generator).to(device, dtype)}


def noise(shape: tuple[int, ...], smooth: int, generator: torch.Generator) -> Tensor:
    """Return noise of mean 0 and deviation 1 in every row, whose amplitudes fall with the frequency along the last
    `smooth` axes, as in nature.

    >>> import torch
    >>> found = noise((4, 3, 32, 32), 2, torch.Generator().manual_seed(0))
    >>> bool((found[..., 1:] - found[..., :-1]).abs().mean() < 0.7)  # about 1.1 for independent numbers
    True
    """
    axes = list(range(-smooth, 0))
    white = torch.randn(shape, generator=generator)
    frequencies = torch.meshgrid(*(torch.fft.fftfreq(shape[axis]) * shape[axis] for axis in axes), indexing="ij")
    distance = torch.stack(frequencies).square().sum(0).sqrt().clamp(min=1)
    found = torch.fft.ifftn(torch.fft.fftn(white, dim=axes) / distance, dim=axes).real
    rows = found.flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
    return rows.reshape(shape)
