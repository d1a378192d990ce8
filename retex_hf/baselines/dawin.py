"""DaWin: mixes experts by how certain each of them is of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.readout import entropy
from ..errors import ConfigError
from ..evaluation.method import Material, without_padding
from ..execution import ExpertCache
from .bodies import CACHE_BYTES
from .dynamic import Dynamic, Mixtures
from .shared_body import SharedBody

MOST_ROUNDS = 20


class DaWin(Dynamic):
    """`theta(x) = theta_0 + scale * T * sum_t lambda_t(x) tau_t` with `lambda = softmax_t(-H_t(x))` (Oh et al., 2025).

    `H_t` is the entropy of expert t's answer to the row. It needs no training, but every row first runs through all
    experts.

    With the task known, all experts answer under the head of the true task, as in the authors' code, which gives the
    task away. With the task unknown, each expert answers under its own head, and the row's head is that of the expert
    with the lowest entropy; as in the equation, the entropy then also depends on the number of classes of the expert's
    task. Generators have no head, so both are the same.

    With oracle routing the body is `theta_0 + scale * T * tau_t`, which overshoots the expert where `scale * T > 1`.

    Args:
        scale: Factor of the mixed task vector, on top of T.
        clusters: Cluster the rows of a batch into this many groups, and mix one body per group from the mean of its
            lambdas, instead of one per row. A row's answer then depends on its batch.
        options: See `Dynamic`.
    """

    name = "DaWin"

    def __init__(self, *, scale: float = 0.3, clusters: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if clusters is not None and clusters < 1:
            raise ConfigError(f"DaWin: clusters must be at least 1, not {clusters!r}.")
        self.scale, self.clusters = scale, clusters

    def prepare(self, material: Material) -> Mixtures:
        weights = self.weights
        self._experts = ExpertCache(CACHE_BYTES)
        factor = self.scale * len(weights.tasks)
        corners = {name: base + factor * weights.vectors[name] for name, base in weights.base.items()}
        return Mixtures(weights, corners, {})

    def route(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the entropies (rows, T, T) of every expert's answers under every head; one pass per expert."""
        return torch.stack([self._entropies(expert, without_padding(inputs)) for expert in self.weights.tasks], dim=1)

    def _entropies(self, expert: str, inputs: Mapping[str, Tensor]) -> Tensor:
        tasks, size = self.weights.tasks, 4 * self.weights.numbers()
        body = self._experts.get(
            expert, lambda: SharedBody(self.weights, self.weights.expert_body(expert)), lambda: size
        )
        scores = body.scores(self.readout, inputs, tasks if self.readout.chooses_head else tasks[:1])
        found = torch.stack([entropy(of) for of in scores.values()], dim=-1)
        return found.expand(-1, len(tasks))

    def shares(self, found: Tensor, heads: Sequence[str] | None) -> Tensor:
        if heads is None:
            under = found.diagonal(dim1=1, dim2=2)
        else:
            under = found[torch.arange(len(found)), :, [self.weights.tasks.index(head) for head in heads]]
        return (-under).softmax(-1)

    def coefficients(self, shares: Tensor) -> Tensor:
        return super().coefficients(shares if self.clusters is None else cluster_means(shares, self.clusters))

    def storage_bytes(self) -> int:
        """Return the bytes of all experts, and of the base that they are mixed around."""
        return (len(self.weights.tasks) + 1) * self.weights.body_bytes()


def cluster_means(points: Tensor, clusters: int) -> Tensor:
    """Replace every point (rows, d) by the mean of its cluster, by k-means started from distant points.

    >>> import torch
    >>> from retex_hf.baselines.dawin import cluster_means
    >>> cluster_means(torch.tensor([[0.0], [1.0], [9.0]]), 2).flatten()
    tensor([0.5000, 0.5000, 9.0000])
    """
    centres = points[:1]
    while len(centres) < min(clusters, len(points)):
        farthest = torch.cdist(points, centres).amin(1).argmax()
        centres = torch.cat([centres, points[farthest : farthest + 1]])
    nearest = torch.cdist(points, centres).argmin(1)
    for _ in range(MOST_ROUNDS):
        # A centre that has lost all its points does not move.
        means = [points[nearest == k].mean(0) if (nearest == k).any() else centres[k] for k in range(len(centres))]
        centres = torch.stack(means)
        moved = torch.cdist(points, centres).argmin(1)
        if torch.equal(moved, nearest):
            break
        nearest = moved
    return centres[nearest]
