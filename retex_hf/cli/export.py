"""The command `retex export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from ..artifact.hub import find_artifact
from ..errors import ConfigError
from ..model.export.checkpoint import export_checkpoint
from ..model.retex_model import RetexModel
from ..utils.paths import as_path
from ..utils.terminal import say
from .options import POSITIONAL, DeviceOptions


@dataclasses.dataclass
class ExportOptions(DeviceOptions):
    """Write one task as a plain checkpoint of the recovered expert, or as a LoRA adapter of the merged model.

    A checkpoint loads without this library. PEFT loads an adapter onto the merged model, which other libraries load
    from the artifact's folder. With --all --for vllm, add adapters of all tasks to the artifact, so that vLLM serves
    and routes it as it is.

    Args:
        artifact: A folder or Hub id.
        task: The task to export; with --all: the folder for a copy of the artifact with all adapters. Default with
            --all: the artifact itself.
        output_dir: The folder to write.
        format: The format to write.
        scope: With --format lora: all layers that PEFT supports (all), only those it can run in a batch of several
            adapters (batch), only linear layers at one rank, as most servers require (linear), or what vLLM takes
            (vllm). Layers left out are listed. Default: all.
        all: Export all tasks, for a server.
        server: With --all: the server.
        revision: Branch, tag or commit of a Hub id.
    """

    EXAMPLES = """
        retex export my-retex snips snips-expert
        retex export my-retex snips snips-lora --format lora
        retex export my-retex --all --for vllm
        retex export org/my-retex --all --for vllm my-retex-vllm
    """

    artifact: Annotated[str, POSITIONAL]
    task: Annotated[str | None, POSITIONAL] = None
    output_dir: Annotated[Path | None, POSITIONAL] = None
    format: Literal["full", "lora"] = "full"
    scope: Literal["all", "batch", "linear", "vllm"] | None = None
    all: bool = False
    server: Annotated[Literal["vllm"] | None, "--for"] = None
    revision: str | None = None

    @classmethod
    def parse(cls, prog: str, arguments: list[str]) -> ExportOptions:
        """Parse the command line; the folder may follow the flags."""
        return cls.from_namespace(vars(cls.parser(prog).parse_intermixed_args(arguments)))

    def run(self) -> None:
        if self.scope is not None and self.format != "lora":
            raise ConfigError("--scope is for --format lora.")
        if self.all or self.server is not None:
            self._export_all()
        elif self.task is None or self.output_dir is None:
            raise ConfigError("retex export needs a task and a folder to write, or --all --for vllm.")
        else:
            self._export_one(self.task, self.output_dir)

    def _export_all(self) -> None:
        if not self.all or self.server is None or self.output_dir is not None or self.format != "full":
            raise ConfigError("--all and --for go together, without a task or --format: ARTIFACT --all --for vllm.")
        local = as_path(self.artifact).is_dir()
        if self.task is None and not local:
            raise ConfigError(f"{self.artifact} is not a folder: name one for the copy with the adapters.")
        folder = find_artifact(self.artifact, revision=self.revision)
        say(self._load(folder, None).export_vllm(folder, self.task))

    def _export_one(self, task: str, output_dir: Path) -> None:
        model = self._load(self.artifact, self.revision)
        if self.format == "full":
            export_checkpoint(model, task, output_dir)
            say(f"{output_dir}: the expert {task!r} as a {type(model.model).__name__}.")
        else:
            say(model.export_lora(task, output_dir, scope=self.scope or "all"))
            say(f"{output_dir}: the expert {task!r} as a LoRA adapter of {self.artifact}.")

    def _load(self, artifact: str | Path, revision: str | None) -> RetexModel:
        return RetexModel.from_pretrained(artifact, revision=revision, **self.model_options)
