"""From a recipe to models and data: local suites, folders, the Hub, or a mirror of it.

A mirror is a folder of files from `hf download`: `<mirror>/<model>` and `<mirror>/datasets/<data set>`. Names found
there are read from it; the rest of the recipe stays the same.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import Task, split_validation, train_experts
from datasets import ClassLabel, Dataset, load_dataset
from recipes import DataSource, Recipe, is_prompt
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, CLIPModel

from retex_hf.data.readout import Classifier, Generator, Readout, ZeroShot
from retex_hf.errors import ConfigError, InputError, first_line
from retex_hf.evaluation import Collate, TaskData


@dataclass(frozen=True)
class Sources:
    """Models, data and readout of some tasks. The data that methods may see are split into `train` and `validation`."""

    base: str
    experts: dict[str, str]
    train: dict[str, TaskData]
    validation: dict[str, TaskData]
    tests: dict[str, TaskData]
    collate: Collate
    readout: Readout


def load_sources(recipe: Recipe, work: Path, mirror: Path | None, *, with_unseen: bool) -> tuple[Sources, list[str]]:
    """Load everything that a recipe names, and its tasks in order; unseen tasks and their experts only on request."""
    if recipe.suite is not None:
        return _load_suite(recipe, work, with_unseen)
    return _load_named(recipe, mirror, with_unseen)


def _load_suite(recipe: Recipe, work: Path, with_unseen: bool) -> tuple[Sources, list[str]]:
    """Load a local suite; first make its base and the experts that are missing in the work dir."""
    suite = importlib.import_module(recipe.suite)
    names = recipe.tasks or [task for task in suite.available(suite.TASKS) if task not in recipe.unseen]
    if max(recipe.sizes, default=0) > len(names):
        raise ConfigError(
            f"The recipe's sizes go up to {max(recipe.sizes)}, but there are data for {len(names)} tasks."
        )
    unseen = [task for task in recipe.unseen or suite.available(getattr(suite, "UNSEEN", ())) if task not in names]
    tasks = [suite.load_task(name) for name in names + (unseen if with_unseen else [])]
    return suite_sources(recipe, tasks, work), names


def suite_sources(
    recipe: Recipe, tasks: Sequence[Task], work: Path, base: Path | None = None, **training: Any
) -> Sources:
    """Load base and experts of a suite for some tasks from the work dir; `training` goes to the suite's fine-tuning."""
    suite = importlib.import_module(recipe.suite)
    base = base or work / "base"
    if not base.exists():
        suite.fetch_base(base)
    train_experts(tasks, work, {}, lambda task, folder: suite.fine_tune_expert(base, task, folder, **training))
    collate = suite.make_collate(base) if hasattr(suite, "make_collate") else suite.collate
    readout = suite.make_readout(base) if hasattr(suite, "make_readout") else Classifier()
    experts = {task.name: str(work / "experts" / task.name) for task in tasks}
    return _as_sources(str(base), experts, tasks, collate, readout, recipe)


def _load_named(recipe: Recipe, mirror: Path | None, with_unseen: bool) -> tuple[Sources, list[str]]:
    """Load models and data by name: folders, or repositories on the Hub or in its mirror."""
    names = recipe.tasks or [task for task in recipe.experts if task not in recipe.unseen]
    everything = names + (recipe.unseen if with_unseen else [])
    base = find(recipe.base, mirror)
    experts = {task: find(recipe.experts[task], mirror) for task in everything if task in recipe.experts}
    tasks = [load_named_task(task, recipe.data[task], mirror, recipe) for task in everything]
    collate = _named_collate(base, tasks[0], recipe)
    readout = _named_readout(recipe, base, experts[names[0]], tasks)
    return _as_sources(base, experts, tasks, collate, readout, recipe), names


def find(name: str, mirror: Path | None, kind: str = "") -> str:
    """Return the folder of a model (or of `datasets`) in a mirror, if it has one; else the name itself."""
    folder = mirror / kind / name if mirror is not None else None
    return str(folder) if folder is not None and folder.is_dir() else name


def _as_sources(
    base: str, experts: dict[str, str], tasks: Sequence[Task], collate: Collate, readout: Readout, recipe: Recipe
) -> Sources:
    train, validation, tests = {}, {}, {}
    for task in tasks:
        left, kept_out = (_in_words(part, readout) for part in split_validation(task))
        train[task.name] = _task_data(task, left.train_inputs, left.train_labels, recipe.train_rows)
        validation[task.name] = _task_data(task, kept_out.train_inputs, kept_out.train_labels, recipe.train_rows)
        tests[task.name] = _task_data(task, left.test_inputs, left.test_labels, recipe.rows)
    return Sources(base, experts, train, validation, tests, collate, readout)


def _in_words(task: Task, readout: Readout) -> Task:
    """Return a task whose answers are the names of its classes, where models generate text."""
    if readout.chooses_head:
        return task
    names = task.label_names
    return replace(
        task,
        train_labels=[names[label] for label in task.train_labels],
        test_labels=[names[label] for label in task.test_labels],
    )


def _task_data(task: Task, inputs: Sequence[Any], answers: Sequence[Any], rows: int | None) -> TaskData:
    """Draw some rows of a task at random, because sets may be sorted by class; the same ones in every run."""
    chosen = sorted(random.Random(0).sample(range(len(inputs)), min(rows or len(inputs), len(inputs))))
    return TaskData(task.name, [inputs[i] for i in chosen], [answers[i] for i in chosen], task.label_names)


def load_named_task(name: str, source: DataSource, mirror: Path | None, recipe: Recipe) -> Task:
    """Load a task from a folder, from the Hub or from its mirror."""
    path = find(source.path, mirror, "datasets")
    parts = []
    for split, rows in ((source.train, recipe.train_rows), (source.test, recipe.rows)):
        try:
            part = load_dataset(path, source.name, split=split)
        except (OSError, ValueError, RuntimeError) as error:
            where = f"{path}, {source.name}" if source.name else path
            raise InputError(f"Task {name!r}: split {split!r} of {where} cannot be read: {first_line(error)}") from None
        parts.append(part.shuffle(seed=0).select(range(min(rows or len(part), len(part)))))
    classes = source.classes or _class_names(name, parts[0], source.label)
    columns = []
    for part in parts:
        columns += [_inputs(name, part, source.input), _labels(name, part, source.label, classes)]
    return Task(name, classes, *columns)


def _class_names(name: str, data: Dataset, label: str) -> list[str]:
    feature = data.features.get(label)
    if not isinstance(feature, ClassLabel):
        raise InputError(f"Task {name!r}: column {label!r} does not name its classes; the recipe must list them.")
    return [text.replace("_", " ") for text in feature.names]


def _inputs(name: str, data: Dataset, columns: str | list[str] | None) -> list[Any]:
    """Return texts, pairs of texts or images by the columns of a recipe; default: `text`, `sentence` or `image`."""
    if columns is None:
        columns = next((column for column in ("text", "sentence", "image", "img") if column in data.column_names), None)
        if columns is None:
            raise InputError(f"Task {name!r}: which of {data.column_names} is the input? The recipe must say.")
    if isinstance(columns, str) and is_prompt(columns):
        try:
            return [columns.format(**row) for row in data]
        except KeyError as error:
            raise InputError(f"Task {name!r}: no column {error} for its prompt in {data.column_names}.") from None
    wanted = [columns] if isinstance(columns, str) else columns
    for column in wanted:
        if column not in data.column_names:
            raise InputError(f"Task {name!r}: the data have no column {column!r}, only {data.column_names}.")
    if len(wanted) == 1:
        return list(data[wanted[0]])
    return list(zip(*(data[column] for column in wanted), strict=True))


def _labels(name: str, data: Dataset, label: str, classes: Sequence[str]) -> list[int]:
    if label not in data.column_names:
        raise InputError(f"Task {name!r}: the data have no column {label!r}, only {data.column_names}.")
    labels = list(data[label])
    for value in labels:
        # GLUE's own tests have -1 everywhere: their labels are not public.
        if not isinstance(value, int) or not 0 <= value < len(classes):
            raise InputError(f"Task {name!r}: label {value!r} is none of its {len(classes)} classes.")
    return [int(value) for value in labels]


def _named_collate(base: str, task: Task, recipe: Recipe) -> Collate:
    """Return a function that runs texts through the base's tokenizer, or images through its processor."""
    sample = task.train_inputs[0]
    if isinstance(sample, (str, tuple)):
        tokenizer = AutoTokenizer.from_pretrained(base)
        if tokenizer.pad_token is None:  # as in GPT-2
            tokenizer.pad_token = tokenizer.eos_token
        if recipe.readout["kind"] == "generate" and not AutoConfig.from_pretrained(base).is_encoder_decoder:
            tokenizer.padding_side = "left"  # a decoder continues from the last token
        options = {"truncation": True, "max_length": recipe.max_length}

        def collate_texts(texts: Sequence[str | tuple[str, str]]) -> dict[str, Tensor]:
            # Row by row: some tasks of a mixed batch have one text, others two.
            rows = [tokenizer(*([text] if isinstance(text, str) else text), **options) for text in texts]
            return dict(tokenizer.pad(rows, return_tensors="pt"))

        return collate_texts
    processor = AutoImageProcessor.from_pretrained(base)

    def collate_images(images: Sequence[Any]) -> dict[str, Tensor]:
        return dict(processor(images=[image.convert("RGB") for image in images], return_tensors="pt"))

    return collate_images


def _named_readout(recipe: Recipe, base: str, expert: str, tasks: Sequence[Task]) -> Readout:
    kind, options = recipe.readout["kind"], {k: v for k, v in recipe.readout.items() if k != "kind"}
    if kind == "classifier":
        return Classifier()
    if kind == "generate":
        return Generator(AutoTokenizer.from_pretrained(base), **options)
    templates = {task.name: recipe.data[task.name].templates or options["templates"] for task in tasks}
    return clip_readout(base, expert, {task.name: task.label_names for task in tasks}, templates)


@torch.no_grad()  # not inference mode: the projection takes part in gradients of entropy
def clip_readout(
    base: str, expert: str, classes: Mapping[str, Sequence[str]], templates: Mapping[str, Sequence[str]]
) -> ZeroShot:
    """Make heads from the text tower of a CLIP model: a class is the mean of its normalised sentences.

    Experts that are a bare image tower (`CLIPVisionModel`) end before CLIP's projection, which the base has.
    """
    model = CLIPModel.from_pretrained(base).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    heads = {
        task: torch.stack([_class_embedding(model, tokenizer, name, templates[task]) for name in names])
        for task, names in classes.items()
    }
    scale = model.logit_scale.exp().item()
    if AutoConfig.from_pretrained(expert).architectures == ["CLIPVisionModel"]:
        projection = model.visual_projection.weight.detach().clone()
        return ZeroShot(heads, lambda output: output.pooler_output @ projection.T, scale)
    return ZeroShot(heads, scale=scale)


def _class_embedding(model: CLIPModel, tokenizer: Any, name: str, templates: Sequence[str]) -> Tensor:
    sentences = [template.format(name) for template in templates]
    tokens = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    pooled = model.text_model(**tokens).pooler_output
    embeddings = nn.functional.normalize(model.text_projection(pooled), dim=-1)
    return nn.functional.normalize(embeddings.mean(0), dim=-1)
