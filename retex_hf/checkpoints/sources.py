"""Sources of tensors: safetensors files, `.bin` files, or memory. Names and shapes are known before a tensor is read,
and files are memory-mapped, so reading one tensor costs only that tensor."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, brief
from ..utils.strict_files import read_json
from .torch_files import read_torch_file

# Supported dtypes. For others (complex, eight bits and fewer, wide unsigned ones) torch lacks operations, or the values
# have a meaning only together with scales stored beside them.
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPES = frozenset(SAFETENSORS_DTYPES.values())
# Real names have about a hundred characters; the time to process a name may grow with its length.
LONGEST_NAME = 1000


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Source(ABC):
    """A set of named tensors. `label` names them in messages; `folder` holds the config files, `files` the tensors.
    `packed` means that the stored tensors are quantised, as the config says, while `read` returns plain ones.
    `optional` are tensors of zeros that a model need not have. `whole` is the SentenceTransformer that a `model` in
    memory is a part of."""

    label: str
    infos: dict[str, TensorInfo]
    folder: Path | None = None
    model: nn.Module | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    whole: nn.Module | None = None
    packed: bool = False
    optional: frozenset[str] = frozenset()

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return one tensor."""

    def identity(self) -> dict[str, Any]:
        """Return a fingerprint of these tensors: names, sizes and times of the files, or a digest of the values."""
        if self.files:
            states = {str(file.resolve()): file.stat() for file in self.files}
            return {path: [state.st_size, state.st_mtime_ns] for path, state in states.items()}
        digest = hashlib.blake2b()
        for name in self.infos:
            digest.update(name.encode())
            digest.update(self.read(name).detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return {"digest": digest.hexdigest()}


@dataclass
class MemorySource(Source):
    """The tensors of a state dict or a module."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach()


@dataclass
class SafetensorsSource(Source):
    """The tensors of safetensors files."""

    handles: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        return self.handles[name].get_tensor(name)


def open_state_dict(tensors: Mapping[str, Tensor], label: str, **kwargs: Any) -> MemorySource:
    """Return a source over tensors in memory."""
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{label}: a tensor's name must be a string, not {name!r}.")
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{label}: {name!r} must be a tensor, not a {type(value).__name__}.")
        check_plain(f"{label}: tensor {name!r}", value)
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return MemorySource(label, infos, tensors=tensors, **kwargs)


def check_module(module: nn.Module, label: str) -> None:
    """Refuse a module whose tensors cannot be exchanged for others."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise CheckpointError(
            f"{label} {'is' if isinstance(module, torch.jit.ScriptModule) else 'holds'} a TorchScript module, which "
            "cannot be copied with other weights: give the module that it was made from."
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_initialised(f"{label}: tensor {name!r}", tensor)


def check_initialised(what: str, tensor: Tensor) -> None:
    """Refuse a tensor of a lazy module that has not run yet; `what` names it."""
    if is_lazy(tensor):
        raise CheckpointError(f"{what} has no shape yet: run the module once first.")


def check_plain(what: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not dense, or not of plain real numbers; `what` names it."""
    check_initialised(what, tensor)
    if tensor.is_meta:
        raise CheckpointError(f"{what} is on the meta device: it has no numbers.")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        raise CheckpointError(f"{what} has the layout {layout}, expected a dense tensor.")
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{what} has the unsupported dtype {tensor.dtype}.")


def open_files(
    files: list[Path], label: str, *, more_dtypes: Mapping[str, torch.dtype] | None = None, **kwargs: Any
) -> Source:
    """Return a source over weight files, all safetensors (with `more_dtypes` allowed) or all `torch.save` files."""
    if all(file.suffix == ".safetensors" for file in files):
        return _open_safetensors(files, label, {**SAFETENSORS_DTYPES, **(more_dtypes or {})}, **kwargs)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_torch_file(file).items():
            _check_name(file, name, tensors)
            tensors[name] = tensor
    return open_state_dict(tensors, label, files=tuple(files), **kwargs)


def _check_name(file: Path, name: Any, known: Mapping[str, Any]) -> None:
    if name in known:
        raise CheckpointError(f"{file} holds tensor {name!r}, which another file of the same weights holds too.")
    if isinstance(name, str) and len(name) > LONGEST_NAME:
        raise CheckpointError(f"{file} holds a tensor whose name has {len(name)} characters: {brief(name, 60)}.")


def _open_safetensors(
    files: list[Path], label: str, dtypes: Mapping[str, torch.dtype], **kwargs: Any
) -> SafetensorsSource:
    infos: dict[str, TensorInfo] = {}
    handles: dict[str, Any] = {}
    for file in files:
        try:
            handle = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                _check_name(file, name, infos)
                piece = handle.get_slice(name)
                infos[name] = TensorInfo(tuple(piece.get_shape()), dtypes[piece.get_dtype()])
                handles[name] = handle
        except FileNotFoundError:  # safetensors also raises this for files that are not readable
            problem = "cannot be read: Permission denied" if file.exists() else "does not exist"
            raise CheckpointError(f"{file} {problem}.") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a valid safetensors file: {error}.") from None
        except KeyError as error:
            raise CheckpointError(f"{file}: tensor {name!r} has the unsupported dtype {error}.") from None
    return SafetensorsSource(label, infos, handles=handles, files=tuple(files), **kwargs)


def weight_files(
    folder: Path, stems: tuple[str, ...], suffixes: tuple[str, ...] = (".safetensors", ".bin")
) -> list[Path]:
    """Return a folder's weight files: the first found of `stem.safetensors`, its shards, `stem.bin`, its shards."""
    for suffix in suffixes:
        for stem in stems:
            single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
            if single.is_file():
                return [single]
            if index.is_file():
                return _shards(index, suffix)
    expected = " or ".join(f"{stem}{suffixes[0]}" for stem in stems)
    raise CheckpointError(f"{folder} holds no weights: expected {expected}, or shards of it.")


def is_plain_name(name: str) -> bool:
    """Return whether a name is a plain file name, without a path, on any system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _shards(index: Path, suffix: str) -> list[Path]:
    names = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f'{index} is not a valid shard index: expected names of files under "weight_map".')
    for name in names.values():
        if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(suffix):
            raise CheckpointError(f"{index} names {name!r}, which is not a {suffix} file beside it.")
    names = sorted(set(names.values()))
    for name in names:
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index.parent / name} is missing, but {index.name} lists it.")
    return [index.parent / name for name in names]
