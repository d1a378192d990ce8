"""Make the base and the experts of a suite, once: a later run makes only what is missing.

    python examples/benchmarks/prepare.py --recipe examples/recipes/experiments/text8.yaml --work-dir retex-text

Writes `<work>/base` and `<work>/experts/<task>`. Every experiment does this by itself; done beforehand, it can run on
other cores, or in parts (`--tasks`). Seconds to minutes per expert on a CPU, up to half an hour in the causal suite.
"""

from __future__ import annotations

from dataclasses import replace

from experiment import parse, run
from sources import load_sources

from retex_hf.errors import ConfigError


def main() -> None:
    recipe, arguments = parse(
        __doc__,
        tasks={"nargs": "+", "metavar": "TASK", "help": "default: those of the recipe"},
        unseen={"action": "store_true", "help": "also the tasks that the recipe holds out"},
    )
    if recipe.suite is None:
        raise ConfigError(f"{arguments.recipe}: its models are named, not made; there is nothing to prepare.")
    if arguments.tasks:
        recipe = replace(recipe, tasks=arguments.tasks, sizes=[])
    load_sources(recipe, arguments.work_dir, arguments.mirror, with_unseen=arguments.unseen)


if __name__ == "__main__":
    run(main)
