"""Verification that an artifact is what its author saved: checks every file and every tensor, and builds no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifact.export_files import check_adapters
from ..artifact.hub import find_artifact
from ..artifact.reading import read_parts, read_side_files
from ..artifact.schema import read_description, read_manifest


@dataclass(frozen=True)
class Verification:
    """Result of a successful check; printing it gives a summary."""

    artifact: str
    files: int
    bytes: int
    tensors: int
    finite: bool

    def __str__(self) -> str:
        numbers = "all finite" if self.finite else "not looked at"
        rows = {
            "files": f"{self.files}, {self.bytes / 1e6:.2f} MB: as recorded (SHA-256)",
            "tensors": f"{self.tensors}: names, shapes and dtypes as the configurations say",
            "numbers": numbers,
        }
        return "\n".join([f"{self.artifact} is whole.", *(f"  {name:8} {text}" for name, text in rows.items())])


def verify(artifact: str | Path, *, finite: bool = False, **hub_options: Any) -> Verification:
    """Check a saved model without loading it; raise a `RetexError` that names the file at the first fault.

    Files must be those recorded when the model was saved, with no further file that would be read with them. Names,
    shapes and dtypes of all tensors must match the configurations.

    Args:
        artifact: A folder or a Hub id.
        finite: Also check every number: none may be NaN or infinite.
        hub_options: Options for a Hub id: `revision`, `cache_dir`, `token`, `local_files_only`.

    Example:
        >>> from retex_hf import verify
        >>> print(verify("retex-quickstart/retex"))  # doctest: +SKIP
        retex-quickstart/retex is whole.
          files    9, 151.36 MB: as recorded (SHA-256)
          tensors  320: names, shapes and dtypes as the configurations say
          numbers  not looked at
    """
    folder = find_artifact(artifact, **hub_options)
    _, files = read_parts(folder, check_finite=finite)
    read_side_files(folder)
    records = read_manifest(folder, read_description(folder)[1])
    check_adapters(folder, records)
    return Verification(
        str(artifact),
        files=len(records),
        bytes=sum(record.size for record in records.values()),
        tensors=sum(len(source.infos) for source in files.sources()),
        finite=finite,
    )
