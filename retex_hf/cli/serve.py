"""The command `retex serve`."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Annotated, Literal

from ..serving.options import API_KEY
from ..serving.options import ServeOptions as EndpointOptions
from .options import POSITIONAL, DeviceOptions


@dataclasses.dataclass
class ServeOptions(DeviceOptions, EndpointOptions):
    """Serve an artifact over HTTP: one OpenAI-compatible endpoint that chooses the expert for every input.

    Models are auto (the default: each input is routed), merged, and the name of every task. Answers say which task gave
    them, how sure the router was, and whether it abstained. SIGTERM finishes open requests, SIGHUP reloads the
    artifact. Logs are JSON lines on standard error, without inputs.

    Needs the extra `serve`: pip install 'retex-hf[serve]'.

    Args:
        artifact: A folder or Hub id.
        engine: What runs the model: vllm, or embedded, which serves every model. Default: auto, vllm where it is
            installed and supports the model.
    """

    EXAMPLES = """
        retex serve my-retex
        retex serve org/retex-llm --host 0.0.0.0 --port 8080 --dtype bfloat16 --device auto
        RETEX_API_KEY=... retex serve my-retex --max-batch 64 --max-wait-ms 10
        curl localhost:8000/classify --json '{"input": ["has my transfer arrived?"]}'
    """

    artifact: Annotated[str, POSITIONAL]
    engine: Literal["auto", "embedded", "vllm"] = "auto"

    def run(self) -> None:
        from ..serving.launch import serve  # imports the engine that is asked for

        if self.api_key is None:
            self.api_key = os.environ.get(API_KEY) or None
        code = serve(self.artifact, self, self.engine)
        if code:
            sys.exit(code)
