"""Numbers at a few bits each: codebooks, rounding, and packing into bytes.

Up to six bits, a code is an index into the Lloyd-Max codebook of the normal distribution: the levels that lose the
least energy of normally distributed numbers, which the entries of singular vectors are. Above, levels are equally
spaced. Each row of numbers has one scale; for given codes the best scale is a least-squares problem, and the codes
follow from the scale, so both are improved in turn from several starts. Codes are stored as bit planes: all lowest bits
first, eight to a byte.
"""

from __future__ import annotations

from functools import cache
from math import pi, sqrt

import torch
from torch import Tensor

# Bits per number that a component may have. Odd ones cost no more to unpack, because planes are separate.
BITS = (2, 3, 4, 5, 6, 8, 12, 16)
LARGEST_CODEBOOK = 6
# A scale per row costs as much as a few codes; its relative precision of half a per cent suffices.
SCALE_DTYPE = torch.bfloat16
SCALE_BITS = 16
# Multiples of a row's deviation that the search for a scale starts from.
STARTS = (0.92, 1.0, 1.08)
ROUNDS = 2


@cache
def codebook(bits: int) -> Tensor:
    """Return the levels of a code in ascending order, for numbers of unit variance.

    >>> [round(level, 4) for level in codebook(2).tolist()]
    [-1.5104, -0.4528, 0.4528, 1.5104]
    """
    if bits > LARGEST_CODEBOOK:
        side = 2 ** (bits - 1) - 1
        # The same number of levels on both sides of zero; the last code is unused.
        return torch.cat([torch.arange(-side, side + 1), torch.tensor([side])]).float() / side
    levels = torch.linspace(0, 3, 2 ** (bits - 1) + 1, dtype=torch.float64)[1:]
    for _ in range(10_000):  # Lloyd's iteration on the positive half: a level is the mean between two thresholds
        edges = torch.cat([levels.new_zeros(1), (levels[1:] + levels[:-1]) / 2, levels.new_tensor([torch.inf])])
        density = torch.exp(-edges.square() / 2) / sqrt(2 * pi)
        mass = torch.special.ndtr(edges)
        moved = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
        done = bool((moved - levels).abs().max() < 1e-12)
        levels = moved
        if done:
            break
    return torch.cat([-levels.flip(0), levels]).float()


@cache
def lost_energy(bits: int) -> float:
    """Return the share of the energy of normally distributed numbers that rounding to a code loses.

    >>> [round(lost_energy(bits), 4) for bits in (2, 3, 4)]
    [0.1175, 0.0345, 0.0095]
    """
    if bits <= LARGEST_CODEBOOK:  # a level is the mean of what it stands for, so rounding loses 1 - E[level^2]
        levels = codebook(bits).double()
        edges = torch.cat(
            [levels.new_tensor([-torch.inf]), (levels[1:] + levels[:-1]) / 2, levels.new_tensor([torch.inf])]
        )
        return 1 - (torch.special.ndtr(edges).diff() * levels.square()).sum().item()
    # Equally spaced up to the largest of a row's numbers, for rows of a few thousand.
    numbers = torch.special.ndtri((torch.arange(4096, dtype=torch.float64) + 0.5) / 4096)
    rounded = decode(*encode(numbers.view(1, -1).float(), bits), bits)
    return ((numbers - rounded[0].double()).square().sum() / numbers.square().sum()).item()


def encode(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes (n, d) of rows of numbers, and the scale (n,) of every row, that lose the least energy.

    >>> import torch
    >>> codes, scale = encode(torch.tensor([[1.0, -1.0, 1.0, 1.0]]), bits=2)
    >>> decode(codes, scale, 2).round(decimals=2).tolist()
    [[1.0, -1.0, 1.0, 1.0]]
    """
    rows = rows.float().contiguous()
    levels = codebook(bits).to(rows.device)
    edges = (levels[1:] + levels[:-1]) / 2
    if bits > LARGEST_CODEBOOK:
        # Above the largest number also after the scale is rounded; a smaller one would cut it off.
        scale = _stored(rows.abs().amax(1) * (1 + 2**-7))
        found = torch.bucketize(rows / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1), edges)
        return found.to(torch.int32), scale.to(SCALE_DTYPE)
    size = rows.square().mean(1).sqrt()
    best = torch.full_like(size, torch.inf)
    codes = torch.zeros(rows.shape, dtype=torch.int32, device=rows.device)
    scales = torch.zeros_like(size)
    for start in STARTS:
        scale = _stored(size * start)
        for _ in range(ROUNDS):
            found = torch.bucketize(rows / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1), edges)
            points = levels[found]
            fitted = (rows * points).sum(1) / points.square().sum(1).clamp(min=torch.finfo(torch.float32).tiny)
            scale = _stored(fitted.clamp(min=0))
            loss = (rows - scale.unsqueeze(1) * points).square().sum(1)
            better = loss < best
            best = torch.where(better, loss, best)
            scales = torch.where(better, scale, scales)
            codes = torch.where(better.unsqueeze(1), found.to(codes.dtype), codes)
    return codes, scales.to(SCALE_DTYPE)


def decode(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the float32 numbers of codes (n, d) with a scale (n,) for each row."""
    numbers = codebook(bits).to(codes.device).index_select(0, codes.flatten().to(torch.int32))
    return numbers.view(codes.shape).mul_(scale.float().unsqueeze(-1))


def packed_bytes(numbers: int, bits: int) -> int:
    """Return the bytes that packed codes take."""
    return bits * -(-numbers // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes as bit planes in bytes (uint8, one axis).

    >>> import torch
    >>> pack(torch.tensor([1, 2, 3, 0, 1, 0, 0, 0]), bits=2).tolist()
    [21, 6]
    """
    flat = codes.flatten().to(torch.int32)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, dtype=torch.int32, device=flat.device)
    planes = [((flat >> bit & 1) * weights).sum(1) for bit in range(bits)]
    return torch.cat(planes).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numbers: int) -> Tensor:
    """Return the first `numbers` codes of packed bit planes: uint8, or int32 for codes of more than eight bits."""
    planes = packed.view(bits, -1)
    codes = _joined(planes[:8])
    for first in range(8, bits, 8):
        codes = codes.to(torch.int32) | _joined(planes[first : first + 8]).to(torch.int32) << first
    return codes[:numbers]


def _joined(planes: Tensor) -> Tensor:
    """Return the codes (uint8) of up to eight bit planes.

    A table spreads the eight bits of a byte over the eight bytes of a word, so that all steps are on words.
    """
    table, words = spread_bits().to(planes.device), None
    for bit, plane in enumerate(planes):
        spread = table.index_select(0, plane.to(torch.int32)) << bit
        words = spread if words is None else words.bitwise_or_(spread)
    assert words is not None  # a code has at least one bit
    return words.view(torch.uint8)


@cache
def spread_bits() -> Tensor:
    """Return, for each byte, a word (int64) whose bytes are its bits, the lowest first."""
    return (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1).to(torch.uint8).contiguous().view(torch.int64)[:, 0]


def _stored(scale: Tensor) -> Tensor:
    """Return a scale as it is stored, so that codes are chosen for it."""
    return scale.to(SCALE_DTYPE).float()
