"""Every knob of ReTeX, validated, with a JSON round trip."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .errors import ConfigError

CONFIG_NAME = "retex_config.json"

ROUTINGS = ("hard", "soft")
POOLINGS = ("mean", "first", "last")
FEATURE_SOURCES = ("merged", "pretrained")


def matches(name: str, patterns: list[str]) -> bool:
    """Whether a parameter matches a pattern: a glob (`*embeddings*`), its name, or the name of a module above it."""
    return any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in patterns)


@dataclass
class RetexConfig:
    """Configuration of a [`RetexModel`].

    Args:
        rank: Rank of the recovered difference of each weight matrix, or `"full"` to store every difference
            exactly. A matrix whose smaller side does not exceed `rank` gets half that side instead.
        task_embedding_dim: Width of the task embedding; default: the number of tasks.
        merge: How experts become one model: a registered method (`"average"`, `"task_arithmetic"`, `"ties"`), the
            same with options (`{"method": "ties", "density": 0.2}`), or the path or Hub id of a finished merge.
        exclude: Patterns of parameters that stay at their merged value for every task (nothing is stored for them).
        heads: `"auto"`, or patterns of the parameters that each task keeps whole. Parameters that the base does not
            have, and output layers whose size differs between experts, are always heads.
        routing: `"hard"` recovers the most likely task of a row, `"soft"` the mixture given by the probabilities.
        temperature: Of the softmax over negative residuals.
        feature_layer: Where the features that identify a task are read: a module name, an index into the model's
            blocks (negative counts from the end), or `"auto"`, which picks the shallowest block that identifies
            held-out reference inputs as well as the best one does.
        feature_pooling: `"mean"` over unmasked tokens, or the `"first"` or `"last"` unmasked token.
        feature_source: Features of the `"merged"` model, or of the `"pretrained"` one (which is then stored too).
        num_reference: Number of reference inputs per task that `fit_signatures` takes.
        signature_rank: Dimension of a task's subspace: an integer, or a ratio of `min(num_reference, width)`.
        tasks: Names of the tasks, filled in on build.
        base_model: Where the base came from (`id`, `revision`), filled in on build.
        experts: Where each expert came from, filled in on build.
        labels: Per task, what its head means (`id2label`, `problem_type`), filled in on build.

    Example:
        >>> from retex_hf import RetexConfig
        >>> config = RetexConfig(rank=64, merge={"method": "task_arithmetic", "scale": 0.3}, exclude=["*embeddings*"])
        >>> config.rank
        64
    """

    rank: int | str = 256
    task_embedding_dim: int | None = None
    merge: str | dict[str, Any] = "average"
    exclude: list[str] = field(default_factory=list)
    heads: str | list[str] = "auto"
    routing: str = "hard"
    temperature: float = 1.0
    feature_layer: str | int = "auto"
    feature_pooling: str = "mean"
    feature_source: str = "merged"
    num_reference: int = 64
    signature_rank: int | float = 0.1
    tasks: list[str] = field(default_factory=list)
    base_model: dict[str, Any] | None = None
    experts: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.rank == "full" or _is_int(self.rank, 1), "rank", self.rank, 'a positive integer or "full"')
        _require(
            self.task_embedding_dim is None or _is_int(self.task_embedding_dim, 1),
            "task_embedding_dim", self.task_embedding_dim, "a positive integer or None",
        )  # fmt: skip
        if isinstance(self.merge, os.PathLike):
            self.merge = os.fspath(self.merge)
        if isinstance(self.merge, dict):
            _require(isinstance(self.merge.get("method"), str), "merge", self.merge, 'a dict with a "method" name')
        else:
            _require(
                isinstance(self.merge, str) and self.merge != "",
                "merge",
                self.merge,
                "a method name, dict or path",
            )
        _require(_is_strings(self.exclude), "exclude", self.exclude, "a list of parameter-name patterns")
        _require(
            self.heads == "auto" or _is_strings(self.heads),
            "heads",
            self.heads,
            '"auto" or a list of patterns',
        )
        _require(self.routing in ROUTINGS, "routing", self.routing, f"one of {ROUTINGS}")
        _require(
            _is_number(self.temperature) and 0 < self.temperature < math.inf,
            "temperature", self.temperature, "a number above 0",
        )  # fmt: skip
        _require(
            _is_int(self.feature_layer) or (isinstance(self.feature_layer, str) and self.feature_layer != ""),
            "feature_layer", self.feature_layer, 'a module name, an index or "auto"',
        )  # fmt: skip
        _require(self.feature_pooling in POOLINGS, "feature_pooling", self.feature_pooling, f"one of {POOLINGS}")
        _require(
            self.feature_source in FEATURE_SOURCES,
            "feature_source",
            self.feature_source,
            f"one of {FEATURE_SOURCES}",
        )
        _require(_is_int(self.num_reference, 1), "num_reference", self.num_reference, "a positive integer")
        _require(
            _is_int(self.signature_rank, 1)
            or (isinstance(self.signature_rank, float) and 0 < self.signature_rank <= 1),
            "signature_rank", self.signature_rank, "a positive integer or a ratio in (0, 1]",
        )  # fmt: skip
        _require(
            _is_strings(self.tasks) and len(set(self.tasks)) == len(self.tasks),
            "tasks",
            self.tasks,
            "unique names",
        )
        _require(self.base_model is None or isinstance(self.base_model, dict), "base_model", self.base_model, "a dict")
        for name in ("experts", "labels"):
            _require(_is_dict_of_dicts(getattr(self, name)), name, getattr(self, name), "a dict of task name to dict")
        self.exclude, self.tasks = list(self.exclude), list(self.tasks)
        self.heads = self.heads if self.heads == "auto" else list(self.heads)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RetexConfig:
        """The inverse of `to_dict`; an unknown field is an error, because ignoring it would change the model."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"RetexConfig has no field {unknown[0]!r}; its fields are {sorted(known)}.")
        return cls(**values)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write `retex_config.json` into a folder."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> RetexConfig:
        """Read `retex_config.json` from a folder."""
        values = read_config_file(Path(folder) / CONFIG_NAME)
        values.pop("artifact", None)
        return cls.from_dict(values)


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object in a `retex_config.json`; the artifact's own section is under the key `"artifact"`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(values).__name__}.")
    return values


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"RetexConfig.{name} must be {allowed}, not {value!r}.")


def _is_int(value: Any, minimum: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (minimum is None or value >= minimum)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_dict_of_dicts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, dict) for k, v in value.items())


def _is_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
