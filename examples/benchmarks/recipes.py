"""Recipes of experiments as YAML files: models, data, readout, and methods to compare.

A recipe has either a `suite` (text, vision, text_to_text, causal, causal_lora: models are made where they are missing)
or `base`, `experts` and `data` (folders or Hub names). Unknown keys are refused, because ignoring one would change the
experiment.

A file may say `like: other.yaml`: it then has the values of that file in the same folder, but for those that it gives
itself, and `rename: {patch32: patch16}` replaces parts of the names of its base and experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from retex_hf import RetexConfig
from retex_hf.errors import ConfigError

SUITES = ("text", "vision", "text_to_text", "causal", "causal_lora")
READOUTS = ("classifier", "zero_shot", "generate")
FILLED_ON_BUILD = {"tasks", "base_model", "experts", "labels", "trunk"}
LIKE, RENAME = "like", "rename"
TEMPLATES = ["a photo of a {}."]


@dataclass(frozen=True)
class DataSource:
    """Source of the data of one task, and the columns of inputs and labels.

    Args:
        path: A folder, or a name on the Hub.
        name: The configuration, for data sets that have several.
        train: The split that methods may see; a part of it is kept for validation.
        test: The split to test on.
        input: A column; a text with columns in braces (a prompt); or two columns (a pair of texts).
        label: The column of class indices.
        classes: Names of the classes, in the order of their indices; default: those of the data set.
        templates: For zero-shot heads: sentences with `{}` for the class; default: those of the readout.
    """

    path: str
    name: str | None = None
    train: str = "train"
    test: str = "test"
    input: str | list[str] | None = None
    label: str = "label"
    classes: list[str] | None = None
    templates: list[str] | None = None


@dataclass(frozen=True)
class Recipe:
    """An experiment's models, data and settings.

    Args:
        suite: A local suite, by the name of its module; excludes `base`, `experts` and `data`.
        base: The pre-trained model: a folder or Hub name.
        experts: Experts of all tasks, including those of `unseen` where they exist.
        data: Data of all tasks, including those of `unseen`.
        readout: How models answer: `classifier`; `{kind: zero_shot, templates: [...]}` for CLIP's image tower with
            heads from the base's text tower; `{kind: generate, ...}` with options of `generate`. Suites have their own.
        tasks: Tasks in the order in which they are added; default: the suite's, or the order of `experts`.
        sizes: Numbers of tasks to compare methods on; default: all of them.
        unseen: Tasks used only for the tests of unseen tasks.
        config: Fields of `RetexConfig`.
        methods: Methods to compare, each a name or `{name: options}`; default: the experiment's own.
        settings: Options by the name of a merge (`merges.py`) or of a method of the main table, over those that the
            experiments give: fewer steps of training, for example. What is not named here runs as its authors run it.
        rows: Test rows per task, drawn at random once; default: all.
        train_rows: Training rows per task that are read, drawn at random once; default: all.
        max_length: Truncate texts to this many tokens.
        seeds: Seeds of all random draws; most experiments use the first.
        batch_size: Rows per batch of the test.
    """

    suite: str | None = None
    base: str | None = None
    experts: dict[str, str] = field(default_factory=dict)
    data: dict[str, DataSource] = field(default_factory=dict)
    readout: dict[str, Any] = field(default_factory=lambda: {"kind": "classifier"})
    tasks: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    methods: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: int | None = None
    train_rows: int | None = None
    max_length: int = 64
    seeds: list[int] = field(default_factory=lambda: [0])
    batch_size: int = 64

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain JSON values."""
        return asdict(self)

    def with_rows(self, rows: int | None) -> Recipe:
        """Return the recipe with another number of test rows, if one is given."""
        return self if rows is None else replace(self, rows=rows)


def read_recipe(file: str | Path) -> Recipe:
    """Read and check a recipe file."""
    file = Path(file)
    return parse_recipe(_inherited(_load(file), file), f"The recipe {file}")


def _load(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The recipe {file} does not exist.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The recipe {file} is not valid YAML: {' '.join(str(error).split())}.") from None


def _inherited(values: Any, file: Path) -> Any:
    """Return the values of a recipe with those that it takes from the one that `like` names."""
    if not isinstance(values, dict) or LIKE not in values:
        return values
    other, names = values[LIKE], values.get(RENAME, {})
    if not (isinstance(other, str) and isinstance(names, dict) and _is_strings([*names, *names.values()])):
        raise ConfigError(f"The recipe {file}: {LIKE} must be a file name, and {RENAME} a mapping of texts.")
    found = _load(file.parent / other)
    if not isinstance(found, dict) or LIKE in found or "base" not in found:
        raise ConfigError(f"The recipe {file}: {other} must be a recipe with base and experts, and not like another.")

    def renamed(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    found["base"] = renamed(found["base"])
    found["experts"] = {task: renamed(expert) for task, expert in found["experts"].items()}
    return {**found, **{key: value for key, value in values.items() if key not in (LIKE, RENAME)}}


def parse_recipe(values: Any, where: str = "The recipe") -> Recipe:
    """Check the values of a recipe; error messages begin with `where`."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must hold keys and values.")
    values = {key: value for key, value in values.items() if value is not None}
    _check_keys(values, {f.name for f in fields(Recipe)}, where)
    for key, (is_allowed, allowed) in RULES.items():
        if key in values and not is_allowed(values[key]):
            raise ConfigError(f"{where}: {key} must be {allowed}, not {values[key]!r}.")
    if "suite" in values:
        given = [key for key in ("base", "experts", "data", "readout", "max_length") if key in values]
        if given:
            raise ConfigError(f"{where}: a suite has its own models, data and readout; it excludes {given[0]}.")
    values = dict(values)
    values["data"] = {task: _data_source(source, task, where) for task, source in values.get("data", {}).items()}
    values["readout"] = _readout(values.get("readout", "classifier"), where)
    values["methods"] = [_method(entry) for entry in values.get("methods", [])]
    _check_keys(values.get("config", {}), {f.name for f in fields(RetexConfig)} - FILLED_ON_BUILD, f"{where}: config")
    RetexConfig(**values.get("config", {}))
    _check_combinations(values, where)
    return Recipe(**values)


def _check_combinations(values: dict[str, Any], where: str) -> None:
    recipe = Recipe(**values)
    if recipe.suite is not None:
        return
    if recipe.base is None or not recipe.experts or not recipe.data:
        raise ConfigError(f"{where} needs a suite, or base, experts and data.")
    for task in recipe.tasks or recipe.experts:
        for key in ("experts", "data"):
            if task not in getattr(recipe, key):
                raise ConfigError(f"{where}: {key} has no entry for task {task!r}.")
    for task in recipe.unseen:
        if task not in recipe.data:
            raise ConfigError(f"{where}: data has no entry for the unseen task {task!r}.")
    for task, source in recipe.data.items():
        if source.templates and recipe.readout["kind"] != "zero_shot":
            raise ConfigError(f"{where}: templates of task {task!r} are for zero_shot, not {recipe.readout['kind']}.")
    count = len(recipe.tasks or [task for task in recipe.experts if task not in recipe.unseen])
    if max(recipe.sizes, default=0) > count:
        raise ConfigError(f"{where}: sizes has {max(recipe.sizes)}, but there are {count} tasks.")


def _data_source(source: Any, task: str, where: str) -> DataSource:
    where = f"{where}: data of task {task!r}"
    if isinstance(source, str):
        return DataSource(path=source)
    if not isinstance(source, dict):
        raise ConfigError(f"{where} must be a path or a mapping, not {source!r}.")
    _check_keys(source, {f.name for f in fields(DataSource)}, where)
    if not isinstance(source.get("path"), str):
        raise ConfigError(f"{where} must have a path.")
    columns = source.get("input")
    if isinstance(columns, list) and not (len(columns) == 2 and _is_strings(columns)):
        raise ConfigError(f"{where}: input must be a column, a prompt or two columns, not {columns!r}.")
    for key in ("classes", "templates"):
        if key in source and not _is_strings(source[key]):
            raise ConfigError(f"{where}: {key} must be a list of texts (quote numbers), not {source[key]!r}.")
    return DataSource(**source)


def _readout(value: str | dict[str, Any], where: str) -> dict[str, Any]:
    readout = {"kind": value} if isinstance(value, str) else dict(value)
    if readout.get("kind") not in READOUTS:
        raise ConfigError(f"{where}: the kind of readout must be one of {READOUTS}, not {readout.get('kind')!r}.")
    if readout["kind"] == "classifier":
        _check_keys(readout, {"kind"}, f"{where}: readout")
    if readout["kind"] == "zero_shot":
        _check_keys(readout, {"kind", "templates"}, f"{where}: readout")
        readout.setdefault("templates", TEMPLATES)
    return readout


def _method(entry: str | dict[str, Any]) -> dict[str, dict[str, Any]]:
    if isinstance(entry, str):
        return {entry: {}}
    ((name, options),) = entry.items()
    return {name: dict(options or {})}


def is_prompt(columns: str) -> bool:
    """Return whether the input of a data source is a text around columns, not a column."""
    return re.search(r"\{\w+\}", columns) is not None


def _check_keys(values: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"{where} has no key {unknown[0]!r}; its keys are {sorted(known)}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_names(value: Any) -> bool:
    return _is_strings(value) and len(set(value)) == len(value)


def _is_method(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) == 1 and all(
            isinstance(name, str) and (options is None or isinstance(options, dict)) for name, options in value.items()
        )
    return isinstance(value, str)


# Key -> (check of a value, description of allowed values).
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "suite": (lambda v: v in SUITES, f"one of {SUITES}"),
    "base": (lambda v: isinstance(v, str) and v != "", "a folder or Hub name"),
    "experts": (
        lambda v: isinstance(v, dict) and all(isinstance(item, str) for pair in v.items() for item in pair),
        "a mapping of tasks to folders or Hub names",
    ),
    "data": (lambda v: isinstance(v, dict) and all(isinstance(task, str) for task in v), "a mapping of tasks to data"),
    "readout": (lambda v: isinstance(v, (str, dict)), f"one of {READOUTS} or a mapping with its kind"),
    "tasks": (_is_names, "a list of different names"),
    "sizes": (lambda v: isinstance(v, list) and all(_is_count(item) for item in v), "a list of numbers of tasks"),
    "unseen": (_is_names, "a list of different names"),
    "config": (lambda v: isinstance(v, dict), "a mapping of fields of RetexConfig"),
    "methods": (
        lambda v: isinstance(v, list) and all(_is_method(item) for item in v),
        "a list of names or {name: options}",
    ),
    "settings": (
        lambda v: isinstance(v, dict) and all(isinstance(k, str) and isinstance(o, dict) for k, o in v.items()),
        "a mapping of names to options",
    ),
    "rows": (_is_count, "a positive integer"),
    "train_rows": (_is_count, "a positive integer"),
    "max_length": (_is_count, "a positive integer"),
    "seeds": (
        lambda v: isinstance(v, list) and v != [] and all(isinstance(item, int) for item in v),
        "a list of integers",
    ),
    "batch_size": (_is_count, "a positive integer"),
}
