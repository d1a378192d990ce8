"""Which expert does an input need? Features, signatures, decision."""

from .decision import Routing, decide
from .features import FeatureExtractor, feature_blocks, pool, resolve_feature_layers
from .signatures import Signatures, fit_signature, held_out_accuracy, shallowest_good

__all__ = [
    "FeatureExtractor",
    "Routing",
    "Signatures",
    "decide",
    "feature_blocks",
    "fit_signature",
    "held_out_accuracy",
    "pool",
    "resolve_feature_layers",
    "shallowest_good",
]
