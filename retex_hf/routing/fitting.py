"""Fit signatures to reference inputs, at the layer that separates tasks best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, InputError
from ..rows import Along
from ..utils.progress import track
from .features import FeatureExtractor
from .pooling import Layout
from .signatures import Signatures, held_out_accuracy, shallowest_good

LABEL_NAMES = ("labels", "label", "label_ids")


def as_batches(batches: Any) -> Iterable[Any]:
    """Return an iterable of batches; wrap a single batch in a list."""
    if isinstance(batches, (Mapping, Tensor)):
        return [batches]
    # Not `iter`, which would start the workers of a `DataLoader`; a `Dataset` has items only.
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise InputError(f"Batches must be dicts or tensors, one or an iterable of them, not {type(batches).__name__}.")
    return batches


def noted(batches: Iterable[dict[str, Any]], seen: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the same batches, and append those that are read to `seen`."""
    for batch in batches:
        seen.append(batch)
        yield batch


def trying(
    make: Callable[[list[str]], FeatureExtractor], candidates: Iterable[list[str]], sample: Mapping[str, Any]
) -> FeatureExtractor:
    """Return an extractor of the layers that give features of a sample: those of the first list that has any. Prefer
    layers that see all of a row to layers that see images only, of which a row may have none."""
    problems: dict[str, str] = {}
    second: list[str] = []
    for layers in candidates:
        found = make(layers).layouts(without_labels(sample))
        good = {layer: layout for layer, layout in found.items() if isinstance(layout, Layout)}
        whole = [layer for layer, layout in good.items() if isinstance(layout.rows, Along)]
        if whole:
            return make(whole)
        second = second or list(good)
        problems |= {layer: problem for layer, problem in found.items() if isinstance(problem, str)}
    if second:
        return make(second)
    layer, problem = next(iter(problems.items()))
    others = f" (nor {len(problems) - 1} others)" if len(problems) > 1 else ""
    raise ConfigError(f"RetexConfig.feature_layer: module {layer!r}{others} cannot be used, because it {problem}.")


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a batch."""
    return {name: value for name, value in batch.items() if name not in LABEL_NAMES}


def fit_signatures(
    make: Callable[[list[str]], FeatureExtractor],
    candidates: Iterable[list[str]],
    references: Mapping[str, Iterable[Mapping[str, Any]]],
    num_reference: int,
    rank: int | float,
    progress: bool = True,
) -> tuple[Signatures, dict[str, float]]:
    """Fit signatures at the shallowest layer that identifies held-out references well; return them and the accuracy per
    layer.

    Args:
        make: Function that creates an extractor of layers.
        candidates: Lists of layers, which are tried in turn.
        references: Batches of every task.
        num_reference: Number of rows used from each task.
        rank: Rank of a task's subspace, as in `RetexConfig.signature_rank`.
        progress: Show a progress bar.
    """
    task, batches = next((task, iter(batches)) for task, batches in references.items())
    first = next(batches, None)
    if first is None:
        raise InputError(f"Task {task!r} has no reference inputs.")
    references = {**references, task: chain([first], batches)}
    extractor = trying(make, candidates, first)
    features: dict[str, list[Tensor]] = {layer: [] for layer in extractor.layers}
    for task in track(references, title="Reading reference inputs", unit="task", progress=progress):
        collected = reference_features(extractor, task, references[task], num_reference)
        for layer in extractor.layers:
            features[layer].append(collected[layer])
    accuracies = {layer: held_out_accuracy(features[layer], rank) for layer in extractor.layers}
    layer = extractor.layers[shallowest_good(list(accuracies.values()))]
    return Signatures.fit(features[layer], rank, layer), accuracies


def reference_features(
    extractor: FeatureExtractor, task: str, batches: Iterable[Mapping[str, Any]], wanted: int
) -> dict[str, Tensor]:
    """Return the features of the first `wanted` rows; read no batch beyond them."""
    parts: dict[str, list[Tensor]] = {layer: [] for layer in extractor.layers}
    rows = 0
    for batch in batches:
        for layer, of_batch in extractor(without_labels(batch)).items():
            parts[layer].append(of_batch.cpu())
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
