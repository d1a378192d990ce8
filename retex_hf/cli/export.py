"""The command `retex export`."""

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

    A checkpoint loads without this library. PEFT loads an adapter onto the merged model, which other libraries load
    from the artifact's folder.

    Args:
        artifact: A folder or Hub id.
        task: The task to export.
        output_dir: The folder to write.
        format: The format to write.
        scope: With --format lora: all layers that PEFT supports (all), only those it can run in a batch of several
            adapters (batch), or only linear layers at one rank, as servers such as vLLM require (linear). Layers left
            out are listed. Default: all.
        revision: Branch, tag or commit of a Hub id.
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
