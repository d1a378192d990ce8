"""Signatures from data on disk or on the Hub: draw inputs, make batches, and fit the model's signatures on them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..artifact.preprocess import Preprocessor, load_preprocessor
from ..artifact.recipe import use_threads
from ..data.datasets import load_inputs
from ..data.task_data import Inputs
from ..errors import ConfigError, InputError, TaskError
from ..model.retex_model import RetexModel
from ..utils.devices import as_model_takes

BATCH_SIZE = 64


@dataclass
class References:
    """Source of reference inputs; the fields are those of a recipe.

    Args:
        data: `{task: source}`, as `load_inputs` takes it.
        split: Split of the sources.
        input_column: The column of texts or images; default: found by common names.
        max_length: Truncate texts to this many tokens; default: the tokenizer's limit.
        seed: Seed of the draw.
    """

    data: dict[str, str] = field(default_factory=dict)
    split: str = "train"
    input_column: str | list[str] | None = None
    max_length: int | None = None
    seed: int = 0

    def load(self) -> dict[str, Inputs]:
        """Load all inputs of every task."""
        return {
            task: load_inputs(task, source, split=self.split, input_column=self.input_column)
            for task, source in self.data.items()
        }

    def batches(
        self, model: RetexModel, inputs: Mapping[str, Inputs] | None = None
    ) -> dict[str, list[dict[str, Tensor]]]:
        """Draw reference batches of every task on the model's device, of as many inputs as its configuration says."""
        preprocessor = self.preprocessor(model.side_folder, model.model)
        found = self.draw(self.load() if inputs is None else inputs, model.retex_config.num_reference, preprocessor)
        return {task: [as_model_takes(batch, model.model) for batch in batches] for task, batches in found.items()}

    def preprocessor(self, side_folder: Path | None, model: nn.Module) -> Preprocessor:
        """Load the preprocessor of a model whose tokenizer or processor is in a folder."""
        if side_folder is None:
            raise ConfigError("The model has no tokenizer or processor, so it takes no raw data.")
        return load_preprocessor(side_folder, model, max_length=self.max_length)

    def draw(
        self, inputs: Mapping[str, Inputs], count: int, preprocessor: Preprocessor
    ) -> dict[str, list[dict[str, Tensor]]]:
        """Draw batches of `count` inputs of every task, or of all where there are fewer."""
        batches = {}
        for task, rows in inputs.items():
            # Draw at random, because data may be sorted by class.
            chosen = random.Random(self.seed).sample(range(len(rows)), min(count, len(rows)))
            drawn = [rows[index] for index in chosen]
            starts = range(0, len(drawn), BATCH_SIZE)
            try:
                batches[task] = [preprocessor(drawn[start : start + BATCH_SIZE]) for start in starts]
            except InputError as error:
                raise InputError(f"Task {task!r}: {error}") from None
        return batches

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        default = References()
        return {name: value for name, value in vars(self).items() if value != getattr(default, name)}


def sign(
    model: RetexModel,
    references: References,
    *,
    inputs: Mapping[str, Inputs] | None = None,
    progress: bool = True,
) -> dict[str, float]:
    """Fit the signatures of a model on data, and record the data in its recipe.

    Args:
        model: The model.
        references: Where the inputs come from.
        inputs: The result of `references.load()`, if it was called already.
        progress: Show a progress bar.

    Returns:
        Held-out identification accuracy per candidate layer, as `fit_signatures` does.
    """
    unknown = [task for task in references.data if task not in model.tasks]
    if unknown:
        raise TaskError(f"There is no task {unknown[0]!r}; the tasks are {model.tasks}.")
    recipe = model.recipe
    batches = references.batches(model, inputs)
    pooled = model.retex_config.signatures == "weights"
    pool = [batch for task in model.tasks for batch in batches.get(task, [])]
    with use_threads(None if recipe is None else recipe.threads):
        accuracies = model.fit_signatures(pool if pooled else batches, progress=progress)
    model.recipe = None if recipe is None else recipe.signed_with(references.to_dict())
    return accuracies
