"""The SVD-residual task identifier of ReTeX, separate from its recovery, for any method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..checkpoints import take_inventory
from ..config import RetexConfig
from ..evaluation.method import Material
from ..routing import FeatureExtractor, candidate_layers, decide, fit_signatures, trunk_parameters
from .merges import shared_body
from .weights import expert_weights


class Identifier:
    """Identifies the task whose feature subspace is nearest to a row, with features of one body shared by all tasks.

    It sees `num_reference` training inputs of each task without labels, the same as `Retex`: on the averaged model (the
    default of both), the two identify the same task for every row.

    Args:
        source: Body to read features from: `"pretrained"`, a merge method as `RetexConfig.merge` names it, or the
            tensors themselves.
        num_reference: Inputs per task, N.
        signature_rank: Dimension of a task's subspace, or a ratio of `min(N, width)`.
        identification: How features are compared, as in `RetexConfig`.
        feature_layer: A module, the index of a block, or `"auto"`.
        feature_pooling: `"mean"`, `"first"` or `"last"`.
    """

    def __init__(
        self,
        source: str | Mapping[str, Any] = "average",
        *,
        num_reference: int = 64,
        signature_rank: int | float = 6,
        identification: str = "whitened",
        feature_layer: str | int = "auto",
        feature_pooling: str = "mean",
    ) -> None:
        self.source = source
        self.config = RetexConfig(
            num_reference=num_reference,
            signature_rank=signature_rank,
            identification=identification,
            feature_layer=feature_layer,
            feature_pooling=feature_pooling,
        )

    def fit(self, material: Material) -> None:
        """Fit the signatures on the reference inputs of every task."""
        count = self.config.num_reference
        self._weights, body = expert_weights(material), shared_body(material, self.source)
        self.tasks = self._weights.tasks
        references = {task: material.references(task, count) for task in self.tasks}
        self._sample = references[self.tasks[0]][0]

        def extractor(layers: list[str]) -> FeatureExtractor:
            # Features are read below the heads, so any head will do.
            return FeatureExtractor(self._weights.module(body, self.tasks[0]), layers, self.config.feature_pooling)

        candidates = candidate_layers(self._weights.model, self.config)
        self.signatures, self.held_out_accuracies = fit_signatures(
            extractor, candidates, references, self.config, progress=False
        )
        # Run only up to the feature layer.
        self._extractor = extractor(list(self.signatures.space.layers))

    def residuals(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the distances (rows, T) of every row to every task's subspace."""
        return self.signatures.residuals(self.signatures.space(self._extractor(inputs)))

    def tasks_of(self, inputs: Mapping[str, Tensor]) -> list[str]:
        """Identify the task of every row."""
        return decide(self.residuals(inputs), self.tasks, "hard", 1.0).tasks

    def storage_bytes(self, held: Collection[str] = ()) -> int:
        """Return the bytes of the signatures, and of the weights that features depend on.

        The weights are left out if `held` names their source: a method that keeps the base, or can average the experts
        that it keeps, needs no second copy.
        """
        parts = (self.signatures.mean, self.signatures.basis, self.signatures.space.common)
        signatures = sum(tensor.numel() * 4 for tensor in parts)
        return signatures if self.source in held else signatures + self.trunk_bytes()

    def trunk_bytes(self) -> int:
        """Return the bytes of the weights that run before the features are ready."""
        names = set(trunk_parameters(self._extractor, self._sample, self._extractor.model))
        aliases = take_inventory(self._weights.model).aliases
        used = [name for name in self._weights.base if names.intersection(aliases[name])]
        return sum(self._weights.base[name].numel() * self._weights.element_size(name) for name in used)


def shared_identifier(material: Material, given: Identifier | None = None) -> Identifier:
    """Return the given identifier, or the default one, fitted once for all methods that use it."""

    def fitted() -> Identifier:
        identifier = given or Identifier()
        identifier.fit(material)
        return identifier

    return material.once("identifier" if given is None else f"identifier {id(given)}", fitted)
