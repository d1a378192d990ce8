"""Upload to the Hub, and lookup of local or downloaded artifacts."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import BadRequestError

from ..checkpoints import fetch, manifest
from ..checkpoints.locate import plain_subfolder
from ..checkpoints.manifest import FileRecord
from ..config import CONFIG_NAME
from ..errors import ArtifactError, ConfigError, HubError, first_line
from ..utils.atomic_file import write_errors
from ..utils.atomic_folder import heal, is_unfinished, scratch_folder
from ..utils.hub_errors import hub_errors, without_secrets
from ..utils.paths import as_path
from .card import CARD_NAME, FIGURES
from .export_files import EXPORT_NAME, is_export_file
from .files import WEIGHTS
from .schema import OWN_FILES

MAIN = "main"
SCRATCH_PREFIX = "retex-push-"


@dataclass(frozen=True)
class Recorded:
    """The files of a saved artifact, to be uploaded as they are: their records, and the configuration's content."""

    folder: Path
    records: Mapping[str, FileRecord]
    config: bytes

    def operations(self) -> list[CommitOperationAdd]:
        """Return the uploads. Small files are read now; weights stay on disk, and are compared when they are sent."""
        if unsafe := sorted(self.records.keys() & {CONFIG_NAME, CARD_NAME, *FIGURES}):
            raise ArtifactError(f"{self.folder / CONFIG_NAME} lists {unsafe[0]}, which no artifact records.")
        return [CommitOperationAdd(CONFIG_NAME, self.config), *map(self._operation, self.records)]

    def _operation(self, name: str) -> CommitOperationAdd:
        expected = self.records[name]
        try:
            if name.endswith(WEIGHTS):
                return RecordedAdd(self.folder, name, expected)
            return CommitOperationAdd(name, manifest.read_verified(self.folder, name, expected))
        except ValueError as error:  # a name that the Hub reserves, or a file that was removed just now
            raise ArtifactError(f"{self.folder / name} cannot be uploaded: {first_line(error)}") from None


class RecordedAdd(CommitOperationAdd):
    """The upload of a recorded file from its place on disk; a content other than the recorded one is refused."""

    def __init__(self, folder: Path, name: str, expected: FileRecord) -> None:
        manifest.check_file(folder, name)
        self.folder, self.name, self.expected = folder, name, expected
        super().__init__(name, folder / name)
        # The client has hashed the file, to announce it.
        manifest.compare(folder, name, expected, FileRecord(self.upload_info.size, self.upload_info.sha256.hex()))

    def b64content(self) -> bytes:
        """Return the content to send within the commit, after comparing these very bytes with the record."""
        return base64.b64encode(manifest.read_verified(self.folder, self.name, self.expected))

    def check_sent(self) -> None:
        """Compare the file again after the client has transferred it, because that has read it again."""
        manifest.check(self.folder, {self.name: self.expected})


def push(
    write: Callable[[Path, str], None],
    repo_id: str,
    *,
    recorded: Recorded | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload ReTeX model",
) -> CommitInfo:
    """Upload the folder that `write(folder, repository id)` writes, as one commit.

    The repository and the branch are created if needed. `write` finds the repository's card and figures in the folder,
    to update them. The files in `recorded` are uploaded too, from where they are. Files of an earlier artifact that are
    not part of this one are deleted in the same commit; other files stay.
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
        written = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        # Not `upload_folder`, which may split a folder into several commits: an artifact must change atomically.
        added = [
            *(recorded.operations() if recorded is not None else ()),
            *(CommitOperationAdd(path, file) for path, file in written.items()),
        ]
        stale = sorted(there - {operation.path_in_repo for operation in added})
        exported = EXPORT_NAME in there
        stale = [path for path in stale if _is_own(path) or (exported and is_export_file(path))]
        operations = [*(CommitOperationDelete(path) for path in stale), *added]
        try:
            large = [operation for operation in added if isinstance(operation, RecordedAdd)]
            if large:
                # Transfer before the commit, so that a file that has changed meanwhile is never committed.
                api.preupload_lfs_files(repo_id, large, revision=revision, create_pr=create_pr, free_memory=False)
                for operation in large:
                    operation.check_sent()
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
            message = without_secrets(" ".join(str(error).split()), token)
            raise HubError(f"Cannot push to {repo_id!r}: {message}") from None
        except (RuntimeError, PermissionError) as error:  # raised when the transfer of large files fails
            message = without_secrets(first_line(error), token)
            raise HubError(f"Cannot push to {repo_id!r}: the upload was interrupted: {message}") from None


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
        raise ArtifactError(f"{folder} is the staging folder of an artifact: expected the artifact itself.")
    heal(folder.absolute())
    if folder.is_file():
        raise ArtifactError(f"{folder} is a file: expected the folder of an artifact.")
    if folder.is_dir() and download_options.get("revision") is not None:
        raise ArtifactError(f"{folder} is a local folder, which has no revision {download_options['revision']!r}.")
    if not folder.is_dir():
        if isinstance(name_or_path, Path) or str(name_or_path).startswith(("/", ".", "~")):
            raise ArtifactError(f"{folder} does not exist.")
        repo_id = str(name_or_path)
        with hub_errors(f"load {repo_id!r}, which is not a local folder", repo_id, token):
            folder = fetch(repo_id, token=token, subfolder=subfolder, **download_options) / (subfolder or "")
    if not (folder / CONFIG_NAME).is_file():
        raise ArtifactError(f"{name_or_path} is not a ReTeX artifact: it has no {CONFIG_NAME}.")
    return folder
