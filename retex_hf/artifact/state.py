"""The parts of a `RetexModel`, as a build produces them and a folder stores them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import RetexConfig
from ..recovery import RecoveryModule
from ..routing import Signatures, WeightSignatures


@dataclass
class RetexParts:
    """The merged model and everything that recovers and identifies its experts.

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
    heads: dict[str, dict[str, Tensor]]
    errors: dict[str, float]
    signatures: Signatures | WeightSignatures | None = None
    pretrained: dict[str, Tensor] = field(default_factory=dict)
    side_folder: Path | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    unverified: bool = False
    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    tokenizers: dict[str, Path] = field(default_factory=dict)
