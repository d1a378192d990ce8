"""The experts in memory, shared by all methods."""

from __future__ import annotations

from ..build.plan import load_expert_weights
from ..evaluation.method import Material
from ..merging.expert_weights import ExpertWeights


def expert_weights(material: Material) -> ExpertWeights:
    """Return the base and all experts, read once for all methods. Treat them as read-only."""
    return material.once("weights", lambda: load_expert_weights(material.base, material.experts))
