"""Configuration of ReTeX: all options, validated, with a JSON round trip."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .errors import ConfigError, brief
from .utils.atomic_file import whole_file
from .utils.atomic_folder import check_target
from .utils.byte_sizes import parse_size
from .utils.paths import as_path
from .utils.strict_files import read_json
from .utils.terminal import visible

CONFIG_NAME = "retex_config.json"

RECOVERIES = ("offset", "affine")
FACTOR_ORDERS = ("generated_first", "shared_first")
SOFT_SAMPLERS = ("dirichlet", "uniform_softmax", "gaussian_softmax")
ROUTINGS = ("hard", "soft")
FAR = ("merged", "soft")
# Chosen with examples/benchmarks/far_inputs.py.
FAR_QUANTILE, FAR_SLACK = 0.95, 1.0
POOLINGS = ("mean", "first", "last")
FEATURE_SOURCES = ("merged", "pretrained")
RECOVERY_DTYPES = ("float32", "bfloat16", "float16", "int8")
SIGNATURES = ("auto", "inputs", "weights")
IDENTIFICATIONS = ("whitened", "residual")
WEIGHTINGS = ("tasks", "plain")
PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
NUMBER = re.compile(r"\s*\d*\.?\d+(?:[eE][+-]?\d+)?\s*")
# Fields that say how offsets of a given rank are made.
OF_RANKS = (
    "inner_rank", "task_embedding_dim", "recovery", "recovery_dtype", "factor_order", "share_layers", "soft_training",
)  # fmt: skip
# Fields under which the exact solver knows the plain sum of squares alone.
PLAIN_ONLY = ("task_embedding_dim", "recovery", "share_layers", "soft_training")
# Chosen on validation rows (examples/benchmarks/bytes.py): the least share of every curve's plateau.
DEFAULT_STORAGE = "2%"
PAPER_RANK = 256
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# The names of special-token fields in model configurations.
TOKEN_ID = re.compile(r"[a-z][a-z0-9_]*_token_id")
# The limit of torch's integers and of most JSON parsers.
LARGEST_INTEGER = 2**63
# Each pattern is matched against every parameter name, in time proportional to the product of the two lengths.
MOST_PATTERNS, LONGEST_PATTERN = 5_000, 1_000


# PEFT's name for the model without an adapter, in `adapter_names`.
BASE = "__base__"
TASK_NAME = (
    "a non-empty string of at most 200 characters, without surrounding spaces and control characters, other than "
    f"{BASE!r}"
)


def is_task_name(name: Any) -> bool:
    """Return whether a value is a valid task name (`TASK_NAME`): it gets printed, drawn and published."""
    fits = isinstance(name, str) and 0 < len(name) <= 200 and name == name.strip() and name == visible(name)
    return fits and name != BASE


def check_task_name(name: Any) -> None:
    """Refuse an invalid task name."""
    if name == BASE:
        raise ConfigError(f"A task cannot be called {BASE!r}: in adapter_names that means the merged model.")
    if not is_task_name(name):
        raise ConfigError(f"A task name must be {TASK_NAME}, not {brief(name)}.")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a parameter matches a pattern: a glob (`*embeddings*`), its name, or that of a parent module."""
    return any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in patterns)


@dataclass(frozen=True)
class RetexConfig:
    """Configuration of a [`RetexModel`].

    Args:
        storage: Budget in bytes: a share of the experts' bytes (`0.01`, `"1%"`; every expert counts as large as the
            merged model, without heads), or a size (`"50MB"`). It is spent where it lowers the error most: on
            directions that a task has to itself or that tasks share, on tensors as they are, at 2 to 16 bits per
            number. The task embedding (4 bytes for every pair of tasks) is part of it, and is stored even where the
            budget is smaller. Default: `"2%"`, unless `rank` is given.
        rank: The same rank for the recovered difference of each weight matrix, as in the paper, used instead of
            `storage`; or `"full"` to store every difference exactly. A matrix whose smaller side does not exceed `rank`
            gets half that side instead.
        weighting: How the exact solver adds up errors. `"tasks"` counts every task's error relative to the size of its
            own difference from the merged model (and, half as strongly, every layer's), `"plain"` adds up the squares,
            as the paper does.
            Default, filled in on build: `"tasks"`; `"plain"` where it is the only one there is (`task_embedding_dim`,
            `recovery="affine"`, `share_layers`, `soft_training`, and `solver="adam"`).
        inner_rank: ReTeX-E: the generated factor is itself a product of this rank. It spans the same space as
            `rank=inner_rank`, and exists to reproduce the paper.
        task_embedding_dim: Width of the task embedding; default: the number of tasks. A narrower one makes tasks share
            generator rows.
        merge: How to merge the experts: a registered method (`"average"`, `"task_arithmetic"`, `"ties"`,
            `"dare_ties"`, `"model_stock"`, ...: `retex_hf.merge_methods()`, docs/merging.md), the same with options
            (`{"method": "ties", "density": 0.2, "weights": {"a": 1, "b": 0.5}}`), or the path or Hub id of a finished
            merge. `"consensus"` and `"adamerging"` learn from data (`from_experts(..., calibration=...)`); the learned
            values are then stored among the options.
        recovery: `"offset"` adds an offset to the merged weights; `"affine"` also scales them, by one learned gamma per
            task and layer.
        recovery_dtype: Storage type of the factors: `"float32"`, `"bfloat16"`, `"float16"`, or `"int8"` with one scale
            per row. Factors are converted after solving or training; arithmetic is in float32.
        factor_order: `"generated_first"` (`G_t S`) or `"shared_first"` (`S G_t`).
        share_layers: Let parameters of the same shape share generator and factor, and so one offset; not allowed with
            `rank="full"`.
        soft_training: None recovers single tasks; `"dirichlet"` (or `{"method": "dirichlet", "alpha": 1.0}`),
            `"uniform_softmax"` and `"gaussian_softmax"` minimise the expected loss over task mixtures drawn from that
            distribution.
        exclude: Patterns of parameters that stay at their merged value for every task (nothing is stored for them).
        heads: `"auto"`, or patterns of the parameters that are stored in full for each task. Parameters that the base
            does not have, and output layers whose size differs between experts, are always heads.
        routing: `"hard"` recovers the most likely task of a row, `"soft"` the mixture given by the probabilities.
            `{"method": "hard", "far": "merged"}` also sets how to run out-of-distribution rows: on the merged model
            (`"merged"`, with the nearest task's head), or on the mixture (`"soft"`). A row is out-of-distribution if
            its residual to the nearest task exceeds `slack` times what a share of `quantile` of that task's inputs do
            not exceed, judged by held-out references; so `1 - quantile` is the rate of false alarms (with n references
            at least `1 / (n + 1)`). A task with fewer than 4 references has no such threshold, and no row is
            out-of-distribution for it.
        temperature: Temperature of the softmax over negative residuals; default: the one at which the probabilities of
            held-out references are right, or 1 where tasks are identified by weights.
        signatures: What identifies the task of a row: reference `"inputs"` given to `fit_signatures`, or the experts'
            `"weights"`, which need none: a row belongs to the task whose update responds most to it, compared with how
            it responds to synthetic inputs (random tokens, drawn images). `"auto"` takes weights until there are
            references.
        identification: How features are compared with those of references: by the distance to a task's subspace, as
            the paper does (`"residual"`), or by the same distance over up to four layers, in which directions count
            less the more inputs of one task vary along them (`"whitened"`).
        feature_layer: Layer from which the features that identify a task are read: a module name, an index into the
            model's blocks (negative counts from the end), or `"auto"`, which picks the shallowest block of the last
            two thirds that identifies held-out reference inputs, as they are and perturbed, as well as the best one
            does. With `signatures="weights"` all layers up to this
            one count, and `"auto"` is the last block.
        feature_pooling: `"mean"` over unmasked tokens, or the `"first"` or `"last"` unmasked token.
        feature_source: Model that computes the features: the `"merged"` one, or the `"pretrained"` one (which is then
            stored too).
        shared_trunk: Let rows whose task is identified begin on the merged model: the pass that identifies a row is
            then the beginning of its expert's own pass, and what it hands to the expert's next layer is aligned with
            what the expert's own layers would. True shares the layers up to the feature layer; `"auto"` the deepest
            trunk up to there within `trunk_tolerance`, or none. Rows whose task is named run on the whole expert.
            `fit_signatures` reports how much the outputs change.
        trunk_tolerance: Share of right answers (classes, or next tokens) that `"auto"` lets the trunk lose, as expected
            from the experts' own probabilities on held-out references, on average over tasks; where a model gives no
            answers, ten times as much is the distance that outputs may move back towards the merged model, relative to
            the expert's.
        num_reference: Number of reference inputs per task that `fit_signatures` takes.
        signature_rank: Dimension of a task's subspace: an integer, or a ratio of `min(num_reference, width)`, as in the
            paper.
        tasks: Names of the tasks, filled in on build.
        base_model: Source of the base (`id`, `revision`), filled in on build.
        experts: Source of each expert, filled in on build.
        labels: Labels of each task's head (`id2label`, `problem_type`), filled in on build.
        vocabulary: Vocabulary of each task, where vocabularies differ: its `size`, its own `token_ids`, and whether it
            has its own `tokenizer`; filled in on build.
        trunk: The shared trunk and its cost, filled in by `fit_signatures`.
        task_bytes: Bytes of `storage` for each task, filled in on build: `add_task` gives one more task as many,
            whatever `storage` is changed to later.

    Example:
        >>> from retex_hf import RetexConfig
        >>> RetexConfig().storage
        '2%'
        >>> config = RetexConfig(rank=64, merge={"method": "task_arithmetic", "scale": 0.3}, exclude=["*embeddings*"])
        >>> config.rank, config.storage
        (64, None)
        >>> RetexConfig(routing={"method": "hard", "far": "merged"}).routing["far"]
        'merged'
    """

    storage: float | str | None = None
    rank: int | str | None = None
    weighting: str | None = None
    inner_rank: int | None = None
    task_embedding_dim: int | None = None
    merge: str | dict[str, Any] = "average"
    recovery: str = "offset"
    recovery_dtype: str = "float32"
    factor_order: str = "generated_first"
    share_layers: bool = False
    soft_training: str | dict[str, Any] | None = None
    exclude: list[str] = field(default_factory=list)
    heads: str | list[str] = "auto"
    routing: str | dict[str, Any] = "hard"
    temperature: float | None = None
    signatures: str = "auto"
    identification: str = "whitened"
    feature_layer: str | int = "auto"
    feature_pooling: str = "mean"
    feature_source: str = "merged"
    shared_trunk: bool | str = False
    trunk_tolerance: float = 0.005
    num_reference: int = 64
    signature_rank: int | float = 6
    tasks: list[str] = field(default_factory=list)
    base_model: dict[str, Any] | None = None
    experts: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, dict[str, Any]] = field(default_factory=dict)
    vocabulary: dict[str, dict[str, Any]] = field(default_factory=dict)
    trunk: dict[str, Any] | None = None
    task_bytes: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.merge, os.PathLike):
            self._store(merge=os.fspath(self.merge))
        for name, (is_allowed, allowed) in RULES.items():
            if not is_allowed(getattr(self, name)):
                raise ConfigError(f"RetexConfig.{name} must be {allowed}, not {brief(getattr(self, name))}.")
        # Copies, so that a list that the caller changes later does not change the configuration.
        self._store(**{name: deepcopy(getattr(self, name)) for name in RULES})
        self._store(exclude=list(self.exclude), tasks=list(self.tasks))
        self._store(heads=self.heads if self.heads == "auto" else list(self.heads))
        self._check_combinations()

    def _store(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the fields are frozen for everyone else

    def _check_combinations(self) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        changed = [name for name in OF_RANKS if getattr(self, name) != defaults[name]]
        if self.rank is None and changed:
            raise ConfigError(
                f"RetexConfig.{changed[0]} is for factors of one rank: give rank too (RetexConfig.paper() has "
                f"{PAPER_RANK}). A budget of storage chooses what is kept of every layer, and its bits."
            )
        if self.rank is not None and self.storage is not None:
            raise ConfigError("RetexConfig.rank and storage exclude each other: storage chooses ranks and bits itself.")
        if self.rank is None and self.storage is None:
            self._store(storage=DEFAULT_STORAGE)
        plain = [name for name in PLAIN_ONLY if getattr(self, name) != defaults[name]]
        if self.weighting == "tasks" and plain:
            raise ConfigError(f'RetexConfig.weighting="tasks" and {plain[0]} exclude each other.')
        if self.inner_rank is not None and isinstance(self.rank, int) and self.inner_rank > self.rank:
            raise ConfigError(
                f"RetexConfig.inner_rank must not exceed rank ({self.rank}), not {self.inner_rank}: "
                "A_t B spans no more than A_t has columns."
            )
        if self.rank == "full" and self.share_layers:
            raise ConfigError(
                'RetexConfig.rank="full" stores every difference exactly, which layers that share one offset '
                "(share_layers) cannot have: give a number as rank, or leave out share_layers."
            )
        if self.recovery == "affine" and self.soft_training is not None:
            raise ConfigError('RetexConfig.recovery="affine" and soft_training exclude each other.')
        if self.shared_trunk and (self.signatures == "weights" or self.feature_source != "merged"):
            raise ConfigError(
                'RetexConfig.shared_trunk needs signatures of reference inputs and feature_source="merged": the trunk '
                "identifies a row, and the row's expert continues from it."
            )
        if self.signatures == "weights" and routing_options(self.routing)["far"] is not None:
            raise ConfigError(
                'RetexConfig.routing with "far" needs signatures of reference inputs, which set its threshold.'
            )
        if self.recovery == "affine" and self.signatures == "weights":
            raise ConfigError(
                'RetexConfig.recovery="affine" and signatures="weights" exclude each other: a scaled weight is no '
                "low-rank update."
            )

    @classmethod
    def paper(cls, **options: Any) -> RetexConfig:
        """Return the paper's own setting: one rank of 256 everywhere, float32, the plain sum of squared errors, and
        tasks identified by residuals at the last layer, to subspaces of a tenth of the references' number.

        >>> from retex_hf import RetexConfig
        >>> RetexConfig.paper().rank, RetexConfig.paper(rank=64, recovery="affine").rank
        (256, 64)
        """
        paper = {"rank": PAPER_RANK, "weighting": "plain"}
        paper |= {"identification": "residual", "feature_layer": -1, "signature_rank": 0.1}
        return cls(**{**paper, **options})

    def with_weighting(self, solver: str) -> RetexConfig:
        """Return the configuration with the weighting that a solver uses, where none was given."""
        if self.weighting == "tasks" and solver == "adam":
            raise ConfigError('RetexConfig.weighting="tasks" is for the exact solver; solver="adam" has objective.')
        if self.weighting is not None:
            return self
        defaults = {f.name: f.default for f in fields(self)}
        plain = solver == "adam" or any(getattr(self, name) != defaults[name] for name in PLAIN_ONLY)
        return replace(self, weighting="plain" if plain else "tasks")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RetexConfig:
        """Invert `to_dict`. Refuse unknown fields: ignoring one would change the model."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"RetexConfig has no field {unknown[0]!r}; its fields are {sorted(known)}.")
        return cls(**values)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write `retex_config.json` into a folder."""
        with whole_file(check_target(save_directory) / CONFIG_NAME) as file:
            file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> RetexConfig:
        """Read `retex_config.json` from a folder."""
        values = read_config_file(as_path(folder, ConfigError) / CONFIG_NAME)
        values.pop("artifact", None)
        return cls.from_dict(values)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a `retex_config.json`; the artifact's own section is under the key `"artifact"`."""
    return read_json(path, ConfigError)


def _is_int(value: Any, minimum: int | None = None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= LARGEST_INTEGER:
        return False
    return minimum is None or value >= minimum


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_dict_of_dicts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, dict) for k, v in value.items())


def _is_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _is_patterns(value: Any) -> bool:
    return _is_strings(value) and len(value) <= MOST_PATTERNS and all(len(item) <= LONGEST_PATTERN for item in value)


PATTERNS = f"a list of patterns for parameter names, at most {MOST_PATTERNS} of at most {LONGEST_PATTERN} characters"


def _is_labels(value: Any) -> bool:
    if not _is_dict_of_dicts(value):
        return False
    for described in value.values():
        names, kind = described.get("id2label"), described.get("problem_type")
        if not isinstance(names, dict) or set(names) != {str(index) for index in range(len(names))}:
            return False
        if not _is_strings(list(names.values())) or not (kind is None or kind in PROBLEM_TYPES):
            return False
    return True


def _is_vocabulary(value: Any) -> bool:
    if not _is_dict_of_dicts(value):
        return False
    for described in value.values():
        if set(described) != {"size", "token_ids", "tokenizer"} or not isinstance(described["tokenizer"], bool):
            return False
        size, ids = described["size"], described["token_ids"]
        if not _is_int(size, 1) or size >= 2**31 or not isinstance(ids, dict):
            return False
        for key, value in ids.items():
            numbers = value if isinstance(value, list) and value else [value]
            if not (isinstance(key, str) and TOKEN_ID.fullmatch(key) and all(_is_int(i) and i < size for i in numbers)):
                return False
    return True


def _is_trunk(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or set(value) != {"junction", "axis", "parameters", "cached", "replayed", "cost"}:
        return False
    if not isinstance(value["junction"], str) or not _is_strings(value["parameters"]):
        return False
    if not all(isinstance(value[key], bool) for key in ("replayed", "cached")):
        return False
    costs, axis = value["cost"], value["axis"]
    return (
        isinstance(axis, int) and not isinstance(axis, bool) and -8 <= axis < 0
        and _is_dict_of_dicts(costs)
        and all("change" in cost and all(_is_number(number) for number in cost.values()) for cost in costs.values())
    )  # fmt: skip


def _is_storage(value: Any) -> bool:
    if isinstance(value, str) and NUMBER.fullmatch(value):  # as command lines give it; a size must have a unit
        value = float(value)
    if not isinstance(value, str):
        return _is_number(value) and 0 < value <= 1
    share = PERCENT.fullmatch(value)
    if share is not None:
        return 0 < float(share[1]) <= 100
    try:
        return parse_size(value, "storage") > 0
    except ConfigError:
        return False


def overridden(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a configuration, overridden by others; a rank and a budget of storage replace each other.

    >>> from retex_hf.config import overridden
    >>> overridden({"rank": 8, "recovery_dtype": "int8", "merge": "ties"}, {"storage": "1%"})
    {'merge': 'ties', 'storage': '1%'}
    """
    replaced: tuple[str, ...] = ()
    if options.get("storage") is not None:
        replaced = ("rank", *OF_RANKS)
    elif options.get("rank") is not None:
        replaced = ("storage",)
    return {**{name: value for name, value in given.items() if name not in replaced}, **options}


def storage_bytes(storage: float | str, experts: int) -> float:
    """Return `RetexConfig.storage` in bytes, for experts of as many bytes together.

    >>> from retex_hf.config import storage_bytes
    >>> storage_bytes(0.01, 2000), storage_bytes("0.5%", 2000), storage_bytes("3KB", 2000)
    (20.0, 10.0, 3000)
    """
    if not isinstance(storage, str) or NUMBER.fullmatch(storage):
        return float(storage) * experts
    share = PERCENT.fullmatch(storage)
    return parse_size(storage, "storage") if share is None else float(share[1]) / 100 * experts


def _is_soft_training(value: Any) -> bool:
    if value is None:
        return True
    options = dict(value) if isinstance(value, dict) else {"method": value}
    method = options.pop("method", None)
    if method != "dirichlet":
        return method in SOFT_SAMPLERS and not options
    alpha = options.pop("alpha", 1.0)
    return _is_number(alpha) and 0 < alpha < math.inf and not options


def _is_routing(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, str) and value in ROUTINGS
    options = dict(value)
    method, far = options.pop("method", None), options.pop("far", None)
    if not isinstance(method, str) or method not in ROUTINGS:
        return False
    if far is None:
        return not options
    quantile, slack = options.pop("quantile", FAR_QUANTILE), options.pop("slack", FAR_SLACK)
    # Soft routing mixes every row already.
    fits = isinstance(far, str) and far in FAR and (method, far) != ("soft", "soft")
    numbers = _is_number(quantile) and 0 < quantile <= 1 and _is_number(slack) and 0 < slack < math.inf
    return fits and numbers and not options


def routing_options(routing: str | dict[str, Any]) -> dict[str, Any]:
    """Return `RetexConfig.routing` with defaults filled in: `method`, `far` (None: never abstain), `quantile`, `slack`.

    >>> from retex_hf.config import routing_options
    >>> routing_options("hard")["far"], routing_options({"method": "hard", "far": "merged"})["quantile"]
    (None, 0.95)
    """
    if not _is_routing(routing):
        raise ConfigError(f"RetexConfig.routing must be {RULES['routing'][1]}, not {routing!r}.")
    given = routing if isinstance(routing, dict) else {"method": routing}
    return {"far": None, "quantile": FAR_QUANTILE, "slack": FAR_SLACK, **given}


# Field -> (check of a value, description of the allowed values).
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rank": (lambda v: v is None or v == "full" or _is_int(v, 1), 'a positive integer, "full" or None'),
    "inner_rank": (lambda v: v is None or _is_int(v, 1), "a positive integer or None"),
    "storage": (
        lambda v: v is None or _is_storage(v),
        'a share of the experts\' bytes, as a number in (0, 1] or such as "1%", a size (a text in B, kB, KB, MB, GB, '
        'TB, KiB, MiB, GiB or TiB, such as "50MB"), or None',
    ),
    "weighting": (lambda v: v is None or v in WEIGHTINGS, f"one of {WEIGHTINGS} or None"),
    "task_embedding_dim": (
        lambda v: v is None or (_is_int(v, 1) and v <= 65_536),
        "a positive integer of at most 65536 or None",
    ),
    "merge": (
        lambda v: isinstance(v["method"] if isinstance(v, dict) and "method" in v else v, str) and v != "",
        'a method name, a dict with a "method" name, or a path',
    ),
    "recovery": (lambda v: v in RECOVERIES, f"one of {RECOVERIES}"),
    "recovery_dtype": (lambda v: v in RECOVERY_DTYPES, f"one of {RECOVERY_DTYPES}"),
    "factor_order": (lambda v: v in FACTOR_ORDERS, f"one of {FACTOR_ORDERS}"),
    "share_layers": (lambda v: isinstance(v, bool), "True or False"),
    "soft_training": (
        _is_soft_training,
        f'None, one of {SOFT_SAMPLERS}, or {{"method": "dirichlet", "alpha": a number above 0}}',
    ),
    "exclude": (lambda v: _is_patterns(v), PATTERNS),
    "heads": (lambda v: v == "auto" or _is_patterns(v), f'"auto" or {PATTERNS}'),
    "routing": (
        lambda v: _is_routing(v),
        f'one of {ROUTINGS}, or {{"method": one of them, "far": "merged" (or "soft", with "hard"), "quantile": a share '
        'in (0, 1], "slack": a number above 0}',
    ),
    "temperature": (lambda v: v is None or (_is_number(v) and 0 < v < math.inf), "a number above 0, or None"),
    "signatures": (lambda v: v in SIGNATURES, f"one of {SIGNATURES}"),
    "identification": (lambda v: v in IDENTIFICATIONS, f"one of {IDENTIFICATIONS}"),
    "feature_layer": (
        lambda v: _is_int(v) or (isinstance(v, str) and v != ""),
        'a module name, an index or "auto"',
    ),
    "feature_pooling": (lambda v: v in POOLINGS, f"one of {POOLINGS}"),
    "feature_source": (lambda v: v in FEATURE_SOURCES, f"one of {FEATURE_SOURCES}"),
    "shared_trunk": (lambda v: isinstance(v, bool) or v == "auto", 'True, False or "auto"'),
    "trunk_tolerance": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "num_reference": (lambda v: _is_int(v, 1), "a positive integer"),
    "signature_rank": (
        lambda v: _is_int(v, 1) or (isinstance(v, float) and 0 < v <= 1),
        "a positive integer or a ratio in (0, 1]",
    ),
    "tasks": (
        lambda v: _is_strings(v) and len(set(v)) == len(v) and all(map(is_task_name, v)),
        f"unique names, each {TASK_NAME}",
    ),
    "base_model": (lambda v: v is None or isinstance(v, dict), "a dict"),
    "experts": (lambda v: _is_dict_of_dicts(v), "a dict of task name to dict"),
    "labels": (
        lambda v: _is_labels(v),
        f'a dict of task name to {{"id2label": {{"0": name, ...}}, "problem_type": None or one of {PROBLEM_TYPES}}}',
    ),
    "vocabulary": (
        lambda v: _is_vocabulary(v),
        'a dict of task name to {"size": a number of tokens, "token_ids": {"pad_token_id": a number below it, ...}, '
        '"tokenizer": True or False}',
    ),
    "task_bytes": (lambda v: v is None or (_is_number(v) and 0 < v < math.inf), "a number above 0, or None"),
    "trunk": (
        lambda v: _is_trunk(v),
        'None, or {"junction": a module name, "axis": a negative number, "parameters": names, "cached": True or False, '
        '"replayed": True or False, "cost": {task: {"change": a number}}}',
    ),
}
