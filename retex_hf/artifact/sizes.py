"""Bytes of each part of a model, and of its experts if stored separately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..checkpoints import take_inventory
from .state import RetexParts

BODY, RECOVERY, HEADS, ROWS = "merged model", "recovery", "heads", "own tokens"
SIGNATURES, PRETRAINED = "signatures", "base, for features"


def sizes_of(parts: RetexParts) -> dict[str, int]:
    """Return the bytes of each part's tensors: the merged model without a head, the recovery, and so on."""
    tensors = parts.model.state_dict(keep_vars=True)
    own = {name for head in parts.heads.values() for name in head}
    body = (tensors[name] for name in take_inventory(parts.model).shapes if name in tensors and name not in own)
    signatures = {} if parts.signatures is None else parts.signatures.tensors
    sizes = {
        BODY: bytes_of(body),
        RECOVERY: bytes_of(parts.recovery.parameters()),
        HEADS: bytes_of(tensor for head in parts.heads.values() for tensor in head.values()),
        ROWS: bytes_of(tensor for rows in parts.rows.values() for tensor in rows.values()),
        SIGNATURES: bytes_of(signatures.values()),
        PRETRAINED: bytes_of(parts.base_tensors.values()),
    }
    return {part: size for part, size in sizes.items() if size}


def bytes_of_experts(sizes: Mapping[str, int], tasks: int) -> int:
    """Return the bytes of all separate experts: one body per task, every head, and rows of tasks' own tokens.

    >>> from retex_hf.artifact.sizes import BODY, HEADS, bytes_of_experts
    >>> bytes_of_experts({BODY: 100, HEADS: 7}, tasks=3)
    307
    """
    return tasks * sizes[BODY] + sizes.get(HEADS, 0) + sizes.get(ROWS, 0)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
