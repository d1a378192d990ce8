"""Task signatures: the mean of a task's features and the subspace they vary in. All functions work on plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RetexError

# Folds of the references, of which one is held out at a time.
FOLDS = 4
# Relative difference between the features of one input in different batches.
ROUNDING = 1e-4
# Padding in `held_out`: residuals are never negative.
NOTHING = -1.0


@dataclass
class Signatures:
    """The signature of each task: `mean` (T, d), `basis` (T, k, d; rows beyond a task's own rank are zero), `held_out`
    (T, N; see `held_out_residuals`), and the module whose output gives the features.

    `held_out` holds the residuals of a task's own inputs, in ascending order, with -1 in front where a task has fewer
    than others.

    >>> import torch
    >>> from retex_hf.routing import Signatures
    >>> features = {"low": torch.randn(64, 8) - 5, "high": torch.randn(64, 8) + 5}
    >>> signatures = Signatures.fit(list(features.values()), rank=0.1, feature_layer="encoder")
    >>> signatures.residuals(torch.full((1, 8), 5.0)).argmin().item()
    1
    """

    mean: Tensor
    basis: Tensor
    held_out: Tensor
    feature_layer: str

    @classmethod
    def fit(cls, features: list[Tensor], rank: int | float, feature_layer: str) -> Signatures:
        """Fit one signature per task from its (N, d) features."""
        mean, basis = _fit_all(features, rank)
        held_out = _in_rows([held_out_residuals(task_features, rank) for task_features in features])
        return cls(mean, basis, held_out, feature_layer)

    def residuals(self, features: Tensor) -> Tensor:
        """Return the distance of each row (B, d) to each task's affine subspace: (B, T)."""
        return _residuals(features, self.mean, self.basis)

    def thresholds(self, quantile: float, slack: float) -> Tensor:
        """Return the residual above which a row is out-of-distribution for each task (T,): `slack` times the quantile
        of the task's own held-out residuals. Infinite for tasks with too few references to hold any out. Never below
        the rounding error of repeating an input, because all references may be identical."""
        known = (self.held_out >= 0).sum(1, keepdim=True)
        if not known.any():
            return torch.full_like(self.mean[:, 0], torch.inf)
        count = known.clamp(min=1)
        place = self.held_out.shape[1] - count + quantile * (count - 1)
        below, above = (self.held_out.gather(1, end.long()) for end in (place.floor(), place.ceil()))
        found = slack * torch.lerp(below, above, place.frac()).squeeze(1)
        least = ROUNDING * self.mean.norm(dim=1)
        return torch.where(known.squeeze(1) > 0, torch.maximum(found, least), torch.inf)

    def to(self, device: torch.device) -> Signatures:
        return Signatures(self.mean.to(device), self.basis.to(device), self.held_out.to(device), self.feature_layer)

    def joined_by(self, other: Signatures) -> Signatures:
        """Return these signatures followed by those of other tasks, fitted at the same layer."""
        return Signatures(
            torch.cat([self.mean, other.mean]),
            _padded([*self.basis, *other.basis]),
            _in_rows([*self.held_out, *other.held_out]),
            self.feature_layer,
        )

    def without(self, task: int) -> Signatures:
        """Return the signatures without one task."""
        kept = torch.arange(len(self.mean)) != task
        return Signatures(self.mean[kept], self.basis[kept], self.held_out[kept], self.feature_layer)


def _residuals(features: Tensor, mean: Tensor, basis: Tensor) -> Tensor:
    centred = features.float().unsqueeze(1) - mean
    inside = torch.einsum("btd,tkd->btk", centred, basis)
    return (centred - torch.einsum("btk,tkd->btd", inside, basis)).norm(dim=-1)


def _fit_all(features: list[Tensor], rank: int | float) -> tuple[Tensor, Tensor]:
    """Return means (T, d) and bases (T, k, d)."""
    fitted = [fit_signature(task_features, rank) for task_features in features]
    return torch.stack([mean for mean, _ in fitted]), _padded([basis for _, basis in fitted])


def _padded(bases: list[Tensor]) -> Tensor:
    """Stack bases of different ranks into one tensor; rows of zeros change no residual."""
    stacked = bases[0].new_zeros(len(bases), max(map(len, bases)), bases[0].shape[1])
    for basis, place in zip(bases, stacked, strict=True):
        place[: len(basis)] = basis
    return stacked


def _in_rows(sorted_residuals: list[Tensor]) -> Tensor:
    """Stack sorted rows of different lengths into one tensor, padded in front with -1, which keeps them sorted."""
    rows = sorted_residuals[0].new_full((len(sorted_residuals), max(map(len, sorted_residuals))), NOTHING)
    for residuals, row in zip(sorted_residuals, rows, strict=True):
        row[len(row) - len(residuals) :] = residuals
    return rows


def fit_signature(features: Tensor, rank: int | float) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) and top right singular vectors (k, d) of one task's features (N, d)."""
    if not torch.isfinite(features).all():
        raise RetexError("The features of the reference inputs hold NaN or infinite values.")
    features = features.double()
    mean = features.mean(0)
    # N centred rows span at most N - 1 directions.
    dimension = min(signature_dimension(rank, *features.shape), len(features) - 1)
    basis = torch.linalg.svd(features - mean, full_matrices=False).Vh[:dimension]
    return mean.float(), basis.float()


def signature_dimension(rank: int | float, num_reference: int, width: int) -> int:
    """Return k: as given, or as a ratio of min(N, d), at least one."""
    largest = min(num_reference, width)
    # In floating point, 0.29 * 100 is slightly below 29.
    return min(largest, rank) if isinstance(rank, int) else max(1, int(rank * largest + 1e-9))


def held_out_residuals(features: Tensor, rank: int | float, folds: int = FOLDS) -> Tensor:
    """Return residuals (N,) of a task's inputs to signatures that were fitted without them, in ascending order.

    The residuals of the inputs that a signature was fitted on are too small to judge others by: with as many dimensions
    as inputs they are zero. Return none for fewer inputs than folds.
    """
    if len(features) < folds:
        return features.new_empty(0, dtype=torch.float32)
    fold = torch.arange(len(features)) % folds
    # Use the dimension of the signature of all inputs: a ratio would give a smaller one, and larger residuals.
    rank = signature_dimension(rank, *features.shape)
    parts = [
        _residuals(features[fold == number], *_fit_all([features[fold != number]], rank)) for number in range(folds)
    ]
    return torch.cat(parts).flatten().sort().values


def held_out_accuracy(features: list[Tensor], rank: int | float, folds: int = FOLDS) -> float:
    """Return how well signatures fitted on a part of the features identify the rest, averaged over tasks."""
    folds = min(folds, *(len(task_features) for task_features in features))
    correct = [0] * len(features)
    for fold in range(folds if folds > 1 else 0):
        held_out = [torch.arange(len(task_features)) % folds == fold for task_features in features]
        kept = [task_features[~out] for task_features, out in zip(features, held_out, strict=True)]
        fitted = _fit_all(kept, rank)
        for task, (task_features, out) in enumerate(zip(features, held_out, strict=True)):
            correct[task] += int((_residuals(task_features[out], *fitted).argmin(1) == task).sum())
    return sum(count / len(f) for count, f in zip(correct, features, strict=True)) / len(features)


def shallowest_good(accuracies: list[float], margin: float = 0.005) -> int:
    """Return the index of the first accuracy within `margin` of the best."""
    best = max(accuracies)
    return next(index for index, accuracy in enumerate(accuracies) if accuracy >= best - margin)
