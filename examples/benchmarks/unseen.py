"""Unseen tasks: benefit of the experts of other tasks, with hard recovery, soft recovery, or none.

    python examples/benchmarks/unseen.py --recipe examples/recipes/experiments/vision8.yaml

Tables (`--only` picks those whose name contains its text; both by default):

    merges    each base merge alone, with ReTeX choosing one expert per row, and with mixtures softmax(-R / tau)
    samplers  mixtures by recoveries that were solved for mixtures: Dirichlet, uniform and Gaussian samplers

Each writes `unseen_<table>.{json,md,png}`. Merging, recovery and signatures use the seen tasks only. The body is never
given the task of a row: every method routes by itself, on unseen inputs too. Heads are chosen as follows:

- seen tasks are read under their own heads, as in the paper: the table compares bodies, not the choice of a head;
- models that answer by class names (CLIP) or by text need no head for an unseen task, as in the paper's protocol;
- other classifiers have no head for an unseen task. It gets a linear probe: logistic regression on what enters the
  head, fitted on `--probe-rows` labelled training rows that ran through the method like the test rows. The probe is the
  same for every method, so differences come from the features.

Temperatures are in units of the mean gap between the smallest and the second residual of seen validation inputs: at 1,
a row with the mean gap puts e times more weight on its nearest task than on the next. Soft recovery is slow, because
every row has a mixture of its own: `--temperatures` are tried on the first merge, `--temperature` on the others and in
the second table. 50 test rows per task are used unless `--rows` says otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from experiment import Study, load, markdown_table, parse, run, write
from identifiers import fit_linear
from matplotlib.figure import Figure
from measuring import answers_as, batches, fit_signatures, gather, right_rows, run_each
from merges import MERGES, learn_merges
from torch import Tensor

from retex_hf import RetexModel
from retex_hf.artifact.plots import COLOURS
from retex_hf.build.plan import load_expert_weights
from retex_hf.errors import ConfigError
from retex_hf.evaluation import TaskData
from retex_hf.evaluation.run import is_right
from retex_hf.utils.tensor_bank import TensorBank

ROWS = 50
TABLES = ("merges", "samplers")
TEMPERATURES, TEMPERATURE = (0.1, 0.3, 1.0), 0.3
GAP_ROWS = 16
BASE = {"method": "task_arithmetic", "scale": 0.0}
ARITHMETIC = {"method": "task_arithmetic", "scale": 0.3}
SAMPLERS: dict[str, Any] = {
    "single tasks": None,
    "Dirichlet(0.1)": {"method": "dirichlet", "alpha": 0.1},
    "Dirichlet(1)": {"method": "dirichlet", "alpha": 1.0},
    "Dirichlet(5)": {"method": "dirichlet", "alpha": 5.0},
    "uniform + softmax": "uniform_softmax",
    "Gaussian + softmax": "gaussian_softmax",
}
HARD, ALONE, WITH_RETEX = "hard", "alone", " + ReTeX"
How = float | str
"""Mixing of the rows of a body: `HARD`, `ALONE`, or softly at a temperature."""


@dataclass(frozen=True)
class Head:
    """The linear layer of a task's head: scores are `features @ weight.T + bias`."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return features @ self.weight.T + self.bias


def take_heads(model: RetexModel) -> dict[str, Head]:
    """Take the heads off a model of classifiers, and replace them by the identity.

    Its logits are then the inputs of the head, row by row, however rows are routed and mixed.
    """
    taken, identities = {}, {}
    for task, tensors in model.heads.items():
        weights = [name for name in tensors if tensors[name].ndim == 2]
        biases = [name for name in tensors if tensors[name].ndim == 1]
        if len(weights) != 1 or len(biases) > 1 or len(tensors) != len(weights) + len(biases):
            raise ConfigError(f"Task {task!r}: a probe needs a head of one linear layer, not {sorted(tensors)}.")
        weight = tensors[weights[0]].float()
        taken[task] = Head(weight, tensors[biases[0]].float() if biases else torch.zeros(len(weight)))
        width = weight.shape[1]
        identities[task] = {weights[0]: torch.eye(width)} | {name: torch.zeros(width) for name in biases}
    model.heads = TensorBank(identities)
    # Logits are no longer classes, and all tasks have the same number of them.
    model.retex_config = replace(model.retex_config, labels={})
    return taken


class Body:
    """A built model with one way of mixing rows, tested on seen and unseen tasks.

    Args:
        study: The seen tasks, with the unseen ones held out.
        model: ReTeX of the seen tasks; signatures are fitted when rows must be identified.
        probe_rows: Training rows per unseen task for a probe.
    """

    def __init__(self, study: Study, model: RetexModel, probe_rows: int) -> None:
        self.study, self.model, self.probe_rows = study, model, probe_rows
        self.heads = take_heads(model) if any(model.heads.values()) else None
        self._residuals: dict[tuple[str, str], Tensor] = {}

    @cached_property
    def gap(self) -> float:
        """Return the unit of temperatures: the mean gap between the nearest and the next task of seen inputs."""
        validation = [sampled(self.study.material.validation[task], GAP_ROWS) for task in self.study.tasks]
        nearest = torch.cat([self.residuals("validation", data) for data in validation]).sort(1).values
        return (nearest[:, 1] - nearest[:, 0]).mean().item()

    @torch.inference_mode()
    def residuals(self, part: str, data: TaskData) -> Tensor:
        """Return residuals (rows, T) of a part of a task's data; computed once for all ways of mixing."""
        key = (part, data.name)
        if self.model.signatures is None:
            fit_signatures(self.model, self.study)
        if key not in self._residuals:
            material, size = self.study.material, self.study.recipe.batch_size
            found = gather(lambda inputs: self.model.identify(**inputs).residuals, data.inputs, material.collate, size)
            self._residuals[key] = found
        return self._residuals[key]

    def mixture(self, part: str, data: TaskData, how: How) -> Tensor | None:
        """Return mixing weights (rows, T): one task, or `softmax(-R / (tau gap))`; None for the merged model alone."""
        if how == ALONE:
            return None
        residuals = self.residuals(part, data)
        if how == HARD:
            return torch.nn.functional.one_hot(residuals.argmin(1), residuals.shape[1]).float()
        return torch.softmax(-residuals / (how * self.gap), 1)

    @torch.inference_mode()
    def run(self, part: str, data: TaskData, how: How, read: Callable[[Any, int], Sequence[Any]]) -> list[Any]:
        """Run the model and return `read(output, rows)`, one entry per row, in the order of the rows."""
        material, mixture = self.study.material, self.mixture(part, data, how)
        found: list[Any] = [None] * len(data)
        with self.model.disable_adapter() if mixture is None else nullcontext():
            for rows, inputs in batches(data.inputs, material.collate, self.study.recipe.batch_size):
                task = self.model.tasks[0] if mixture is None else mixture[rows]
                output = material.readout.call(self.model, inputs, task=task)
                for row, entry in zip(rows, read(output, len(rows)), strict=True):
                    found[row] = entry
        return found

    def features(self, part: str, data: TaskData, how: How) -> Tensor:
        """Return the input of the head, for each row."""
        return torch.stack(self.run(part, data, how, lambda output, _: output.logits.float()))

    def right(self, data: TaskData, how: How) -> float:
        """Return the accuracy on test rows that need no head in the model."""
        answers = self.study.material.readout.answers
        found = self.run("test", data, how, lambda output, rows: answers(output, [data.name] * rows))
        return float(np.mean([is_right(answer, truth) for answer, truth in zip(found, data.answers, strict=True)]))

    def seen(self, how: How) -> dict[str, float]:
        """Return the accuracy on every seen task under its own head."""
        if self.heads is None:
            return {test.name: self.right(test, how) for test in self.study.tests}
        return {
            test.name: accuracy(self.heads[test.name](self.features("test", test, how)), test.answers)
            for test in self.study.tests
        }

    def unseen(self, how: How) -> dict[str, float]:
        """Return the accuracy on every unseen task, by a probe where the model has a head inside."""
        if self.heads is None:
            return {test.name: self.right(test, how) for test in self.study.unseen_tests}
        found = {}
        for test in self.study.unseen_tests:
            train = sampled(self.study.held_out.train[test.name], self.probe_rows)
            classes = max(*train.answers, *test.answers) + 1
            probe = fit_linear(self.features("train", train, how), torch.tensor(train.answers), classes)
            found[test.name] = accuracy(probe(self.features("test", test, how)), test.answers)
        return found


def sampled(data: TaskData, count: int) -> TaskData:
    """Draw some rows of a task at random; the same ones for every method."""
    rows = random.Random(0).sample(range(len(data)), min(count, len(data)))
    return TaskData(data.name, [data.inputs[row] for row in rows], [data.answers[row] for row in rows])


def accuracy(scores: Tensor, answers: Sequence[int]) -> float:
    """Return the share of rows whose largest score is that of the right class."""
    return (scores.argmax(1) == torch.tensor(answers)).float().mean().item()


class Bodies:
    """Bodies by their ingredients; only the latest is kept, because cells are ordered by body."""

    def __init__(self, study: Study, probe_rows: int) -> None:
        self.study, self.probe_rows = study, probe_rows
        self._latest: tuple[dict[str, Any], Body] | None = None

    def get(self, options: dict[str, Any]) -> Body:
        if self._latest is None or self._latest[0] != options:
            material, self._latest = self.study.material, None
            config = self.study.config(**options)
            model = RetexModel.from_experts(material.base, material.experts, config, progress=False)
            self._latest = (options, Body(self.study, model, self.probe_rows))
        return self._latest[1]

    def measure(self, options: dict[str, Any], how: How) -> dict[str, Any]:
        """Return the accuracies of one row of a table."""
        body = self.get(options)
        return {"seen": body.seen(how), "unseen": body.unseen(how)}


def experts_themselves(study: Study) -> dict[str, Any]:
    """Evaluate the expert of every task on its own task, including the unseen ones where they have one."""
    found: dict[str, Any] = {}
    for part, material, tests in (
        ("seen", study.material, study.tests),
        ("unseen", study.held_out, study.unseen_tests),
    ):
        if not material.experts:
            found[part] = None
            continue
        weights = load_expert_weights(material.base, material.experts)
        found[part] = {}
        for test in tests:
            expert = weights.module(weights.expert_body(test.name), test.name)
            answer = answers_as(material.readout, expert, test.name)
            right = right_rows(answer, test, material.collate, study.recipe.batch_size)
            found[part][test.name] = float(right.mean())
    return found


Row = tuple[str, dict[str, Any], How]


def merge_rows(merges: Mapping[str, Any], temperatures: Sequence[float], temperature: float) -> dict[str, Row]:
    """Return `{label: (line, options of RetexConfig, how rows are mixed)}` of the first table.

    All temperatures are tried on the first merge, one on the others, because soft recovery is slow.
    """
    rows: dict[str, Row] = {"pre-trained": ("pre-trained", {"merge": BASE, "exclude": ["*"]}, ALONE)}
    for number, (name, merge) in enumerate(merges.items()):
        rows[name] = (name, {"merge": merge}, ALONE)
        rows[f"{name} + ReTeX, hard"] = (name + WITH_RETEX, {"merge": merge}, HARD)
        for tau in temperatures if number == 0 else [temperature]:
            rows[f"{name} + ReTeX, soft, tau {tau:g}"] = (name + WITH_RETEX, {"merge": merge}, tau)
    return rows


def sampler_rows(temperature: float) -> dict[str, Row]:
    """Return the rows of the second table, on task arithmetic: with the average, all samplers have one optimum."""
    return {
        f"soft, solved for {name}": (name, {"merge": ARITHMETIC, "soft_training": sampler}, temperature)
        for name, sampler in SAMPLERS.items()
    }


def as_markdown(title: str, results: Mapping[str, dict[str, Any]], tasks: Sequence[str], unseen: Sequence[str]) -> str:
    """Format mean accuracy on seen and on unseen tasks, and on every unseen task."""
    rows = []
    for label, found in results.items():
        single = [None if found["unseen"] is None else found["unseen"][task] for task in unseen]
        rows.append([label, mean(found["seen"]), mean(found["unseen"]), *single])
    header = f"## {title}\n\nSeen: {', '.join(tasks)}. Unseen: {', '.join(unseen)}.\n\n"
    return header + markdown_table(["method", "seen", "unseen", *unseen], rows)


def mean(accuracies: Mapping[str, float] | None) -> float | None:
    """Return the mean over tasks; None where there are none."""
    return None if accuracies is None else float(np.mean(list(accuracies.values())))


def as_figure(title: str, rows: Mapping[str, Row], results: Mapping[str, dict[str, Any]]) -> Figure:
    """Plot unseen against seen accuracy, one colour per merge; a line joins ReTeX's ways of mixing."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[str, float, float]]] = {}
    for label, (line, _, how) in rows.items():
        if label in results:
            point = (f"{how:g}" if isinstance(how, float) else how, *map(mean, _both(results[label])))
            lines.setdefault(line, []).append(point)
    merges = list(dict.fromkeys(line.removesuffix(WITH_RETEX) for line in lines))
    for line, points in lines.items():
        colour = COLOURS[merges.index(line.removesuffix(WITH_RETEX)) % len(COLOURS)]
        xs, ys = [point[1] for point in points], [point[2] for point in points]
        axes.plot(xs, ys, "o-" if len(points) > 1 else "s", color=colour, markersize=5, linewidth=1, label=line)
        for name, x, y in points if len(points) > 1 else ():
            axes.annotate(name, (x, y), (3, 4), textcoords="offset points", fontsize=6, color=colour)
    axes.set(title=title, xlabel="accuracy on seen tasks", ylabel="accuracy on unseen tasks")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def _both(found: Mapping[str, Any]) -> tuple[Any, Any]:
    return found["seen"], found["unseen"]


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        merges={
            "nargs": "+",
            "choices": list(MERGES),
            "default": list(MERGES),
            "help": "base merges of the first table",
        },
        temperatures={"nargs": "+", "type": float, "default": list(TEMPERATURES), "help": "on the first merge"},
        temperature={"type": float, "default": TEMPERATURE, "help": "on the others, and of the table samplers"},
        probe_rows={"type": int, "default": 128, "help": "training rows per unseen task for a linear probe"},
    )
    work, tables = arguments.work_dir, [t for t in TABLES if arguments.only is None or arguments.only in t]
    if not tables:
        raise ConfigError(f"There is no table with {arguments.only!r} in its name; the tables are {', '.join(TABLES)}.")
    study = load(recipe.with_rows(arguments.rows or ROWS), work, mirror=arguments.mirror, with_unseen=True)
    if not study.unseen_tests:
        raise ConfigError("The recipe names no unseen tasks, and its suite has none.")
    titles = {"merges": "Unseen tasks by base merge", "samplers": "Unseen tasks by sampler of mixtures"}
    planned: dict[str, dict[str, Row]] = {}
    taus = (arguments.temperatures, arguments.temperature)
    if "merges" in tables:
        planned["merges"] = merge_rows(learn_merges(study, work, arguments.merges), *taus)
    if "samplers" in tables:
        planned["samplers"] = sampler_rows(arguments.temperature)
    bodies = Bodies(study, arguments.probe_rows)
    unseen = [test.name for test in study.unseen_tests]
    identity = study.identity("unseen", unseen=unseen, probe_rows=arguments.probe_rows)
    for name, rows in planned.items():
        cells: dict[str, tuple[Any, Callable[[], Any]]] = {"individual": ("experts", lambda: experts_themselves(study))}
        for label, (_, options, how) in rows.items():
            cells[label] = ([options, how], lambda options=options, how=how: bodies.measure(options, how))
        results = run_each(work, "unseen", cells, identity)
        markdown = as_markdown(titles[name], results, study.tasks, unseen)
        write(work, f"unseen_{name}", results, markdown, as_figure(titles[name], rows, results))


if __name__ == "__main__":
    run(main)
