"""Mixed batches in one pass: the merged model for all rows, plus each row's own offsets."""

from .call import MixedUnsupported
from .cost import Call, grouped_cost, mixed_cost
from .model import MixedModel

__all__ = ["Call", "MixedModel", "MixedUnsupported", "grouped_cost", "mixed_cost"]
