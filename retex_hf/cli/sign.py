"""The command `retex sign`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..artifact.recipe_record import RecipeRecord, check_trusted
from ..errors import ConfigError
from ..model.retex_model import RetexModel
from ..utils.tables import Table, percent
from ..utils.terminal import say
from ..workflows.signing import References, sign
from .options import POSITIONAL, DeviceOptions


@dataclasses.dataclass
class SignOptions(DeviceOptions):
    """Fit the signatures that identify tasks, from a few unlabelled inputs of each task.

    Args:
        artifact: A folder that `retex build` wrote.
        data: Inputs of a task: a text file (one per line), .jsonl, .csv or .parquet, a folder with <split>.* files, a
            folder of images, or a Hub data set (owner/name:configuration@revision). Repeat for each task. Default: with
            --trust-recipe, the data named in the artifact's recipe.
        trust_recipe: Read the data that the artifact's own recipe names, on this machine or the Hub. Only for artifacts
            built by you or by people you trust.
        split: Split of the data. Default: with the recipe's data, the recipe's; else train.
        input_column: The column of texts or images, or two of them, [a, b]. Default: with the recipe's data, the
            recipe's; else found by common names.
        max_length: Truncate texts to this many tokens. Default: as in the recipe, else the tokenizer's limit.
        seed: Seed of the draw of inputs. Default: with the recipe's data, the recipe's; else 0.
        num_reference: Inputs per task. Default: as the artifact was built.
        signature_rank: Dimension of a task's subspace, a number or a share. Default: as the artifact was built.
        feature_layer: Where features are read: a module, an index, or auto. Default: as the artifact was built.
        output_dir: Write to another folder instead of changing this one.
    """

    EXAMPLES = """
        retex sign my-retex --data reviews=reviews.txt --data news=news.jsonl
        retex sign my-retex --data a=org/dataset-a --data b=data/b --split validation --num-reference 256
    """

    artifact: Annotated[Path, POSITIONAL]
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    trust_recipe: bool = False
    split: str | None = None
    input_column: str | list[str] | None = None
    max_length: int | None = None
    seed: int | None = None
    num_reference: int | None = None
    signature_rank: int | float | None = None
    feature_layer: str | int | None = None
    output_dir: Path | None = None

    def run(self) -> None:
        model = RetexModel.from_pretrained(self.artifact, **self.model_options)
        recipe = model.recipe or RecipeRecord()
        data = self.data or recipe.data_of(model.tasks)
        if not data:
            raise ConfigError(f"Say which data to sign with: --data TASK=SOURCE for each of {model.tasks}.")
        if not self.data:
            shown = {f"data of {task!r}": source for task, source in data.items()}
            check_trusted(shown, self.artifact, self.trust_recipe, "name the data with --data TASK=SOURCE")
        known = recipe.references()
        if self.data:  # not from the recipe
            known = {"max_length": known.get("max_length")}
        own = {name: getattr(self, name) for name in ("split", "input_column", "max_length", "seed")}
        references = References(data, **known | {name: value for name, value in own.items() if value is not None})
        inputs = references.load()
        given = {name: getattr(self, name) for name in ("num_reference", "signature_rank", "feature_layer")}
        given = {name: value for name, value in given.items() if value is not None}
        model.retex_config = dataclasses.replace(model.retex_config, **given)
        if model.recipe is not None and given:
            model.recipe = recipe.with_values(config={**recipe.get("config", {}), **given})
        accuracies = sign(model, references, inputs=inputs, progress=True)
        target = self.output_dir or self.artifact
        if self.output_dir is not None:
            model.save_pretrained(target)
        else:
            model.save_description(target)
        if accuracies:
            rows = [[layer, percent(share)] for layer, share in accuracies.items()]
            say(Table(["layer", "identified, held out (%)"], rows).text())
            print()
        read_at = getattr(model.signatures, "feature_layer", None)
        say(f"{target}: signed {len(model.tasks)} tasks" + (f", features of {read_at}." if read_at else "."))
