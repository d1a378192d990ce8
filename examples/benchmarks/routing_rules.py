"""Rules of identification, compared on stored features: clean and corrupted rows, references, numbers of tasks, doubt.

    recipes=examples/recipes/experiments
    python examples/benchmarks/routing_rules.py --recipe $recipes/vision8.yaml --work-dir retex-vision
    python examples/benchmarks/routing_rules.py --recipe $recipes/text21.yaml --work-dir retex-text21

Writes `routing_rules.{json,md}`, of which examples/benchmarks/results holds those of the suites. Features are those of
the averaged model, computed once (see routing_features.py). Figures are means over tasks of the share of test rows
identified as their own task; "corrupted" is the mean over all kinds and severities. Tables:

    conditions  every kind of corruption, 64 references per task
    references  8 to 400 references per task
    tasks       4 tasks to all of them
    doubt       calibration error of probabilities, false alarms at a rate of 5 %, and rows of unseen tasks found
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from corrupted import CLEAN
from experiment import RECIPES, Recipe, load, markdown_table, parse, run, write
from identifiers import by_regression
from routing_features import PERTURBED, Features, StudyFeatures, stored
from torch import Tensor

from retex_hf import RetexConfig
from retex_hf.evaluation import TaskData
from retex_hf.routing import FeatureSpace, Signatures
from retex_hf.routing.feature_space import spread
from retex_hf.routing.fitting import SHALLOW, fit_features
from retex_hf.routing.signatures import cross_validated

ROWS, REFERENCES = 60, 64
COUNTS = (8, 16, 64, 256, 400)
SIZES = (4, 8, 12, 14, 16, 21)
RATE = 0.05
BINS = 10
RANK = RetexConfig().signature_rank
PAPER, RESIDUAL, UNPERTURBED, BEFORE, DEFAULT = (
    "residual, last layer (the paper's)",
    "residual, layer chosen",
    "whitened, clean references",
    "former default: any layer but the first third, growing subspaces",
    "whitened, perturbed references (default)",
)
NORMALISED, GAUSSIAN, REGRESSION = "default, rows normalised", "one Gaussian covariance (LDA)", "logistic regression"

Task = list[Features]
Score = Callable[[Features], Tensor]
"""Maps features of rows by block to scores (rows, T), of which the smallest is the task's."""


def of_signatures(signatures: Signatures) -> Score:
    return lambda features: signatures.residuals(signatures.space(features))


def paper(clean: Task, perturbed: Task) -> Score:
    last = list(clean[0])[-1]
    return of_signatures(Signatures.fit([task[last] for task in clean], 0.1, last))


def fitted(identification: str, clean: Task, perturbed: Task) -> Score:
    return of_signatures(fit_features(clean, perturbed, RetexConfig(identification=identification))[0])


def whitened(clean: Task, perturbed: Task) -> Score:
    """Whiten without perturbed references, over layers up to the last."""
    space = FeatureSpace.fit(spread(list(clean[0])), clean)
    return of_signatures(Signatures.fit_in(space, [space(task) for task in clean], RANK))


def earlier(clean: Task, perturbed: Task) -> Score:
    """Apply the default, but let features end in the first half of the layers, and subspaces grow with references."""
    layers = list(clean[0])
    later = len(layers) - len(layers) // SHALLOW
    # Of the candidates, the first half is passed over.
    candidates = [*layers[:later], *layers[-later:]]
    config = RetexConfig(signature_rank=0.1)
    return of_signatures(fit_features(clean, perturbed, config, candidates)[0])


def normalised(clean: Task, perturbed: Task) -> Score:
    """Apply the default to features whose rows have length one in every layer, around the mean of all tasks."""
    centre = {layer: torch.stack([task[layer].mean(0) for task in clean]).mean(0) for layer in clean[0]}

    def unit(features: Features) -> Features:
        return {layer: torch.nn.functional.normalize(found - centre[layer], dim=1) for layer, found in features.items()}

    score = fitted("whitened", list(map(unit, clean)), list(map(unit, perturbed)))
    return lambda features: score(unit(features))


def gaussian(clean: Task, perturbed: Task, shrinkage: float = 0.1) -> Score:
    """Compare Mahalanobis distances to the means, all tasks sharing one covariance, over all layers."""
    space = FeatureSpace(tuple(clean[0]), FeatureSpace.fit(list(clean[0]), clean).scale, torch.zeros(0, 0))
    placed = [space(task) for task in clean]
    rows = torch.cat([task - task.mean(0) for task in placed]).double()
    covariance = rows.T @ rows / len(rows)
    floor = shrinkage * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    root = torch.linalg.cholesky((1 - shrinkage) * covariance + floor)

    def whiten(rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(root, rows.double().T, upper=False).T

    means = whiten(torch.stack([task.mean(0) for task in placed]))
    return lambda features: torch.cdist(whiten(space(features)), means)


def regression(clean: Task, perturbed: Task) -> Score:
    layers = spread(list(clean[0]))
    identify = by_regression([torch.cat([task[layer] for layer in layers], 1) for task in clean])

    def score(features: Features) -> Tensor:
        found = identify(torch.cat([features[layer] for layer in layers], 1))
        return 1 - torch.nn.functional.one_hot(found, len(clean)).float()

    return score


RULES: dict[str, Callable[[Task, Task], Score]] = {
    PAPER: paper,
    RESIDUAL: partial(fitted, "residual"),
    UNPERTURBED: whitened,
    BEFORE: earlier,
    DEFAULT: partial(fitted, "whitened"),
    NORMALISED: normalised,
    GAUSSIAN: gaussian,
    REGRESSION: regression,
}


def references(features: StudyFeatures, tasks: Sequence[str], count: int, kind: str) -> Task:
    """Return the first references of every task."""
    return [{layer: found[:count] for layer, found in features.pool[task][kind].items()} for task in tasks]


def identified(score: Score, features: StudyFeatures, tasks: Sequence[str], condition: str) -> float:
    """Return the mean over tasks of the share of rows identified as their own task."""
    found = [score(features.test[task][condition]).argmin(1) == number for number, task in enumerate(tasks)]
    return torch.stack([rows.float().mean() for rows in found]).mean().item()


def shares(features: StudyFeatures, tasks: Sequence[str], count: int, rules: Sequence[str]) -> dict[str, Any]:
    """Return `{rule: {condition: identified}}`, with the mean over all corruptions."""
    given = [references(features, tasks, count, kind) for kind in (CLEAN, PERTURBED)]
    table = {}
    for rule in rules:
        score = RULES[rule](*given)
        found = {name: identified(score, features, tasks, name) for name in features.test[tasks[0]]}
        worse = [share for name, share in found.items() if name != CLEAN]
        table[rule] = {**found, "corrupted": sum(worse) / len(worse), "worst": min(worse)}
    return table


def doubt(features: StudyFeatures, tasks: Sequence[str], count: int) -> dict[str, Any]:
    """Return the calibration error of probabilities at temperature 1 and at the fitted one, on held-out references and
    on test rows; the rate of false alarms, and the share of rows of every unseen task that are found."""
    given = [references(features, tasks, count, kind) for kind in (CLEAN, PERTURBED)]
    signatures, _ = fit_features(*given, RetexConfig())
    space = signatures.space
    make = partial(FeatureSpace.fit, space.layers)
    parts = {
        "references": cross_validated(given[0], RANK, make, given[1]),
        "test": [signatures.residuals(space(features.test[task][CLEAN])) for task in tasks],
    }
    errors = {
        f"{name}, {label}": calibration_error(residuals, temperature)
        for name, residuals in parts.items()
        for label, temperature in (("temperature 1", 1.0), ("fitted", signatures.temperature))
    }
    thresholds = signatures.thresholds(1 - RATE, 1.0)

    def alarms(rows: Features) -> float:
        placed = space(rows)
        nearest = signatures.residuals(placed).argmin(1)
        distances = signatures.distances(placed).gather(1, nearest.unsqueeze(1)).squeeze(1)
        return (distances > thresholds[nearest]).float().mean().item()

    own = [alarms(features.test[task][CLEAN]) for task in tasks]
    return {
        "calibration error": errors,
        "false alarms": sum(own) / len(own),
        "unseen": {task: alarms(rows) for task, rows in features.unseen.items()},
    }


def calibration_error(residuals: Sequence[Tensor], temperature: float) -> float:
    """Return the expected calibration error of the likeliest task: the mean gap between probability and accuracy, over
    bins of the probability weighted by their rows.

    >>> import torch
    >>> rows = torch.tensor([[0.0, 100.0]] * 3 + [[100.0, 0.0]])  # certain, and right in three of four
    >>> calibration_error([rows], 1.0)
    0.25
    """
    probabilities = [torch.softmax(-found / temperature, 1) for found in residuals]
    surest, named = torch.cat(probabilities).max(1)
    right = (named == torch.cat([torch.full((len(one),), task) for task, one in enumerate(residuals)])).float()
    bins = (surest * BINS).long().clamp(max=BINS - 1)
    gaps = [(surest[bins == place] - right[bins == place]).sum().abs() for place in range(BINS)]
    return (torch.stack(gaps).sum() / len(surest)).item()


def markdown(results: Mapping[str, Any]) -> str:
    """Format all tables."""
    conditions = results["conditions"]
    names = [name for name in next(iter(conditions.values())) if name not in ("corrupted", "worst")]
    names += ["corrupted", "worst"]
    rules = list(conditions)
    parts = [
        f"# Rules of identification: {results['suite']}",
        f"{len(results['tasks'])} tasks, {REFERENCES} references:",
        markdown_table(["test rows", *rules], [[name, *(conditions[rule][name] for rule in rules)] for name in names]),
    ]
    for title, key in (("references per task", "references"), ("tasks", "sizes")):
        rows = [
            [f"{rule}, {part}", *(results[key][count][rule][part] for count in results[key])]
            for rule in next(iter(results[key].values()))
            for part in (CLEAN, "corrupted")
        ]
        parts += [f"By {title}:", markdown_table([title, *results[key]], rows)]
    return "\n\n".join(part.strip() for part in [*parts, doubt_table(results["doubt"])]) + "\n"


def doubt_table(found: Mapping[str, Any]) -> str:
    """Format what is known of doubt."""
    rows = [[f"calibration error, {name}", value] for name, value in found["calibration error"].items()]
    rows.append([f"the tasks' own rows found out-of-distribution (target {RATE})", found["false alarms"]])
    rows += [[f"rows of {task}", share] for task, share in found["unseen"].items()]
    return f"Doubt:\n\n{markdown_table(['', 'share'], rows)}"


def unseen_tests(recipe: Recipe) -> tuple[TaskData, ...]:
    """Return test rows of the tasks that a suite's recipe holds out, which need no experts here."""
    if recipe.suite is None:
        return ()
    tasks = map(importlib.import_module(recipe.suite).load_task, recipe.unseen)
    rows = recipe.rows
    return tuple(TaskData(task.name, list(task.test_inputs[:rows]), task.test_labels[:rows]) for task in tasks)


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        str(RECIPES / "vision8.yaml"),
        corrupted_rows={"type": int, "default": ROWS, "help": "corrupted test rows per task and condition"},
        source={"default": "average", "help": "body to read features from: a merge, or pretrained"},
    )
    study = load(recipe, arguments.work_dir, mirror=arguments.mirror)
    study = replace(study, unseen_tests=unseen_tests(recipe))
    features = stored(study, arguments.work_dir, arguments.corrupted_rows, arguments.source)
    compared = [PAPER, RESIDUAL, UNPERTURBED, BEFORE, DEFAULT]
    most = min(len(next(iter(pool[CLEAN].values()))) for pool in features.pool.values())
    results = {
        "suite": arguments.recipe.stem,
        "source": arguments.source,
        "tasks": study.tasks,
        "conditions": shares(features, study.tasks, REFERENCES, list(RULES)),
        "references": {
            str(count): shares(features, study.tasks, count, [*compared, REGRESSION])
            for count in COUNTS
            if count <= most
        },
        "sizes": {
            str(size): shares(features, study.tasks[:size], REFERENCES, compared)
            for size in SIZES
            if size <= len(study.tasks)
        },
        "doubt": doubt(features, study.tasks, REFERENCES),
    }
    write(arguments.work_dir, "routing_rules", results, markdown(results), None)


if __name__ == "__main__":
    run(main)
