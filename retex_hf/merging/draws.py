"""Random numbers per tensor and task, independent of other draws, their order and the number of pieces."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from torch import Tensor


class Draws:
    """A stream of uniform numbers in [0, 1) for a seed, a task and a tensor.

    Philox is a function of a key and a counter, and its raw output is the same in all versions and on all machines. The
    key is a digest of the three, so that a resumed build, or one with tensors or experts in another order, draws the
    same numbers.
    """

    def __init__(self, seed: int, task: str, name: str) -> None:
        digest = hashlib.blake2b(json.dumps([seed, task, name]).encode(), digest_size=16).digest()
        self._source = np.random.Philox(key=int.from_bytes(digest, "little"))

    def take(self, shape: torch.Size) -> Tensor:
        """Return the next numbers of the stream, in float64."""
        raw = self._source.random_raw(shape.numel())
        return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).view(shape)
