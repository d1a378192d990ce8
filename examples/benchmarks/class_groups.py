"""Many tasks from one: the classes of a data set, dealt to several tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from common import Task

from retex_hf.errors import ConfigError

GROUP = re.compile(r"(?P<data>.+)-(?P<number>\d+)of(?P<count>\d+)")


def load_group(name: str, load: Callable[[str], Task]) -> Task | None:
    """Return the task that a name such as "banking77-3of10" stands for; None for other names."""
    found = GROUP.fullmatch(name)
    if found is None:
        return None
    groups = {task.name: task for task in class_groups(load(found["data"]), int(found["count"]))}
    if name not in groups:
        raise ConfigError(f"There is no group {name!r}, only {list(groups)}.")
    return groups[name]


def class_groups(task: Task, count: int, seed: int = 0) -> list[Task]:
    """Shuffle the classes of a task and deal them to `count` tasks of about equal size, with labels renumbered."""
    classes = list(range(len(task.label_names)))
    most = len(classes) // 2
    if not 2 <= count <= most:
        raise ConfigError(f"The {len(classes)} classes of {task.name} make between 2 and {most} groups, not {count}.")
    random.Random(seed).shuffle(classes)
    return [_group(task, f"{task.name}-{i + 1}of{count}", sorted(classes[i::count])) for i in range(count)]


def _group(task: Task, name: str, classes: Sequence[int]) -> Task:
    def rows(inputs: Sequence[Any], labels: Sequence[int]) -> tuple[list[Any], list[int]]:
        chosen = [row for row, label in enumerate(labels) if label in classes]
        return [inputs[row] for row in chosen], [classes.index(labels[row]) for row in chosen]

    train, test = rows(task.train_inputs, task.train_labels), rows(task.test_inputs, task.test_labels)
    return Task(name, [task.label_names[label] for label in classes], *train, *test)
