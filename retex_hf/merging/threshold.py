"""Find the magnitude threshold that keeps the top `density` share of a task vector's entries, without holding the
vector.

A float32 without its sign bit sorts like the integer of the same bits, so the k-th largest magnitude is found among
integers. A sample brackets it; then one pass over the entries counts those above the bracket and makes a histogram of
the few inside, one bin per float. If the counts show that the bracket misses the answer, it is widened to all floats. A
bracket too wide for such bins is narrowed to one bin, and all entries are read again. The result is exact in every
case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from torch import Tensor

from .registry import TaskTensors

# `read(wanted)` yields `(v, expert, base)` for all tensors of the task vectors numbered in `wanted`, tensor by tensor.
Read = Callable[[Collection[int]], Iterable[tuple[int, Tensor, Tensor]]]

MAGNITUDE_BITS = 0x7FFFFFFF
MOST_BINS = 1 << 19
# Entries of a sample: enough for brackets of about one per cent of all entries.
SAMPLE_SIZE = 1 << 17
# Margin of a bracket to either side, in standard deviations of the sample's own error.
SAMPLE_MARGIN = 6
CHUNK = 1 << 15  # entries per step, so that they stay in the processor's cache
LARGE_CHUNK = 1 << 24  # entries per step on other devices, where launching an operation costs more than memory


def magnitude_thresholds(read: Read, num_vectors: int, size: int, density: float) -> list[float]:
    """Return the smallest of the `round(density * size)` largest magnitudes of each of several task vectors of `size`
    entries.

    `read` is called once per pass: for the sample, for the count, and again for vectors that need another pass.
    """
    if size == 0:
        return [0.0] * num_vectors
    kept = max(1, round(density * size))
    searches = _sampled_searches(read, num_vectors, size, kept)
    while wanted := [number for number, search in enumerate(searches) if not search.done]:
        for number in wanted:
            searches[number].start()
        for number, expert, base in read(wanted):
            for bits in _magnitudes(expert, base):
                searches[number].count(bits)
        for number in wanted:
            searches[number].narrow()
    return [np.int32(search.first).view(np.float32).item() for search in searches]


def vector_thresholds(tensors: TaskTensors, density: float) -> list[float]:
    """Return the magnitude threshold that keeps the top `density` share of entries of each whole task vector."""

    def read(wanted: Collection[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        for name in tensors.names:
            base = tensors.read_base(name)
            for number in wanted:
                yield number, tensors.read_expert(tensors.tasks[number], name), base

    size = sum(tensors.read_base(name).numel() for name in tensors.names)
    return magnitude_thresholds(read, len(tensors.tasks), size, density)


def chunk_size(tensor: Tensor) -> int:
    """Return how many entries to process at a time on a tensor's device."""
    return CHUNK if tensor.device.type == "cpu" else LARGE_CHUNK


def trimming_bounds(limits: list[float]) -> list[float]:
    """Return bounds with which `hardshrink` keeps the entries that reach a limit.

    `hardshrink` keeps values above its bound, but a limit itself must be kept; with a negative bound it keeps
    everything.
    """
    return np.nextafter(np.array(limits, dtype=np.float32), np.float32(-inf)).tolist()


@dataclass
class _Search:
    """The search for the `kept`-th largest of many integers, within `first..last`; the initial bracket may miss it."""

    kept: int
    first: int
    last: int
    done: bool = False
    above: int = field(init=False)
    bins: np.ndarray = field(init=False)
    shift: int = field(init=False)

    def start(self) -> None:
        self.shift = max(0, (self.last - self.first).bit_length() - MOST_BINS.bit_length() + 1)
        self.above, self.bins = 0, np.zeros((self.last - self.first >> self.shift) + 1, dtype=np.int64)

    def count(self, bits: np.ndarray) -> None:
        above = bits > self.last
        self.above += int(np.count_nonzero(above))
        inside = np.not_equal(bits >= self.first, above, out=above)
        if len(self.bins) == 1:
            self.bins[0] += np.count_nonzero(inside)
        else:
            found = bits[inside] - self.first >> self.shift
            # Add at the bins directly: a full histogram does not pay off for the few entries of a chunk.
            np.add.at(self.bins, found, 1)

    def narrow(self) -> None:
        from_top = self.above + np.cumsum(self.bins[::-1])
        if not self.above < self.kept <= from_top[-1]:
            self.first, self.last = 0, MAGNITUDE_BITS
            return
        chosen = len(self.bins) - 1 - int(np.searchsorted(from_top, self.kept))
        self.first += chosen << self.shift
        self.last = min(self.last, self.first + (1 << self.shift) - 1)
        self.done = self.first == self.last


def _sampled_searches(read: Read, num_vectors: int, size: int, kept: int) -> list[_Search]:
    # An odd step avoids sampling a single column of a matrix whose width is a power of two.
    step = -(-size // SAMPLE_SIZE) | 1
    samples: list[list[np.ndarray]] = [[] for _ in range(num_vectors)]
    offsets = [0] * num_vectors
    for number, expert, base in read(range(num_vectors)):
        start = -offsets[number] % step
        picked = (tensor.reshape(-1)[start::step] for tensor in (expert, base))
        samples[number].extend(_magnitudes(*picked))
        offsets[number] += expert.numel()
    return [_bracket(np.sort(np.concatenate(sample))[::-1], size, kept) for sample in samples]


def _bracket(sample: np.ndarray, size: int, kept: int) -> _Search:
    """Return a search over the bracket that a sample (descending) gives; it is done if the sample is the whole
    vector."""
    if len(sample) == size:
        return _Search(kept, int(sample[kept - 1]), int(sample[kept - 1]), done=True)
    share = kept / size
    margin = SAMPLE_MARGIN * (len(sample) * share * (1 - share)) ** 0.5 + SAMPLE_MARGIN
    upper, lower = int(len(sample) * share - margin), int(len(sample) * share + margin) + 1
    last = int(sample[min(upper, len(sample) - 1)]) if upper >= 0 else MAGNITUDE_BITS
    first = int(sample[lower]) if lower < len(sample) else 0
    return _Search(kept, first, last)


def _magnitudes(expert: Tensor, base: Tensor) -> Iterator[np.ndarray]:
    """Yield `|expert - base|` as integers that sort alike, a chunk at a time; in numpy, which compares faster than
    torch."""
    expert, base = expert.reshape(-1), base.reshape(-1)
    step = chunk_size(expert)
    for start in range(0, len(expert), step):
        part = slice(start, start + step)
        bits = torch.sub(expert[part].float(), base[part].float()).cpu().numpy().view(np.int32)
        yield np.bitwise_and(bits, MAGNITUDE_BITS, out=bits)
