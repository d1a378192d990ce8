"""Conversion of a row of logits to a label, as the configuration describes the row's head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def label_scores(row: Tensor, described: Mapping[str, Any]) -> Tensor:
    """Return scores of a head's own classes: probabilities, or the values themselves for a regression.

    `described` is the head's entry in `RetexConfig.labels`; columns of `row` beyond its classes are padding.

    >>> import torch
    >>> from retex_hf.data.labels import label_scores
    >>> label_scores(torch.tensor([0.0, 0.0, float("-inf")]), {"id2label": {"0": "no", "1": "yes"}})
    tensor([0.5000, 0.5000])
    """
    row = row[: len(described["id2label"])].float()
    kind = described.get("problem_type")
    if kind == "regression" or (kind is None and len(row) == 1):
        return row
    return row.sigmoid() if kind == "multi_label_classification" else row.softmax(0)


def best_label(row: Tensor, described: Mapping[str, Any]) -> tuple[str, float]:
    """Return the label of the highest score, and the score."""
    scores = label_scores(row, described)
    best = int(scores.argmax())
    return described["id2label"][str(best)], scores[best].item()
