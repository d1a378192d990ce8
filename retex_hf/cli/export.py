"""`retex export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from ..errors import ConfigError
from ..model.export.checkpoint import export_checkpoint
from ..model.retex_model import RetexModel
from ..utils.terminal import say
from .options import POSITIONAL, DeviceOptions


@dataclasses.dataclass
class ExportOptions(DeviceOptions):
    """Write one task as a plain checkpoint of the recovered expert, or as a LoRA adapter of the merged model.

    A checkpoint needs nothing of this library. An adapter is loaded by PEFT onto the merged model, which is what the
    artifact's folder is for other libraries.

    Args:
        artifact: A folder or Hub id.
        task: Which task.
        output_dir: The folder to write.
        format: What to write.
        scope: With --format lora: all that PEFT can carry, only what it can run in a batch of several adapters (batch),
            or only linear layers at one rank, as servers such as vLLM take them (linear). What is left out is named.
            Default: all.
        revision: Of a Hub id: a branch, tag or commit.
    """

    EXAMPLES = """
        retex export my-retex snips snips-expert
        retex export my-retex snips snips-lora --format lora
        retex export my-retex snips snips-lora --format lora --scope linear
    """

    artifact: Annotated[str, POSITIONAL]
    task: Annotated[str, POSITIONAL]
    output_dir: Annotated[Path, POSITIONAL]
    format: Literal["full", "lora"] = "full"
    scope: Literal["all", "batch", "linear"] | None = None
    revision: str | None = None

    def run(self) -> None:
        if self.scope is not None and self.format != "lora":
            raise ConfigError("--scope is for --format lora.")
        model = RetexModel.from_pretrained(self.artifact, revision=self.revision, **self.model_options)
        if self.format == "full":
            export_checkpoint(model, self.task, self.output_dir)
            say(f"{self.output_dir}: the expert {self.task!r} as a {type(model.model).__name__}.")
        else:
            say(model.export_lora(self.task, self.output_dir, scope=self.scope or "all"))
            say(f"{self.output_dir}: the expert {self.task!r} as a LoRA adapter of {self.artifact}.")
