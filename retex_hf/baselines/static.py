"""References without a router of their own: the experts themselves, the base, and one merged body for all tasks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..evaluation.method import Material, Prediction
from ..merging.expert_weights import Weights
from .bodies import TaskBodies
from .heads import most_confident
from .identifier import Identifier, shared_identifier
from .merges import CALIBRATION_ROWS, PRETRAINED, describe_merge, learned_merge, merge_name, shared_body
from .shared_body import SharedBody

HEADS = ("confidence", "identifier")


class Individual(TaskBodies):
    """The expert of the true task, against which every method is measured. Does not identify tasks."""

    name = "individual"

    def body(self, task: str) -> Weights:
        return self.weights.expert_body(task)

    def storage_bytes(self) -> int:
        return len(self.weights.tasks) * self.weights.body_bytes()


class OneBody(TaskBodies):
    """One body for all tasks, under the head of the row's task.

    Authors' scripts give the true head to the model. Here, with the task unknown, the head is chosen as well.

    Args:
        head: `"confidence"` takes the head whose answer has the lowest entropy relative to the logarithm of its number
            of classes; `"identifier"` takes the head of the task that our identifier chooses. Generators have no head.
        identifier: Identifier to use; default: the one that all methods share.
    """

    modes = ("known", "unknown")
    source: Any
    """The body, as `Identifier.source` names it."""

    def __init__(self, head: str = "confidence", identifier: Identifier | None = None) -> None:
        if head not in HEADS:
            raise ConfigError(f"{type(self).__name__}: head must be one of {HEADS}, not {head!r}.")
        self.head, self._given = head, identifier
        self.identifier: Identifier | None = None

    def fit(self, material: Material) -> None:
        super().fit(material)
        self._body = self.make_body(material)
        self.routes = self.head == "identifier" and self.readout.chooses_head
        if self.routes:
            self.identifier = shared_identifier(material, self._given)
        elif self.readout.chooses_head:
            self._shared = SharedBody(self.weights, self._body)

    @abstractmethod
    def make_body(self, material: Material) -> Weights:
        """Make the one body."""

    def body(self, task: str) -> Weights:
        return self._body

    def module(self, task: str) -> nn.Module:
        # All modules share the body, so none takes memory of its own.
        return self._cache.get(task, lambda: self.weights.module(self._body, task))

    @torch.no_grad()
    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        if tasks is None and self.readout.chooses_head and not self.routes:
            chosen, answers = most_confident(self._shared.scores(self.readout, inputs, self.weights.tasks))
            return Prediction(answers, chosen)
        if self.readout.chooses_head and any(self.weights.heads.values()):
            return super().predict(inputs, tasks, oracle=oracle)
        # Heads are outside of the model, so all rows run together.
        if tasks is None and self.readout.chooses_head:
            tasks = self.choose(inputs)
        output = self.readout.call(self.module(self.weights.tasks[0]), inputs)
        return Prediction(self.readout.answers(output, tasks or []), None if tasks is None else list(tasks))

    def choose(self, inputs: Mapping[str, Tensor]) -> list[str]:
        return super().choose(inputs) if self.identifier is None else self.identifier.tasks_of(inputs)

    def storage_bytes(self) -> int:
        identifier = 0 if self.identifier is None else self.identifier.storage_bytes((self.source,))
        return self.weights.body_bytes() + identifier


class ZeroShotBase(OneBody):
    """The pre-trained body under each task's head, before any fine-tuning."""

    name = "zero-shot"
    source = PRETRAINED

    def make_body(self, material: Material) -> Weights:
        return self.weights.base


class Merged(OneBody):
    """The merged body that ReTeX starts from, without recovery.

    Args:
        merge: As `RetexConfig.merge`: a registered method, one with options, or a finished merge.
        head: See `OneBody`.
        identifier: See `OneBody`.
        name: Name in tables; default: the merge, and how the head is chosen if not by confidence.
        calibration_rows: Rows per task that a learnt merge sees; see `learned_merge`.
    """

    def __init__(
        self,
        merge: str | dict[str, Any] = "average",
        head: str = "confidence",
        identifier: Identifier | None = None,
        *,
        name: str | None = None,
        calibration_rows: int = CALIBRATION_ROWS,
    ) -> None:
        super().__init__(head, identifier)
        # A method without options is its name, by which the identifier knows the body that it reads.
        if isinstance(merge, dict) and set(merge) == {"method"}:
            merge = merge["method"]
        self.source, self.calibration_rows = merge, calibration_rows
        by_identifier = "" if head == "confidence" else " (identified head)"
        self.name = name or merge_name(merge) + by_identifier

    def make_body(self, material: Material) -> Weights:
        self.found = learned_merge(material, self.source, self.calibration_rows)
        return shared_body(material, self.found)

    def state(self) -> dict[str, Any]:
        return {"merge": describe_merge(self.found)}
