"""Identification of the task, and so the expert, that an input needs: features, signatures, decision.

Names are imported on first use: a server routes by signatures, and has none of the libraries that build a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .alignment import RIDGES, Alignment, Correction, Moments, entries, regressors, unmasked
    from .decision import Routing, decide
    from .feature_space import FeatureSpace
    from .features import Entry, FeatureExtractor
    from .fitting import as_batches, fit_signatures, noted, reference_features, trying
    from .layers import block_lists, candidate_layers, feature_blocks, trunk_blocks
    from .pooling import pool
    from .signatures import (
        Signatures,
        fit_signature,
        held_out_accuracy,
        held_out_residuals,
        shallowest_good,
        stored_shapes,
    )
    from .synthetic import like, synthetic_batches
    from .trunk_tensors import answers, describe_trunk, keeps_cache, trunk_parameters
    from .weight_scores import WeightScorer, WeightSignatures

__all__ = [
    "RIDGES",
    "Alignment",
    "Correction",
    "Entry",
    "FeatureExtractor",
    "FeatureSpace",
    "Moments",
    "Routing",
    "Signatures",
    "WeightScorer",
    "WeightSignatures",
    "answers",
    "as_batches",
    "block_lists",
    "candidate_layers",
    "decide",
    "describe_trunk",
    "entries",
    "feature_blocks",
    "fit_signature",
    "fit_signatures",
    "held_out_accuracy",
    "held_out_residuals",
    "keeps_cache",
    "like",
    "noted",
    "pool",
    "reference_features",
    "regressors",
    "shallowest_good",
    "stored_shapes",
    "synthetic_batches",
    "trunk_blocks",
    "trunk_parameters",
    "trying",
    "unmasked",
]
_HOMES = {
    "RIDGES": "alignment",
    "Alignment": "alignment",
    "Correction": "alignment",
    "Entry": "features",
    "FeatureExtractor": "features",
    "FeatureSpace": "feature_space",
    "Moments": "alignment",
    "Routing": "decision",
    "Signatures": "signatures",
    "WeightScorer": "weight_scores",
    "WeightSignatures": "weight_scores",
    "answers": "trunk_tensors",
    "as_batches": "fitting",
    "block_lists": "layers",
    "candidate_layers": "layers",
    "decide": "decision",
    "describe_trunk": "trunk_tensors",
    "entries": "alignment",
    "feature_blocks": "layers",
    "fit_signature": "signatures",
    "fit_signatures": "fitting",
    "held_out_accuracy": "signatures",
    "held_out_residuals": "signatures",
    "keeps_cache": "trunk_tensors",
    "like": "synthetic",
    "noted": "fitting",
    "pool": "pooling",
    "reference_features": "fitting",
    "regressors": "alignment",
    "shallowest_good": "signatures",
    "stored_shapes": "signatures",
    "synthetic_batches": "synthetic",
    "trunk_blocks": "layers",
    "trunk_parameters": "trunk_tensors",
    "trying": "fitting",
    "unmasked": "alignment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
