"""The command `retex eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from ..artifact.recipe_record import RecipeRecord, check_trusted
from ..errors import ConfigError
from ..evaluation import Report, TaskData, load_task
from ..model.retex_model import RetexModel
from ..utils.atomic_folder import check_target
from ..utils.paths import as_path
from ..utils.terminal import as_json, say
from ..workflows.evaluation import evaluate_model, sample_rows
from ..workflows.predictor import PROMPT, Predictor, preprocessor_of, read_classes
from .options import POSITIONAL, DeviceOptions


@dataclasses.dataclass
class EvalOptions(DeviceOptions):
    """Measure an artifact on one shuffled stream of all tasks: task known, task unknown, oracle routing.

    The figures are stored in the artifact and appear on its card.

    Args:
        artifact: A folder or Hub id.
        data: Labelled data of a task, as for sign. Repeat for each task. Default: with --trust-recipe, the data named
            in the artifact's recipe.
        trust_recipe: Read the sources that the artifact's own recipe names, on this machine or the Hub: data and, with
            --individual, experts and base. Only for artifacts built by you or by people you trust.
        split: Split of the data.
        input_column: The column of texts or images, or two of them, [a, b]. Default: with the recipe's data, the
            recipe's; else found by common names.
        label_column: The column of labels. Default: found by common names.
        max_length: Truncate texts to this many tokens. Default: as in the recipe, else the tokenizer's limit.
        rows: Draw at most this many rows of each task at random. Default: all.
        individual: Also run the experts, and give figures relative to them. Experts are held in host memory and run on
            the CPU.
        experts: An expert for --individual. Repeat for each task. Default: with --trust-recipe, those of the recipe.
        base: The base for --individual. Default: with --trust-recipe, that of the recipe.
        batch_size: Rows per call.
        classes: For models of images and texts: a JSON file of the classes of each task, {task: [names]}.
        prompt: For those: the template that a class name is put into.
        max_new_tokens: For models that generate text: maximum length of an answer.
        seed: Seed of the order of the stream and of the draw of rows.
        save: Store the figures in the artifact and on its card.
        results_dir: Also write results.json, results.md and results.png to this folder.
        json: Print the figures as JSON.
    """

    EXAMPLES = """
        retex eval my-retex --data a=data/a --data b=data/b --rows 500
        retex eval my-retex --trust-recipe --individual
        retex eval my-retex --trust-recipe --json > figures.json
    """

    artifact: Annotated[str, POSITIONAL]
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    trust_recipe: bool = False
    split: str = "test"
    input_column: str | list[str] | None = None
    label_column: str | None = None
    max_length: int | None = None
    rows: int | None = None
    individual: bool = False
    experts: Annotated[dict[str, str], "--expert"] = dataclasses.field(default_factory=dict)
    base: str | None = None
    batch_size: int = 64
    classes: Path | None = None
    prompt: str = PROMPT
    max_new_tokens: int | None = None
    seed: int = 0
    save: bool = True
    results_dir: Path | None = None
    json: bool = False

    def run(self) -> None:
        if not self.individual and (self.experts or self.base):
            raise ConfigError("--expert and --base are for --individual.")
        if self.prompt != PROMPT and self.classes is None:
            raise ConfigError("--prompt is for --classes.")
        if self.results_dir is not None:
            check_target(self.results_dir)  # fail before the work, not after it
        model = RetexModel.from_pretrained(self.artifact, **self.model_options)
        recipe = model.recipe or RecipeRecord()
        data = self.data or self._trusted_data(recipe, model.tasks)
        if self.save and not as_path(self.artifact).is_dir():
            raise ConfigError(f"{self.artifact} is on the Hub, where no figures can be stored: pass --no-save.")
        experts, base = self._individual(recipe, model.tasks) if self.individual else (None, None)
        classes = read_classes(self.classes)
        generate: dict[str, Any] = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        if self.input_column is None and not self.data:
            self.input_column = recipe.references().get("input_column")
        preprocessor = preprocessor_of(model, self.max_length)
        predictor = Predictor(model, preprocessor, classes=classes, prompt=self.prompt, **generate)
        tests = [self._load(model, task, source, classes) for task, source in data.items()]
        report = evaluate_model(
            predictor,
            tests,
            experts=experts,
            base=base,
            seed=self.seed,
            batch_size=self.batch_size,
            progress=True,
        )
        self._keep(model, report)

    def _load(self, model: RetexModel, task: str, source: str, classes: dict[str, list[str]] | None) -> TaskData:
        described = model.retex_config.labels.get(task)
        names = list(described["id2label"].values()) if described else (classes or {}).get(task)
        loaded = load_task(
            task,
            source,
            split=self.split,
            input_column=self.input_column,
            label_column=self.label_column,
            label_names=names,
        )
        return loaded if self.rows is None else sample_rows(loaded, self.rows, self.seed)

    def _trusted_data(self, recipe: RecipeRecord, tasks: list[str]) -> dict[str, str]:
        named = recipe.data_of(tasks)
        if not named:
            raise ConfigError(f"Say which data to evaluate on: --data TASK=SOURCE for each of {tasks}.")
        shown = {f"data of {task!r}": source for task, source in named.items()}
        check_trusted(shown, self.artifact, self.trust_recipe, "name the data with --data TASK=SOURCE")
        return named

    def _individual(self, recipe: RecipeRecord, tasks: list[str]) -> tuple[dict[str, str], str | None]:
        """Return the experts and their base: those that the caller names, else those of a trusted recipe."""
        found = {**recipe.experts, **self.experts}
        missing = [task for task in tasks if task not in found]
        if missing:
            raise ConfigError(f"The expert of {missing[0]!r} is not recorded: pass --expert {missing[0]}=SOURCE.")
        named = {f"expert {task!r}": found[task] for task in tasks if task not in self.experts}
        base = self.base or recipe.base
        if self.base is None and base is not None:
            named["base"] = base
        check_trusted(named, self.artifact, self.trust_recipe, "name them with --expert TASK=SOURCE and --base")
        return {task: found[task] for task in tasks}, base

    def _keep(self, model: RetexModel, report: Report) -> None:
        if self.results_dir is not None:
            report.save(self.results_dir)
        if self.save:
            model.evaluation = report.summary()
            model.save_description(self.artifact)
        say(as_json(report.summary(), indent=2) if self.json else report)
        if self.save and not self.json:
            say(f"\nKept in {self.artifact}, and on its card.")
