"""Fit signatures to reference inputs, at the layer that separates tasks best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..backends import library_of
from ..backends.input_forms import Tokens
from ..config import RetexConfig
from ..errors import ConfigError, InputError
from ..rows import Along
from ..utils.progress import track
from .feature_space import FeatureSpace, spread
from .features import FeatureExtractor
from .layers import trunk_blocks
from .perturbation import perturbed_inputs
from .pooling import Layout
from .signatures import Signatures, SpaceMaker, cross_validated, identified, shallowest_good

LABEL_NAMES = ("labels", "label", "label_ids")
# One over these shares of the layers are passed over: the first may tell present tasks apart by words or colours, which
# tasks to come may share, and which weather changes most. Features begin after a third of the layers, and end in the
# second half: those that end earlier tell clean inputs apart as well, and corrupted ones worse
# (examples/benchmarks/routing_rules.py).
SHALLOW, EARLY = 3, 2


Batch = TypeVar("Batch", bound=Mapping[str, Any])


def as_batches(batches: Any) -> Iterable[Any]:
    """Return an iterable of batches; wrap a single batch in a list."""
    if isinstance(batches, (Mapping, Tensor)):
        return [batches]
    # Not `iter`, which would start the workers of a `DataLoader`; a `Dataset` has items only.
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise InputError(f"Batches must be dicts or tensors, one or an iterable of them, not {type(batches).__name__}.")
    return batches


def noted(batches: Iterable[Batch], seen: list[Any]) -> Iterator[Batch]:
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
    config: RetexConfig,
    progress: bool = True,
) -> tuple[Signatures, dict[str, float]]:
    """Fit signatures up to the shallowest layer from which held-out references, as they are and perturbed, are
    identified well; return them and the accuracy on those as they are per layer.

    Args:
        make: Function that creates an extractor of layers.
        candidates: Lists of layers, which are tried in turn.
        references: Batches of every task.
        config: Number of references, rank of subspaces, and the rule of identification.
        progress: Show a progress bar.
    """
    task, batches = next((task, iter(batches)) for task, batches in references.items())
    first = next(batches, None)
    if first is None:
        raise InputError(f"Task {task!r} has no reference inputs.")
    references = {**references, task: chain([first], batches)}
    extractor = trying(make, candidates, first)
    layers = extractor.layers
    if config.feature_layer != "auto" and config.identification != "residual":
        extractor = _with_layers_before(make, extractor, first)
    features, perturbed = _read(extractor, references, config, progress)
    return fit_features(features, perturbed, config, layers)


def fit_features(
    features: Sequence[Mapping[str, Tensor]],
    perturbed: Sequence[Mapping[str, Tensor]],
    config: RetexConfig,
    candidates: Sequence[str] | None = None,
) -> tuple[Signatures, dict[str, float]]:
    """Fit signatures to features; see `fit_signatures`.

    Args:
        features: The features (N, d) of every task's references by layer, in the order of the layers.
        perturbed: Those of the same references, perturbed.
        config: Rank of subspaces, and the rule of identification.
        candidates: Layers to choose the last one from; default: all. The first half of several is passed over.
    """
    layers = list(features[0])
    candidates = layers if candidates is None else candidates
    chosen = candidates[len(candidates) // EARLY :]
    spaces = {layer: _space_maker(config, layers, layer) for layer in candidates}
    fit = partial(cross_validated, features, config.signature_rank, perturbed=perturbed)
    residuals = {layer: fit(make_space=make) for layer, make in spaces.items()}
    accuracies = {layer: identified(found) for layer, found in residuals.items()}
    layer = chosen[-1]
    if len(chosen) > 1:
        worse = [fit(make_space=spaces[one], judge_perturbed=True) for one in chosen]
        both = [(accuracies[one] + identified(found)) / 2 for one, found in zip(chosen, worse, strict=True)]
        layer = chosen[shallowest_good(both)]
    space = spaces[layer](features, perturbed)
    placed = [space(of_task) for of_task in features]
    return Signatures.fit_in(space, placed, config.signature_rank, residuals[layer]), accuracies


def _read(
    extractor: FeatureExtractor,
    references: Mapping[str, Iterable[Mapping[str, Any]]],
    config: RetexConfig,
    progress: bool,
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return the features of every task's references by layer, as they are and perturbed."""
    form = library_of(extractor.model).input_form(extractor.model)
    tokens = form if isinstance(form, Tokens) else None
    features, perturbed = [], []
    for task in track(references, title="Reading reference inputs", unit="task", progress=progress):
        seen: list[Mapping[str, Any]] = []
        features.append(reference_features(extractor, task, noted(references[task], seen), config.num_reference))
        worse = _perturbed(map(without_labels, seen), tokens)
        perturbed.append(reference_features(extractor, task, worse, config.num_reference))
    return features, perturbed


def _perturbed(batches: Iterable[dict[str, Any]], tokens: Tokens | None) -> Iterator[dict[str, Any]]:
    rows = 0
    for batch in batches:
        yield perturbed_inputs(batch, tokens, rows)
        rows += next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0)


def _with_layers_before(
    make: Callable[[list[str]], FeatureExtractor], extractor: FeatureExtractor, sample: Mapping[str, Any]
) -> FeatureExtractor:
    """Return an extractor that reads the blocks before a layer too, where there are any."""
    layer = extractor.layers[-1]
    found = trying(make, [trunk_blocks(extractor.model, layer)], sample)
    return found if found.layers[-1] == layer else extractor


def _space_maker(config: RetexConfig, layers: Sequence[str], last: str) -> SpaceMaker:
    """Return the function that fits the space of features of a pass that ends at one of the layers. The first of all
    layers are passed over where others are left."""
    if config.identification == "residual":
        return lambda *_: FeatureSpace.plain(last)
    place = layers.index(last)
    return partial(FeatureSpace.fit, spread(layers[min(len(layers) // SHALLOW, place) : place + 1]))


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
