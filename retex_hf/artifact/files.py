"""The files of an artifact, verified against their records and used exactly as verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from ..checkpoints import manifest
from ..checkpoints.folder_files import FolderFiles
from ..checkpoints.manifest import FileRecord
from ..checkpoints.sources import Source, open_files, open_state_dict, weight_files
from ..checkpoints.tokenizer_files import is_side_file
from ..config import CONFIG_NAME
from ..errors import ArtifactError, CheckpointError
from ..utils.progress import SECONDS_WITHOUT_BAR, track
from .export_files import is_export_file

WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class ArtifactFiles(FolderFiles):
    """The files of an artifact, except tokenizers and processors, which `preprocess` reads.

    `tensors` holds the weights read into memory, by file; others are memory-mapped on demand.
    """

    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, records: Mapping[str, FileRecord], *, verify: bool, keep: bool) -> ArtifactFiles:
        """Open an artifact's files.

        Args:
            folder: The artifact.
            records: The files that its configuration records.
            verify: Compare their contents with their records.
            keep: Keep weights in memory as verified. Otherwise they are memory-mapped, and a file that is later changed
                in place changes what was read: use this for inspection only.
        """
        own = {name: found for name, found in records.items() if not is_side_file(name)}
        if not verify:  # readers report missing files themselves
            there = {name: found for name, found in own.items() if (folder / name).exists()}
            manifest.check(folder, there, content=False)
            return cls(folder)
        weights = {name: found for name, found in own.items() if name.endswith(WEIGHTS)}
        small = {name: found for name, found in own.items() if name not in weights}
        verified = {name: manifest.read_verified(folder, name, found) for name, found in small.items()}
        if not keep:
            manifest.check(folder, weights)
            return cls(folder, verified)
        # Adapters are for other programs.
        own_weights = {name: found for name, found in weights.items() if not is_export_file(name)}
        return cls(folder, verified, dict(_read_weights(folder, own_weights)))

    def weights(self, stem: str) -> Source:
        """Return the tensors of one part of the artifact, from one file or from shards."""
        try:
            files = weight_files(self.folder, (stem,), suffixes=(WEIGHTS,))
            label = str(files[0]) if len(files) == 1 else f"{self.folder / stem}*{WEIGHTS}"
            if not self.tensors:
                return open_files(files, label)
            return open_state_dict(self._joined(files), label, files=tuple(files))
        except CheckpointError as error:
            raise ArtifactError(str(error)) from None

    def _joined(self, files: list[Path]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file in files:
            if file.name not in self.tensors:
                raise ArtifactError(f"{file} is not one of the files that {CONFIG_NAME} lists.")
            if twice := sorted(tensors.keys() & self.tensors[file.name].keys()):
                raise ArtifactError(
                    f"{file} holds tensor {twice[0]!r}, which another file of the same weights holds too."
                )
            tensors |= self.tensors[file.name]
        return tensors

    def sources(self) -> Iterator[Source]:
        """Open every weight file separately."""
        for file in sorted(self.folder.glob(f"*{WEIGHTS}")):
            if not self.tensors:
                yield open_files([file], str(file))
            elif file.name in self.tensors:
                yield open_state_dict(self.tensors[file.name], str(file))


def _read_weights(folder: Path, records: Mapping[str, FileRecord]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Read each weight file once, so that the verified bytes are the ones used.

    Files are read one after the other, because each briefly needs twice its size. Tensors are copied into torch's own
    aligned memory, on which results depend in their last bit.
    """
    size = sum(found.size for found in records.values())
    with track(title="Reading files", unit="B", total=size, delay=SECONDS_WITHOUT_BAR, leave=False) as bar:
        for name, found in records.items():
            try:
                read = load_safetensors(manifest.read_verified(folder, name, found))
            except (SafetensorError, KeyError) as error:  # KeyError: a dtype unknown to torch
                raise ArtifactError(f"{folder / name} is not a valid safetensors file: {error}.") from None
            yield name, {key: read.pop(key).clone() for key in list(read)}
            bar.update(found.size)
