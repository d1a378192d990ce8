"""The commands `retex add-task` and `retex remove-task`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..artifact.recipe_record import RecipeRecord
from ..errors import ConfigError
from ..model.retex_model import RetexModel
from ..utils.terminal import say
from ..workflows.from_recipe import add_task
from ..workflows.signing import References
from .options import POSITIONAL, DeviceOptions, Options


@dataclasses.dataclass
class AddTaskOptions(DeviceOptions):
    """Add an expert to an artifact, without needing the other experts; answers of the other tasks do not change.

    Args:
        artifact: A folder that `retex build` wrote.
        task: The name of the new task.
        expert: Its expert: a folder, a Hub id (org/repo, org/repo/subfolder), a PEFT adapter, or a GGUF file.
        data: Inputs of the task, as for sign; required if the artifact is signed.
        split: Split of the data.
        input_column: The column of texts or images, or two of them, [a, b]. Default: found by common names.
        max_length: Truncate texts to this many tokens. Default: as in the recipe, else the tokenizer's limit.
        seed: Seed of the draw of inputs.
        base: The base model; required for experts given as adapters.
        tolerance: Relative error that the task may have in each parameter. Default: that of the other tasks; in an
            artifact of a budget of bytes, as many bytes as each task of the build was given.
        output_dir: Write to another folder instead of changing this one.
    """

    EXAMPLES = """
        retex add-task my-retex news experts/news --data data/news
        retex add-task my-retex news org/news-lora --data news.txt --tolerance 0.1 --output-dir my-retex-5
    """

    artifact: Annotated[Path, POSITIONAL]
    task: Annotated[str, POSITIONAL]
    expert: Annotated[str, POSITIONAL]
    data: str | None = None
    split: str = "train"
    input_column: str | list[str] | None = None
    max_length: int | None = None
    seed: int = 0
    base: str | None = None
    tolerance: float | None = None
    output_dir: Path | None = None

    def run(self) -> None:
        model = RetexModel.from_pretrained(self.artifact, **self.model_options)
        if model.signatures is not None and self.data is None:
            raise ConfigError(f"{self.artifact} is signed: say with --data where inputs of {self.task!r} are.")
        if model.signatures is None and model.retex_config.signatures != "weights" and self.data is not None:
            raise ConfigError(f"{self.artifact} is not signed: leave out --data, and run retex sign afterwards.")
        known = (model.recipe or RecipeRecord()).references().get("max_length")
        length = known if self.max_length is None else self.max_length
        data = {} if self.data is None else {self.task: self.data}
        references = References(data, self.split, self.input_column, length, self.seed)
        options = {"base": self.base, "tolerance": self.tolerance, "progress": True}
        say(add_task(model, self.task, self.expert, references, **options))
        target = self.output_dir or self.artifact
        model.save_pretrained(target)
        say(f"{target}: tasks {', '.join(model.tasks)}.")


@dataclasses.dataclass
class RemoveTaskOptions(Options):
    """Remove a task from an artifact: its factors, head and signature. The merged model does not change.

    Args:
        artifact: A folder that `retex build` wrote.
        task: The task to remove.
        output_dir: Write to another folder instead of changing this one.
    """

    EXAMPLES = """
        retex remove-task my-retex news
    """

    artifact: Annotated[Path, POSITIONAL]
    task: Annotated[str, POSITIONAL]
    output_dir: Path | None = None

    def run(self) -> None:
        model = RetexModel.from_pretrained(self.artifact)
        model.delete_task(self.task)
        target = self.output_dir or self.artifact
        model.save_pretrained(target)
        say(f"{target}: tasks {', '.join(model.tasks)}.")
