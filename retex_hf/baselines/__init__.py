"""The systems that ReTeX is compared with, behind one interface: `fit` on the data a method may see, then `predict`.

All are written from their papers' equations. Where an authors' script uses test labels, true tasks or true heads to
choose something, ours does not; each method's documentation says what it sees.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..evaluation.method import Method
from .dawin import DaWin
from .emr import EMR, IdEMR
from .identifier import Identifier, shared_identifier
from .lora import IdLoRA, LoRA
from .low_rank import TSVC, DeltaCoMe, LoRAExtraction, TaskSVD, TwinCompression
from .mow import MoW
from .signs import BitDelta, SparseTernary, StoredEMR
from .sim import SiM
from .spectral import MASS, Arrow, SpectR
from .static import Individual, Merged, ZeroShotBase
from .twin import TwinMerging
from .weights import expert_weights
from .wemoe import WEMoE

BASELINES: dict[str, type[Method]] = {
    "individual": Individual,
    "zero_shot": ZeroShotBase,
    "merged": Merged,
    "emr": EMR,
    "id_emr": IdEMR,
    "lora": LoRA,
    "id_lora": IdLoRA,
    "sim": SiM,
    "mass": MASS,
    "spectr": SpectR,
    "arrow": Arrow,
    "twin_merging": TwinMerging,
    "dawin": DaWin,
    "wemoe": WEMoE,
    "mow": MoW,
    "svd": TaskSVD,
    "lora_extraction": LoRAExtraction,
    "twin_compression": TwinCompression,
    "tsv_c": TSVC,
    "delta_come": DeltaCoMe,
    "bitdelta": BitDelta,
    "sparse_ternary": SparseTernary,
    "stored_emr": StoredEMR,
}


def make(name: str, **options: Any) -> Method:
    """Make a baseline by name; pass options to its constructor.

    >>> from retex_hf.baselines import make
    >>> make("merged", merge="ties", head="identifier").name
    'ties (identified head)'
    """
    if name not in BASELINES:
        raise ConfigError(f"There is no baseline {name!r}; the baselines are {sorted(BASELINES)}.")
    return BASELINES[name](**options)


__all__ = [
    "BASELINES",
    "EMR",
    "MASS",
    "Arrow",
    "DaWin",
    "IdEMR",
    "IdLoRA",
    "Identifier",
    "Individual",
    "LoRA",
    "Merged",
    "MoW",
    "SiM",
    "SpectR",
    "TwinMerging",
    "WEMoE",
    "ZeroShotBase",
    "expert_weights",
    "make",
    "shared_identifier",
]
