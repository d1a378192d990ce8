"""The space in which features are compared: those of several layers side by side, with directions in which inputs of
every task vary shrunk, and those along which perturbation moves inputs. Such directions (length, style, brightness)
tell tasks apart least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.random_numbers import repeatable

# Most layers that are read, and most directions that are shrunk.
LAYERS, DIRECTIONS = 4, 128
# References per direction: fewer references know fewer directions.
PER_DIRECTION = 3
# Share of the mean variance in every estimated variance.
SHRINKAGE = 0.3
# Sizes from which on singular vectors are approximated.
LARGE = 1024


@dataclass(frozen=True)
class FeatureSpace:
    """`layers` that are read, a `scale` for each (L,), and the shrunk directions `common` (q, d): features `x` (d,) of
    all layers become `x - common.T @ (common @ x)`.

    >>> import torch
    >>> from retex_hf.routing.feature_space import FeatureSpace
    >>> space = FeatureSpace(("a", "b"), torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    >>> space({"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[1.0, 1.0]])}).tolist()
    [[0.0, 4.0, 2.0, 2.0]]
    """

    layers: tuple[str, ...]
    scale: Tensor
    common: Tensor

    @classmethod
    def plain(cls, layer: str) -> FeatureSpace:
        """Return the space of one layer's features as they are."""
        return cls((layer,), torch.ones(1), torch.zeros(0, 0))

    @classmethod
    def fit(
        cls,
        layers: Sequence[str],
        features: Sequence[Mapping[str, Tensor]],
        perturbed: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> FeatureSpace:
        """Fit the scales, and the directions in which inputs of one task vary, to the features (N, d) of each task by
        layer. `perturbed` are features of the same inputs in bad weather: what weather changes varies too.

        Variances `v_i` along the singular directions of what remains without each task's mean (and of the differences
        that perturbation makes), shrunk towards the mean variance, are reduced to the one `v` that follows the last
        direction kept: a factor of `sqrt(v / v_i)`. This is whitening, restricted to the directions that vary most.
        """
        varying = {layer: torch.cat([task[layer] - task[layer].mean(0) for task in features]) for layer in layers}
        deviations = torch.stack([part.square().mean().sqrt() for part in varying.values()])
        scale = torch.where(deviations > 0, 1 / deviations, 1.0)
        if perturbed is not None:
            for layer, part in varying.items():
                changes = [worse[layer] - task[layer] for task, worse in zip(features, perturbed, strict=True)]
                varying[layer] = torch.cat([part, *changes])
        rows = torch.cat([part * factor for part, factor in zip(varying.values(), scale, strict=True)], 1)
        count = min(DIRECTIONS, len(rows) // PER_DIRECTION, *rows.shape)
        values, directions = top_directions(rows, count + 1)
        variances = (1 - SHRINKAGE) * values.square() / max(len(rows), 1) + SHRINKAGE * rows.square().mean()
        count = min(count, len(variances) - 1)
        if count < 1 or not variances.any():
            return cls(tuple(layers), scale.float(), torch.zeros(0, 0))
        factors = (variances[count] / variances[:count]).sqrt()
        common = (1 - factors).sqrt().unsqueeze(1) * directions[:count]
        return cls(tuple(layers), scale.float(), common.float().contiguous())

    def __call__(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the features (rows, d) of all layers in this space."""
        parts = [
            features[layer].float() * factor.to(features[layer].device)
            for layer, factor in zip(self.layers, self.scale, strict=True)
        ]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if not len(self.common):
            return found
        common = self.common.to(found.device)
        return found - (found @ common.T) @ common

    def unshrunk(self, placed: Tensor) -> Tensor:
        """Return features (rows, d) of this space with no direction shrunk: `x` of `x - common.T @ (common @ x)`.

        A row of `common` of squared length `s` has shrunk its direction to a factor of `1 - s`.

        >>> import torch
        >>> space = FeatureSpace(("a",), torch.ones(1), torch.tensor([[0.6, 0.0], [0.0, 0.8]]))
        >>> space.unshrunk(space({"a": torch.tensor([[3.0, 4.0]])})).tolist()
        [[3.0, 4.0]]
        """
        if not len(self.common):
            return placed
        common = self.common.to(placed.device)
        return placed + (placed @ common.T / (1 - common.square().sum(1))) @ common

    def to(self, device: torch.device) -> FeatureSpace:
        return FeatureSpace(self.layers, self.scale.to(device), self.common.to(device))


def top_directions(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest singular values (k,) and right singular vectors (k, d), at most `count` of them."""
    if min(rows.shape) <= LARGE:
        _, values, directions = torch.linalg.svd(rows.double(), full_matrices=False)
        return values[:count], directions[:count]
    with repeatable(rows.device):  # the same directions every time
        _, values, directions = torch.svd_lowrank(rows, q=min(count + 8, *rows.shape), niter=4)
    return values[:count].double(), directions.T[:count].double()


def spread(layers: Sequence[str], count: int = LAYERS) -> list[str]:
    """Return at most `count` of the layers, evenly spaced, with the last.

    >>> spread(["0", "1", "2", "3", "4", "5", "6"], 4)
    ['0', '2', '4', '6']
    >>> spread(["0", "1"], 4)
    ['0', '1']
    """
    if len(layers) <= count:
        return list(layers)
    return [layers[round(step * (len(layers) - 1) / (count - 1))] for step in range(count)]
