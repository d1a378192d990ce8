"""Numbers at a few bits: codebooks, rounding and packing."""

from __future__ import annotations

import pytest
import torch

from retex_hf.recovery.codes import (
    BITS,
    LARGEST_CODEBOOK,
    codebook,
    decode,
    encode,
    lost_energy,
    pack,
    packed_bytes,
    unpack,
)

# Max (1960), table 1: the least mean squared error of 2^b levels for a normal variable.
MAX_1960 = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


def normal(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_are_the_best_for_normal_numbers(bits):
    assert lost_energy(bits) == pytest.approx(MAX_1960[bits], rel=5e-3)
    levels = codebook(bits).double()
    assert torch.equal(levels, -levels.flip(0))
    # Lloyd's conditions: a level is the mean of the numbers that are nearest to it.
    numbers = torch.special.ndtri((torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000)
    nearest = torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2)
    for index, level in enumerate(levels):
        assert numbers[nearest == index].mean().item() == pytest.approx(level.item(), abs=1e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [8, 384, 1000])
def test_rounding_loses_no_more_than_it_is_charged(bits, length):
    rows = normal(64, length) * torch.logspace(-6, 3, 64).unsqueeze(1)
    found = decode(*encode(rows, bits), bits)
    lost = ((rows - found).square().sum(1) / rows.square().sum(1)).mean().item()
    assert lost <= 1.05 * lost_energy(bits) + 1e-12


@pytest.mark.parametrize("bits", BITS)
def test_more_bits_lose_less(bits):
    losses = [lost_energy(number) for number in BITS]
    assert losses == sorted(losses, reverse=True)
    assert len(codebook(bits)) == 2**bits and (bits <= LARGEST_CODEBOOK or codebook(bits).abs().max() == 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_packing_is_exact_and_as_long_as_said(bits, count):
    codes = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(1))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and len(packed) == packed_bytes(count, bits) == bits * -(-count // 8)
    assert torch.equal(unpack(packed, bits, count).long(), codes)


def test_zeros_and_equal_numbers_are_exact():
    rows = torch.stack([torch.zeros(16), torch.full((16,), 0.5), -torch.full((16,), 2.0)])
    for bits in BITS:
        assert torch.allclose(decode(*encode(rows, bits), bits), rows, rtol=2**-7)


def test_the_scale_is_the_best_one_for_the_codes():
    """Least squares: no other scale of the same codes is nearer, up to the precision in which scales are stored."""
    rows = normal(8, 200, seed=3)
    codes, scale = encode(rows, 3)
    points = codebook(3)[codes.long()]
    best = (rows * points).sum(1) / points.square().sum(1)
    assert torch.allclose(scale.float(), best, rtol=2**-7)
