"""From a recipe to a model: build, sign, and repeat the recorded changes."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack

from accelerate import Accelerator

from ..artifact import reading, writing
from ..artifact.recipe import Recipe, use_threads
from ..artifact.recipe_record import OF_ADDING
from ..artifact.state import RetexParts
from ..build.build import build_folder
from ..build.plan import prepare
from ..checkpoints import open_source
from ..checkpoints.tokenizer_files import find_side_folder
from ..config import RetexConfig
from ..data.task_data import Inputs
from ..errors import ConfigError
from ..model.edit_tasks import AddedTask
from ..model.retex_model import RetexModel
from ..recovery import TrainingConfig
from ..utils.atomic_folder import check_target
from ..utils.devices import parse_device
from .signing import References, sign


class _HubOptions(TypedDict, total=False):
    """How to read from the Hub."""

    token: str | None
    cache_dir: str | None


class _BuildOptions(_HubOptions):
    """The options that a build in memory and one into a folder share."""

    solver: str
    training: TrainingConfig | None
    model_config: str | dict[str, Any] | None
    check_base: bool
    dtype: str | None
    device: str | None
    accelerator: Accelerator | None
    progress: bool


def make(
    recipe: Recipe,
    *,
    accelerator: Accelerator | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    progress: bool = True,
) -> RetexModel:
    """Build the model that a recipe describes, into the folder `recipe.output_dir` where it is given.

    The folder is replaced once, after the model is built, signed and changed as the recipe says. Only the main process
    of an accelerator signs and changes the model: processes share the solving, not the rest.
    """
    recipe.check()
    config = RetexConfig(**recipe.config)
    training = _training(recipe)
    references = references_of(recipe.to_dict())
    # Load before building, so that invalid data fails here and not after a folder has been written.
    inputs = references.load()
    options: _HubOptions = {"token": token, "cache_dir": cache_dir}
    _check_signing(recipe, config, references, inputs, **options)
    _check_changes(recipe, **options)
    build_options: _BuildOptions = {
        "solver": recipe.solver,
        "training": training,
        "model_config": recipe.model_config,
        "check_base": recipe.check_base,
        "dtype": recipe.dtype,
        "device": recipe.device,
        "accelerator": accelerator,
        "progress": progress,
        **options,
    }
    device = None if recipe.device is None else parse_device(recipe.device)
    output_dir = recipe.output_dir

    def complete(model: RetexModel) -> None:
        _complete(recipe, references, inputs, model, progress=progress, **options)

    with use_threads(recipe.threads):
        if not output_dir:
            model = RetexModel.from_experts(recipe.base, recipe.experts, config, **build_options)
            if accelerator is None or accelerator.is_main_process:
                complete(model)
            return model

        def publish(parts: RetexParts, folder: Path | None) -> None:
            model = RetexModel(parts)
            complete(model if device is None else model.to(device))
            if folder is None or recipe.changes:  # the weights changed, or are on no disk yet
                model.save_pretrained(output_dir)
            else:
                writing.carry_over(model.parts(), folder, check_target(output_dir))

        more = inputs or recipe.changes or recipe.solver == "adam"
        folder = build_folder(
            recipe.base, recipe.experts, config, output_dir, publish=publish if more else None, **build_options
        )
        model = RetexModel(reading.read(folder))
        return model if device is None else model.to(device)


def _complete(
    recipe: Recipe,
    references: References,
    inputs: dict[str, Inputs],
    model: RetexModel,
    *,
    progress: bool,
    **options: Unpack[_HubOptions],
) -> None:
    """Apply the recipe's remaining steps to a model that was just built."""
    if recipe.solver == "adam" and model.recipe is not None:
        kept = ("mixed_precision", "gradient_accumulation_steps")
        stored = recipe.stored()
        model.recipe = model.recipe.with_values(**{name: stored[name] for name in kept if name in stored})
    if inputs:
        sign(model, references, inputs=inputs, progress=progress)
    for change in recipe.changes:
        apply_change(model, change, progress=progress, **options)


def _check_signing(
    recipe: Recipe,
    config: RetexConfig,
    references: References,
    inputs: dict[str, Inputs],
    **options: Unpack[_HubOptions],
) -> None:
    """Refuse inputs that the tokenizer or processor of the model to build does not take."""
    if inputs:
        blueprint = prepare(
            recipe.base,
            recipe.experts,
            config,
            on_meta=True,
            model_config=recipe.model_config,
            check_base=False,
            **options,
        )
        side_folder = find_side_folder((blueprint.base, *blueprint.sources.values()))
        references.draw(inputs, 1, references.preprocessor(side_folder, blueprint.model))


def _check_changes(recipe: Recipe, **options: Unpack[_HubOptions]) -> None:
    """Refuse changes whose experts or data are not where the recipe says."""
    for change in recipe.changes:
        references_of(change.get("sign", change)).load()
        if "add" in change:
            open_source(change["expert"], f"expert {change['add']!r}", adapters=True, **options)


def apply_change(
    model: RetexModel, change: dict[str, Any], *, progress: bool = True, **options: Unpack[_HubOptions]
) -> None:
    """Apply one entry of a recipe's `changes` to a model."""
    change = dict(change)
    if "remove" in change:
        model.delete_task(change["remove"])
    elif "sign" in change:
        sign(model, References(**change["sign"]), progress=progress)
    else:
        own = {key: change[key] for key in OF_ADDING if key in change}
        add_task(model, change["add"], change["expert"], references_of(change), progress=progress, **own, **options)


def add_task(model: RetexModel, name: str, expert: str, references: References, **options: Any) -> AddedTask:
    """Call `RetexModel.add_task` with reference inputs from data, and record their source in the recipe."""
    batches = references.batches(model)[name] if references.data else None
    with use_threads(None if model.recipe is None else model.recipe.threads):
        added = model.add_task(name, expert, references=batches, **options)
    if model.recipe is not None and batches is not None:
        model.recipe = model.recipe.task_signed_with(name, references.to_dict())
    return added


def references_of(values: dict[str, Any]) -> References:
    """Return the part of a recipe, or of a change, that says where reference inputs come from."""
    return References(**{key: value for key, value in values.items() if key in References.__dataclass_fields__})


def differences(recipe: Recipe) -> list[str]:
    """Return the reasons why a build from a recipe may differ in bits from the artifact that the recipe came with."""
    found = [f"the artifact went on to {what}, which no recipe can repeat" for what in recipe.unrecorded]
    for package, made_with in recipe.made_with.items():
        if version(package) != made_with:
            found.append(f"it was made with {package} {made_with}, but {version(package)} is installed")
    return found


def _training(recipe: Recipe) -> TrainingConfig | None:
    if recipe.solver == "adam":
        return TrainingConfig(**recipe.training)
    if recipe.training:
        raise ConfigError('training is for solver "adam"; the closed form has nothing to train.')
    return None
