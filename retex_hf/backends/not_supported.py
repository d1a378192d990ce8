"""Functions of the backend protocol for libraries whose models have no such thing: each refuses in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from ..checkpoints.folder_files import FolderFiles
from ..checkpoints.sources import Source
from ..errors import CheckpointError


def architecture(folder: Path) -> NoReturn:
    raise CheckpointError(f"{folder} does not say which class its model has.")


def vetted_config(folder: Path, files: FolderFiles | None = None) -> NoReturn:
    raise CheckpointError(f"{folder} holds a model that has no configuration.")


def load_on_meta(folder: Path, source: Source) -> NoReturn:
    raise CheckpointError(f"{folder} does not say which class its model has, so it cannot be made.")


def describe(
    model: nn.Module, model_config: str | dict[str, Any] | None, folder: Path | None, sibling: nn.Module | None
) -> NoReturn:
    raise CheckpointError(f"A {type(model).__name__} takes no model_config.")


def set_labels(model: nn.Module, labels: dict[str, Any]) -> NoReturn:
    raise CheckpointError(f"A {type(model).__name__} has no labels that can be set.")


def resize_vocabulary(model: nn.Module, size: int, widest: int, base: Source) -> NoReturn:
    raise _no_vocabulary(model)


def set_vocabulary(model: nn.Module, size: int, token_ids: Mapping[str, Any]) -> NoReturn:
    raise _no_vocabulary(model)


def own_token_ids(model: nn.Module, source: Source, size: int) -> NoReturn:
    raise _no_vocabulary(model)


def _no_vocabulary(model: nn.Module) -> CheckpointError:
    return CheckpointError(f"A {type(model).__name__} cannot have task-specific tokens.")
