"""ReTeX, behind the interface of the other methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..artifact.sizes import BODY, HEADS, sizes_of
from ..config import RetexConfig
from ..evaluation.method import Material, Method, Prediction
from ..model.retex_model import RetexModel
from .merges import CALIBRATION_ROWS, describe_merge, learned_merge

NUMBER_BYTES = 4


class Retex(Method):
    """ReTeX: the merged model, the recovery of every expert, and the signatures of the tasks.

    It sees the weights, and `num_reference` training inputs of each task without labels (none if the configuration asks
    for `signatures="weights"`).

    Args:
        config: Defaults to `RetexConfig()`. Soft routing is `RetexConfig(routing="soft")`.
        name: Name in tables.
        model: A finished model to use instead; signatures are fitted if it has none and there are inputs.
        calibration_rows: Rows per task that a learnt merge sees; see `learned_merge`.
        options: Further arguments of `RetexModel.from_experts`.
    """

    routes = True
    model: RetexModel
    """The given one, or made by `fit`."""

    def __init__(
        self,
        config: RetexConfig | None = None,
        *,
        name: str = "ReTeX",
        model: RetexModel | None = None,
        calibration_rows: int = CALIBRATION_ROWS,
        **options: Any,
    ) -> None:
        self.name, self.config, self.options = name, config or RetexConfig(), options
        self.calibration_rows, self._given = calibration_rows, model
        if model is not None:
            self.model = model

    def fit(self, material: Material) -> None:
        self.readout = material.readout
        if self._given is None:
            merge = learned_merge(material, self.config.merge, self.calibration_rows)
            config, options = replace(self.config, merge=merge), {"progress": False, **self.options}
            self.model = RetexModel.from_experts(material.base, material.experts, config, **options)
        config = self.model.retex_config
        if self.model.signatures is None and config.signatures != "weights" and material.train:
            references = {task: material.references(task, config.num_reference) for task in self.model.tasks}
            self.model.fit_signatures(references, progress=False)

    @torch.no_grad()
    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        if tasks is not None:
            output, chosen = self.readout.call(self.model, inputs, task=list(tasks)), list(tasks)
        else:
            output = self.readout.call(self.model, inputs)
            chosen = output.routing.tasks
        return Prediction(self.readout.answers(output, chosen), chosen)

    def storage_bytes(self) -> int:
        """Return the bytes of the artifact without its heads.

        These are the merged body, the stored factors, the signatures, and the base's tensors where features come from
        those.
        """
        sizes = sizes_of(self.model.parts())
        return sum(sizes.values()) - sizes.get(HEADS, 0)

    def packed_bytes(self) -> int:
        rounded = [part for part in self.model.parts().recovery.parameters() if part.element_size() < NUMBER_BYTES]
        return sum(part.nbytes for part in rounded)

    def body_bytes(self) -> int:
        """Return the bytes of the merged model without a head."""
        return sizes_of(self.model.parts())[BODY]

    def state(self) -> dict[str, Any]:
        errors = self.model.recovery_errors.values()
        known = [error for error in errors if error is not None]
        return {
            "merge": describe_merge(self.model.retex_config.merge),
            "rank": self.model.retex_config.rank,
            "feature_layer": getattr(self.model.signatures, "feature_layer", None),
            "mean_recovery_error": (sum(known) / len(known) if known else None) if errors else 0.0,
        }
