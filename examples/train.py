"""Build one ReTeX model from experts on any number of processes: exactly, or with the paper's training.

    accelerate launch examples/train.py --recipe examples/recipes/quickstart.yaml
    accelerate launch --multi_gpu --num_processes 2 examples/train.py --recipe examples/recipes/quickstart_adam.yaml
    python examples/train.py --base org/base --expert a=org/expert-a --expert b=org/expert-b --output-dir out --rank 64

This is `retex build` on several processes, followed by figures, evaluation and upload. A recipe is a YAML file; every
key and every field of its sections `config` (RetexConfig) and `training` (TrainingConfig) is also a flag, and flags
override it. With `data`, signatures are fitted and the model is evaluated beside its experts. `--multi_gpu` also starts
several processes on CPUs (put `--cpu` after the script's name to leave existing GPUs unused); `accelerate launch --cpu`
always starts one process. Paths in a recipe are relative to the current folder; models and data may be local or on the
Hub.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from accelerate import Accelerator
from common import quiet

from retex_hf import RetexError, RetexModel
from retex_hf.artifact.plots import save_figures
from retex_hf.artifact.recipe import Recipe
from retex_hf.cli.build import BuildOptions
from retex_hf.cli.options import Parser
from retex_hf.evaluation import load_task
from retex_hf.workflows.analysis import analyse
from retex_hf.workflows.evaluation import evaluate_model
from retex_hf.workflows.from_recipe import make
from retex_hf.workflows.predictor import Predictor, preprocessor_of


@dataclasses.dataclass
class TrainOptions(BuildOptions):
    """Build one ReTeX model from experts on any number of processes, draw figures, evaluate and upload it.

    Args:
        recipe: YAML file to start from.
        experts: An expert: a folder, a Hub id, or a PEFT adapter of either kind. Repeat for each task.
        data: Data of a task: a folder with train.* and test.* files, or a Hub id. Repeat for each task.
    """

    EXAMPLES = """
        accelerate launch examples/train.py --recipe examples/recipes/quickstart.yaml
        accelerate launch --multi_gpu --num_processes 2 examples/train.py --recipe RECIPE --solver adam
    """

    recipe: Path | None = None

    @classmethod
    def add_arguments(cls, parser: Parser, left_out: set[str] = frozenset()) -> None:
        super().add_arguments(parser, left_out)


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
    model = make(recipe, accelerator=accelerator)
    if accelerator.is_main_process:
        finish(model, recipe)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def finish(model: RetexModel, recipe: Recipe) -> None:
    """Draw figures, evaluate and upload, on one process."""
    draw(model, recipe)
    if recipe.data:
        evaluate(model, recipe)
    if recipe.push_to_hub:
        print(model.push_to_hub(recipe.push_to_hub).commit_url)
    print(f"Saved to {recipe.output_dir}.")


def draw(model: RetexModel, recipe: Recipe) -> None:
    """Draw the figures and save them beside the artifact."""
    analysis = analyse(model, recipe.experts) if recipe.analyse else None
    save_figures(
        recipe.output_dir,
        records=model.training_history,
        errors={name: error for name, error in model.recovery_errors.items() if error is not None},
        energy_ratios=analysis and analysis.energy_ratios,
        storage=analysis and analysis.storage_curve(),
    )


def evaluate(model: RetexModel, recipe: Recipe) -> None:
    """Evaluate experts, merged model and ReTeX on the test parts; store the figures in the artifact and print them."""
    preprocessor = preprocessor_of(model, recipe.max_length)
    labels = {task: list(described["id2label"].values()) for task, described in model.retex_config.labels.items()}
    tests = [
        load_task(task, source, input_column=recipe.input_column, label_names=labels.get(task))
        for task, source in recipe.data.items()
    ]
    report = evaluate_model(Predictor(model, preprocessor), tests, experts=recipe.experts, base=recipe.base)
    model.evaluation = report.summary()
    model.save_description(recipe.output_dir)
    report.save(recipe.output_dir)
    print(f"\n{report}\n")


def main() -> None:
    quiet()
    try:
        recipe = TrainOptions.parse("train.py", sys.argv[1:]).as_recipe()
        if not recipe.output_dir:
            raise RetexError("A run needs an output_dir, from the recipe or as a flag.")
        run(recipe)
    except RetexError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
