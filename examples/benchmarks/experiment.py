"""Shared parts of all experiments: make a study of a recipe, make and evaluate methods on it, store cells.

    recipe, arguments = parse(__doc__)                     # --recipe --work-dir --rows --threads --only --mirror
    study = load(recipe, arguments.work_dir)
    cells = {spec.label: lambda spec=spec: pack(study.evaluate(spec.make())) for spec in study.methods()}
    done = run_cells(arguments.work_dir / "cells", cells, study.identity("main_table"), only=arguments.only)
    evaluations = [unpack(cell) for cell in done.values()]
    write(arguments.work_dir, "main_table", {...}, markdown, figure)

An experiment writes `<work>/<experiment>.json`, `.md` and `.png`. Run again with the same recipe and work dir, it
resumes.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cells import run_cells
from common import quiet, write_json
from recipes import Recipe, parse_recipe, read_recipe
from sources import Sources, load_sources

from retex_hf import RetexConfig
from retex_hf.artifact.plots import COLOURS, DPI, LINES, MARKERS
from retex_hf.baselines import BASELINES
from retex_hf.baselines import make as make_baseline
from retex_hf.baselines.retex import Retex
from retex_hf.config import overridden
from retex_hf.errors import ConfigError, RetexError
from retex_hf.evaluation import Material, Method, TaskData
from retex_hf.evaluation.run import Evaluation, evaluate

__all__ = [
    "MethodSpec",
    "Recipe",
    "Study",
    "as_study",
    "lines_figure",
    "load",
    "markdown_table",
    "pack",
    "parse",
    "parse_recipe",
    "read_recipe",
    "run",
    "run_cells",
    "unpack",
    "write",
]

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "experiments"
RETEX = "ReTeX"
CALIBRATION = "calibration_rows"
MODES = ("known", "unknown", "oracle")
# Convert an evaluation to the value of a cell, and back.
pack, unpack = Evaluation.as_dict, Evaluation.from_dict


@dataclass(frozen=True)
class MethodSpec:
    """A method of a recipe: its name in the registry, its options, and its label in tables.

    `ReTeX` takes fields of `RetexConfig` as options, which override those of the recipe, and `calibration_rows`. The
    option `label` of any method is its name in tables.
    """

    name: str
    label: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, entry: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> MethodSpec:
        """Parse one entry `{name: options}` of a recipe's methods."""
        ((name, given),) = entry.items()
        options = dict(given)
        if name != RETEX and name not in BASELINES:
            raise ConfigError(f"There is no method {name!r}; there are {[RETEX, *sorted(BASELINES)]}.")
        label = options.pop("label", None)
        if name == RETEX:
            label = label or ", ".join([name, *(f"{key} {value}" for key, value in options.items())])
            return cls(name, label, overridden(config, options))
        return cls(name, label or _baseline(name, options).name, options)

    def make(self) -> Method:
        """Make a new, unfitted method."""
        if self.name == RETEX:
            fields = {key: value for key, value in self.options.items() if key != CALIBRATION}
            given = {CALIBRATION: self.options[CALIBRATION]} if CALIBRATION in self.options else {}
            return Retex(RetexConfig(**fields), name=self.label, **given)
        method = _baseline(self.name, self.options)
        method.name = self.label
        return method


def _baseline(name: str, options: Mapping[str, Any]) -> Method:
    try:
        return make_baseline(name, **options)
    except TypeError as error:  # the constructor does not have the option
        raise ConfigError(f"Method {name!r}: {error}.") from None


@dataclass(frozen=True)
class Study:
    """A recipe with everything it names loaded.

    `material` is for fitting methods, `tests` for testing them. `held_out` and `unseen_tests` are the same for the
    tasks that no method may see before the test; empty unless `load` was asked for them.
    """

    recipe: Recipe
    material: Material
    tests: list[TaskData]
    held_out: Material | None = None
    unseen_tests: tuple[TaskData, ...] = ()

    @property
    def tasks(self) -> list[str]:
        return self.material.tasks

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of tasks to compare methods on; all tasks if the recipe names none."""
        return self.recipe.sizes or [len(self.tasks)]

    def config(self, **options: Any) -> RetexConfig:
        """Return the recipe's configuration of ReTeX, overridden by options; a rank and a budget replace each other."""
        return RetexConfig(**overridden(self.recipe.config, options))

    def methods(self, default: Sequence[Mapping[str, Mapping[str, Any]]] = ()) -> list[MethodSpec]:
        """Return the recipe's methods, or the experiment's own if the recipe names none."""
        specs = [MethodSpec.parse(entry, self.recipe.config) for entry in self.recipe.methods or default]
        labels = [spec.label for spec in specs]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(f"Two methods of the recipe are called {label!r}: give one of them a label.")
        return specs

    def subset(self, tasks: int | Sequence[str]) -> Study:
        """Return the study of the first tasks, or of the named tasks; nothing fitted is carried over."""
        names = self.tasks[:tasks] if isinstance(tasks, int) else list(tasks)
        material = _restrict(self.material, names)
        return replace(self, material=material, tests=[test for test in self.tests if test.name in names])

    def with_seed(self, seed: int) -> Study:
        """Return the study under another seed; nothing fitted is carried over."""
        return replace(self, material=replace(self.material, seed=seed, shared={}))

    def evaluate(self, method: Method, modes: Sequence[str] = MODES, *, progress: bool = False) -> Evaluation:
        """Fit a method on the material and test it."""
        method.fit(self.material)
        return self.test(method, modes, progress=progress)

    def test(self, method: Method, modes: Sequence[str] = MODES, *, progress: bool = False) -> Evaluation:
        """Test a fitted method."""
        return evaluate(
            method,
            self.tests,
            self.material.collate,
            modes=modes,
            seed=self.material.seed,
            batch_size=self.recipe.batch_size,
            progress=progress,
        )

    def identity(self, experiment: str, **options: Any) -> dict[str, Any]:
        """Return everything that cells of this study depend on: recipe (without methods), models, rows and seed."""
        recipe = {
            key: value for key, value in self.recipe.to_dict().items() if key not in ("methods", "sizes", "seeds")
        }
        return {
            "experiment": experiment,
            "recipe": recipe,
            "tasks": self.tasks,
            "models": {name: _version(model) for name, model in self._models().items()},
            "seed": self.material.seed,
            "rows": {test.name: len(test) for test in (*self.tests, *self.unseen_tests)},
            **options,
        }

    def _models(self) -> dict[str, str]:
        held_out = {} if self.held_out is None else self.held_out.experts
        return {"": self.material.base, **self.material.experts, **held_out}

    def release(self) -> None:
        """Free the objects that methods share; a study of other tasks shares nothing with this one."""
        self.material.shared.clear()
        gc.collect()


def load(recipe: Recipe, work: Path, *, mirror: Path | None = None, with_unseen: bool = False) -> Study:
    """Load everything a recipe names; make missing models of a local suite under `work`."""
    return as_study(recipe, *load_sources(recipe, work, mirror, with_unseen=with_unseen))


def as_study(recipe: Recipe, sources: Sources, names: Sequence[str]) -> Study:
    """Make the study of the named tasks; hold out all other tasks of the sources."""
    everything = Material(
        base=sources.base,
        experts=sources.experts,
        train=sources.train,
        validation=sources.validation,
        collate=sources.collate,
        readout=sources.readout,
        seed=recipe.seeds[0],
    )
    unseen = [task for task in sources.tests if task not in names]
    return Study(
        recipe,
        _restrict(everything, names),
        [sources.tests[task] for task in names],
        _restrict(everything, unseen) if unseen else None,
        tuple(sources.tests[task] for task in unseen),
    )


def _version(model: str) -> list[Any] | None:
    """Return sizes and times of the files of a local folder, to detect other weights; None for names on the Hub."""
    files = sorted(file for file in Path(model).glob("*") if file.suffix in (".safetensors", ".bin"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files] or None


def _restrict(material: Material, tasks: Sequence[str]) -> Material:
    def chosen(values: Mapping[str, Any]) -> dict[str, Any]:
        return {task: values[task] for task in tasks if task in values}

    return replace(
        material,
        experts=chosen(material.experts),
        train=chosen(material.train),
        validation=chosen(material.validation),
        shared={},
    )


def parse(
    description: str, default_recipe: str = "text8.yaml", *, arguments: Sequence[str] | None = None, **flags: Any
) -> tuple[Recipe, argparse.Namespace]:
    """Parse the command line of an experiment; `flags` are further ones, `name={options of add_argument}`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPES / default_recipe, help="YAML file (see recipes.py)")
    parser.add_argument("--work-dir", type=Path, help="models, cells and results; default: retex-<recipe>")
    parser.add_argument("--rows", type=int, help="test rows per task, instead of the recipe's")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--only", help="compute only cells whose key contains this")
    parser.add_argument("--mirror", type=Path, help="folder of downloaded models and data sets, by their Hub names")
    for name, options in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    given = parser.parse_args(arguments)
    given.work_dir = given.work_dir or Path(f"retex-{given.recipe.stem}")
    torch.set_num_threads(given.threads)
    quiet()
    return read_recipe(given.recipe).with_rows(given.rows), given


def run(main: Any) -> None:
    """Run an experiment's `main`; report faults of a recipe or its data in one sentence, without a traceback."""
    try:
        main()
    except RetexError as error:
        sys.exit(f"error: {error}")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table whose first column is text and whose others are numbers; None is an empty cell, floats have 3
    digits.

    >>> print(markdown_table(["method", "accuracy"], [["average", 0.5], ["none", None]]), end="")
    | method | accuracy |
    |---|---:|
    | average | 0.500 |
    | none |  |
    """

    def cell(value: Any) -> str:
        if value is None:
            return ""
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def lines_figure(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    xlabel: str,
    ylabel: str,
    *,
    xticks: Sequence[float] | None = None,
    log_x: bool = False,
) -> Figure:
    """Plot one panel per title, one line `(xs, ys)` per label; a label looks the same in all panels."""
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure = Figure(figsize=(4.2 * len(panels) + 2.6, 3.8), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for label, (xs, ys) in lines.items():
            index = labels.index(label)
            axes.plot(
                xs,
                ys,
                label=label,
                color=COLOURS[index % len(COLOURS)],
                linestyle=LINES[index // len(COLOURS) % len(LINES)],
                marker=MARKERS[index // len(COLOURS) % len(MARKERS)],
                markersize=4,
            )
        if log_x:
            axes.set_xscale("log", base=2)
        if xticks is not None:
            axes.set_xticks(list(xticks), [str(tick) for tick in xticks])
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(xlabel)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel(ylabel)
    handles = {}
    for axes in all_axes:
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=7)
    return figure


def command() -> str:
    """Return the command that is running, with the script's path from the repository's root.

    A result file states it, so that its table can be made again.
    """
    script = Path(sys.argv[0]).name
    return shlex.join(["python", f"examples/benchmarks/{Path(script).stem}.py", *sys.argv[1:]])


def write(work: Path, experiment: str, results: Mapping[str, Any], markdown: str, figure: Figure | None) -> None:
    """Write `<experiment>.json` (with the command), `.md` and `.png`, and print the table."""
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / f"{experiment}.json", {"command": command(), **results})
    (work / f"{experiment}.md").write_text(markdown, encoding="utf-8")
    if figure is not None:
        figure.savefig(work / f"{experiment}.png", dpi=DPI)
    print("\n" + markdown)
