"""Build one ReTeX model from experts on any number of processes: exactly, or with the paper's training.

    accelerate launch examples/train.py --recipe examples/recipes/quickstart.yaml
    accelerate launch --multi_gpu --num_processes 2 examples/train.py --recipe examples/recipes/quickstart_adam.yaml
    python examples/train.py --base org/base --expert a=org/expert-a --expert b=org/expert-b --output-dir out --rank 64

A recipe is a YAML file with the keys `base`, `experts`, `config` (fields of RetexConfig), `solver`, `training` (fields
of TrainingConfig), `data`, `output_dir`, `push_to_hub`, `mixed_precision`, `gradient_accumulation_steps`, `log_with`,
`cpu`, `analyse` (also draw spectra and error against storage). Every key and every field is also a flag; flags win.
With `data`, signatures are fitted and the model is evaluated.
`--multi_gpu` starts several processes on CPUs too (then with `--cpu` after the script's name, where there are GPUs that
should not be used); `accelerate launch --cpu` starts one, whatever number is asked for.
Paths in a recipe are relative to the current folder; models and data may be local or on the Hub.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from common import Collate, Task, as_markdown, evaluate, quiet, reference_inputs, summarise
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from retex_hf import RetexConfig, RetexError, RetexModel, TrainingConfig
from retex_hf.analysis import analyse
from retex_hf.evaluation import load_task as load_data
from retex_hf.plots import save_figures

FILLED_ON_BUILD = {"tasks", "base_model", "experts", "labels"}


@dataclasses.dataclass
class Recipe:
    """Everything a run needs.

    Args:
        base: The pre-trained model: a folder or Hub id.
        experts: Task names and their experts.
        config: Fields of RetexConfig.
        solver: "closed_form" (exact) or "adam" (the paper's training).
        training: Fields of TrainingConfig, for "adam".
        data: Task names and their data: a folder with train.* and test.* files, or a Hub id.
        max_length: Texts are cut after so many tokens.
        output_dir: Where the artifact, its figures and the results go.
        push_to_hub: Upload the artifact to this repository.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_accumulation_steps: Backward passes per optimizer step.
        log_with: A tracker of accelerate, such as "tensorboard" or "wandb".
        cpu: Stay on the CPU.
        analyse: Also draw the experts' spectra, and error against storage.
    """

    base: str | None = None
    experts: dict[str, str] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    solver: str = "closed_form"
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    max_length: int = 64
    output_dir: str | None = None
    push_to_hub: str | None = None
    mixed_precision: str = "no"
    gradient_accumulation_steps: int = 1
    log_with: str | None = None
    cpu: bool = False
    analyse: bool = False

    @classmethod
    def from_yaml(cls, path: Path) -> Recipe:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RetexError(f"The recipe {path} does not exist.") from None
        except yaml.YAMLError as error:
            raise RetexError(f"The recipe {path} is not valid YAML: {error}.") from None
        if not isinstance(values, dict):
            raise RetexError(f"The recipe {path} must hold keys and values.")
        _check_keys(values, _names(cls), f"The recipe {path}")
        for section, known in (("config", _names(RetexConfig) - FILLED_ON_BUILD), ("training", _names(TrainingConfig))):
            _check_keys(values.get(section) or {}, known, f"{section!r} of the recipe {path}")
        return cls(**{key: value for key, value in values.items() if value is not None})

    def check(self) -> None:
        if self.mixed_precision is False:  # YAML reads a bare `no` so
            self.mixed_precision = "no"
        if not self.base or not self.experts or not self.output_dir:
            raise RetexError("A run needs a base, experts and an output_dir, from the recipe or as flags.")
        unknown = sorted(set(self.data) - set(self.experts))
        if unknown:
            raise RetexError(f"data names {unknown[0]!r}, which is not among the experts {sorted(self.experts)}.")


def _names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _check_keys(values: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise RetexError(f"{where} has no key {unknown[0]!r}; its keys are {sorted(known)}.")


def parse_recipe(arguments: list[str]) -> Recipe:
    """The recipe file, overridden by flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, help="YAML file to start from")
    for name in ("expert", "data"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="TASK=SOURCE")
    run = parser.add_argument_group("run")
    for field in dataclasses.fields(Recipe):
        if field.name not in ("experts", "data", "config", "training"):
            _add_flag(run, field, Recipe)
    for cls, left_out in ((RetexConfig, FILLED_ON_BUILD), (TrainingConfig, set())):
        group = parser.add_argument_group(cls.__name__)
        for field in dataclasses.fields(cls):
            if field.name not in left_out:
                _add_flag(group, field, cls)
    given = vars(parser.parse_args(arguments))
    recipe = Recipe.from_yaml(given["recipe"]) if given["recipe"] else Recipe()
    recipe.experts |= dict(_pair(text) for text in given["expert"])
    recipe.data |= dict(_pair(text) for text in given["data"])
    for field in dataclasses.fields(Recipe):
        if given.get(field.name) is not None and field.name not in ("experts", "data"):
            setattr(recipe, field.name, given[field.name])
    recipe.config |= {n: given[n] for n in _names(RetexConfig) - FILLED_ON_BUILD if given[n] is not None}
    recipe.training |= {n: given[n] for n in _names(TrainingConfig) if given[n] is not None}
    recipe.check()
    return recipe


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field, cls: type) -> None:
    flag, text = "--" + field.name.replace("_", "-"), _description(cls, field.name)
    if typing.get_type_hints(cls)[field.name] is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        # YAML's reading of a value is the right type for every field: 64, 0.15, full, [a, b], {method: ties}.
        group.add_argument(flag, type=yaml.safe_load, metavar="VALUE", help=text)


def _description(cls: type, name: str) -> str:
    """What the class's documentation says of a field."""
    found = re.search(rf"^ {{8}}{name}: (.+(?:\n {{12}}.+)*)", cls.__doc__, re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]).replace("%", "%%").replace("`", "")


def _pair(text: str) -> tuple[str, str]:
    task, separator, source = text.partition("=")
    if not separator:
        raise RetexError(f"Expected TASK=SOURCE, not {text!r}.")
    return task, source


def load_task(name: str, source: str, label_names: list[str]) -> Task:
    """A task from a local folder with train.* and test.* files, or from the Hub (its splits `train` and `test`)."""
    train, test = (load_data(name, source, split=split) for split in ("train", "test"))
    return Task(name, label_names, list(train.inputs), train.answers, list(test.inputs), test.answers)


def make_collate(folder: str, task: Task, max_length: int) -> Collate:
    """Texts through the tokenizer, images through the image processor that were saved with a model."""
    if isinstance(task.train_inputs[0], str):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        options = {"padding": True, "truncation": True, "max_length": max_length, "return_tensors": "pt"}
        return lambda texts: dict(tokenizer(list(texts), **options))
    processor = AutoImageProcessor.from_pretrained(folder)
    return lambda images: dict(processor([image.convert("RGB") for image in images], return_tensors="pt"))


def evaluate_and_report(model: RetexModel, recipe: Recipe, tasks: list[Task], collate: Collate) -> None:
    """The table of the examples, on the terminal and beside the artifact."""
    texts = isinstance(tasks[0].train_inputs[0], str)
    loader = AutoModelForSequenceClassification if texts else AutoModelForImageClassification
    results = evaluate(model, tasks, collate, lambda task: loader.from_pretrained(recipe.experts[task]))
    report = {"tasks": results, "summary": summarise(results), "rank": model.retex_config.rank}
    output = Path(recipe.output_dir)
    (output / "results.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (output / "results.md").write_text(as_markdown(report), encoding="utf-8")
    print("\n" + as_markdown(report))


def run(recipe: Recipe) -> None:
    accelerator = Accelerator(
        cpu=recipe.cpu,
        mixed_precision=recipe.mixed_precision,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        log_with=recipe.log_with,
        project_dir=recipe.output_dir,
    )
    if recipe.log_with:
        accelerator.init_trackers("retex", config={**recipe.config, **recipe.training})
    accelerator.print(f"Processes: {accelerator.num_processes}.")
    config = RetexConfig(**recipe.config)
    training = TrainingConfig(**recipe.training) if recipe.solver == "adam" else None
    model = RetexModel.from_experts(
        recipe.base, recipe.experts, config, solver=recipe.solver, training=training, accelerator=accelerator
    )
    if accelerator.is_main_process:
        finish(model, recipe)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def draw(model: RetexModel, recipe: Recipe) -> None:
    """The pictures, beside the artifact."""
    analysis = analyse(model, recipe.experts) if recipe.analyse else None
    save_figures(
        recipe.output_dir,
        records=model.training_history,
        errors=model.recovery_errors,
        energy_ratios=analysis and analysis.energy_ratios,
        storage=analysis and analysis.storage_curve(),
    )


def finish(model: RetexModel, recipe: Recipe) -> None:
    """What one process does alone: signatures, files, pictures, evaluation, upload."""
    labels = {task: list(v["id2label"].values()) for task, v in model.retex_config.labels.items()}
    tasks = [load_task(name, source, labels.get(name, [])) for name, source in recipe.data.items()]
    collate = make_collate(recipe.base, tasks[0], recipe.max_length) if tasks else None
    if len(tasks) == len(model.tasks):
        wanted = model.retex_config.num_reference
        model.fit_signatures({task.name: [collate(reference_inputs(task, wanted))] for task in tasks})
    model.save_pretrained(recipe.output_dir)
    draw(model, recipe)
    if len(tasks) == len(model.tasks):
        with torch.inference_mode():
            evaluate_and_report(model, recipe, tasks, collate)
    if recipe.push_to_hub:
        model.push_to_hub(recipe.push_to_hub)
    print(f"Saved to {recipe.output_dir}.")


def main() -> None:
    quiet()
    try:
        run(parse_recipe(sys.argv[1:]))
    except RetexError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
