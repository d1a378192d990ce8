"""Systems that keep the signs of differences: BitDelta all of them, sparse ternary those of the largest, and EMR one
vector for all tasks with a mask per task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .compressed import PRETRAINED, Budgeted, Compressed, check_bits, in_words, on
from .differences import SCALE_BYTES, Reference, Whole
from .emr import elect, mean_magnitudes

# More than half of all entries would be cheaper to name by those left out.
LARGEST_DENSITY = 0.5


def stored_scale(scale: Tensor) -> Tensor:
    """Return a scale as it is stored, in 16 bits."""
    return scale.to(torch.bfloat16).float()


class BitDelta(Compressed):
    """BitDelta: `alpha sign(W_t - W_ref)`, with one alpha per matrix, and one bit per number.

    `alpha` is the mean magnitude, which is the least-squares optimum for given signs. The authors then distil the
    alphas on text; that needs data and is not done. Vectors are kept in full (bfloat16), as by the authors.

    Args:
        reference: See `Compressed`; the authors' is `"pretrained"`.
        exclude: See `Compressed`.
    """

    title = "BitDelta"

    def __init__(self, *, reference: Reference = PRETRAINED, exclude: Sequence[str] = ()) -> None:
        super().__init__(reference, exclude)

    def label(self) -> str:
        return f"{self.title} {on(self.reference)}"

    def compress(self) -> None:
        """Do nothing: there is nothing to choose."""

    def offsets(self, task: str) -> Iterator[tuple[str, Tensor]]:
        for name in self.differences.vectors:
            yield name, self.differences.stored(task, name, Whole(None))
        for name, sides in self.differences.matrices.items():
            difference = self.differences.of(task, name)
            yield name, one_bit(difference.reshape(sides)).view(difference.shape)

    def added_bytes(self) -> int:
        vectors = self.differences.bytes(dict.fromkeys(self.differences.vectors, Whole(None)))
        matrices = sum(
            -(-self.differences.numbers(name) // 8) + SCALE_BYTES * sides[0]
            for name, sides in self.differences.matrices.items()
        )
        return len(self.weights.tasks) * (vectors + matrices)


def one_bit(matrices: Tensor) -> Tensor:
    """Return the mean magnitude of each matrix (batch, a, b) times the signs of its entries; zero counts as negative.

    >>> import torch
    >>> one_bit(torch.tensor([[[3.0, -1.0]]])).tolist()
    [[[2.0, -2.0]]]
    """
    scale = stored_scale(matrices.abs().mean((1, 2), keepdim=True))
    return torch.where(matrices > 0, scale, -scale)


class SparseTernary(Budgeted):
    """Sparse ternary task vectors, as in ComPEFT: the largest entries of the whole vector, as signs and one scale.

    Positions are charged at their entropy, which no code can beat, and signs at a bit each. The authors choose the
    scale on validation data as a multiple of the standard deviation; here it is the mean magnitude of the kept entries,
    which is the least-squares optimum and needs no data.

    Args:
        storage: See `Budgeted`; it sets the density.
        reference: See `Compressed`; the authors' is `"pretrained"`.
        exclude: See `Compressed`.
    """

    title = "sparse ternary"

    def __init__(
        self, storage: float | str = 0.01, *, reference: Reference = PRETRAINED, exclude: Sequence[str] = ()
    ) -> None:
        super().__init__(storage, reference, exclude)

    def label(self) -> str:
        return f"{self.title} {on(self.reference)}"

    def compress(self) -> None:
        self.numbers = sum(map(self.differences.numbers, self.differences.sides))
        budget = self.budget() / len(self.weights.tasks)
        low, high = 0, int(LARGEST_DENSITY * self.numbers)
        while low < high:  # the most entries that fit
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ternary_bytes(self.numbers, middle) <= budget else (low, middle - 1)
        self.kept = low

    def offsets(self, task: str) -> Iterator[tuple[str, Tensor]]:
        if not self.kept:
            return
        found = {name: self.differences.of(task, name) for name in self.differences.sides}
        flat = torch.cat([tensor.flatten() for tensor in found.values()])
        ternary = sparse_ternary(flat, self.kept).split([tensor.numel() for tensor in found.values()])
        for (name, tensor), part in zip(found.items(), ternary, strict=True):
            yield name, part.view(tensor.shape)

    def added_bytes(self) -> int:
        return len(self.weights.tasks) * ternary_bytes(self.numbers, self.kept)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "density": self.kept / max(self.numbers, 1)}


def sparse_ternary(numbers: Tensor, kept: int) -> Tensor:
    """Return the mean magnitude of the `kept` largest numbers with their signs, and zero elsewhere.

    >>> import torch
    >>> sparse_ternary(torch.tensor([0.1, -4.0, 2.0, 0.5]), kept=2).tolist()
    [0.0, -3.0, 3.0, 0.0]
    """
    magnitudes, places = numbers.abs().topk(kept, sorted=False)
    found = torch.zeros_like(numbers)
    found[places] = stored_scale(magnitudes.double().mean()) * numbers[places].sign()
    return found


def ternary_bytes(numbers: int, kept: int) -> int:
    """Return the bytes of the positions (at their entropy) and signs of some numbers, and of their scale.

    >>> ternary_bytes(1000, 0), ternary_bytes(1000, 500)
    (0, 190)
    """
    if not kept:
        return 0
    density = kept / numbers
    entropy = -density * log2(density) - (1 - density) * log2(1 - density) if kept < numbers else 0.0
    return ceil((numbers * entropy + kept) / 8) + SCALE_BYTES


class StoredEMR(Compressed):
    """EMR-Merging with its one vector for all tasks at a number of bits; masks take a bit per number and task.

    The scale of each task is fitted to the rounded vector. `EMR` is the same in the model's own dtype, without
    `exclude`.

    Args:
        bits: Bits per number of the unified vector; None: bfloat16.
        exclude: See `Compressed`.
    """

    title = "EMR"

    def __init__(self, *, bits: int | None = None, exclude: Sequence[str] = ()) -> None:
        super().__init__(PRETRAINED, exclude)
        self.bits = check_bits(self, bits)

    def label(self) -> str:
        return f"{self.title}, {in_words(self.bits)}"

    def compress(self) -> None:
        self.unified: dict[str, Tensor] = {}
        self._masks: dict[str, np.ndarray] = {}  # eight entries per byte, one row per task
        own, masked = torch.zeros(2, len(self.weights.tasks), dtype=torch.float64)
        for name in self.differences.sides:
            vectors = self.weights.vectors[name]
            unified, masks = elect(vectors)
            self.unified[name] = Whole(self.bits).stored(unified)
            sums = mean_magnitudes(vectors, self.unified[name], masks)
            own, masked = own + sums[0], masked + sums[1]
            self._masks[name] = np.packbits(masks.flatten(1).numpy(), axis=1)
        # An expert equal to the base has an empty mask, so any scale will do.
        self.scales = stored_scale(torch.where(masked > 0, own / masked, 1.0))

    def offsets(self, task: str) -> Iterator[tuple[str, Tensor]]:
        index = self.weights.tasks.index(task)
        for name, unified in self.unified.items():
            bits = np.unpackbits(self._masks[name][index], count=unified.numel())
            yield name, self.scales[index] * torch.from_numpy(bits).bool().view(unified.shape) * unified

    def added_bytes(self) -> int:
        """Return the bytes of the unified vector, one bit per number and task, and one scale per task."""
        unified = self.differences.bytes(dict.fromkeys(self.unified, Whole(self.bits)))
        return unified + sum(masks.nbytes for masks in self._masks.values()) + SCALE_BYTES * len(self.scales)
