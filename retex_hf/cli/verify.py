"""The command `retex verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..errors import ConfigError
from ..model.retex_model import RetexModel
from ..utils.paths import as_path
from ..workflows.verification import verify
from .options import POSITIONAL, Options


@dataclass
class VerifyOptions(Options):
    """Check an artifact without loading it: every file by its checksum, every tensor by its name, shape and dtype.

    Args:
        artifact: A folder or Hub id.
        finite: Also check every number: none may be NaN or infinite.
        record: For a folder: first record its files as they are now, after changing them on purpose.
        revision: Branch, tag or commit of a Hub id.
    """

    EXAMPLES = """
        retex verify my-retex
        retex verify org/my-retex --revision main --finite
        retex verify my-retex --record
    """

    artifact: Annotated[str, POSITIONAL]
    finite: bool = False
    record: bool = False
    revision: str | None = None

    def run(self) -> None:
        if self.record:
            folder = as_path(self.artifact)
            if not folder.is_dir():
                raise ConfigError(f"--record needs a folder; {self.artifact} is not one.")
            RetexModel.from_pretrained(folder, verify=False).save_description(folder)
        print(verify(self.artifact, finite=self.finite, revision=self.revision))
