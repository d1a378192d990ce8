"""The merged model while it is being built: in memory, or in files as its library writes them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import Backend
from ..checkpoints import Checkpoint, Inventory, Source, TensorInfo
from ..checkpoints.tensor_store import Store
from ..errors import CheckpointError


class MergedTensors(Mapping[str, Tensor]):
    """The merged tensors under the model's names. `units` are groups of names that must be written together."""

    units: list[tuple[str, ...]]

    @abstractmethod
    def write(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Store the tensors of one unit, cast to the model's dtypes; None keeps what the model computes."""

    @abstractmethod
    def tensors_of(self, unit: tuple[str, ...]) -> list[Tensor]:
        """Return the tensors that `write` fills."""


class ModelTensors(MergedTensors):
    """The tensors of a model in memory."""

    def __init__(self, model: nn.Module, inventory: Inventory) -> None:
        self._tensors = model.state_dict()
        self.units = [(name,) for name in (*inventory.shapes, *inventory.integers)]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def write(self, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                self._tensors[name].copy_(tensor)

    def tensors_of(self, unit: tuple[str, ...]) -> list[Tensor]:
        return [self._tensors[name] for name in unit]


class FileTensors(MergedTensors):
    """The tensors of a model on the meta device, kept in a store in the library's file format.

    Written tensors go through the library's own conversion, and are read back like any checkpoint.
    """

    def __init__(self, model: nn.Module, library: Backend, inventory: Inventory, store: Store) -> None:
        self._model, self._library = model, library
        self._meta = model.state_dict()
        # A tied tensor is merged under one of its names, and may be saved under another, or under several.
        leaders = {alias: name for name, aliases in inventory.aliases.items() for alias in aliases}
        self._saved: dict[str, list[str]] = {}
        for name in library.saved_names(model):
            self._saved.setdefault(leaders.get(name, name), []).append(name)
        self._files = self._plan()
        self.units = list(self._files)
        meta = library.file_form(model, {name: self._meta[name] for names in self._saved.values() for name in names})
        infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in meta.items()}
        self._check(infos)
        self._stored = store.allocate("model", infos, library.index_metadata(model))
        source = StoredSource("the merged model", infos, tensors=self._stored)
        self._checkpoint = Checkpoint.from_entries(source.label, library.align(model, source)[0], inventory)
        lost = [name for name in inventory.shapes if name not in self._checkpoint]
        if lost:
            raise CheckpointError(f"{type(model).__name__} is saved without its tensor {lost[0]!r}.")

    def _plan(self) -> dict[tuple[str, ...], list[str]]:
        """Group names into units, with their tensors' names in files; names that share a file tensor form one unit."""
        files = {name: self._to_files({name: self._meta[name]}) for name in self._saved}
        owner: dict[str, str] = {}
        units: dict[str, list[str]] = {}
        for name, tensors in files.items():
            first = next((owner[file] for file in tensors if file in owner), name)
            units.setdefault(first, []).append(name)
            owner |= dict.fromkeys(tensors, first)
        planned = {}
        for names in units.values():
            planned[tuple(names)] = list(self._to_files({name: self._meta[name] for name in names}))
        return planned

    def _to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._library.file_form(
            self._model, {saved: tensor for name, tensor in tensors.items() for saved in self._saved[name]}
        )

    def _check(self, infos: Mapping[str, TensorInfo]) -> None:
        """Refuse a model whose files differ between conversion unit by unit and all at once."""
        found = {}
        for unit in self.units:
            for name, tensor in self._to_files({name: self._meta[name] for name in unit}).items():
                found[name] = TensorInfo(tuple(tensor.shape), tensor.dtype)
        if found != dict(infos):
            wrong = sorted(name for name in {*found, *infos} if found.get(name) != infos.get(name))
            raise CheckpointError(
                f"{type(self._model).__name__} cannot be written tensor by tensor ({wrong[0]!r} depends on others): "
                "build without output_dir, and save."
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._checkpoint.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.entries)

    def __len__(self) -> int:
        return len(self._checkpoint.entries)

    def write(self, tensors: Mapping[str, Tensor | None]) -> None:
        cast = {}
        for name, tensor in tensors.items():
            if tensor is None:
                raise CheckpointError(
                    f"No checkpoint holds {name!r}, which {type(self._model).__name__} computes: "
                    "build without output_dir, and save."
                )
            cast[name] = tensor.to("cpu", self._meta[name].dtype)
        for name, tensor in self._to_files(cast).items():
            self._stored[name].copy_(tensor)

    def tensors_of(self, unit: tuple[str, ...]) -> list[Tensor]:
        return [self._stored[name] for name in self._files[unit]]


@dataclass
class StoredSource(Source):
    """Tensors of a store, under their names in files."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Copy a model without its values; keep ties."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return deepcopy(model, memo)
