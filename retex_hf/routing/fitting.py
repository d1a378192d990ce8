"""From reference inputs to signatures, at the layer that tells tasks apart best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import InputError
from .features import FeatureExtractor
from .signatures import Signatures, held_out_accuracy, shallowest_good

LABEL_NAMES = ("labels", "label", "label_ids")


def as_batches(batches: Any) -> Iterable[Any]:
    """An iterable of batches; a single batch is one too."""
    return [batches] if isinstance(batches, (Mapping, Tensor)) else batches


def noted(batches: Iterable[dict[str, Any]], seen: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same batches, remembered as far as they are read."""
    for batch in batches:
        seen.append(batch)
        yield batch


def fit_signatures(
    extractor: FeatureExtractor,
    references: Mapping[str, Iterable[Mapping[str, Any]]],
    num_reference: int,
    rank: int | float,
    progress: bool = True,
) -> tuple[Signatures, dict[str, float]]:
    """Signatures at the shallowest of the extractor's layers that identifies held-out references well, and how well
    each layer does."""
    features: dict[str, list[Tensor]] = {layer: [] for layer in extractor.layers}
    for task in tqdm(references, desc="Reading reference inputs", unit="task", disable=not progress):
        collected = reference_features(extractor, task, references[task], num_reference)
        for layer in extractor.layers:
            features[layer].append(collected[layer])
    accuracies = {layer: held_out_accuracy(features[layer], rank) for layer in extractor.layers}
    layer = extractor.layers[shallowest_good(list(accuracies.values()))]
    return Signatures.fit(features[layer], rank, layer), accuracies


def reference_features(
    extractor: FeatureExtractor, task: str, batches: Iterable[Mapping[str, Any]], wanted: int
) -> dict[str, Tensor]:
    """Features of the first `wanted` rows; no batch beyond them is asked for."""
    parts: dict[str, list[Tensor]] = {layer: [] for layer in extractor.layers}
    rows = 0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name not in LABEL_NAMES}
        for layer, features in extractor(inputs).items():
            parts[layer].append(features.cpu())
        rows += len(parts[extractor.layers[0]][-1])
        if rows >= wanted:
            break
    if rows == 0:
        raise InputError(f"Task {task!r} has no reference inputs.")
    features = {layer: torch.cat(pieces)[:wanted] for layer, pieces in parts.items()}
    for layer, found in features.items():
        broken = (~torch.isfinite(found).all(1)).nonzero().flatten().tolist()
        if broken:
            raise InputError(
                f"Reference input {broken[0]} of task {task!r} has NaN or infinite features at {layer!r}: expected "
                "inputs that the model has finite activations for."
            )
    return features
