"""Writing of the model card (`README.md`) from a model's parts and its measured results."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...backends import library_of
from ...config import CONFIG_NAME
from ...errors import ArtifactError, shorten
from ...utils.drawing import NEEDS_MATPLOTLIB, can_draw
from ...utils.strict_files import check_links, read_text
from ..state import RetexParts
from . import figures as drawing
from . import sections
from .text import context
from .usage import GENERATOR, use_of

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
# Cards with the results of hundreds of benchmarks have a tenth of this size.
MOST_CARD_BYTES = 2_000_000
TEMPLATE = Path(__file__).with_name("model_card_template.md")
FIGURES_FOLDER = "figures"
# Captions of figures; the first two are drawn from the model itself, the others by an analysis of the build.
DRAWN = {
    "errors": "What recovery misses of the experts' differences, by parameter",
    "results": "Measured shares of right rows, by task",
}
CAPTIONS = DRAWN | {
    "energy_ratios": "How much of each expert's difference its strongest directions hold",
    "storage": "Recovery error against storage",
    "losses": "Training of the recovery module",
    "gammas": "Scales of the affine variant during training",
}
FIGURES = {f"{FIGURES_FOLDER}/{name}.png": name for name in CAPTIONS}
TAGS = ("retex", "model-merging", "merge", "multi-task")
METHOD = "ReTeX"
# A configuration or a revision distinguishes Hub datasets from folders.
HUB_DATA = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::[^@/]+(?:@.+)?|@.+)")
LICENCE_KEYS = ("license", "license_name", "license_link")


def write_card(
    parts: RetexParts,
    folder: Path,
    *,
    previous: Path | None = None,
    name: str | None = None,
    figures: bool = False,
    artifact: Path | None = None,
) -> None:
    """Write the card of an artifact into its folder.

    Args:
        parts: The model.
        folder: The folder in which the artifact is being written.
        previous: The folder that it will replace, whose card is updated; default: `folder`.
        name: The Hub repository that the card is for, whose card is in `previous`. Of that card and the one of the
            artifact that the model was loaded from, the one that a person changed since the last push is updated.
            Default: the card is local, and is titled after the folder that is replaced.
        figures: Draw the figures, which takes longer than the rest of a save. Existing figures are always redrawn.
            Without matplotlib the card shows none of the model's own figures, and a warning says so.
        artifact: The folder that holds the artifact's other files; default: `folder`.
    """
    previous = folder if previous is None else previous
    own = _own_card(parts) if name is not None else None
    name = name or previous.name
    folder.mkdir(exist_ok=True)
    results = measured(parts)
    outdated = _draw_figures(parts, results, folder, previous, figures)
    old = _previous_card(parts, previous)
    text = _text_of(old) if old is not None else None
    from_here = None
    if own is not None and text is not None:
        ours = _text_of(own)
        text, both = sections.choose(ours, text, str(own))
        from_here = text == ours
        if both:
            logger.warning("%s and the card of %s were both edited since the last push; the Hub's is kept.", own, name)
    shown = [
        (path, CAPTIONS[figure])
        for path, figure in FIGURES.items()
        if _is_there(path, folder, previous) and figure not in outdated and (figure != "results" or results)
    ]
    card = _filled(_metadata(parts, name, results), figures=shown, **context(parts, artifact or folder, name, results))
    # Keep the licence of the base even if its card is no longer available.
    text = sections.update(text, card.data.to_dict(), card.text, str(old), lasting=LICENCE_KEYS, pushed=from_here)
    (folder / CARD_NAME).write_text(text, encoding="utf-8")


def _text_of(card: Path) -> str:
    """Read a card that others may have written. Refuse links, because a card is published."""
    check_links([card], card.parent, ArtifactError)
    text = read_text(card, ArtifactError, most=MOST_CARD_BYTES).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _filled(data: ModelCardData, **values: Any) -> ModelCard:
    """Render the template in a sandbox, unlike `ModelCard.from_template`, as a second line of defence."""
    template = ImmutableSandboxedEnvironment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    return ModelCard(template.render(card_data=data.to_yaml(), **{**data.to_dict(), **values}))


def _previous_card(parts: RetexParts, previous: Path) -> Path | None:
    """Return the card to update: the folder's own, else that of the artifact the model was loaded from."""
    return previous / CARD_NAME if (previous / CARD_NAME).is_file() else _own_card(parts)


def _own_card(parts: RetexParts) -> Path | None:
    """Return the card of the artifact that the model was loaded from, or None."""
    source = parts.side_folder
    if source is not None and (source / CONFIG_NAME).is_file() and (source / CARD_NAME).is_file():
        return source / CARD_NAME
    return None


# ---- metadata --------------------------------------------------------------------------------------------------------


def _metadata(parts: RetexParts, name: str, results: Mapping[str, Mapping[str, float | None]]) -> ModelCardData:
    config, use = parts.config, use_of(parts.model)
    origins = [config.base_model or {}, *config.experts.values()]
    ids = list(dict.fromkeys(origin["id"] for origin in origins if origin.get("source") == "hub"))
    data = {} if parts.recipe is None else parts.recipe.data_of(config.tasks)
    datasets = {task: found["id"] for task, source in data.items() if (found := HUB_DATA.fullmatch(str(source)))}
    metric = "exact_match" if use.kind == GENERATOR else "accuracy"
    entries = [
        EvalResult(
            task_type=use.pipeline_tag or "other",
            task_name=task,
            dataset_type=datasets.get(task, task),
            dataset_name=task,
            metric_type="task_identification" if title == IDENTIFIED else metric,
            metric_name=IDENTIFICATION if title == IDENTIFIED else f"{metric.capitalize().replace('_', ' ')} ({title})",
            metric_value=share,
        )
        for title, shares in results.items()
        if title not in (EXPERT, MERGED)
        for task, share in shares.items()
        if share is not None
    ]
    return ModelCardData(
        library_name=sections.LIBRARY,
        base_model=ids or None,
        base_model_relation="merge" if ids else None,
        tags=[*TAGS, library_of(parts.model).NAME],
        pipeline_tag=use.pipeline_tag,
        datasets=list(dict.fromkeys(datasets.values())) or None,
        metrics=[metric] if entries else None,
        model_name=name.rpartition("/")[2] if entries else None,
        eval_results=entries or None,
        **_licence(parts),
    )


def _licence(parts: RetexParts) -> dict[str, Any]:
    """Return the licence from the base's own card, if the card is next to its weights."""
    base, folder = parts.config.base_model or {}, parts.side_folder
    if folder is None or not (folder / CARD_NAME).is_file():
        return {}
    if folder.resolve().name not in (base.get("id"), base.get("revision")):
        return {}  # the card of an expert, or of an artifact, which is updated anyway
    path = folder / CARD_NAME
    try:
        values, *_ = sections.split(_text_of(path), str(path))
    except ArtifactError as error:  # an untrusted card must not make a save fail
        logger.warning("The licence of the base is not known, name it on the card yourself: %s", error)
        return {}
    return {key: values[key] for key in LICENCE_KEYS if _is_licence(values.get(key))}


def _is_licence(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


# ---- measurements ----------------------------------------------------------------------------------------------------

UNKNOWN, KNOWN, IDENTIFIED = "task unknown", "task known", "task identified"
IDENTIFICATION = "Task identification"
# References that the model is compared with; both know the task.
EXPERT, MERGED = "the expert itself", "merged only"


def measured(parts: RetexParts) -> dict[str, dict[str, float | None]]:
    """Return `{title: {task: share}}` of the last evaluation; None for tasks added since. Empty without evaluation."""
    summary = parts.evaluation
    if summary is None:
        return {}
    try:
        methods, individual = summary["methods"], summary["individual"]
        own = METHOD if METHOD in methods else next(name for name in methods if name != individual)
        modes = methods[own]["modes"]
        found = {
            UNKNOWN: modes.get("unknown", {}).get("accuracy"),
            KNOWN: modes.get("known", {}).get("accuracy"),
            IDENTIFIED: modes.get("unknown", {}).get("identification"),
            EXPERT: methods[individual]["modes"]["known"]["accuracy"] if individual is not None else None,
            MERGED: methods.get("merged", {}).get("modes", {}).get("known", {}).get("accuracy"),
        }
        return {
            title: {task: figure["tasks"].get(task, {}).get("value") for task in parts.config.tasks}
            for title, figure in found.items()
            if figure is not None
        }
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ArtifactError(f"The evaluation of the model is not what Report.summary() gives: {error!r}.") from None


# ---- figures ---------------------------------------------------------------------------------------------------------


def _is_there(path: str, folder: Path, previous: Path) -> bool:
    return (folder / path).is_file() or (previous / path).is_file()


def _draw_figures(
    parts: RetexParts,
    results: Mapping[str, Mapping[str, float | None]],
    folder: Path,
    previous: Path,
    everything: bool,
) -> set[str]:
    """Draw the available figures, and copy those of the artifact that the model was loaded from.

    Return the names of figures that could not be drawn for lack of matplotlib: files of that name are outdated.
    """
    outdated: set[str] = set()
    source = parts.side_folder
    if source is not None and not (source / CONFIG_NAME).is_file():
        source = None  # not of an artifact
    errors = {name: error for name, error in parts.errors.items() if error is not None}
    for path, name in FIGURES.items():
        if name in DRAWN:
            wanted = everything or (previous / path).is_file()
            if wanted and (errors if name == "errors" else results):
                if can_draw():
                    drawing.draw(name, errors, results, folder / path)
                else:
                    outdated.add(name)
        elif source is not None and (source / path).is_file() and not _is_there(path, folder, previous):
            check_links([source / path], source, ArtifactError)
            (folder / FIGURES_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(source / path, folder / path)
    if outdated:
        logger.warning("The model card lacks the figures %s. %s", shorten(sorted(outdated)), NEEDS_MATPLOTLIB)
    return outdated
