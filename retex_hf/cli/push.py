"""The command `retex push`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..model.retex_model import RetexModel
from ..utils.hub_errors import without_secrets
from ..utils.progress import waiting
from ..utils.terminal import say
from .options import POSITIONAL, Options


@dataclasses.dataclass
class PushOptions(Options):
    """Upload an artifact to the Hub as one commit, with its card. Manual edits of the card are kept. If the card was
    edited both here and on the Hub since the last push, the Hub's edits win, with a warning.

    The token comes from `hf auth login` or the environment variable HF_TOKEN.

    Args:
        artifact: A folder that `retex build` wrote.
        repo_id: The repository; created if it does not exist.
        private: Make a new repository private.
        revision: The branch; created if it does not exist. Default: main.
        create_pr: Open a pull request instead of committing.
        commit_message: Message of the commit.
        max_shard_size: Size above which weights are stored in several files.
    """

    EXAMPLES = """
        retex push my-retex org/retex-minilm-4task --private
        retex push my-retex org/retex-minilm-4task --create-pr --commit-message "Add the news task"
    """

    artifact: Annotated[Path, POSITIONAL]
    repo_id: Annotated[str, POSITIONAL]
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    commit_message: str = "Upload ReTeX model"
    max_shard_size: str = "5GB"

    def run(self) -> None:
        model = RetexModel.from_pretrained(self.artifact)
        with waiting(f"Pushing to {without_secrets(self.repo_id)}"):
            commit = model.push_to_hub(
                self.repo_id,
                private=self.private or None,
                revision=self.revision,
                create_pr=self.create_pr,
                commit_message=self.commit_message,
                max_shard_size=self.max_shard_size,
            )
        say(without_secrets(commit.pr_url or commit.commit_url))
