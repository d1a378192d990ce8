"""Load task data from `datasets` objects, folders, files and the Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, load_dataset, load_from_disk

from ..errors import EvaluationError, first_line
from ..utils.paths import as_path
from ..utils.strict_files import read_json
from .data_files import Images, check_csv, check_json, read_arrays
from .parquet_files import check_parquet
from .task_data import Inputs, TaskData

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
CHECKS = {"json": check_json, "csv": check_csv, "parquet": check_parquet}
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
LABELS_FILE = "labels.json"
INPUT_COLUMNS = ("text", "sentence", "image", "img")
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text_a", "text_b"),
)
LABEL_COLUMNS = ("label", "labels", "target", "answer")
# owner/name, or a bare name; then :configuration and @revision.
HUB_NAME = re.compile(r"(?P<path>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^@]+))?(?:@(?P<revision>.+))?")
# A column name within a prompt.
COLUMN = re.compile(r"{(\w+)}")

Source = str | Path | Dataset | DatasetDict


def load_task(
    name: str,
    source: Source,
    *,
    split: str = "test",
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_names: Sequence[str] | None = None,
) -> TaskData:
    """Load one task's data.

    Args:
        name: Name of the task.
        source: A `Dataset` (taken whole) or `DatasetDict`; a folder that `save_to_disk` wrote, that holds
            `<split>.jsonl`, `.json`, `.csv` (also with `.gz`) or `.parquet`, or images as `<split>/<class>/<file>`; one
            such file; an `.npz` file with the arrays `<split>_x` and `<split>_y`; or a Hub name, `owner/name`, with
            `:configuration` and `@revision` where needed. Beside files, `labels.json` (for `a.npz`: `a.json`) may name
            the classes, as a list or under the key "labels".
        split: The split to load.
        input_column: The column of texts or images; two columns for pairs of texts; or a prompt with columns in braces.
            Default: found by common names, and refused where there are several.
        label_column: The column of labels. Default: found likewise.
        label_names: The classes in the order of the head. Labels that carry names are looked up in it, so data that
            number the classes in another order are read correctly. Default: the names in the data.

    Returns:
        Class indices as answers, or texts where labels are texts and no classes are named.
    """
    if isinstance(source, (str, Path)) and Path(source).suffix == ".npz":
        return _load_arrays(name, _typed_path(name, source), split, label_names)
    data, named = _load(name, source, split)
    label = _label_column(name, data, label_column)
    columns = _input_columns(name, data, input_column, label)
    feature = data.features[label]
    own = feature.names if isinstance(feature, ClassLabel) else named
    answers = _answers(name, list(data[label]), own, label_names)
    texts = any(isinstance(answer, str) for answer in answers)
    return TaskData(name, _inputs(name, data, columns), answers, None if texts else label_names or own)


def load_inputs(
    name: str, source: Source, *, split: str = "train", input_column: str | Sequence[str] | None = None
) -> Inputs:
    """Load one task's inputs, whether or not they are labelled.

    `source` is anything that `load_task` takes, and also a `.txt` file of one input per line (with a tab between the
    texts of a pair), or a folder of images without classes.
    """
    path = _typed_path(name, source) if isinstance(source, (str, Path)) else None
    if path is not None and path.suffix == ".npz":
        return _read_arrays(name, path, f"{split}_x")[0]
    if path is not None and path.suffix == ".txt" and path.is_file():
        return _read_lines(name, path)
    if path is not None and (images := [file for file in (path, path / split) if _images_in(file)]):
        return _inputs(name, _image_files(_images_in(images[0])), "image")
    data, _ = _load(name, source, split)
    label = next((column for column in LABEL_COLUMNS if column in data.column_names), "")
    return _inputs(name, data, _input_columns(name, data, input_column, label))


def _load(name: str, source: Source, split: str) -> tuple[Dataset, list[str] | None]:
    """Return the split of a source, and its class names where a file beside it has them."""
    if isinstance(source, (str, Path)):
        path = _typed_path(name, source)
        data, named = _load_path(name, path, split) if path.exists() else (_load_hub(name, str(source), split), None)
    else:
        data, named = _part(name, source, split, "the data"), None
    for column in [column for column, feature in data.features.items() if isinstance(feature, Image)]:
        data = data.cast_column(column, Image(decode=False))  # `Images` decodes them, within limits
    return data, named


def _typed_path(name: str, source: str | Path) -> Path:
    try:
        return as_path(source, EvaluationError)
    except EvaluationError as error:
        raise EvaluationError(f"Task {name!r}: {error}") from None


def _read_lines(name: str, path: Path) -> list[str | tuple[str, str]]:
    try:
        # `splitlines` would also split at characters that may occur within a text.
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except UnicodeDecodeError:
        raise EvaluationError(f"Task {name!r}: {path} is not text in UTF-8.") from None
    if not lines:
        raise EvaluationError(f"Task {name!r}: {path} is empty.")
    return [read_line(line) for line in lines]


def read_line(line: str) -> str | tuple[str, str]:
    """Parse a line of a text file: a text, or a pair of texts separated by a tab."""
    parts = line.split("\t")
    return (parts[0], parts[1]) if len(parts) == 2 else line


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix.lower() in IMAGE_SUFFIXES) if folder.is_dir() else []


def _image_files(files: Sequence[Path], labels: Sequence[str] | None = None) -> Dataset:
    """Return image files as a dataset, with their classes where `labels` is given."""
    columns: dict[str, Any] = {"image": [str(file) for file in files]}
    features: dict[str, Any] = {"image": Image(decode=False)}
    if labels is not None:
        features["label"] = ClassLabel(names=sorted(set(labels)))
        columns["label"] = list(labels)
    return Dataset.from_dict(columns, features=Features(**features))


def _read_arrays(name: str, path: Path, *wanted: str) -> list[np.ndarray]:
    if not path.is_file():
        raise EvaluationError(f"Task {name!r}: {path} does not exist.")
    return read_arrays(path, wanted, f"Task {name!r}: {path}")


def _load_arrays(name: str, path: Path, split: str, label_names: Sequence[str] | None) -> TaskData:
    inputs, labels = _read_arrays(name, path, f"{split}_x", f"{split}_y")
    own = _read_names(path.with_suffix(".json"))
    return TaskData(name, inputs, _answers(name, labels.tolist(), own, label_names), label_names or own)


def _load_path(name: str, path: Path, split: str) -> tuple[Dataset, list[str] | None]:
    """Return the split of a folder or file, and its class names where a file beside it has them."""
    if path.is_file():
        return _load_file(name, path), _read_names(path.parent / LABELS_FILE)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _part(name, _load_saved(name, path), split, str(path)), None
    files = sorted(file for file in path.glob(f"{split}.*") if _loader(file))
    if len(files) > 1:
        raise EvaluationError(
            f"Task {name!r}: {path} holds {files[0].name} and {files[1].name}; one file must be the split."
        )
    if files:
        return _load_file(name, files[0]), _read_names(path / LABELS_FILE)
    images = sorted(file for file in (path / split).glob("*/*") if file.suffix.lower() in IMAGE_SUFFIXES)
    if images:
        return _image_files(images, [file.parent.name for file in images]), None
    raise EvaluationError(
        f"Task {name!r}: {path} holds no {split} file ({', '.join(LOADERS)}), no images as {split}/<class>/<file>, and "
        "nothing that save_to_disk wrote."
    )


def _loader(file: Path) -> str | None:
    """Return the builder of `datasets` that reads a file, by its suffix before that of a compression."""
    suffixes = file.suffixes[:-1] if file.suffix == ".gz" else file.suffixes
    return LOADERS.get(suffixes[-1]) if suffixes else None


def _load_saved(name: str, folder: Path) -> Dataset | DatasetDict:
    try:
        return load_from_disk(str(folder))
    except Exception as error:  # `datasets` may raise anything on a broken folder
        raise EvaluationError(f"Task {name!r}: {folder} cannot be read ({first_line(error)}).") from error


def _load_file(name: str, file: Path) -> Dataset:
    loader = _loader(file)
    if loader is None:
        raise EvaluationError(f"Task {name!r}: {file} is not one of {', '.join([*LOADERS, '.npz'])}.")
    if not file.stat().st_size:
        raise EvaluationError(f"Task {name!r}: {file} is empty.")
    CHECKS[loader](file, f"Task {name!r}: {file}")
    try:
        return load_dataset(loader, data_files=str(file), split="train")
    except Exception as error:  # the reader may raise anything on a broken file
        reason = first_line(error.__cause__ or error)  # `datasets` says what it did, the cause what is wrong
        raise EvaluationError(f"Task {name!r}: {file} cannot be read ({reason}).") from error


def _load_hub(name: str, source: str, split: str) -> Dataset:
    found = HUB_NAME.fullmatch(source)
    if found is None or _loader(Path(source)) or Path(source).suffix == ".txt":
        raise EvaluationError(
            f"Task {name!r}: {source} does not exist, and is not a Hub name (owner/name, :configuration, @revision)."
        )
    try:
        return load_dataset(found["path"], found["config"], split=split, revision=found["revision"])
    except Exception as error:  # network errors, a missing repository or a missing split
        raise EvaluationError(
            f"Task {name!r}: {source} is neither a local file or folder, nor a Hub dataset whose split {split!r} can "
            f"be loaded ({first_line(error)})."
        ) from error


def _part(name: str, data: Dataset | DatasetDict, split: str, where: str) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if not isinstance(data, DatasetDict):
        raise EvaluationError(
            f"Task {name!r}: data must be a Dataset, a DatasetDict, a path or a Hub name, not {type(data).__name__}."
        )
    if split not in data:
        raise EvaluationError(f"Task {name!r}: {where} has no split {split!r}, only {sorted(data)}.")
    return data[split]


def _read_names(path: Path) -> list[str] | None:
    if not path.is_file():
        return None
    names = read_json(path, EvaluationError, kind=None)
    names = names.get("labels") if isinstance(names, dict) else names
    if not isinstance(names, list) or not all(isinstance(label, str) for label in names):
        raise EvaluationError(f'{path} must hold the names of the classes, as a list or under the key "labels".')
    return names


def _input_columns(name: str, data: Dataset, given: str | Sequence[str] | None, label: str) -> str | tuple[str, ...]:
    """Return the input: a column, several columns, or a prompt."""
    there = data.column_names
    if given is not None:
        columns = given if isinstance(given, str) else tuple(given)
        if isinstance(columns, tuple):
            wanted = list(columns)
        else:
            wanted = COLUMN.findall(columns) if "{" in columns else [columns]
        for column in wanted:
            _require_column(name, column, there)
        return columns
    found: list[str | tuple[str, ...]] = [column for column in INPUT_COLUMNS if column in there]
    found += [pair for pair in PAIRS if set(pair) <= set(there)]
    if not found:
        others = {column: feature for column, feature in data.features.items() if column not in (label, *LABEL_COLUMNS)}
        found = [column for column, feature in others.items() if isinstance(feature, Image) or _is_text(feature)]
    if len(found) != 1:
        fault = (
            f"any of {', '.join(map(_title, found))} could be the input" if found else "no column looks like an input"
        )
        raise EvaluationError(f"Task {name!r}: {fault} among {there}; say which with input_column.")
    return found[0]


def _label_column(name: str, data: Dataset, given: str | None) -> str:
    there = data.column_names
    if given is not None:
        _require_column(name, given, there)
        return given
    found = [column for column in LABEL_COLUMNS if column in there]
    found = found or [column for column, feature in data.features.items() if isinstance(feature, ClassLabel)]
    if len(found) != 1:
        fault = f"any of {', '.join(map(_title, found))} could be the label" if found else "there is no label column"
        raise EvaluationError(f"Task {name!r}: {fault} among {there}; say which with label_column.")
    return found[0]


def _is_text(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def _require_column(name: str, column: str, there: Sequence[str]) -> None:
    if column not in there:
        raise EvaluationError(f"Task {name!r}: the data have no column {column!r}, only {list(there)}.")


def _title(column: str | tuple[str, ...]) -> str:
    return repr(column) if isinstance(column, str) else " with ".join(map(repr, column))


def _inputs(name: str, data: Dataset, columns: str | tuple[str, ...]) -> Sequence[Any]:
    if isinstance(columns, tuple):
        return list(zip(*(data[column] for column in columns), strict=True))
    if "{" in columns:
        return [_filled(columns, row) for row in data]
    # Images are decoded on access.
    return Images(name, data, columns) if isinstance(data.features[columns], Image) else list(data[columns])


def _filled(prompt: str, row: Mapping[str, Any]) -> str:
    """Return a prompt with the values of a row in place of its columns."""
    # `str.format` would let a prompt read attributes of a value, or ask for a gigabyte of padding.
    return COLUMN.sub(lambda found: str(row[found[1]]), prompt)


def _answers(name: str, labels: Sequence[Any], own: Sequence[str] | None, wanted: Sequence[str] | None) -> list[Any]:
    """Return labels as class indices in the order of `wanted` (else of `own`), or unchanged where nothing names them.

    Missing labels (None, -1) and others that are no answers are passed on; evaluation refuses them by row.
    """
    order = {label: index for index, label in enumerate(wanted or own or ())}

    def index(row: int, label: Any) -> Any:
        if isinstance(label, float) and label.is_integer():
            label = int(label)  # CSV files give integers as floats where one is missing
        if wanted is not None and own is not None and isinstance(label, int) and 0 <= label < len(own):
            label = own[label]
        if not isinstance(label, str) or not order:
            return label
        if label not in order:
            raise EvaluationError(f"Task {name!r}: row {row} has label {label!r}, which is not one of {list(order)}.")
        return order[label]

    return [index(row, label) for row, label in enumerate(labels)]
