"""The command `retex push`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..utils.hub_errors import without_secrets
from ..utils.progress import waiting
from ..utils.terminal import say
from ..workflows.sharing import push_folder
from .options import POSITIONAL, Options


@dataclasses.dataclass
class PushOptions(Options):
    """Upload an artifact to the Hub as one commit, with its card. Its files are verified, and sent as they are. Manual
    edits of the card are kept. If the card was edited both here and on the Hub since the last push, the Hub's edits
    win, with a warning.

    The token comes from `hf auth login` or the environment variable HF_TOKEN.

    Args:
        artifact: A folder that `retex build` wrote.
        repo_id: The repository; created if it does not exist.
        private: Make a new repository private.
        revision: The branch; created if it does not exist. Default: main.
        create_pr: Open a pull request instead of committing.
        commit_message: Message of the commit.
        max_shard_size: Load the model and write its weights anew, in several files above this size, instead of
            sending the files as they are.
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
    max_shard_size: str | None = None

    def run(self) -> None:
        private = self.private or None
        with waiting(f"Pushing to {without_secrets(self.repo_id)}"):
            if self.max_shard_size is None:
                commit = push_folder(
                    self.artifact,
                    self.repo_id,
                    private=private,
                    revision=self.revision,
                    create_pr=self.create_pr,
                    commit_message=self.commit_message,
                )
            else:
                from ..model.retex_model import RetexModel  # imported only where a model is loaded, which is slow

                model = RetexModel.from_pretrained(self.artifact)
                commit = model.push_to_hub(
                    self.repo_id,
                    private=private,
                    revision=self.revision,
                    create_pr=self.create_pr,
                    commit_message=self.commit_message,
                    max_shard_size=self.max_shard_size,
                )
        say(without_secrets(commit.pr_url or commit.commit_url))
