"""One row of a request: what waits in the queue, runs in a batch, and reports to its request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ..routing import Routing

AUTO, MERGED = "auto", "merged"


@dataclass(frozen=True)
class Decision:
    """Which task answered a row, how sure the router was, and whether it abstained.

    `probability` and `residual` are those of the task, where the router was asked; `task` is None where the merged
    model answered without the head of a task.
    """

    task: str | None
    probability: float | None = None
    residual: float | None = None
    abstained: bool = False

    @classmethod
    def of(cls, routing: Routing, row: int) -> Decision:
        """Return the decision on one row of a batch."""
        task = int(routing.task_ids[row])
        probabilities, residuals, abstained = routing.probabilities, routing.residuals, routing.abstained
        return cls(
            routing.tasks[row],
            None if probabilities is None else float(probabilities[row, task]),
            None if residuals is None else float(residuals[row, task]),
            abstained is not None and bool(abstained[row]),
        )

    def body(self) -> dict[str, Any]:
        """Return the field `retex` of a response."""
        return {"task": self.task, "probability": self.probability, "abstained": self.abstained}


@dataclass(frozen=True)
class Routed:
    """The row's task is known."""

    decision: Decision


@dataclass(frozen=True)
class Text:
    """More of a generated text."""

    text: str


@dataclass(frozen=True)
class Done:
    """The row's answer is complete: a label with scores, a vector, or the reason why a text ended."""

    decision: Decision
    value: Any
    tokens: int = 0


@dataclass(frozen=True)
class Failed:
    """The row has no answer."""

    error: Exception


Event = Routed | Text | Done | Failed


@dataclass(eq=False)
class Row:
    """A row of a request.

    Args:
        value: The input: a text, an image, or a `Prompt` to continue.
        model: "auto", "merged", or the name of a task.
        key: Rows of one key may run in one batch.
        size: Most tokens that the row takes in a batch.
        tokens: Tokens of the input.
        truncated: Whether the model reads the beginning of the input only.
        index: Place in the request.
        listener: Takes the row's events.
        arrived: When the row was put into the queue.
        cancelled: Whether nobody waits for the answer any more.
        finished: Whether it has an answer, or failed.
        routed: Whether its task was reported.
        begun: Whether some of its text was reported, so that it cannot run again.
    """

    value: Any
    model: str
    key: Hashable
    size: int = 1
    tokens: int = 0
    truncated: bool = False
    index: int = 0
    listener: Callable[[Row, Event], None] | None = None
    arrived: float = field(default_factory=monotonic)
    cancelled: bool = False
    finished: bool = False
    routed: bool = False
    begun: bool = False

    @property
    def answer(self) -> int:
        """Return the most tokens that the row takes beyond its input."""
        return self.size - self.tokens

    def send(self, event: Event) -> None:
        """Report to the request, its task once; nothing follows an answer or a failure."""
        if self.finished or (self.routed and isinstance(event, Routed)):
            return
        self.routed |= isinstance(event, Routed)
        self.begun |= isinstance(event, Text)
        self.finished = isinstance(event, (Done, Failed))
        if self.listener is not None and not self.cancelled:
            self.listener(self, event)
