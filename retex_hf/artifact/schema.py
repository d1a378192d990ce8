"""The schema of a saved folder: its file names, and the "artifact" section of `retex_config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

from ..backends import LIBRARIES, library_of
from ..checkpoints import manifest
from ..checkpoints.manifest import IF_MEANT
from ..config import CONFIG_NAME, RetexConfig, read_config_file
from ..errors import ArtifactError, ConfigError, brief
from ..recovery import ComponentLayout, Layout, RecoveryModule
from ..recovery.components import COMPONENTS, ROUNDED
from ..recovery.layout import KINDS, MATRIX, ORDERS, VECTOR
from ..utils.strict_files import is_count
from .sealing import FORMAT_VERSION, seal
from .state import RetexParts

RECOVERY, SIGNATURES, HEADS, ROWS, PRETRAINED = (
    "retex_recovery",
    "retex_signatures",
    "retex_heads",
    "retex_rows",
    "retex_pretrained",
)
TRAINING_NAME, RECIPE_NAME, EVALUATION_NAME = "retex_training.json", "retex_recipe.yaml", "retex_evaluation.json"
TASK_EMBEDDING = "task_embedding"
# Files that a new save replaces; everything else in the folder belongs to the user and is kept.
OWN_FILES = (
    "retex_*", "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "open_clip_config.json", "open_clip_model.safetensors", "diffusion_pytorch_model*.safetensors",
    "diffusion_pytorch_model.safetensors.index.json", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
)  # fmt: skip
# Further files that show that a folder already holds a model.
FOREIGN_MODELS = (
    "adapter_config.json",
    "pytorch_model*.bin",
    "open_clip_pytorch_model.bin",
    "diffusion_pytorch_model*.bin",
)
# Files that transformers would read instead of the merged model or apply to it: adapters, version-specific
# configurations, and checkpoints of distributed training (which are pickled).
TAKEN_FOR_MODELS = ("adapter_config.json", "adapter_model*", "config.*.json", ".metadata", "*.distcp")


def described_weights(parts: RetexParts) -> dict[str, Any]:
    """Return the configuration's entries for the weights other than the merged model's."""
    rows = {task: {name: list(tensor.shape) for name, tensor in own.items()} for task, own in parts.rows.items()}
    return {
        "library": library_of(parts.model).NAME,
        "recovery": {name: _entry_to_json(parts.recovery, name, parts.errors.get(name)) for name in parts.recovery},
        "heads": {
            task: {name: list(tensor.shape) for name, tensor in head.items()} for task, head in parts.heads.items()
        },
        **({"rows": rows} if rows else {}),
    }


def head_key(task: str, name: str) -> str:
    """Return the name of a task's head tensor in the file of all heads."""
    return f"{task}/{name}"


def _entry_to_json(recovery: RecoveryModule, name: str, error: float | None) -> dict[str, Any]:
    """Describe how one parameter is recovered: its layout, its generator and its error."""
    layout = recovery[name].layout
    values: dict[str, Any] = {"shape": list(layout.shape), "kind": layout.kind}
    if isinstance(layout, ComponentLayout):
        values = layout.to_json()
    elif layout.kind == MATRIX:
        values |= {"batch": layout.batch, "rows": layout.rows, "columns": layout.columns, "rank": layout.rank}
        values |= {"order": layout.order, "inner_rank": layout.inner_rank}
    return values | {
        "generator": recovery.generator_name(name),
        "scaled": recovery.scale(name) is not None,
        "error": error if error is None or isfinite(error) else None,
    }


def read_manifest(folder: Path, section: dict[str, Any]) -> dict[str, manifest.FileRecord]:
    """Return the records of an artifact's files from its configuration."""
    return manifest.from_json(folder / CONFIG_NAME, section.get("files"))


class OtherVersion(ArtifactError):
    """The artifact has another format version."""


def read_description(folder: Path, *, verify: bool = True) -> tuple[RetexConfig, dict[str, Any]]:
    """Return the configuration of a folder and its "artifact" section.

    With `verify`, refuse a configuration that was changed after it was written; it contains its own checksum.
    """
    try:
        values = read_config_file(folder / CONFIG_NAME)
    except ConfigError as error:
        raise ArtifactError(f"{folder} is not a ReTeX artifact: {error}") from None
    path = folder / CONFIG_NAME
    section = values.get("artifact")
    if not isinstance(section, dict):
        raise ArtifactError(f'{path} has no "artifact" section: it is a configuration, not a saved model.')
    if section.get("format_version") != FORMAT_VERSION:
        raise OtherVersion(
            f"{path} has format version {brief(section.get('format_version'))}; this library reads version "
            f"{FORMAT_VERSION}: build it again from its experts, with `retex build` and its recipe or with "
            "RetexModel.from_experts."
        )
    if verify and section.get("seal") != seal(values):
        raise ArtifactError(f"{path} is not as it was saved: its own checksum does not match. {IF_MEANT}")
    del values["artifact"]
    library = section.get("library")
    if not isinstance(library, str) or library not in LIBRARIES:
        raise ArtifactError(f"{path}: library {brief(library)} is not one of {sorted(LIBRARIES)}.")
    try:
        config = RetexConfig.from_dict(values)
    except (ConfigError, TypeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    if not config.tasks:
        raise ArtifactError(f"{path} names no tasks.")
    return config, section


@dataclass(frozen=True)
class Entry:
    """The configuration's description of one recovered parameter."""

    layout: Layout | ComponentLayout
    generator: str
    scaled: bool
    error: float | None

    @classmethod
    def from_json(cls, folder: Path, name: str, values: Any) -> Entry:
        try:
            fields: dict[str, Any] = {"generator": name, "scaled": False, "error": None, **values}
            own = {key: fields.pop(key) for key in ("generator", "scaled", "error")}
            components = fields.get("kind") in (COMPONENTS, ROUNDED)
            layout = ComponentLayout.from_json(fields) if components else _paper_layout(fields)
            valid = isinstance(own["generator"], str) and isinstance(own["scaled"], bool) and _is_error(own["error"])
            # Components are neither shared between layers nor scaled.
            valid = valid and not (components and (own["generator"] != name or own["scaled"]))
        except (TypeError, AttributeError, KeyError, ValueError):
            valid = False
        if not valid:
            raise ArtifactError(f"{folder / CONFIG_NAME}: the recovery of {name!r} is not valid: {brief(values)}.")
        return cls(layout, **own)


def _paper_layout(fields: dict[str, Any]) -> Layout:
    layout = Layout(**{**fields, "shape": tuple(fields["shape"])})
    if not _is_valid(layout):
        raise ValueError
    return layout


def _is_valid(layout: Layout) -> bool:
    inner = 1 if layout.inner_rank is None else layout.inner_rank
    sizes = (*layout.shape, layout.batch, layout.rows, layout.columns, layout.rank, inner)
    if layout.kind not in KINDS or layout.order not in ORDERS:
        return False
    if not all(is_count(size) for size in sizes):
        return False
    if layout.kind == MATRIX:
        return prod(layout.shape) == prod(layout.stacked_shape) > 0 and layout.rank >= inner > 0
    # Only a matrix uses the other fields of a layout.
    return layout == Layout(layout.shape, layout.kind) and (layout.kind == VECTOR or prod(layout.shape) > 0)


def _is_error(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < inf)
