"""Parsing of `task=` in all its forms, and grouping of rows that share an expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import BASE
from ..errors import TaskError


@dataclass
class Group:
    """Rows that run on one expert.

    The expert is that of a task, or a mixture of tasks where `weights` are given (`task_id` is then the likeliest task,
    whose head is used). Rows that are not `recovered` run on the merged model with the task's head.
    """

    task_id: int
    rows: Tensor
    weights: Tensor | None = None
    recovered: bool = True

    def mixture(self, tasks: int) -> Tensor:
        """Return the weights of all tasks, (T,)."""
        if self.weights is not None:
            return self.weights
        return torch.nn.functional.one_hot(torch.tensor(self.task_id), tasks).float()


@dataclass
class Assignment:
    """A task per row, and optional mixing weights (rows, T).

    Weights are given where a row runs on something other than its task's expert. Rows that run on the merged model have
    weights of zero.
    """

    task_ids: Tensor
    weights: Tensor | None = None

    def mixtures(self, tasks: int) -> Tensor:
        """Return the weights of all tasks for each row, (rows, T)."""
        return torch.nn.functional.one_hot(self.task_ids, tasks).float() if self.weights is None else self.weights

    def groups(self) -> list[Group]:
        if self.weights is None:
            return [
                Group(task_id, (self.task_ids == task_id).nonzero().flatten())
                for task_id in self.task_ids.unique().tolist()
            ]
        # Group by task as well as by weights: equal weights do not determine the head.
        by_row = torch.cat([self.task_ids.unsqueeze(1).to(self.weights.dtype), self.weights], dim=1)
        kinds, member = torch.unique(by_row, dim=0, return_inverse=True)
        groups = []
        for index, (task_id, *mixture) in enumerate(kinds.tolist()):
            rows = (member == index).nonzero().flatten()
            pure, merged = mixture[int(task_id)] == 1, not any(mixture)
            groups.append(Group(int(task_id), rows, None if pure or merged else kinds[index, 1:], not merged))
        return groups


def task_index(task: str, tasks: list[str]) -> int:
    """Return the position of a task name; refuse an unknown one."""
    if task not in tasks:
        raise TaskError(f"Unknown task {task!r}; the tasks are {tasks}.")
    return tasks.index(task)


@dataclass(frozen=True)
class Mixture:
    """Several tasks mixed in equal parts for every row; the head is that of the first."""

    names: tuple[str, ...]

    def weights(self, tasks: list[str]) -> Tensor:
        weights = torch.zeros(len(tasks))
        weights[[task_index(name, tasks) for name in self.names]] = 1 / len(self.names)
        return weights


def as_active(names: Any, tasks: list[str]) -> str | Mixture | None:
    """Parse the argument of `set_adapter`: a task, several tasks, or None for routing."""
    if names is None or isinstance(names, str):
        return names if names is None else tasks[task_index(names, tasks)]
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise TaskError(f"Expected a task, a list of tasks or None, not {names!r}; the tasks are {tasks}.")
    if len(set(names)) < len(names):
        raise TaskError(f"{list(names)} names a task twice.")
    for name in names:
        task_index(name, tasks)
    return names[0] if len(names) == 1 else Mixture(tuple(names))


def parse_adapter_names(names: Any, tasks: list[str], rows: int) -> Assignment:
    """Parse PEFT's `adapter_names`: a task per row, or `"__base__"` for the merged model."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TaskError(f"adapter_names must be a list with one task per row, not {names!r}; the tasks are {tasks}.")
    _check_rows(len(names), rows, "adapter_names")
    ids = torch.tensor([0 if name == BASE else task_index(name, tasks) for name in names], dtype=torch.long)
    if BASE not in names:
        return Assignment(ids)
    weights = torch.nn.functional.one_hot(ids, len(tasks)).float()
    weights[[name == BASE for name in names]] = 0
    return Assignment(ids, weights)


def parse_task(task: Any, tasks: list[str], rows: int) -> Assignment:
    """Parse `task=`: a name, one name or id per row (list, array or 1-D tensor), or mixing weights (rows, T)."""
    if isinstance(task, str):
        return Assignment(torch.full((rows,), task_index(task, tasks)))
    if isinstance(task, Mixture):
        first = task_index(task.names[0], tasks)
        return Assignment(torch.full((rows,), first), task.weights(tasks).expand(rows, -1))
    if isinstance(task, np.ndarray):
        task = task.tolist()  # an array of strings cannot become a tensor
    if isinstance(task, (list, tuple)) and all(isinstance(name, str) for name in task):
        _check_rows(len(task), rows)
        return Assignment(torch.tensor([task_index(name, tasks) for name in task], dtype=torch.long))
    try:
        values = torch.as_tensor(task).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TaskError(
            "task= must be a task name, one name per row, a tensor of task ids or a (rows, tasks) tensor of weights, "
            f"not {task!r}; the tasks are {tasks}."
        ) from None
    if values.is_floating_point() and values.ndim == 2:
        return _parse_weights(values.float(), tasks, rows)
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool or values.ndim > 1:
        raise TaskError(
            f"task= must hold integer ids of shape (rows,) or float weights of shape (rows, {len(tasks)}), "
            f"not {values.dtype} of shape {tuple(values.shape)}; the tasks are {tasks}."
        )
    ids = values.long().expand(rows) if values.ndim == 0 else values.long()
    _check_rows(len(ids), rows)
    for task_id in ids.tolist():
        if not 0 <= task_id < len(tasks):
            raise TaskError(f"Task id {task_id} is outside 0 to {len(tasks) - 1}; the tasks are {tasks}.")
    return Assignment(ids)


def _parse_weights(weights: Tensor, tasks: list[str], rows: int) -> Assignment:
    if weights.shape[1] != len(tasks):
        raise TaskError(f"task= has weights for {weights.shape[1]} tasks, but there are {len(tasks)}: {tasks}.")
    _check_rows(len(weights), rows)
    valid = (weights >= 0).all(1) & ((weights.sum(1) - 1).abs() < 1e-3)
    if not valid.all():
        row = int((~valid).nonzero()[0])
        raise TaskError(
            f"Mixing weights must be non-negative and sum to 1; row {row} is {weights[row].tolist()}, "
            f"for the tasks {tasks}."
        )
    weights = weights / weights.sum(1, keepdim=True)
    return Assignment(weights.argmax(1), weights)


def _check_rows(given: int, rows: int, name: str = "task=") -> None:
    if given != rows:
        raise TaskError(f"{name} has {given} entries, but the batch has {rows} rows.")
