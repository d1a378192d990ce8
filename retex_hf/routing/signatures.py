"""Task signatures: the mean of a task's features and the subspace they vary in. Tensors in, tensors out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RetexError


@dataclass
class Signatures:
    """What identifies each task: `mean` (T, d), `basis` (T, k, d; rows beyond a task's own rank are zero), and the
    module whose output the features are.

    >>> import torch
    >>> from retex_hf.routing import Signatures
    >>> features = {"low": torch.randn(64, 8) - 5, "high": torch.randn(64, 8) + 5}
    >>> signatures = Signatures.fit(list(features.values()), rank=0.1, feature_layer="encoder")
    >>> signatures.residuals(torch.full((1, 8), 5.0)).argmin().item()
    1
    """

    mean: Tensor
    basis: Tensor
    feature_layer: str

    @classmethod
    def fit(cls, features: list[Tensor], rank: int | float, feature_layer: str) -> Signatures:
        """Fit one signature per task from its (N, d) features."""
        fitted = [fit_signature(task_features, rank) for task_features in features]
        widest = max(len(basis) for _, basis in fitted)
        mean = torch.stack([mean for mean, _ in fitted])
        basis = mean.new_zeros(len(fitted), widest, mean.shape[1])
        for task, (_, task_basis) in enumerate(fitted):
            basis[task, : len(task_basis)] = task_basis
        return cls(mean, basis, feature_layer)

    def residuals(self, features: Tensor) -> Tensor:
        """Distance of each row (B, d) to each task's affine subspace: (B, T)."""
        centred = features.float().unsqueeze(1) - self.mean
        inside = torch.einsum("btd,tkd->btk", centred, self.basis)
        return (centred - torch.einsum("btk,tkd->btd", inside, self.basis)).norm(dim=-1)

    def to(self, device: torch.device) -> Signatures:
        return Signatures(self.mean.to(device), self.basis.to(device), self.feature_layer)

    def joined_by(self, mean: Tensor, basis: Tensor) -> Signatures:
        """With one more task, the last one, of mean (d,) and basis (k, d)."""
        widest = max(len(basis), self.basis.shape[1])
        joined = self.basis.new_zeros(len(self.basis) + 1, widest, self.basis.shape[2])
        joined[:-1, : self.basis.shape[1]] = self.basis
        joined[-1, : len(basis)] = basis
        return Signatures(torch.cat([self.mean, mean.unsqueeze(0)]), joined, self.feature_layer)

    def without(self, task: int) -> Signatures:
        """Without one task."""
        kept = torch.arange(len(self.mean)) != task
        return Signatures(self.mean[kept], self.basis[kept], self.feature_layer)


def fit_signature(features: Tensor, rank: int | float) -> tuple[Tensor, Tensor]:
    """Mean (d,) and top right singular vectors (k, d) of one task's features (N, d)."""
    if not torch.isfinite(features).all():
        raise RetexError("The features of the reference inputs hold NaN or infinite values.")
    features = features.double()
    mean = features.mean(0)
    # N centred rows span at most N - 1 directions.
    dimension = min(signature_dimension(rank, *features.shape), len(features) - 1)
    basis = torch.linalg.svd(features - mean, full_matrices=False).Vh[:dimension]
    return mean.float(), basis.float()


def signature_dimension(rank: int | float, num_reference: int, width: int) -> int:
    """k: as given, or as a ratio of min(N, d), at least one."""
    largest = min(num_reference, width)
    # 0.29 * 100 is a hair below 29.
    return min(largest, rank) if isinstance(rank, int) else max(1, int(rank * largest + 1e-9))


def held_out_accuracy(features: list[Tensor], rank: int | float, folds: int = 4) -> float:
    """How well signatures fitted on a part of the features identify the rest, averaged over tasks."""
    folds = min(folds, *(len(task_features) for task_features in features))
    correct = [0] * len(features)
    for fold in range(folds if folds > 1 else 0):
        held_out = [torch.arange(len(task_features)) % folds == fold for task_features in features]
        kept = [task_features[~out] for task_features, out in zip(features, held_out, strict=True)]
        signatures = Signatures.fit(kept, rank, "")
        for task, (task_features, out) in enumerate(zip(features, held_out, strict=True)):
            correct[task] += int((signatures.residuals(task_features[out]).argmin(1) == task).sum())
    return sum(count / len(f) for count, f in zip(correct, features, strict=True)) / len(features)


def shallowest_good(accuracies: list[float], margin: float = 0.005) -> int:
    """Index of the first accuracy within `margin` of the best."""
    best = max(accuracies)
    return next(index for index, accuracy in enumerate(accuracies) if accuracy >= best - margin)
