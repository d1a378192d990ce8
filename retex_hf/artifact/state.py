"""What a `RetexModel` is made of: a build produces it, a folder on disk holds it."""

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
    """The merged model and all that recovers and identifies its experts.

    `heads` are the tensors each task keeps whole; `errors` the relative recovery error of each parameter; `pretrained`
    the base's tensors where features come from them; `side_folder` is where tokenizer and processor files lie,
    `history` the record of a training run, `recipe` what a build of the same artifact needs (None where it cannot be
    written down, because experts were in memory), and `evaluation` the figures that were last measured.
    Where vocabularies differ, `rows` are each task's rows of tokens that the merged model lacks, and `tokenizers` says
    where the tokenizers lie that tasks have of their own. `unverified`: it was read from files whose contents were not
    compared with what is recorded of them.
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
