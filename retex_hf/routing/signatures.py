"""Task signatures: the mean of a task's features and the subspace they vary in. All functions work on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import RetexError
from ..utils.strict_files import is_count
from .alignment import SIDE, Alignment
from .alignment import TENSORS as TRUNK
from .feature_space import FeatureSpace

SpaceMaker = Callable[[Sequence[Mapping[str, Tensor]], Sequence[Mapping[str, Tensor]] | None], FeatureSpace]
"""Fits a space to the features (N, d) of each task by layer, and to those of the same inputs perturbed, if given."""

# Folds of the references, of which one is held out at a time.
FOLDS = 4
# Relative difference between the features of one input in different batches.
ROUNDING = 1e-4
# Tensors of `Signatures` with one entry per task.
PER_TASK = ("mean", "basis", "wide_mean", "wide_basis", "held_out")
# Padding in `held_out`: residuals are never negative.
NOTHING = -1.0


@dataclass
class Signatures:
    """The signature of each task: `mean` (T, d), `basis` (T, k, d; rows beyond a task's own rank are zero), the `space`
    of the features, and the `temperature` at which probabilities are right on held-out references.

    `wide_mean` and `wide_basis` are the same with no direction shrunk: what tells tasks apart least still tells inputs
    of no task. `held_out` (T, N; see `held_out_residuals`) holds the distances of a task's own inputs to that subspace,
    in ascending order, with -1 in front where a task has fewer than others. `alignment` corrects the hidden states of a
    shared trunk, where there is one.

    >>> import torch
    >>> from retex_hf.routing import Signatures
    >>> features = {"low": torch.randn(64, 8) - 5, "high": torch.randn(64, 8) + 5}
    >>> signatures = Signatures.fit(list(features.values()), rank=0.1, feature_layer="encoder")
    >>> signatures.residuals(torch.full((1, 8), 5.0)).argmin().item()
    1
    """

    mean: Tensor
    basis: Tensor
    wide_mean: Tensor
    wide_basis: Tensor
    held_out: Tensor
    space: FeatureSpace
    temperature: float = 1.0
    alignment: Alignment | None = None

    @classmethod
    def fit(cls, features: list[Tensor], rank: int | float, feature_layer: str) -> Signatures:
        """Fit one signature per task from its (N, d) features of one layer, as the paper does."""
        return cls.fit_in(FeatureSpace.plain(feature_layer), features, rank)

    @classmethod
    def fit_in(
        cls, space: FeatureSpace, features: list[Tensor], rank: int | float, held_out: list[Tensor] | None = None
    ) -> Signatures:
        """Fit one signature per task from its (N, d) features in a space. `held_out` are the residuals (N, T) of all
        references to signatures that were fitted without them, which give the temperature."""
        mean, basis = _fit_all(features, rank)
        wide = [space.unshrunk(placed) for placed in features] if len(space.common) else features
        wide_mean, wide_basis = _fit_all(wide, rank) if len(space.common) else (mean, basis)
        own = _in_rows([held_out_residuals(placed, rank).sort().values for placed in wide])
        temperature = 1.0 if held_out is None else fitted_temperature(held_out)
        return cls(mean, basis, wide_mean, wide_basis, own, space, temperature)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as they are stored: those without shrunk directions only if any is shrunk."""
        own = {"mean": self.mean, "basis": self.basis, "held_out": self.held_out}
        wide = {"wide_mean": self.wide_mean, "wide_basis": self.wide_basis} if len(self.space.common) else {}
        own |= {**wide, "scale": self.space.scale, "common": self.space.common}
        return own if self.alignment is None else {**own, **self.alignment.tensors}

    @property
    def description(self) -> dict[str, Any]:
        """Return what `stored_shapes` needs to know of the tensors, for a JSON file."""
        return {
            "feature_layer": self.feature_layer,
            "layers": list(self.space.layers),
            "rank": self.basis.shape[1],
            "width": self.mean.shape[1],
            "held_out": self.held_out.shape[1],
            "common": len(self.space.common),
            "temperature": self.temperature,
            "trunk": None if self.alignment is None else list(self.alignment.down.shape[1:]),
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Signatures:
        """Return stored signatures; the tensors must have the shapes that `stored_shapes` returns."""
        space = FeatureSpace(tuple(description["layers"]), tensors["scale"], tensors["common"])
        own = {name: tensors[name] for name in ("mean", "basis", "held_out")}
        own |= {f"wide_{name}": tensors.get(f"wide_{name}", tensors[name]) for name in ("mean", "basis")}
        aligned = [tensors[name] for name in TRUNK if name in tensors]
        alignment = Alignment(*aligned) if aligned else None
        return cls(**own, space=space, temperature=float(description["temperature"]), alignment=alignment)

    @property
    def feature_layer(self) -> str:
        """Return the last layer that features are read from."""
        return self.space.layers[-1]

    def residuals(self, features: Tensor) -> Tensor:
        """Return the distance of each row (B, d) to each task's affine subspace: (B, T)."""
        return _residuals(features, self.mean, self.basis)

    def distances(self, features: Tensor) -> Tensor:
        """Return the same with no direction of the space shrunk: how far each row (B, d) is from each task."""
        return _residuals(self.space.unshrunk(features.float()), self.wide_mean, self.wide_basis)

    def thresholds(self, quantile: float, slack: float) -> Tensor:
        """Return the distance above which a row is out-of-distribution for each task (T,): `slack` times the one of
        rank `ceil((n + 1) quantile)` among the task's `n` held-out references.

        Of a task's own inputs, as the references are, at most a share of `1 - quantile` exceeds it (split conformal
        prediction). That needs `1 / (1 - quantile)` references; with fewer, the largest distance serves, which `1 / (n
        + 1)` exceed. The threshold is infinite for tasks with too few references to hold any out, and never below the
        rounding error of repeating an input, because all references may be identical.
        """
        known = (self.held_out >= 0).sum(1)
        if not known.any():
            return torch.full_like(self.mean[:, 0], torch.inf)
        # In floating point, 0.9 * 10 may be slightly above 9.
        rank = torch.minimum(((known + 1) * quantile - 1e-9).ceil().long(), known).clamp(min=1)
        place = self.held_out.shape[1] - known + rank - 1
        found = slack * self.held_out.gather(1, place.clamp(max=self.held_out.shape[1] - 1).unsqueeze(1)).squeeze(1)
        least = ROUNDING * self.wide_mean.norm(dim=1)
        return torch.where(known > 0, torch.maximum(found, least), torch.inf)

    def to(self, device: torch.device) -> Signatures:
        moved = {name: getattr(self, name).to(device) for name in PER_TASK}
        alignment = None if self.alignment is None else self.alignment.to(device)
        return replace(self, **moved, space=self.space.to(device), alignment=alignment)

    def joined_by(self, other: Signatures) -> Signatures:
        """Return these signatures followed by those of other tasks, fitted in the same space. A trunk is not aligned
        with those yet."""
        return replace(
            self,
            mean=torch.cat([self.mean, other.mean]),
            basis=_padded([*self.basis, *other.basis]),
            wide_mean=torch.cat([self.wide_mean, other.wide_mean]),
            wide_basis=_padded([*self.wide_basis, *other.wide_basis]),
            held_out=_in_rows([*self.held_out, *other.held_out]),
        )

    def without(self, task: int) -> Signatures:
        """Return the signatures without one task."""
        kept = torch.arange(len(self.mean)) != task
        alignment = None if self.alignment is None else self.alignment.without(task)
        return replace(self, **{name: getattr(self, name)[kept] for name in PER_TASK}, alignment=alignment)


def stored_shapes(description: Any, tasks: int) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of stored signatures by their untrusted description; None where that is not valid."""
    if not isinstance(description, Mapping):
        return None
    sizes: list[Any] = [description.get(key) for key in ("rank", "width", "held_out", "common")]
    layers: Any = description.get("layers")
    temperature: Any = description.get("temperature")
    trunk: Any = description.get("trunk")
    valid = (
        all(is_count(size) for size in sizes)
        and (trunk is None or _is_trunk(trunk))
        and isinstance(layers, list) and all(isinstance(one, str) for one in layers)
        and layers[-1:] == [description.get("feature_layer")]
        and isinstance(temperature, (int, float)) and 0 < temperature < math.inf
    )  # fmt: skip
    if not valid:
        return None
    rank, width, held_out, common = sizes
    shapes: dict[str, tuple[int, ...]] = {
        "mean": (tasks, width),
        "basis": (tasks, rank, width),
        "held_out": (tasks, held_out),
        "scale": (len(layers),),
        "common": (common, width if common else 0),
    }
    if common:
        shapes |= {"wide_mean": (tasks, width), "wide_basis": (tasks, rank, width)}
    if trunk is not None:
        shapes |= dict(zip(TRUNK, ((tasks, *trunk), (tasks, *trunk[:2]), (tasks, trunk[1])), strict=True))
    return shapes


def _is_trunk(described: Any) -> bool:
    """Return whether this is the shape of one task's `trunk_down`: of positions, or of the 3 x 3 around them."""
    if not isinstance(described, list) or not all(map(is_count, described)):
        return False
    return len(described) == 2 or (len(described) == 4 and described[2:] == [SIDE, SIDE])


def _residuals(features: Tensor, mean: Tensor, basis: Tensor) -> Tensor:
    centred = features.float().unsqueeze(1) - mean
    inside = torch.einsum("btd,tkd->btk", centred, basis)
    return (centred - torch.einsum("btk,tkd->btd", inside, basis)).norm(dim=-1)


def _fit_all(features: list[Tensor], rank: int | float | list[int]) -> tuple[Tensor, Tensor]:
    """Return means (T, d) and bases (T, k, d), of one rank or one per task."""
    ranks = rank if isinstance(rank, list) else [rank] * len(features)
    fitted = [fit_signature(task_features, one) for task_features, one in zip(features, ranks, strict=True)]
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
    """Return residuals (N,) of a task's inputs to signatures that were fitted without them.

    The residuals of the inputs that a signature was fitted on are too small to judge others by: with as many dimensions
    as inputs they are zero. Return none for fewer inputs than folds.
    """
    if len(features) < folds:
        return features.new_empty(0, dtype=torch.float32)
    space = FeatureSpace.plain("")
    return cross_validated([{"": features}], rank, lambda *_: space, folds=folds)[0].flatten()


def cross_validated(
    features: Sequence[Mapping[str, Tensor]],
    rank: int | float,
    make_space: SpaceMaker,
    perturbed: Sequence[Mapping[str, Tensor]] | None = None,
    *,
    judge_perturbed: bool = False,
    folds: int = FOLDS,
) -> list[Tensor]:
    """Return the residuals (N, T) of each task's inputs to signatures, in a space, that were fitted without them.

    Args:
        features: The features (N, d) of each task by layer.
        rank: Rank of a task's subspace; a ratio is of all of its inputs, as in `held_out_residuals`.
        make_space: Fits the space to features, and to those of the same inputs perturbed.
        perturbed: Features of the same inputs, perturbed.
        judge_perturbed: Judge the perturbed inputs instead.
        folds: Folds of the inputs; a task with fewer has infinite residuals of its own, as nothing is left to fit.
    """
    counts = [len(next(iter(task.values()))) for task in features]
    source = perturbed if judge_perturbed and perturbed is not None else features
    found = [torch.full((count, len(features)), torch.inf) for count in counts]
    folds = min(folds, *counts)
    for fold in range(folds if folds > 1 else 0):
        out = [torch.arange(count) % folds == fold for count in counts]
        kept = [_rows(task, ~rows) for task, rows in zip(features, out, strict=True)]
        worse = None if perturbed is None else [_rows(task, ~rows) for task, rows in zip(perturbed, out, strict=True)]
        space = make_space(kept, worse)
        placed = [space(task) for task in kept]
        ranks = [signature_dimension(rank, count, part.shape[1]) for count, part in zip(counts, placed, strict=True)]
        fitted = _fit_all(placed, ranks)
        for task, rows in enumerate(out):
            judged = _rows(source[task], rows)
            found[task][rows] = _residuals(space(judged), *fitted).cpu()
    return found


def identified(residuals: Sequence[Tensor]) -> float:
    """Return the share of rows whose smallest residual is that of their own task, averaged over tasks.

    >>> import torch
    >>> identified([torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[3.0, 1.0]])])
    0.75
    """
    shares = [
        ((found.argmin(1) == task) & torch.isfinite(found[:, task])).float().mean().item()
        for task, found in enumerate(residuals)
    ]
    return sum(shares) / len(shares)


def held_out_accuracy(features: list[Tensor], rank: int | float, folds: int = FOLDS) -> float:
    """Return how well signatures fitted on a part of the features of one layer identify the rest, averaged over
    tasks."""
    space = FeatureSpace.plain("")
    return identified(cross_validated([{"": one} for one in features], rank, lambda *_: space, folds=folds))


def fitted_temperature(residuals: Sequence[Tensor]) -> float:
    """Return the temperature at which `softmax(-residuals / temperature)` is likeliest to name the rows' own tasks (the
    least cross-entropy, every task counting alike); 1 where nothing is known.

    >>> import torch
    >>> rows = torch.tensor([[0.0, 2.0]] * 9 + [[2.0, 0.0]])  # nine of ten are right by a distance of 2
    >>> round(2 / fitted_temperature([rows, rows.flip(1)]), 2)  # log(9 / 1)
    2.2
    """
    known = [(task, found[torch.isfinite(found).all(1)].double()) for task, found in enumerate(residuals)]
    known = [(task, found - found.amin(1, keepdim=True)) for task, found in known if len(found)]
    if not known or len(residuals) < 2:
        return 1.0
    unit = torch.cat([found.mean().reshape(1) for _, found in known]).mean().clamp(min=1e-12)

    def loss(log_temperature: float) -> float:
        tau = unit * math.exp(log_temperature)
        each = [torch.log_softmax(-found / tau, 1)[:, task].mean() for task, found in known]
        return -torch.stack(each).mean().item()

    # The loss is unimodal in the logarithm: golden sections narrow e^-8 ... e^4 times the mean distance.
    low, high, ratio = -8.0, 4.0, (math.sqrt(5) - 1) / 2
    for _ in range(60):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, second) if loss(first) <= loss(second) else (first, high)
    return float(unit * math.exp((low + high) / 2))


def _rows(features: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    return {layer: found[chosen] for layer, found in features.items()}


def shallowest_good(accuracies: list[float], margin: float = 0.005) -> int:
    """Return the index of the first accuracy within `margin` of the best."""
    best = max(accuracies)
    return next(index for index, accuracy in enumerate(accuracies) if accuracy >= best - margin)
