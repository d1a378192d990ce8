"""`retex verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..verification import verify
from .options import POSITIONAL, Options


@dataclass
class VerifyOptions(Options):
    """Check that an artifact is whole, without loading it: every file by its checksum, every tensor by its name, shape
    and dtype.

    Args:
        artifact: A folder or Hub id.
        finite: Also look at every number: none may be NaN or infinite.
        revision: Of a Hub id: a branch, tag or commit.
    """

    EXAMPLES = """
        retex verify my-retex
        retex verify org/my-retex --revision main --finite
    """

    artifact: Annotated[str, POSITIONAL]
    finite: bool = False
    revision: str | None = None

    def run(self) -> None:
        print(verify(self.artifact, finite=self.finite, revision=self.revision))
