"""Calibration data for learned merges: batches of every task, and the experts in memory to evaluate them on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import as_inputs
from ..data.readout import Answer, Readout
from ..errors import InputError, TaskError
from ..routing.fitting import LABEL_NAMES, as_batches
from ..utils.devices import CPU, moved
from .expert_weights import ExpertWeights


@dataclass(frozen=True)
class Batch:
    """Keyword arguments of a model's forward, and the correct answers where they are known."""

    inputs: dict[str, Any]
    answers: list[Answer] | None

    @property
    def rows(self) -> int:
        return next(len(value) for value in self.inputs.values() if isinstance(value, Tensor) and value.ndim)


@dataclass(frozen=True)
class CalibrationData:
    """Batches of each task, and the readout that turns outputs into answers."""

    readout: Readout
    batches: dict[str, list[Batch]]

    def fingerprint(self) -> str:
        """Return a digest of the data and of how answers are read."""
        digest = hashlib.sha256()
        _feed(digest, {task: [vars(batch) for batch in batches] for task, batches in self.batches.items()})
        _feed(digest, {"readout": type(self.readout).__qualname__, **vars(self.readout)})
        return digest.hexdigest()


@dataclass(frozen=True)
class Calibration:
    """The experts and data that a learned merge may use.

    Args:
        weights: Base, task vectors and heads, in memory.
        readout: How answers are read from outputs.
        batches: Batches of each task.
        progress: Show progress bars.
        held_out: Labelled batches of each task that nothing is learned from, by which a merge that is trained keeps its
            best step.
    """

    weights: ExpertWeights
    readout: Readout
    batches: Mapping[str, list[Batch]]
    progress: bool = True
    held_out: Mapping[str, list[Batch]] | None = None

    def inputs(self) -> dict[str, list[dict[str, Any]]]:
        """Return the inputs of each task's batches, without answers."""
        return {task: [batch.inputs for batch in batches] for task, batches in self.batches.items()}

    @torch.no_grad()
    def accuracy(self, body: Mapping[str, Tensor], task: str) -> float:
        """Return the share of a task's rows that a body answers correctly under the task's own head."""
        return self._accuracy(body, task, self.batches[task])

    @torch.no_grad()
    def held_out_accuracy(self, body: Mapping[str, Tensor]) -> float:
        """Return the accuracy of a body on held-out rows under their tasks' own heads, averaged over tasks."""
        assert self.held_out is not None  # callers check
        return fmean(self._accuracy(body, task, batches) for task, batches in self.held_out.items())

    def _accuracy(self, body: Mapping[str, Tensor], task: str, batches: list[Batch]) -> float:
        module = self.weights.module(body, task)
        right, rows = 0, 0
        for batch in batches:
            truths = _answers(task, batch)
            found = self.readout.answers(self.readout.call(module, batch.inputs), [task] * batch.rows)
            right += sum(answer == truth for answer, truth in zip(found, truths, strict=True))
            rows += batch.rows
        return right / rows


def read_calibration(
    calibration: Mapping[str, Iterable[Any]], readout: Readout, model: nn.Module, tasks: list[str]
) -> CalibrationData:
    """Read all batches of every task and check them. `model` is of the experts' class."""
    if not isinstance(calibration, Mapping):
        raise InputError(f"calibration must be a dict of task name to batches, not a {type(calibration).__name__}.")
    unknown = [task for task in calibration if task not in tasks]
    if unknown:
        raise TaskError(f"calibration has batches of {unknown[0]!r}, which is not one of the tasks {tasks}.")
    missing = [task for task in tasks if task not in calibration]
    if missing:
        raise TaskError(f"calibration needs batches of every task; {missing} have none.")
    found = {task: [_read(task, as_inputs(model, b)) for b in as_batches(calibration[task])] for task in tasks}
    for task, batches in found.items():
        if sum(batch.rows for batch in batches) == 0:
            raise InputError(f"Task {task!r} has no calibration inputs.")
    return CalibrationData(readout, found)


def _read(task: str, batch: dict[str, Any]) -> Batch:
    # Learned merges hold all experts in host memory and run them there.
    inputs = moved({name: value for name, value in batch.items() if name not in LABEL_NAMES}, CPU)
    labels: Any = next((batch[name] for name in LABEL_NAMES if name in batch), None)
    sizes = {name: len(value) for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
    if not sizes:
        raise InputError(f"Task {task!r}: a calibration batch holds no tensor of inputs.")
    if len(set(sizes.values())) > 1:
        raise InputError(f"Task {task!r}: the tensors of a calibration batch differ in their number of rows: {sizes}.")
    return Batch(inputs, labels.tolist() if hasattr(labels, "tolist") else labels)


def _answers(task: str, batch: Batch) -> list[Answer]:
    if batch.answers is None:
        raise InputError(f'Task {task!r}: a calibration batch has no "labels", and this merge chooses by accuracy.')
    if len(batch.answers) != batch.rows or not all(isinstance(answer, Answer) for answer in batch.answers):
        raise InputError(
            f"Task {task!r}: the labels of a calibration batch of {batch.rows} rows must be as many class indices or "
            "texts."
        )
    return batch.answers


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(str(len(value)).encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (str, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    else:
        # The behaviour of a function or a tokenizer cannot be hashed, so hash its name.
        digest.update(getattr(value, "__qualname__", type(value).__qualname__).encode())
