"""Which expert does an input need? Features, signatures, decision."""

from .decision import Routing, decide
from .features import FeatureExtractor, feature_blocks, pool, resolve_feature_layers
from .fitting import as_batches, fit_signatures
from .signatures import Signatures, fit_signature, held_out_accuracy, shallowest_good

__all__ = [
    "FeatureExtractor",
    "Routing",
    "Signatures",
    "as_batches",
    "decide",
    "feature_blocks",
    "fit_signature",
    "fit_signatures",
    "held_out_accuracy",
    "pool",
    "resolve_feature_layers",
    "shallowest_good",
]
