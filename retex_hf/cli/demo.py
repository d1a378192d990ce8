"""The command `retex demo`."""

from __future__ import annotations

import dataclasses
import socket
from typing import Annotated

from ..errors import ConfigError
from .options import POSITIONAL, DeviceOptions


@dataclasses.dataclass
class DemoOptions(DeviceOptions):
    """Open a page to try an artifact: type texts or drop images, see the task, the residuals and the answers.

    Needs the extra `demo`: pip install 'retex-hf[demo]'.

    Args:
        artifact: A folder or Hub id.
        host: The address to listen on. Default: this machine only.
        port: The port to listen on. Default: the first free one from 7860.
        open: Open the page in a browser.
        revision: Branch, tag or commit of a Hub id.
    """

    EXAMPLES = """
        retex demo my-retex
        retex demo org/retex-images --host 0.0.0.0 --port 8080 --no-open
    """

    artifact: Annotated[str, POSITIONAL]
    host: str = "127.0.0.1"
    port: int | None = None
    open: bool = True
    revision: str | None = None

    def run(self) -> None:
        from ..demo import launch  # raises an error that says what to install if the extra is missing

        if self.port is not None and not 1 <= self.port <= 65_535:
            raise ConfigError(f"--port must be from 1 to 65535, not {self.port}.")
        try:
            socket.getaddrinfo(self.host, self.port)
        except (OSError, UnicodeError):
            raise ConfigError(f"--host {self.host!r} is not an address of this machine.") from None
        launch(
            self.artifact,
            server_name=self.host,
            server_port=self.port,
            inbrowser=self.open,
            revision=self.revision,
            model_options=self.model_options,
        )
