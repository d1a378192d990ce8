"""Routers without data: choose the expert by the right singular vectors of its own update. MASS, SpectR and Arrow.

Each chooses among the experts themselves, kept whole, so that its loss is that of identification alone. The authors mix
adapters (MASS: of the tasks under a threshold, SpectR and Arrow: per token and layer); one task per row is what a head
needs. All three read the activations of the pre-trained model, as the authors' do: their updates are differences from
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import ConfigError
from ..evaluation.method import Material
from ..merging.expert_weights import ExpertWeights
from ..routing import FeatureExtractor, feature_blocks
from .static import Individual


class Spectrum(NamedTuple):
    """The largest singular values (T, k) and right singular vectors (T, k, d) of every task's update of a layer."""

    values: Tensor
    vectors: Tensor


class SpectralRouter(Individual):
    """Base of the three: `scores` of every task at each linear layer, averaged over layers and tokens.

    Args:
        rank: Singular vectors kept of every update.
    """

    modes = ("known", "unknown")
    routes = True

    def __init__(self, *, rank: int) -> None:
        if rank < 1:
            raise ConfigError(f"{type(self).__name__}: rank must be at least 1, not {rank!r}.")
        self.rank = rank

    def fit(self, material: Material) -> None:
        super().fit(material)
        model = self.weights.module(self.weights.base, self.weights.tasks[0])
        self._extractor = FeatureExtractor(model, feature_blocks(model)[-1:], "mean")
        self.spectra = {name: _spectrum(self.weights, name, module, self.rank) for name, module in _linear(model)}
        self.spectra = {name: found for name, found in self.spectra.items() if (found.values[:, 0] > 0).all()}
        if not self.spectra:
            raise ConfigError(f"{self.name} needs a linear layer that every expert has changed, and there is none.")
        self._heard: dict[str, Tensor] = {}
        for name in self.spectra:
            model.get_submodule(name).register_forward_pre_hook(partial(self._listen, name))

    def _listen(self, name: str, module: nn.Module, args: tuple[Tensor]) -> None:
        self._heard[name] = args[0]

    def read(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs (rows, tokens, d) of the linear layers that see one batch row per row."""
        self._heard.clear()
        rows = len(next(iter(self._extractor(inputs).values())))
        return {
            name: found.reshape(rows, -1, found.shape[-1])
            for name, found in self._heard.items()
            if len(found) == rows  # layers that see windows or single tokens do not tell which row these belong to
        }

    def scores(self, hidden: Tensor, spectrum: Spectrum) -> Tensor:
        """Return how well each task fits each token: (rows, tokens, T), larger is better."""
        raise NotImplementedError

    def task_scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the score (rows, T) of every task."""
        found = [
            token_mean(self.scores(hidden, self.spectra[name]), inputs.get("attention_mask"))
            for name, hidden in self.read(inputs).items()
        ]
        return torch.stack(found).mean(0)

    @torch.no_grad()
    def choose(self, inputs: Mapping[str, Tensor]) -> list[str]:
        return [self.weights.tasks[index] for index in self.task_scores(inputs).argmax(1).tolist()]

    def state(self) -> dict[str, Any]:
        return {"layers": list(self.spectra)}


class SpectR(SpectralRouter):
    """`softmax_t |Sigma_t V_t^T x|` per token and linear layer (Fleshman and Van Durme, 2025). Nothing divides by the
    size of an update, so that experts of larger updates are favoured, as in the paper.

    Args:
        rank: Singular vectors kept of every update.
    """

    name = "SpectR"

    def __init__(self, *, rank: int = 16) -> None:
        super().__init__(rank=rank)

    def scores(self, hidden: Tensor, spectrum: Spectrum) -> Tensor:
        responses = torch.einsum("bnd,tkd->bntk", hidden, spectrum.values.unsqueeze(-1) * spectrum.vectors)
        return responses.norm(dim=-1).softmax(-1)


class Arrow(SpectralRouter):
    """`softmax_t |v_t^T x|` per token and linear layer, with the top right singular vector `v_t` (Ostapenko et al.,
    2024)."""

    name = "Arrow"

    def __init__(self) -> None:
        super().__init__(rank=1)

    def scores(self, hidden: Tensor, spectrum: Spectrum) -> Tensor:
        return torch.einsum("bnd,td->bnt", hidden, spectrum.vectors[:, 0]).abs().softmax(-1)


class MASS(SpectralRouter):
    """The least `|z - V_t^T V_t z|` at one linear layer, `z` its input averaged over tokens and `V_t` the top right
    singular vectors of the task's update (Crisostomi et al., 2025).

    Args:
        rank: Singular vectors kept of every update.
        layer: Name of the linear layer; default: the last block's first linear layer that all experts have changed.
    """

    name = "MASS"

    def __init__(self, *, rank: int = 16, layer: str | None = None) -> None:
        super().__init__(rank=rank)
        self.layer = layer

    def fit(self, material: Material) -> None:
        super().fit(material)
        block = self._extractor.layers[-1]
        inside = [name for name in self.spectra if name.startswith(f"{block}.")]
        chosen = self.layer or next(iter(inside or list(self.spectra)[-1:]))
        if chosen not in self.spectra:
            raise ConfigError(f"MASS: layer must be one of {list(self.spectra)}, not {chosen!r}.")
        self.layer = chosen

    def task_scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        assert self.layer is not None  # chosen by fit
        mean = token_mean(self.read(inputs)[self.layer], inputs.get("attention_mask"))
        return -projection_residuals(mean, self.spectra[self.layer].vectors)


def projection_residuals(rows: Tensor, vectors: Tensor) -> Tensor:
    """Return the distance (rows, T) of each row (rows, d) to the span of each task's orthonormal vectors (T, k, d)."""
    inside = torch.einsum("bd,tkd->btk", rows, vectors)
    return (rows.unsqueeze(1) - torch.einsum("btk,tkd->btd", inside, vectors)).norm(dim=-1)


def token_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Average (rows, tokens, ...) over tokens: the unmasked ones, where a mask fits."""
    if mask is None or mask.shape != values.shape[:2]:
        return values.mean(1)
    weights = mask.to(values.dtype).unsqueeze(-1)
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1)


def _linear(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def _spectrum(weights: ExpertWeights, name: str, module: nn.Module, rank: int) -> Spectrum:
    """Return the spectrum of a layer's updates; zeros for a layer that is not shared by all tasks, such as a head."""
    vectors = weights.vectors.get(f"{name}.weight")
    if vectors is None:
        return Spectrum(torch.zeros(1, 1), torch.zeros(1, 1, 1))
    updates = vectors.mT if isinstance(module, Conv1D) else vectors
    found = [torch.linalg.svd(update, full_matrices=False) for update in updates]
    return Spectrum(torch.stack([one.S[:rank] for one in found]), torch.stack([one.Vh[:rank] for one in found]))
