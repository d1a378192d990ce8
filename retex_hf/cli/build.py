"""The command `retex build`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from ..artifact.recipe import FILLED_ON_BUILD, Recipe, field_names, settable_fields
from ..artifact.schema import RECIPE_NAME
from ..config import RetexConfig, overridden
from ..errors import ConfigError
from ..recovery import TrainingConfig
from ..utils.hub_errors import without_secrets
from ..utils.paths import as_path
from ..utils.progress import waiting
from ..utils.terminal import say
from ..workflows.from_recipe import differences, make
from .options import POSITIONAL, Options, Parser, add_fields

# Sections of a recipe whose fields have flags of their own, and fields that only the library writes.
NOT_FLAGS = {"config", "training", "changes", "unrecorded", "made_with", "experts", "data"}
# For processes of accelerate, which `examples/train.py` starts.
OF_ACCELERATE = {"mixed_precision", "gradient_accumulation_steps", "log_with", "cpu", "analyse"}


@dataclasses.dataclass
class BuildOptions(Options):
    """Merge experts and solve for the recovery of each, into one folder.

    All options can be set in a recipe, a YAML file whose keys are the flags below; flags override it. The artifact
    stores its recipe: building from that again gives the same files. An interrupted build resumes. With data,
    signatures are fitted too.

    Args:
        recipe: A YAML file, or an artifact whose recipe to use.
        experts: An expert: a folder, a Hub id (org/repo, org/repo/subfolder), a PEFT adapter of either kind, or a GGUF
            file. Repeat for each task.
        data: Data of a task, to fit signatures on: a folder, a file or a Hub id. Repeat for each task.
    """

    EXAMPLES = """
        retex build recipe.yaml
        retex build --base bert-base --expert a=experts/a --expert b=experts/b --storage 2% --output-dir my-retex
        retex build my-retex --output-dir again        # the stored recipe, bit for bit
        retex build recipe.yaml --storage 0.5% --output-dir small
    """

    recipe: Annotated[Path | None, POSITIONAL] = None
    experts: Annotated[dict[str, str], "--expert"] = dataclasses.field(default_factory=dict)
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def add_arguments(cls, parser: Parser, left_out: set[str] = OF_ACCELERATE) -> None:
        add_fields(parser, cls, {"flags"})
        add_fields(parser.add_argument_group("the build"), Recipe, NOT_FLAGS | left_out)
        add_fields(parser.add_argument_group("RetexConfig"), RetexConfig, FILLED_ON_BUILD)
        # The draw of references and the draws of training share one seed.
        add_fields(parser.add_argument_group("TrainingConfig, for --solver adam"), TrainingConfig, {"seed"})

    @classmethod
    def from_namespace(cls, values: dict[str, Any]) -> BuildOptions:
        own = ("recipe", "experts", "data")
        flags = {name: value for name, value in values.items() if name not in own and value is not None}
        return cls(flags=flags, **{name: values[name] for name in own if values[name] is not None})

    def as_recipe(self) -> Recipe:
        """Return the recipe file, overridden by flags."""
        recipe = Recipe() if self.recipe is None else Recipe.read(_recipe_file(self.recipe))
        values = recipe.to_dict()
        values["experts"] = {**recipe.experts, **self.experts}
        values["data"] = {**recipe.data, **self.data}
        values |= {name: value for name, value in self.flags.items() if name in field_names(Recipe)}
        sections = {"config": settable_fields(), "training": field_names(TrainingConfig) - {"seed"}}
        for section, known in sections.items():
            given = {name: value for name, value in self.flags.items() if name in known}
            values[section] = overridden(getattr(recipe, section), given)
        if "seed" in self.flags and values.get("solver") == "adam":
            values["training"]["seed"] = self.flags["seed"]
        merged = Recipe.from_dict(values, "The recipe with these flags")
        merged.check()
        return merged

    def run(self) -> None:
        recipe = self.as_recipe()
        if not recipe.output_dir:
            raise ConfigError("Say where the artifact goes: --output-dir, or output_dir in the recipe.")
        for difference in differences(recipe):
            say(f"note: not reproduced bit for bit: {difference}.")
        model = make(recipe, progress=True)
        errors = [error for error in model.recovery_errors.values() if error is not None]
        mean = sum(errors) / len(errors) if errors else 0.0
        signed = "signed" if model.signatures is not None else "not signed with inputs yet (retex sign)"
        say(f"{recipe.output_dir}: {len(model.tasks)} tasks, mean error over tensors {mean:.3f}, {signed}.")
        if recipe.push_to_hub:
            with waiting(f"Pushing to {without_secrets(recipe.push_to_hub)}"):
                commit = model.push_to_hub(recipe.push_to_hub)
            say(without_secrets(commit.commit_url))


def _recipe_file(path: Path) -> Path:
    path = as_path(path, ConfigError)
    if path.is_dir():
        if not (path / RECIPE_NAME).is_file():
            raise ConfigError(
                f"{path} holds no {RECIPE_NAME}: it is not an artifact, or was built from experts in memory."
            )
        return path / RECIPE_NAME
    return path
