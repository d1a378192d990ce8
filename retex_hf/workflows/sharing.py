"""Upload of a saved model as it is: the recorded files are verified and sent unchanged, and no model is loaded."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import CommitInfo

from ..artifact import hub
from ..artifact.card import write_card
from ..artifact.reading import read_parts, read_side_files
from ..artifact.schema import read_description, read_manifest, seal
from ..backends import library_of, plain_modules
from ..config import CONFIG_NAME
from ..errors import ArtifactError
from ..utils.strict_files import parse_json, read_file


def push_folder(
    artifact: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload ReTeX model",
) -> CommitInfo:
    """Upload the folder of a saved model to the Hub, as one commit.

    Every file is verified as by `verify`, and sent as it is: weights are neither loaded nor copied. A file that changes
    before its upload is over is refused, and nothing is committed then. Only recorded files are sent, and the card and
    its figures, which are made for the repository as in `RetexModel.push_to_hub`; the folder itself is not changed.

    Args:
        artifact: A folder that `save_pretrained` or `retex build` wrote.
        repo_id: `name` or `owner/name`; created if needed.
        private: Whether a newly created repository is private.
        token: Hub token; default: that of `hf auth login`.
        revision: The branch, created if needed; default: main.
        create_pr: Open a pull request instead of changing the main branch.
        commit_message: First line of the commit.
    """
    folder = hub.find_artifact(artifact).absolute()
    section = read_description(folder)[1]
    parts, _ = read_parts(folder)
    read_side_files(folder)
    if library_of(parts.model) is plain_modules:
        raise ArtifactError(
            f"{folder} was built from modules of a custom class, which its card names: push it with "
            "RetexModel.from_pretrained(FOLDER, make_model=...).push_to_hub(...)."
        )
    recorded = hub.Recorded(folder, read_manifest(folder, section), _read_sealed(folder, section["seal"]))

    def write(place: Path, name: str) -> None:
        write_card(parts, place, name=name, figures=True, artifact=folder)

    return hub.push(
        write,
        repo_id,
        recorded=recorded,
        private=private,
        token=token,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
    )


def _read_sealed(folder: Path, expected: str) -> bytes:
    """Return the content of the configuration; refuse another one than the files were verified with."""
    path = folder / CONFIG_NAME
    content = read_file(path, ArtifactError)
    values = parse_json(content.decode(errors="replace"), str(path), ArtifactError)
    if not isinstance(values.get("artifact"), dict) or seal(values) != expected:
        raise ArtifactError(f"{folder} was saved again while it was read: push it when it is no longer being saved.")
    return content
