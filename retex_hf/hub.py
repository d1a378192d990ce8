"""To the Hub and from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, create_repo, upload_folder

from .checkpoints import download
from .config import CONFIG_NAME
from .errors import ArtifactError, CheckpointError


def push(
    save: Callable[[Path], None], repo_id: str, *, private: bool | None, token: str | None, **upload_options: Any
) -> CommitInfo:
    """Upload the folder that `save` writes as one commit; the repository is created if need be."""
    repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "artifact"
        save(folder)
        return upload_folder(repo_id=repo_id, folder_path=folder, token=token, **upload_options)


def find_artifact(name_or_path: str | Path, **download_options: Any) -> Path:
    """The local folder of an artifact: a path, or a Hub id, which is downloaded."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        if isinstance(name_or_path, Path) or str(folder).startswith(("/", ".", "~")):
            raise ArtifactError(f"{folder} does not exist.")
        try:
            folder = download(str(name_or_path), "from_pretrained", **download_options)
        except CheckpointError as error:
            raise ArtifactError(str(error)) from None
    if not (folder / CONFIG_NAME).is_file():
        raise ArtifactError(f"{folder} is not a ReTeX artifact: it has no {CONFIG_NAME}.")
    return folder
