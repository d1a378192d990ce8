"""Evaluation of a method on one mixed, shuffled stream of all tasks, in three modes that are never mixed."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.readout import Answer
from ..data.task_data import TaskData
from ..errors import EvaluationError
from ..utils.atomic_file import whole_file
from ..utils.paths import as_path
from ..utils.progress import track
from ..utils.strict_files import read_json
from .checks import check_answers, check_chosen_tasks, check_tasks
from .method import Collate, Method, Prediction
from .metrics import matches

MODES = {"known": "task known", "unknown": "task unknown", "oracle": "oracle routing"}
NOT_SAID = -1


@dataclass(frozen=True)
class TaskScore:
    """Outcome of each row of one task, in the order of its data.

    Args:
        correct: Whether the answer is right; with the task unknown and a class as answer, the task must be right too.
        identified: Whether the row's task was identified; None where the task was given or the method does not say.
    """

    correct: np.ndarray
    identified: np.ndarray | None = None

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


@dataclass(frozen=True)
class Evaluation:
    """All results of one method: `scores[mode][task]`, its storage, and the outcome of its `fit`."""

    method: str
    scores: dict[str, dict[str, TaskScore]]
    storage_bytes: int
    state: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    packed_bytes: int = 0

    @property
    def tasks(self) -> list[str]:
        return list(next(iter(self.scores.values())))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, one digit per row."""
        scores = {mode: {task: _digits(score) for task, score in found.items()} for mode, found in self.scores.items()}
        return {
            "method": self.method,
            "seed": self.seed,
            "storage_bytes": self.storage_bytes,
            "packed_bytes": self.packed_bytes,
            "state": self.state,
            "scores": scores,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Make an evaluation from the result of `as_dict`."""
        scores = {
            mode: {
                task: TaskScore(**{key: _bits(rows) for key, rows in score.items()}) for task, score in found.items()
            }
            for mode, found in values["scores"].items()
        }
        stored, packed = values["storage_bytes"], values.get("packed_bytes", 0)
        return cls(values["method"], scores, stored, values["state"], values["seed"], packed)

    def save(self, path: str | Path) -> None:
        """Write everything as JSON, so that a long series of evaluations can be resumed."""
        # Write atomically: an interrupted run must not leave half a file that the next one takes for a result.
        with whole_file(path) as file:
            file.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Read a file written by `save`."""
        values = read_json(as_path(path, EvaluationError), EvaluationError)
        try:
            return cls.from_dict(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationError(f"{path} is not an evaluation written by Evaluation.save ({error!r}).") from None


def _digits(score: TaskScore) -> dict[str, str]:
    rows = {"correct": score.correct, "identified": score.identified}
    return {key: "".join("1" if bit else "0" for bit in bits) for key, bits in rows.items() if bits is not None}


def _bits(digits: str) -> np.ndarray:
    return np.array([digit == "1" for digit in digits])


def evaluate(
    method: Method,
    tasks: Sequence[TaskData],
    collate: Collate,
    *,
    modes: Sequence[str] = tuple(MODES),
    seed: int = 0,
    batch_size: int = 64,
    accelerator: Accelerator | None = None,
    progress: bool = True,
    num_labels: Mapping[str, int] | None = None,
) -> Evaluation:
    """Evaluate a fitted method on one shuffled stream of all tasks, once per mode.

    With an accelerator, whole batches are dealt to its processes and all processes return the same result. Neither
    batches nor the result depend on the number of processes.

    Args:
        method: The method, on which `fit` has been called.
        tasks: Test data.
        collate: Makes a batch of raw inputs.
        modes: Which of "known", "unknown" and "oracle" to run. Modes that the method does not have are left out.
        seed: Seed of the order of the stream.
        batch_size: Rows of a batch, of all tasks mixed.
        accelerator: The accelerator whose processes share the work; all of them must call this function.
        progress: Show a progress bar.
        num_labels: The width of each task's head, to check labels against; default: the number of `label_names`. Tasks
            named here but not in `tasks` are further candidates that the method may identify.
    """
    check_tasks(tasks, num_labels)
    modes = _modes(method, modes)
    choice = {task.name for task in tasks} | set(num_labels or {})
    stream = mixed_batches([len(task) for task in tasks], batch_size, seed)
    state = _plain_state(method)
    scores = {}
    bar = track(
        title=f"Evaluating {method.name}",
        unit="batch",
        total=len(modes) * len(stream),
        progress=progress and _is_main(accelerator),
    )
    with bar, torch.inference_mode():
        for mode in modes:
            bar.set_description(f"Evaluating {method.name}, {MODES[mode]}")
            rows = _run(Question(method, tasks, collate, mode, choice), stream, accelerator, bar)
            scores[mode] = _by_task(rows, tasks, mode)
    return Evaluation(method.name, scores, method.storage_bytes(), state, seed, method.packed_bytes())


def mixed_batches(sizes: Sequence[int], batch_size: int, seed: int) -> list[list[tuple[int, int]]]:
    """Return a shuffled stream of (task, row) over tasks of these sizes, cut into batches.

    >>> from retex_hf.evaluation.run import mixed_batches
    >>> mixed_batches([2, 1], 2, seed=0)
    [[(0, 0), (1, 0)], [(0, 1)]]
    """
    if batch_size < 1:
        raise EvaluationError(f"batch_size must be at least 1, not {batch_size}.")
    stream = [(task, row) for task, size in enumerate(sizes) for row in range(size)]
    random.Random(seed).shuffle(stream)
    return [stream[start : start + batch_size] for start in range(0, len(stream), batch_size)]


def modes_of(method: Method) -> list[str]:
    """Return the modes of a method; oracle routing requires a router."""
    return [mode for mode in MODES if (method.routes if mode == "oracle" else mode in method.modes)]


def _modes(method: Method, wanted: Sequence[str]) -> list[str]:
    unknown = [mode for mode in wanted if mode not in MODES]
    if unknown:
        raise EvaluationError(f"There is no mode {unknown[0]!r}; the modes are {', '.join(MODES)}.")
    found = [mode for mode in modes_of(method) if mode in wanted]
    if not found:
        raise EvaluationError(f"{method.name} can be evaluated in the modes {modes_of(method)}, not in {list(wanted)}.")
    return found


@dataclass(frozen=True)
class Question:
    """One mode of one evaluation of a method. `choice` are the tasks that a row may be identified as."""

    method: Method
    tasks: Sequence[TaskData]
    collate: Collate
    mode: str
    choice: Collection[str]

    def score(self, batch: Sequence[tuple[int, int]]) -> Tensor:
        """Run the method on a batch and return (task, row, correct, identified) of each row."""
        true = [self.tasks[task].name for task, _ in batch]
        right = [self.tasks[task].answers[row] for task, row in batch]
        inputs = self.collate([self.tasks[task].inputs[row] for task, row in batch])
        prediction = ask(self.method, inputs, true, self.mode)
        check_answers(prediction, self.method.name, true)
        correct = [is_right(*pair) for pair in zip(prediction.answers, right, strict=True)]
        identified = [NOT_SAID] * len(batch)
        if self.mode == "unknown":
            classes = [not isinstance(answer, str) for answer in right]
            check_chosen_tasks(prediction, self.method.name, true, self.choice, must_say=any(classes))
            if prediction.tasks is not None:
                identified = [int(found == task) for found, task in zip(prediction.tasks, true, strict=True)]
            # A class is right only under the right head; a text does not depend on the head.
            correct = [
                hit and (found == 1 or not cls) for hit, found, cls in zip(correct, identified, classes, strict=True)
            ]
        return torch.tensor([(*place, *found) for place, *found in zip(batch, correct, identified, strict=True)])


def _plain_state(method: Method) -> dict[str, Any]:
    """Return the method's `fit` results; refuse values that a report cannot hold before the long run starts."""
    state = method.state()
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"The state of {method.name} cannot be stored as JSON ({error}).") from None


def ask(method: Method, inputs: Mapping[str, Tensor], tasks: Sequence[str], mode: str) -> Prediction:
    """Answer a batch in one mode; pass the true tasks on only where the mode allows it."""
    if mode == "unknown":
        return method.predict(inputs)
    return method.predict(inputs, tasks=tasks, oracle=mode == "oracle")


def _run(
    question: Question, stream: Sequence[Sequence[tuple[int, int]]], accelerator: Accelerator | None, bar: Any
) -> Tensor:
    """Return (task, row, correct, identified) of every row of the stream, on every process."""
    pieces = []
    if accelerator is None:
        for batch in stream:
            pieces.append(question.score(batch))
            bar.update()
        return torch.cat(pieces)
    # The unit of work is a whole batch: cutting batches up would change their padding, and with it the last digits. The
    # accelerator's own settings (uneven or split batches) are for training; here a process might wait for ever.
    loader = prepare_data_loader(
        DataLoader(range(len(stream)), batch_size=1),  # type: ignore[arg-type]  # takes any sequence
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        dispatch_batches=False,
    )
    for number in loader:
        scored = question.score(stream[int(number)])
        # Pieces must have one size to be gathered; only the last batch of the stream is shorter.
        piece = torch.full((1, len(stream[0]), scored.shape[1]), NOT_SAID)
        piece[0, : len(scored)] = scored
        gathered = accelerator.gather_for_metrics(piece.to(accelerator.device)).cpu()
        pieces += list(gathered)
        bar.update(len(gathered))
    rows = torch.cat(pieces)
    return rows[rows[:, 0] != NOT_SAID]


def is_right(answer: Answer, right: Answer) -> bool:
    """Return whether an answer is the right class, or the right text up to case and outer white space."""
    if isinstance(right, str):
        return isinstance(answer, str) and matches(answer, right)
    return not isinstance(answer, str) and int(answer) == int(right)


def _by_task(rows: Tensor, tasks: Sequence[TaskData], mode: str) -> dict[str, TaskScore]:
    """Sort scored rows back into their tasks; check that every row is there once."""
    scores = {}
    for number, task in enumerate(tasks):
        mine = rows[rows[:, 0] == number]
        mine = mine[mine[:, 1].argsort()]
        if mine[:, 1].tolist() != list(range(len(task))):
            raise EvaluationError(
                f"The processes returned {len(mine)} rows of task {task.name!r}, which has {len(task)}; every row must "
                "come back once."
            )
        has_tasks = mode == "unknown" and bool((mine[:, 3] != NOT_SAID).all())
        identified = (mine[:, 3] == 1).numpy() if has_tasks else None
        scores[task.name] = TaskScore((mine[:, 2] == 1).numpy(), identified)
    return scores


def _is_main(accelerator: Accelerator | None) -> bool:
    return accelerator is None or accelerator.is_main_process
