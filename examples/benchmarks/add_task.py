"""Adding a task to a finished artifact, without the other experts, against a build from all of them.

    python examples/benchmarks/add_task.py               # --work-dir retex-quickstart --task snips

The artifact is built from all experts of the text quickstart but one, which is then added: within the error of the
others, without raising the rank, and exactly. Accuracy is with the task given; tasks are identified from reference
inputs. Only a build from all experts has the new one in its merge. Trains the experts first if no quickstart has run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import Task, accuracy, quiet
from identification import identified
from suites import Suite, text_suite

from retex_hf import RetexModel

HOW = {"within the others' error": None, "no more rank": 1.0, "exactly": 0.0}


def known_accuracy(model: RetexModel, suite: Suite, tasks: list[Task]) -> float:
    """Return the mean accuracy over some tasks, with the task given."""
    found = [accuracy(lambda t=task, **x: model(**x, task=t.name), task, suite.collate, None) for task in tasks]
    return sum(found) / len(found)


def describe(model: RetexModel, suite: Suite, new: Task) -> list[str]:
    """Return accuracy of one task and of the others, identification, and the size of the recovery."""
    others = [task for task in suite.tasks if task is not new]
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.recovery.parameters())
    figures = (known_accuracy(model, suite, [new]), known_accuracy(model, suite, others), identified(model, suite))
    return [*(f"{figure:.3f}" for figure in figures), f"{size / 1e6:.1f}"]


def mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-quickstart"))
    parser.add_argument("--task", help="the task to add; default: each in turn")
    arguments = parser.parse_args()
    quiet()
    suite = text_suite(arguments.work_dir)
    names = [task.name for task in suite.tasks]
    if arguments.task not in (None, *names):
        parser.error(f"--task must be one of {names}")
    references = suite.references()
    start = time.perf_counter()
    rebuilt = suite.build()
    rebuilding = time.perf_counter() - start
    rebuilt.fit_signatures(references, progress=False)
    print("| added | how | seconds | mean error | whole | added (MB) | accuracy | others | identified | all (MB) |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for new in suite.tasks:
        if arguments.task not in (None, new.name):
            continue
        own = accuracy(suite.load_expert(suite.expert(new)).eval(), new, suite.collate, None)
        rest = dataclasses.replace(suite, tasks=[task for task in suite.tasks if task is not new])
        print(f"| {new.name} | the expert itself | | | | | {own:.3f} | | | |")
        for how, tolerance in HOW.items():
            model = rest.build()
            model.fit_signatures({task.name: references[task.name] for task in rest.tasks}, progress=False)
            start = time.perf_counter()
            added = model.add_task(
                new.name, suite.expert(new), references=references[new.name], tolerance=tolerance, progress=False
            )
            seconds = time.perf_counter() - start
            error, whole = mean(list(added.errors.values())), f"{len(added.whole)} of {len(added.errors)}"
            added_size = f"{added.added_bytes / 1e6:.1f}"
            figures = [f"{seconds:.1f}", error, whole, added_size, *describe(model, suite, new)]
            print(f"| {new.name} | {how} | " + " | ".join(figures) + " |", flush=True)
        figures = [f"{rebuilding:.1f}", mean(list(rebuilt.recovery_errors.values())), "", ""]
        figures += describe(rebuilt, suite, new)
        print(f"| {new.name} | built from all | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
