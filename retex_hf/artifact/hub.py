"""Upload to the Hub, and lookup of local or downloaded artifacts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import BadRequestError

from ..checkpoints import fetch
from ..checkpoints.locate import plain_subfolder
from ..config import CONFIG_NAME
from ..errors import ArtifactError, ConfigError, HubError, first_line
from ..utils.atomic_file import write_errors
from ..utils.atomic_folder import heal, is_unfinished, scratch_folder
from ..utils.hub_errors import hub_errors, without_secrets
from ..utils.paths import as_path
from .card import CARD_NAME, FIGURES
from .schema import OWN_FILES

MAIN = "main"
SCRATCH_PREFIX = "retex-push-"


def push(
    write: Callable[[Path, str], None],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload ReTeX model",
) -> CommitInfo:
    """Upload the folder that `write(folder, repository id)` writes, as one commit.

    The repository and the branch are created if needed. `write` finds the repository's card and figures in the folder,
    to update them. Files of an earlier artifact that are not part of this one are deleted in the same commit; other
    files stay.
    """
    if create_pr and revision not in (None, MAIN):
        raise ConfigError(f"create_pr=True proposes a change of the main branch; leave out revision={revision!r}.")
    api = HfApi(token=token)
    with (
        hub_errors(f"push to {repo_id!r}", repo_id, token),
        scratch_folder(SCRATCH_PREFIX) as scratch,
        write_errors(scratch.parent),
    ):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and revision != MAIN and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        before = api.model_info(repo_id, revision=revision)
        if private and before.private is False:
            raise HubError(f"Cannot push to {repo_id!r} with private=True: it exists already, and is public.")
        there = {sibling.rfilename for sibling in before.siblings or ()}
        folder = scratch / "artifact"
        folder.mkdir()
        for path in sorted(there & {CARD_NAME, *FIGURES}):
            cached = api.hf_hub_download(repo_id, path, revision=before.sha, cache_dir=scratch / "cache")
            (folder / path).parent.mkdir(exist_ok=True)
            shutil.copyfile(cached, folder / path)
        write(folder, repo_id)
        files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        stale = sorted(path for path in there - set(files) if _is_own(path))
        # Not `upload_folder`, which may split a folder into several commits: an artifact must change atomically.
        operations = [
            *(CommitOperationDelete(path) for path in stale),
            *(CommitOperationAdd(path, file) for path, file in files.items()),
        ]
        try:
            return api.create_commit(
                repo_id,
                operations,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
                parent_commit=before.sha,
            )
        except ValueError as error:
            if isinstance(error, BadRequestError) or CARD_NAME not in str(error):
                raise
            # The Hub's explanation follows on further lines.
            said = without_secrets(" ".join(str(error).split()), token)
            raise HubError(f"Cannot push to {repo_id!r}: {said}") from None
        except (RuntimeError, PermissionError) as error:  # raised when the transfer of large files fails
            said = without_secrets(first_line(error), token)
            raise HubError(f"Cannot push to {repo_id!r}: the upload broke off: {said}") from None


def _is_own(path: str) -> bool:
    """Return whether a repository's file belongs to an artifact and is replaced by a new one."""
    return "/" not in path and any(PurePosixPath(path).match(own) for own in OWN_FILES)


def find_artifact(
    name_or_path: str | Path, *, token: str | None = None, subfolder: str | None = None, **download_options: Any
) -> Path:
    """Return the local folder of an artifact given by path or by Hub id (which is downloaded), or its `subfolder`."""
    folder = as_path(name_or_path)
    if subfolder is not None and folder.is_dir():
        folder = folder / plain_subfolder(subfolder)
        if not folder.is_dir():
            raise ArtifactError(f"{folder} does not exist.")
    if is_unfinished(folder.resolve()):
        raise ArtifactError(f"{folder} is where an artifact is being written: expected the artifact itself.")
    heal(folder.absolute())
    if folder.is_file():
        raise ArtifactError(f"{folder} is a file: expected the folder of an artifact.")
    if folder.is_dir() and download_options.get("revision") is not None:
        raise ArtifactError(f"{folder} is a local folder, which has no revision {download_options['revision']!r}.")
    if not folder.is_dir():
        if isinstance(name_or_path, Path) or str(name_or_path).startswith(("/", ".", "~")):
            raise ArtifactError(f"{folder} does not exist.")
        repo_id = str(name_or_path)
        with hub_errors(f"load {repo_id!r}, which is no local folder", repo_id, token):
            folder = fetch(repo_id, token=token, subfolder=subfolder, **download_options) / (subfolder or "")
    if not (folder / CONFIG_NAME).is_file():
        raise ArtifactError(f"{name_or_path} is not a ReTeX artifact: it has no {CONFIG_NAME}.")
    return folder
