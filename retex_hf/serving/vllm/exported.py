"""Reading of what `retex export --for vllm` has written into an artifact."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ...artifact.export_files import EXPORT_NAME, EXPORT_VERSION, check_adapters
from ...artifact.sealing import FORMAT_VERSION, seal
from ...config import CONFIG_NAME, RetexConfig, read_config_file
from ...errors import ArtifactError
from ...routing.signatures import Signatures, stored_shapes
from ...utils.strict_files import read_json

SIGNATURES, PRETRAINED = "retex_signatures.safetensors", "retex_pretrained.safetensors"


@dataclass(frozen=True)
class Exported:
    """An artifact with adapters for vLLM: its configuration, its signatures, and what the server must be told."""

    folder: Path
    config: RetexConfig
    signatures: Signatures
    dtype: str
    max_rank: int
    max_labels: int | None
    adapters: dict[str, Path]

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks, in the order of their ids."""
        return self.config.tasks

    def labels(self, task: str) -> dict[int, str]:
        """Return the names of a task's classes."""
        named = self.config.labels.get(task, {}).get("id2label", {})
        return {int(index): str(name) for index, name in named.items()}


def read_exported(folder: Path) -> Exported:
    """Read an exported artifact; refuse one whose small files are not as they were recorded.

    The merged model's weights and the adapters are read by vLLM, which does not verify them: `retex verify` does.
    """
    if not (folder / EXPORT_NAME).is_file():
        raise ArtifactError(
            f"{folder} has no {EXPORT_NAME}: run `retex export {folder} --all --for vllm` where retex_hf builds models."
        )
    values = read_config_file(folder / CONFIG_NAME)
    section: Any = values.pop("artifact", None)
    if not isinstance(section, dict) or section.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(f"{folder / CONFIG_NAME} is not an artifact's of format version {FORMAT_VERSION}.")
    if section.get("seal") != seal({**values, "artifact": section}):
        raise ArtifactError(f"{folder / CONFIG_NAME} is not as it was saved: its own checksum does not match.")
    config = RetexConfig.from_dict(values)
    for name in (EXPORT_NAME, SIGNATURES):
        _check_recorded(folder, name, section)
    exported = read_json(folder / EXPORT_NAME, ArtifactError)
    adapters: Any = exported.get("adapters")
    if (
        exported.get("version") != EXPORT_VERSION
        or not isinstance(adapters, dict)
        or set(adapters) != set(config.tasks)
    ):
        raise ArtifactError(f"{folder / EXPORT_NAME} does not fit the artifact: export it again.")
    check_adapters(folder, section["files"])
    return Exported(
        folder=folder,
        config=config,
        signatures=_read_signatures(folder, section.get("signatures"), len(config.tasks)),
        dtype=exported["dtype"],
        max_rank=exported["max_lora_rank"],
        max_labels=exported["max_labels"],
        adapters={task: folder / adapters[task]["folder"] for task in config.tasks},
    )


def _check_recorded(folder: Path, name: str, section: dict[str, Any]) -> None:
    recorded = section.get("files", {}).get(name, {}).get("sha256")
    try:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{folder / name} cannot be read: {error.strerror}.") from None
    if found != recorded:
        raise ArtifactError(f"{folder / name} is not the file that {CONFIG_NAME} records: export the artifact again.")


def _read_signatures(folder: Path, description: Any, tasks: int) -> Signatures:
    shapes, tensors = stored_shapes(description, tasks), load_file(folder / SIGNATURES)
    if shapes is None or {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        raise ArtifactError(f"{folder / SIGNATURES} does not hold the signatures that {CONFIG_NAME} describes.")
    return Signatures.of_tensors(tensors, description)
