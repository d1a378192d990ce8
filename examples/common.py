"""Shared parts of the examples: the training loop, the evaluation of an artifact, and the table of results."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_linear_schedule_with_warmup
from transformers.utils import logging

from retex_hf import RetexModel
from retex_hf.baselines.retex import Retex
from retex_hf.config import DEFAULT_STORAGE
from retex_hf.data.readout import Classifier
from retex_hf.evaluation import Collate, Material, TaskData
from retex_hf.evaluation import evaluate as evaluate_method

DATA = Path(__file__).resolve().parent / "data"
SECONDS = "seconds.json"
EVALUATION_BATCH = 64
COLUMNS = {
    "individual": "individual experts",
    "merged": "merged",
    "task_given": "ReTeX, task given",
    "task_unknown": "ReTeX, task unknown",
    "identification": "task identified",
}


@dataclass(frozen=True)
class Task:
    """One classification task: raw inputs, integer labels, and the names of the labels."""

    name: str
    label_names: list[str]
    train_inputs: Sequence[Any]
    train_labels: Sequence[int]
    test_inputs: Sequence[Any]
    test_labels: Sequence[int]


@dataclass(frozen=True)
class Training:
    """Settings of one fine-tuning run."""

    epochs: int
    learning_rate: float
    batch_size: int = 32
    weight_decay: float = 0.01
    # A new head starts from noise, the body from pre-trained weights: the head needs larger steps.
    head_speed_up: float = 10.0
    # Prefix of the names of the head's parameters.
    head: str = "classifier"
    # Batch normalisation keeps the statistics of the base: averaged statistics of several experts fit no data at all.
    fixed_statistics: bool = False


def data_folder(kind: str) -> Path:
    """Return the folder of the tasks of a kind ("text" or "image").

    This is the folder that the environment variable RETEX_DATA names, else the shared data beside the repository, else
    the shipped tasks.
    """
    if "RETEX_DATA" in os.environ:
        return Path(os.environ["RETEX_DATA"]) / kind
    beside = DATA.parents[2] / "shared" / "data" / kind
    return beside if beside.is_dir() else DATA / kind


def parse_arguments(description: str, work_dir: str) -> argparse.Namespace:
    """Parse the command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work-dir", type=Path, default=Path(work_dir), help="where everything is written")
    parser.add_argument("--storage", default=DEFAULT_STORAGE, help="bytes of the recovery: a share, or a size")
    parser.add_argument(
        "--evaluate-only",
        action="store_true",
        help="only load and evaluate the artifact in the work dir (the script starts itself this way)",
    )
    quiet()
    return parser.parse_args()


def quiet() -> None:
    """Silence loading bars and "newly initialised head" warnings of a dozen models, which would hide the results."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Record how long a step took."""
    print(f"== {step}", flush=True)
    start = time.perf_counter()
    yield
    seconds[step] = round(time.perf_counter() - start, 1)


def similar_length_batches(inputs: Sequence[Any], size: int, rng: random.Random) -> list[list[int]]:
    """Return random batches of inputs of similar length, so that little of a batch is padding."""
    order = list(range(len(inputs)))
    rng.shuffle(order)
    batches = []
    for start in range(0, len(order), 16 * size):
        chunk = sorted(order[start : start + 16 * size], key=lambda i: len(inputs[i]))
        batches += [chunk[i : i + size] for i in range(0, len(chunk), size)]
    rng.shuffle(batches)
    return batches


def train(model: PreTrainedModel, task: Task, collate: Collate, settings: Training) -> None:
    """Fine-tune all weights of a classifier with AdamW, linear warm-up and linear decay."""
    head = [p for name, p in model.named_parameters() if name.startswith(settings.head)]
    body = [p for name, p in model.named_parameters() if not name.startswith(settings.head)]
    groups = [{"params": body}, {"params": head, "lr": settings.learning_rate * settings.head_speed_up}]

    def loss(batch: list[int]) -> Tensor:
        labels = torch.tensor([int(task.train_labels[i]) for i in batch])
        return model(**collate([task.train_inputs[i] for i in batch]), labels=labels).loss

    descend(model, groups, task, settings, loss)


def descend(
    model: PreTrainedModel,
    groups: list[dict[str, Any]],
    task: Task,
    settings: Training,
    loss_of: Callable[[list[int]], Tensor],
) -> None:
    """Minimise a loss over batches of training rows, given by number; `groups` are the optimiser's parameters."""
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    rng = random.Random(0)
    batches = [
        batch
        for _ in range(settings.epochs)
        for batch in similar_length_batches(task.train_inputs, settings.batch_size, rng)
    ]
    schedule = get_linear_schedule_with_warmup(optimizer, len(batches) // 10, len(batches))
    model.train()
    if settings.fixed_statistics:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    progress = tqdm(batches, desc=f"train {task.name}", unit="batch")
    for batch in progress:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


def train_experts(
    tasks: Sequence[Task], work: Path, seconds: dict[str, float], fine_tune: Callable[[Task, Path], None]
) -> None:
    """Train the experts that the work dir does not hold yet."""
    with timed(seconds, "fine-tune experts"):
        for task in tasks:
            folder = work / "experts" / task.name
            if folder.exists():
                print(f"{task.name}: using the expert in {folder}")
            else:
                fine_tune(task, folder)


def split_validation(task: Task, share: float = 0.2) -> tuple[Task, Task]:
    """Split the training part of a task: rows to train on, and a share held out for choosing settings.

    The first task keeps the test part. The second has the share as both its parts, so that it can be used for fitting
    on unlabelled inputs or for evaluation without showing the test part. The split depends only on the number of
    inputs, so all callers get the same one.
    """
    order = list(range(len(task.train_inputs)))
    random.Random(0).shuffle(order)
    count = round(share * len(order))
    if not 0 < count < len(order):
        raise ValueError(f"{task.name}: a share of {share} of {len(order)} training inputs leaves one part empty")
    kept_out, left = sorted(order[:count]), sorted(order[count:])

    def rows(indices: list[int]) -> tuple[Sequence[Any], list[int]]:
        inputs = task.train_inputs
        chosen = inputs[indices] if hasattr(inputs, "dtype") else [inputs[i] for i in indices]
        return chosen, [int(task.train_labels[i]) for i in indices]

    train_inputs, train_labels = rows(left)
    inputs, labels = rows(kept_out)
    return (
        replace(task, train_inputs=train_inputs, train_labels=train_labels),
        replace(task, train_inputs=inputs, train_labels=labels, test_inputs=inputs, test_labels=labels),
    )


def reference_inputs(task: Task, count: int) -> list[Any]:
    """Draw training inputs of a task at random, because a set may be sorted by class."""
    inputs = list(task.train_inputs)
    return random.Random(0).sample(inputs, min(count, len(inputs)))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that appears under its name only when complete: an interrupted run leaves no half model."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(folder)


@torch.inference_mode()
def accuracy(forward: Callable[..., Any], task: Task, collate: Collate, name: str | None) -> float:
    """Return the share of a task's test inputs whose largest logit is the right class; a name shows a progress bar."""
    right = 0
    for start in tqdm(range(0, len(task.test_inputs), EVALUATION_BATCH), desc=name, unit="batch", disable=name is None):
        rows = slice(start, start + EVALUATION_BATCH)
        predicted = forward(**collate(task.test_inputs[rows])).logits.argmax(-1)
        right += (predicted == torch.as_tensor(task.test_labels[rows])).sum().item()
    return right / len(task.test_inputs)


def accuracy_on_mixed_stream(model: RetexModel, tasks: Sequence[Task], collate: Collate) -> dict[str, dict[str, float]]:
    """Evaluate one shuffled stream of all tests.

    Return `task_given`, `task_unknown` (a row counts only if both its task and its class are right) and
    `identification`, per task.
    """
    method = Retex(model=model)
    # A finished model needs no material.
    method.fit(Material(base=None, experts={}, train={}, validation={}, collate=collate, readout=Classifier()))
    tests = [TaskData(task.name, task.test_inputs, task.test_labels, task.label_names) for task in tasks]
    scores = evaluate_method(method, tests, collate, modes=("known", "unknown"), batch_size=EVALUATION_BATCH).scores
    return {
        task.name: {
            "task_given": scores["known"][task.name].accuracy,
            "task_unknown": scores["unknown"][task.name].accuracy,
            "identification": float(scores["unknown"][task.name].identified.mean()),
        }
        for task in tasks
    }


def evaluate(
    model: RetexModel,
    tasks: Sequence[Task],
    collate: Collate,
    load_expert: Callable[[str], PreTrainedModel],
) -> dict[str, dict[str, float]]:
    """Return test accuracies per task: of its expert, the merged model, and ReTeX with the task given and unknown."""
    results = accuracy_on_mixed_stream(model, tasks, collate)
    for task in tasks:

        def told(task: Task = task, **inputs: Tensor) -> Any:
            return model(**inputs, task=task.name)

        row = results[task.name]
        with model.disable_adapter():  # the merged weights, under the head of this task
            row["merged"] = accuracy(told, task, collate, f"{task.name}, merged")
        row["individual"] = accuracy(load_expert(task.name), task, collate, f"{task.name}, expert")
    return results


def folder_bytes(folder: Path) -> int:
    """Return the size of a folder on disk."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def summarise(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the mean over tasks, and the mean over tasks of each method relative to the individual expert."""
    rows = list(results.values())
    accuracies = [column for column in COLUMNS if column != "identification"]
    return {
        "mean": {column: sum(row[column] for row in rows) / len(rows) for column in COLUMNS},
        "normalised": {
            column: sum(row[column] / row["individual"] for row in rows) / len(rows) for column in accuracies
        },
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Format the report as one table, followed by storage and time."""
    rows = {**report["tasks"], **report["summary"]}
    lines = ["| task | " + " | ".join(COLUMNS.values()) + " |", "|---" + "|---:" * len(COLUMNS) + "|"]
    for name, row in rows.items():
        cells = [f"{row[column]:.3f}" if column in row else "" for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if "storage_bytes" in report:
        storage = report["storage_bytes"]
        lines += [
            "",
            f"Storage: {storage['artifact'] / 1e6:.1f} MB for the artifact (storage {report['storage']}), "
            f"{storage['experts'] / 1e6:.1f} MB for the {len(report['tasks'])} experts "
            f"({storage['artifact'] / storage['experts']:.0%}).",
        ]
    if "seconds" in report:
        lines += ["", "Seconds: " + ", ".join(f"{step} {value:.1f}" for step, value in report["seconds"].items()) + "."]
    return "\n".join(lines) + "\n"


def read_json(file: Path) -> Any:
    """Read a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def write_json(file: Path, value: Any) -> None:
    """Write a value as a readable JSON file."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_report(work: Path, model: RetexModel, results: dict[str, Any], seconds: dict[str, float]) -> None:
    """Print the table and write it as results.json and results.md."""
    report = {
        "tasks": results,
        "summary": summarise(results),
        "storage": model.retex_config.storage,
        "storage_bytes": {
            "artifact": folder_bytes(work / "retex"),
            "experts": sum(folder_bytes(work / "experts" / task) for task in results),
        },
        "seconds": seconds,
    }
    table = as_markdown(report)
    write_json(work / "results.json", report)
    (work / "results.md").write_text(table, encoding="utf-8")
    print("\n" + table)


def evaluate_in_fresh_process(script: str, work: Path, seconds: dict[str, float]) -> None:
    """Run the script again in a new process, so that the evaluation uses nothing but the saved files."""
    write_json(work / SECONDS, seconds)
    child = subprocess.run([sys.executable, script, "--evaluate-only", "--work-dir", str(work)], check=False)
    sys.exit(child.returncode)
