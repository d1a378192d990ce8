"""The protocol of a backend: what the rest of the library asks of the module of a model library.

A backend is a module with these names; `LIBRARIES` lists all of them. Functions that do not apply to a library's models
are those of `not_supported`, which refuse in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoints.folder_files import FolderFiles
from ..checkpoints.inventory import Inventory
from ..checkpoints.sources import Source, TensorInfo
from .input_forms import InputForm

Model = TypeVar("Model", bound=nn.Module, contravariant=True)


class Backend(Protocol[Model]):
    """The functions and constants of a backend for models of the class `Model`.

    A `folder` holds a checkpoint, whose weights are `source`. `files` are the files of an artifact as verified, which
    are read instead of those in the folder. Folders, sources and configurations are untrusted.
    """

    # ---- constants ---------------------------------------------------------------------------------------------------

    NAME: str
    """The library's name in an artifact and on its card."""
    CONFIG: str
    """The file name of a model's configuration."""
    WEIGHTS_STEM: str
    """The file name of a model's weights, without shard number and ending."""
    SHARDED: bool
    """Whether the library reads weights in several files."""
    NAMES_FIELDS: bool
    """Whether `forward` returns named fields, and a tuple of them with `return_dict=False`."""

    # ---- recognition -------------------------------------------------------------------------------------------------

    def owns(self, model: nn.Module) -> bool:
        """Return whether a model is of this library."""

    def architecture(self, folder: Path) -> str:
        """Return the name of the architecture in a folder, which experts must share."""

    # ---- reading -----------------------------------------------------------------------------------------------------

    def vetted_config(self, folder: Path, files: FolderFiles | None = None) -> dict[str, Any]:
        """Return the configuration in a folder; refuse one that would run code or fetch files."""

    def limited(self, folder: Path, source: Source) -> AbstractContextManager[None]:
        """Refuse, within this context, to make a model that its weights could not fill."""

    def plan(self, folder: Path, source: Source, *, files: FolderFiles | None = None) -> nn.Module:
        """Return a folder's model on the meta device, after comparing its weights with its configuration."""

    def load_on_meta(self, folder: Path, source: Source) -> nn.Module:
        """Return a folder's model on the meta device; missing weights are reported later."""

    def load(
        self,
        folder: Path,
        source: Source,
        *,
        files: FolderFiles | None = None,
        copy: bool = True,
        strict: bool = True,
        **options: Any,
    ) -> nn.Module:
        """Return a folder's model with its weights; without `copy`, it may use the memory of the source itself."""

    def describe(
        self,
        model: Model,
        model_config: str | dict[str, Any] | None,
        folder: Path | None,
        sibling: nn.Module | None,
    ) -> None:
        """Attach the configuration to a model of a library (in `DESCRIBED`) whose models do not keep theirs."""

    def cast(self, model: Model, dtype: torch.dtype) -> None:
        """Convert a model to a dtype in place, as the library does."""

    # ---- writing -----------------------------------------------------------------------------------------------------

    def save(self, model: Model, folder: Path, max_shard_size: str | int) -> None:
        """Write weights and configuration as the library does."""

    def save_config(self, model: Model, folder: Path) -> None:
        """Write the configuration alone."""

    def saved_names(self, model: Model) -> list[str]:
        """List the tensors that `save` writes, tied ones once."""

    def file_form(self, model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors from the model's names and shapes to those of its files."""

    def index_metadata(self, model: Model) -> dict[str, Any]:
        """Return the library's own entries in the index of sharded weights."""

    # ---- tensors of experts ------------------------------------------------------------------------------------------

    def align(
        self, model: Model, source: Source
    ) -> tuple[dict[str, tuple[TensorInfo, Callable[[], Tensor]]], list[str]]:
        """Return a checkpoint's tensors under the model's names, read on demand, and its names that do not fit."""

    def check_configuration(self, model: Model, source: Source, *, is_base: bool = False) -> None:
        """Refuse an expert, or the base, whose configuration makes it compute otherwise than the model."""

    def head_names(self, model: Model, names: list[str]) -> set[str]:
        """Return which parameters belong to the output layer of a task."""

    # ---- labels and tokens -------------------------------------------------------------------------------------------

    def labels_of(self, source: Source) -> dict[str, Any]:
        """Return a checkpoint's label maps, `id2label` and `label2id`; empty if it has none."""

    def num_labels(self, model: Model) -> int | None:
        """Return the number of classes; None if the model is no classifier."""

    def set_labels(self, model: Model, labels: dict[str, Any]) -> None:
        """Give a classifier's configuration the labels of a task."""

    def vocabulary_names(self, model: Model, inventory: Inventory) -> list[str]:
        """Return the parameters with one row per token; empty if tasks cannot have tokens of their own."""

    def resize_vocabulary(self, model: Model, size: int, widest: int, base: Source) -> None:
        """Give a model `size` tokens; special tokens from there up to `widest` become those of the base."""

    def set_vocabulary(self, model: Model, size: int, token_ids: Mapping[str, Any]) -> None:
        """Give a model's configuration the vocabulary size and special tokens of a task."""

    def own_token_ids(self, model: Model, source: Source, size: int) -> dict[str, Any]:
        """Return an expert's special token ids that differ from the model's and are among its `size` tokens."""

    # ---- running -----------------------------------------------------------------------------------------------------

    def main_inputs(self, model: Model) -> tuple[str, ...]:
        """Return the names of the model's main inputs; of a dual encoder, those that are not text."""

    def row_inputs(self, model: Model) -> tuple[str, ...]:
        """Return the names of inputs that tell how many rows a batch has; the first that is given counts."""

    def input_form(self, model: Model) -> InputForm | None:
        """Return what the main input looks like; None where nothing says so."""

    def feature_root(self, model: Model) -> nn.Module:
        """Return the module in which inputs become features."""

    def feature_call(self, model: Model) -> tuple[str, str]:
        """Return the path of the submodule that turns inputs into features, and its method that does."""

    def is_dual_encoder(self, model: Model) -> bool:
        """Return whether a model encodes two inputs separately, such as CLIP."""

    def is_text_parameter(self, name: str) -> bool:
        """Return whether a parameter of a dual encoder belongs to the text encoder."""
