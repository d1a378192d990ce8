"""Identification of the task, and so the expert, that an input needs: features, signatures, decision."""

from .alignment import Alignment, positions
from .decision import Routing, decide
from .feature_space import FeatureSpace
from .features import Entry, FeatureExtractor
from .fitting import as_batches, fit_signatures, noted, reference_features, trying
from .layers import block_lists, candidate_layers, feature_blocks, trunk_blocks
from .pooling import pool
from .signatures import Signatures, fit_signature, held_out_accuracy, held_out_residuals, shallowest_good
from .synthetic import synthetic_batches
from .trunk_parameters import answers, describe_trunk, keeps_cache, trunk_parameters
from .weight_scores import WeightScorer, WeightSignatures

__all__ = [
    "Alignment",
    "Entry",
    "FeatureExtractor",
    "FeatureSpace",
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
    "feature_blocks",
    "fit_signature",
    "fit_signatures",
    "held_out_accuracy",
    "held_out_residuals",
    "keeps_cache",
    "noted",
    "pool",
    "positions",
    "reference_features",
    "shallowest_good",
    "synthetic_batches",
    "trunk_blocks",
    "trunk_parameters",
    "trying",
]
