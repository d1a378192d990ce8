"""The extractor, the scorer and the runner of a model, made from its parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..artifact.state import RetexParts
from ..backends import library_of
from ..errors import first_line
from ..execution import ExpertCache, ExpertRunner, beside_own, copy_with
from ..execution.vocabulary_rows import rows_beyond, with_all_rows
from ..routing import FeatureExtractor, WeightScorer, candidate_layers, like, synthetic_batches, trying

logger = logging.getLogger(__name__)


def extractor_of(
    parts: RetexParts,
    layers: list[str],
    blocks: Sequence[str] = (),
    known: dict[Any, Any] | None = None,
    with_cache: bool = False,
) -> FeatureExtractor:
    """Return the extractor of features at some layers, on the merged model or on the base.

    Args:
        parts: The parts of the model.
        layers: Names of the layers.
        blocks: Blocks of a shared trunk, whose outputs are recorded.
        known: Findings about kinds of inputs, which are added to.
        with_cache: Record the keys and values that a decoder's blocks fill a cache with, too.
    """
    tensors = beside_own(parts.model, parts.base_tensors)
    # Rows of unknown tasks may hold tokens that only some tasks have.
    if parts.config.vocabulary:
        rows = rows_beyond(parts.model, library_of(parts.model), parts.heads, parts.rows)
        tensors |= with_all_rows({**parts.model.state_dict(), **tensors}, rows)
    model = copy_with(parts.model, tensors).eval()
    return FeatureExtractor(model, layers, parts.config.feature_pooling, blocks, known, with_cache)


def scorer_of(parts: RetexParts, sample: Mapping[str, Any], known: dict[Any, Any] | None = None) -> WeightScorer:
    """Return the scorer of `signatures="weights"`, calibrated with synthetic inputs if the model takes any: at the
    layer of its pool, or at the last usable one."""
    return _scorer_and_calibration(parts, sample, known)[0]


def scorers_of(parts: RetexParts, known: dict[Any, Any] | None = None) -> Callable[[Mapping[str, Any]], WeightScorer]:
    """Return a function that returns the scorer of a batch, which is calibrated with images of their size."""
    form = library_of(parts.model).input_form(parts.model)
    made: dict[Any, WeightScorer] = {}

    def scorer(inputs: Mapping[str, Any]) -> WeightScorer:
        key = None if form is None else like(form, inputs)
        if key not in made:
            made[key] = scorer_of(parts, inputs, known)
        return made[key]

    return scorer


def announced_scorer_of(parts: RetexParts, sample: Mapping[str, Any], known: dict[Any, Any] | None) -> WeightScorer:
    """Return the same, and say in the log what it compares inputs with, unless the model has a pool."""
    scorer, compared = _scorer_and_calibration(parts, sample, known)
    if parts.signatures is None:
        logger.warning(
            "Tasks are identified by how their weights respond to an input, %s: give fit_signatures some inputs of "
            "each task, which identify it better.",
            compared,
        )
    return scorer


def _scorer_and_calibration(
    parts: RetexParts, sample: Mapping[str, Any], known: dict[Any, Any] | None
) -> tuple[WeightScorer, str]:
    extract = partial(extractor_of, parts, known=known)
    if parts.signatures is None:
        layer = trying(extract, candidate_layers(parts.model, parts.config), sample).layers[-1]
    else:
        layer = parts.signatures.feature_layer
    scorer = WeightScorer(extract([layer]), parts.recovery)
    form = library_of(parts.model).input_form(parts.model)
    if form is None:
        return scorer, "alone"
    parameter = next(parts.model.parameters())
    try:
        scorer.calibrate(list(synthetic_batches(like(form, sample), parameter.device, parameter.dtype)))
    except Exception as error:  # of a model that needs other inputs too
        alone = WeightScorer(extract([layer]), parts.recovery)
        return alone, f"alone, because synthetic inputs do not run ({first_line(error)})"
    return scorer, "compared with synthetic inputs"


def runner_of(parts: RetexParts, cache: ExpertCache | None = None, **options: Any) -> ExpertRunner:
    """Return the runner of the experts; by default it keeps none of them."""
    return ExpertRunner(
        model=parts.model,
        library=library_of(parts.model),
        recovery=parts.recovery,
        tasks=parts.config.tasks,
        heads=parts.heads,
        labels=parts.config.labels,
        cache=ExpertCache(0) if cache is None else cache,
        rows=parts.rows,
        vocabulary=parts.config.vocabulary,
        **options,
    )
