"""The parts of a `RetexModel`, as a build produces them and a folder stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import RetexConfig, routing_options
from ..recovery import RecoveryModule
from ..routing import Signatures, WeightSignatures
from ..utils.tensor_bank import TensorBank
from .recipe_record import RecipeRecord

# Parts that are modules of the model: torch moves, saves and trains them.
MODULES = ("model", "recovery", "heads", "rows", "pretrained")
BASE_TENSORS = "base"


@dataclass(frozen=True)
class RetexParts:
    """The merged model and everything that recovers and identifies its experts.

    A change makes new parts, with `dataclasses.replace`; calls that are running keep the old ones.

    `heads` are the tensors that each task stores whole, `errors` the relative recovery error of each parameter,
    `pretrained` the base's tensors where features come from them, `side_folder` the folder of tokenizer and processor
    files, `history` the record of a training run, `recipe` the recipe of the artifact (None if experts were in memory),
    and `evaluation` the latest measurements. Where vocabularies differ, `rows` are each task's rows of tokens that the
    merged model lacks, and `tokenizers` the folders of tasks' own tokenizers. `unverified` is set if the parts were
    read from files that were not compared with their records.
    """

    config: RetexConfig
    model: nn.Module
    recovery: RecoveryModule
    heads: TensorBank
    errors: Mapping[str, float | None]
    signatures: Signatures | WeightSignatures | None = None
    pretrained: TensorBank = field(default_factory=TensorBank)
    side_folder: Path | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    recipe: RecipeRecord | None = None
    evaluation: dict[str, Any] | None = None
    unverified: bool = False
    rows: TensorBank = field(default_factory=TensorBank)
    tokenizers: Mapping[str, Path] = field(default_factory=dict)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Return the parts that are modules, by name."""
        return {name: getattr(self, name) for name in MODULES}

    @property
    def identified_by(self) -> str | None:
        """Return what tells the tasks of rows apart, `"inputs"` or `"weights"`; None where nothing does yet."""
        if isinstance(self.signatures, Signatures):
            return "inputs"
        # Scaled weights have no update of low rank, and thresholds need references.
        possible = self.config.recovery == "offset" and routing_options(self.config.routing)["far"] is None
        return "weights" if self.config.signatures != "inputs" and possible else None

    @property
    def base_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the base that features are computed with; empty if those are the merged model's."""
        return self.pretrained[BASE_TENSORS] if self.pretrained else {}


def bank_of_base(tensors: Mapping[str, Tensor]) -> TensorBank:
    """Return the base's tensors as `RetexParts.pretrained` holds them."""
    return TensorBank({BASE_TENSORS: tensors} if tensors else {})
