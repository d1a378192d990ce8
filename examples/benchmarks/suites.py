"""The experts of the two quickstarts, for benchmarks; trained here if no earlier run has left them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quickstart
import quickstart_images
from common import Collate, Task, reference_inputs, train_experts
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, AutoTokenizer

from retex_hf import RetexConfig, RetexModel


@dataclass(frozen=True)
class Suite:
    """A base, its experts and their tasks; `options` are settings of `RetexConfig`."""

    name: str
    work: Path
    tasks: list[Task]
    collate: Collate
    options: dict[str, Any]
    load_expert: Callable[[Path], Any]

    def expert(self, task: Task) -> Path:
        return self.work / "experts" / task.name

    def build(self, **options: Any) -> RetexModel:
        """Build the artifact of the quickstart, with other options where given, without signatures."""
        experts = {task.name: self.expert(task) for task in self.tasks}
        config = RetexConfig(**{**self.options, **options})
        return RetexModel.from_experts(self.work / "base", experts, config, progress=False)

    def references(self, count: int = 64) -> dict[str, list[dict[str, Any]]]:
        """Return reference inputs of every task, as `fit_signatures` takes them."""
        return {task.name: [self.collate(reference_inputs(task, count))] for task in self.tasks}


def text_suite(work: Path) -> Suite:
    """Return MiniLM and four text tasks."""
    tasks = [quickstart.load_task(name) for name in quickstart.TASKS]
    base = work / "base"
    if not base.exists():
        quickstart.fetch_base(base)
    train_experts(
        tasks,
        work,
        {},
        lambda task, folder: quickstart.fine_tune_expert(base, task, quickstart.TASKS[task.name], folder),
    )
    collate = quickstart.text_collate(AutoTokenizer.from_pretrained(base))
    options = {"rank": 64, "exclude": ["*embeddings*"]}
    return Suite("text (MiniLM)", work, tasks, collate, options, AutoModelForSequenceClassification.from_pretrained)


def image_suite(work: Path) -> Suite:
    """Return a small ResNet and four image tasks."""
    tasks = [quickstart_images.load_task(name) for name in quickstart_images.TASKS]
    base = work / "base"
    if not base.exists():
        quickstart_images.train_base(tasks, base)
    train_experts(tasks, work, {}, lambda task, folder: quickstart_images.fine_tune_expert(base, task, folder))
    options = {"rank": 32}
    load = AutoModelForImageClassification.from_pretrained
    return Suite("images (ResNet)", work, tasks, quickstart_images.collate, options, load)
