"""The recipe: everything a build needs, as plain values for a YAML file.

An artifact carries its own recipe (`retex_recipe.yaml`). Building from it again gives the same files.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from ..config import RetexConfig, check_task_name
from ..errors import ConfigError, brief
from ..recovery import TrainingConfig
from ..utils.strict_files import read_yaml

FILLED_ON_BUILD = {"tasks", "base_model", "experts", "labels", "vocabulary", "trunk", "task_bytes"}
# Fields that determine where results go, but not the results.
OF_THE_RUN = {"output_dir", "push_to_hub", "log_with", "cpu", "analyse", "device"}
# Fields that determine how reference inputs are read.
OF_REFERENCES = ("split", "input_column", "max_length", "seed")
# Sums depend on the number of threads in their last bit, so a recipe may ask for more than there are cores, up to a
# limit.
MOST_THREADS = max(256, os.cpu_count() or 1)
PACKAGES = ("retex-hf", "torch", "transformers", "open_clip_torch")


@dataclasses.dataclass
class Recipe:
    """Everything a build needs.

    Args:
        base: The pre-trained model: a folder or Hub id.
        experts: Task names and their experts.
        config: Fields of RetexConfig.
        solver: "closed_form" (exact) or "adam" (the paper's training).
        training: Fields of TrainingConfig, for "adam".
        model_config: For OpenCLIP weights without a configuration: the architecture's name.
        check_base: Refuse experts that do not descend from the base.
        dtype: Dtype of the merged model: float32, bfloat16 or float16. Default: as the first expert is stored.
        device: Where to merge, solve and fit signatures, such as cuda or cuda:1, or auto for an accelerator, if there
            is one. Default: the CPU.
        data: Task names and their data: a folder with train.* and test.* files, a file, or a Hub id. Signatures are
            fitted on them.
        split: The split of the data that signatures are fitted on.
        input_column: The column of texts or images; default: found by common names.
        max_length: Truncate texts to this many tokens; default: the tokenizer's limit.
        seed: Seed of the draw of reference inputs.
        changes: Changes after the build, in order: `{add: task, expert: source, data: source}`, `{remove: task}`,
            `{sign: {data: ..., ...}}`.
        unrecorded: Changes that a recipe cannot express, such as fitting signatures on batches in memory.
        threads: Number of threads of the solver, on which sums depend in their last bit. Default: torch's own.
        made_with: Versions of the libraries that the artifact was made with.
        output_dir: Folder of the artifact.
        push_to_hub: Upload the artifact to this repository.
        mixed_precision: "no", "bf16" or "fp16", for "adam".
        gradient_accumulation_steps: Backward passes per optimizer step, for "adam".
        log_with: A tracker supported by accelerate, such as "tensorboard" or "wandb".
        cpu: Stay on the CPU.
        analyse: Also draw the experts' spectra, and error against storage.

    Example:
        >>> from retex_hf.artifact.recipe import Recipe
        >>> recipe = Recipe.from_dict({"base": "org/base", "experts": {"a": "org/a"}, "config": {"rank": 64}})
        >>> recipe.to_dict()
        {'base': 'org/base', 'experts': {'a': 'org/a'}, 'config': {'rank': 64}}
    """

    base: str | None = None
    experts: dict[str, str] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    solver: str = "closed_form"
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_config: str | dict[str, Any] | None = None
    check_base: bool = True
    dtype: str | None = None
    device: str | None = None
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    split: str = "train"
    input_column: str | list[str] | None = None
    max_length: int | None = None
    seed: int = 0
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    unrecorded: list[str] = dataclasses.field(default_factory=list)
    threads: int | None = None
    made_with: dict[str, str] = dataclasses.field(default_factory=dict)
    output_dir: str | None = None
    push_to_hub: str | None = None
    mixed_precision: str = "no"
    gradient_accumulation_steps: int = 1
    log_with: str | None = None
    cpu: bool = False
    analyse: bool = False

    @classmethod
    def read(cls, path: str | Path) -> Recipe:
        """Read a YAML file."""
        name = f"The recipe {path}"
        return cls.from_dict(read_yaml(Path(path), ConfigError, name=name), name)

    @classmethod
    def from_dict(cls, values: Any, where: str = "The recipe") -> Recipe:
        """Make a recipe from plain values; `where` names them in messages."""
        if not isinstance(values, dict):
            raise ConfigError(f"{where} must hold keys and values.")
        _check_keys(values, field_names(cls), where)
        values = {key: value for key, value in values.items() if value is not None}
        if values.get("mixed_precision") is False:  # YAML reads a bare `no` as False
            values["mixed_precision"] = "no"
        for name, kind in kinds_of(cls).items():
            if name in values:
                check_kind(values[name], kind, f"{name!r} of {_lower(where)}")
        for section, known in (("config", settable_fields()), ("training", field_names(TrainingConfig))):
            _check_keys(values.get(section, {}), known, f"{section!r} of {_lower(where)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the values that differ from their defaults."""
        default = Recipe()
        values = {name: getattr(self, name) for name in field_names(Recipe, ordered=True)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    def stored(self) -> dict[str, Any]:
        """Return the part that an artifact keeps: everything that the result depends on."""
        return {name: value for name, value in self.to_dict().items() if name not in OF_THE_RUN}

    def check(self) -> None:
        """Refuse a recipe that cannot be built."""
        if not self.base or not self.experts:
            raise ConfigError("A build needs a base and experts, from a recipe or as flags.")
        for task in self.experts:
            check_task_name(task)
        unknown = sorted(set(self.data) - set(self.experts))
        if unknown:
            raise ConfigError(f"data names {unknown[0]!r}, which is not among the experts {sorted(self.experts)}.")
        missing = [task for task in self.experts if task not in self.data]
        if self.data and missing:
            raise ConfigError(
                f"data names no source for the task {missing[0]!r}; signatures need inputs of every task."
            )
        _check_threads(self.threads)
        for change in self.changes:
            if not isinstance(change, dict) or not {"add", "remove", "sign"} & set(change):
                raise ConfigError(f"A change must be an add, a remove or a sign, not {brief(change)}.")
            if "add" in change and not isinstance(change.get("expert"), str):
                raise ConfigError(f"A change that adds a task must name its expert, unlike {brief(change)}.")
            if "add" in change:
                check_task_name(change["add"])


def describe_build(
    base: Any,
    experts: Mapping[str, Any],
    config: RetexConfig,
    *,
    revisions: Mapping[str, str | None],
    solver: str = "closed_form",
    training: TrainingConfig | None = None,
    model_config: str | dict[str, Any] | None = None,
    check_base: bool = True,
    dtype: torch.dtype | None = None,
) -> Recipe | None:
    """Return the recipe of a build, or None if one of its sources exists only in memory.

    Paths are kept as given. `revisions` holds the commit of every Hub source, because a branch can move.
    """
    if not all(isinstance(source, (str, PathLike)) for source in (base, *experts.values())):
        return None
    return Recipe(
        base=pinned(base, revisions.get(str(base))),
        experts={task: pinned(source, revisions.get(str(source))) for task, source in experts.items()},
        config=changed_fields(config),
        solver=solver,
        training={} if training is None else _plain(changed_fields(training)),
        model_config=model_config,
        check_base=check_base,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        made_with={name: version(name) for name in PACKAGES},
    )


def pinned(source: str | PathLike[str], revision: str | None) -> str:
    """Return a source at a commit, because a branch can move; None leaves it as it is."""
    text = fspath(source)
    return text if revision is None else f"{text.partition('@')[0]}@{revision}"


@contextmanager
def use_threads(threads: int | None) -> Iterator[None]:
    """Use as many threads as a recipe was built with; None keeps torch's number."""
    usual = torch.get_num_threads()
    _check_threads(threads)
    torch.set_num_threads(threads or usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _check_threads(threads: Any) -> None:
    whole = isinstance(threads, int) and not isinstance(threads, bool)
    if threads is not None and not (whole and 1 <= threads <= MOST_THREADS):
        raise ConfigError(f"threads must be a positive number of at most {MOST_THREADS}, not {brief(threads)}.")


def changed_fields(config: RetexConfig | TrainingConfig) -> dict[str, Any]:
    """Return the user-settable fields of a configuration that differ from their defaults."""
    found = {}
    for field in dataclasses.fields(config):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if field.name not in FILLED_ON_BUILD and getattr(config, field.name) != default:
            found[field.name] = getattr(config, field.name)
    return found


def field_names(cls: type, ordered: bool = False) -> Any:
    """Return the names of a dataclass's fields."""
    names = [field.name for field in dataclasses.fields(cls)]
    return names if ordered else set(names)


def kinds_of(cls: type[Recipe]) -> dict[str, str]:
    """Return the annotations of a recipe's fields, for `check_kind`."""
    return {field.name: str(field.type) for field in dataclasses.fields(cls)}


def settable_fields() -> set[str]:
    """Return the fields of RetexConfig that a user can set."""
    return field_names(RetexConfig) - FILLED_ON_BUILD


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _lower(where: str) -> str:
    return where[0].lower() + where[1:]


def _check_keys(values: Any, known: set[str], where: str) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must hold keys and values, not {values!r}.")
    unknown = sorted(str(key) for key in set(values) - known)
    if unknown:
        raise ConfigError(f"{where} has no key {unknown[0]!r}; its keys are {sorted(known)}.")


# Types by annotation, and their description; other annotations are checked where the values are used.
KINDS = {
    "str": (str, "a text"),
    "str | None": (str, "a text"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "int | None": (int, "a whole number"),
}


def check_kind(value: Any, annotation: str, where: str) -> None:
    """Refuse a value that is not of an annotation's type; `where` names it in messages."""
    if annotation == "dict[str, str]":
        if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
            raise ConfigError(f"{where} must hold names and texts, not {brief(value)}.")
    elif annotation.startswith("list[") and not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, not {brief(value)}.")
    elif annotation == "str | list[str] | None":
        if not isinstance(value, str) and not (
            isinstance(value, list) and all(isinstance(part, str) for part in value)
        ):
            raise ConfigError(f"{where} must be a text or a list of texts, not {brief(value)}.")
    elif annotation in KINDS:
        kind, words = KINDS[annotation]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{where} must be {words}, not {brief(value)}.")
