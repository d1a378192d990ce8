"""Which expert does an input need? Features, signatures, decision."""

from .decision import Routing, decide
from .features import FeatureExtractor, feature_blocks, pool, resolve_feature_layers
from .fitting import as_batches, fit_signatures, noted, reference_features
from .signatures import Signatures, fit_signature, held_out_accuracy, shallowest_good
from .trunk import describe_trunk, keeps_cache, trunk_parameters
from .weights import WeightScorer, WeightSignatures

__all__ = [
    "FeatureExtractor",
    "Routing",
    "Signatures",
    "WeightScorer",
    "WeightSignatures",
    "as_batches",
    "decide",
    "describe_trunk",
    "feature_blocks",
    "fit_signature",
    "fit_signatures",
    "held_out_accuracy",
    "keeps_cache",
    "noted",
    "pool",
    "reference_features",
    "resolve_feature_layers",
    "shallowest_good",
    "trunk_parameters",
]
