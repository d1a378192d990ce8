"""EMR-Merging: one elected task vector, and a mask and a scale per task. Needs no data, but must be given the task."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..evaluation.method import Material
from ..merging.expert_weights import Weights
from .bodies import Identified, TaskBodies

SCALE_BYTES = 4


def elect(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unified task vector of one tensor, and each task's mask, from stacked task vectors (T, ...).

    `gamma = sign(mean tau)`, with -1 where the mean is 0; `M_t = tau_t * gamma > 0`; `tau_uni = gamma * max_t |M_t *
    tau_t|`.

    >>> import torch
    >>> from retex_hf.baselines.emr import elect
    >>> unified, masks = elect(torch.tensor([[3.0, -1.0, 1.0], [1.0, -2.0, -1.0]]))
    >>> unified.tolist(), masks.tolist()
    ([3.0, -2.0, -1.0], [[True, True, False], [True, True, True]])
    """
    gamma = torch.where(vectors.mean(0) > 0, 1.0, -1.0)
    masks = vectors * gamma > 0
    return gamma * torch.where(masks, vectors.abs(), 0).amax(0), masks


def mean_magnitudes(vectors: Tensor, unified: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `mean |tau_t|` and `mean |M_t * tau_uni|` of one tensor, each (T,), in float64."""
    own = vectors.double().abs().flatten(1).mean(1)
    masked = torch.where(masks, unified.double().abs(), 0).flatten(1).mean(1)
    return own, masked


class EMR(TaskBodies):
    """`W_t = W_0 + r_t M_t * tau_uni`; uses no data, must be given the task, and keeps the tasks' own heads.

    `r_t` is the ratio of the sums over tensors of `mean |tau_t|` and of `mean |M_t * tau_uni|`.
    """

    name = "EMR"

    def fit(self, material: Material) -> None:
        super().fit(material)
        self.unified: Weights = {}
        self._masks: dict[str, np.ndarray] = {}  # eight entries per byte, one row per task
        own, masked = torch.zeros(2, len(self.weights.tasks), dtype=torch.float64)
        for name, vectors in self.weights.vectors.items():
            self.unified[name], masks = elect(vectors)
            sums = mean_magnitudes(vectors, self.unified[name], masks)
            own, masked = own + sums[0], masked + sums[1]
            self._masks[name] = np.packbits(masks.flatten(1).numpy(), axis=1)
        # An expert equal to the base has an empty mask, so any scale will do.
        self.scales = torch.where(masked > 0, own / masked, 1.0).float()

    def mask(self, task: str, name: str) -> Tensor:
        """Return `M_t` of one tensor."""
        unified = self.unified[name]
        row = self._masks[name][self.weights.tasks.index(task)]
        return torch.from_numpy(np.unpackbits(row, count=unified.numel())).bool().view(unified.shape)

    def body(self, task: str) -> Weights:
        scale = self.scales[self.weights.tasks.index(task)]
        return {
            name: base + scale * torch.where(self.mask(task, name), self.unified[name], 0)
            for name, base in self.weights.base.items()
        }

    def storage_bytes(self) -> int:
        """Return the bytes of the base, the unified vector, one bit per number and task, and one scale per task."""
        return 2 * self.weights.body_bytes() + self.packed_bytes() + SCALE_BYTES * len(self.scales)

    def packed_bytes(self) -> int:
        return sum(packed.nbytes for packed in self._masks.values())

    def state(self) -> dict[str, Any]:
        return {**super().state(), "scales": dict(zip(self.weights.tasks, self.scales.tolist(), strict=True))}


class IdEMR(Identified, EMR):
    """EMR, with the task chosen by our identifier."""

    name = "ID-EMR"
