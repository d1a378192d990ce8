"""A batch of prompts while it is generated: every row with settings, stop strings and an end of its own.

The rows run in one call of `generate` without sampling. A logits processor draws the tokens of rows that sample, and
leaves `generate` no other choice; a stopping criterion reads the tokens of every step, reports them, and ends rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import RetexError
from ..execution import RowCallback
from ..routing import Routing
from .metrics import Metrics
from .rows import Decision, Done, Routed, Row, Text
from .sampling import Sampling
from .shared_tokenizer import SharedTokenizer
from .text_stream import StopFinder, TextStream
from .turns import Turns

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True)
class Prompt:
    """A prompt to continue.

    Args:
        encode: Returns its token ids in a tokenizer (that of a task, or None for the merged model's).
        sampling: How tokens are chosen.
        max_tokens: Most tokens to generate.
        stops: Strings before which the text ends.
        streams: Whether the request wants the text piece by piece.
    """

    encode: Callable[[str | None], list[int]]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...] = ()
    streams: bool = False


@dataclass
class Continuation:
    """The state of one row: its tokens so far, and what is not reported yet."""

    row: Row
    stream: TextStream
    ends: frozenset[int]
    decision: Decision
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    done: bool = False
    place: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        self._finder = StopFinder(self.prompt.stops)

    @property
    def prompt(self) -> Prompt:
        return self.row.value

    def begin(self) -> None:
        """Begin, or begin again: the same tokens come again, and are not reported twice."""
        self.place = 0
        self.generator = self.prompt.sampling.generator() if self.prompt.sampling.draws else None

    def take(self, token: int, metrics: Metrics) -> bool:
        """Take the row's next token; return whether the row ends."""
        if self.done or self.row.cancelled:
            self.done = True
            return True
        self.place += 1
        if self.place <= len(self.tokens):
            if self.tokens[self.place - 1] != token:
                raise RetexError("The batch had to run group by group, and gave other tokens than in one pass.")
            return False
        self.tokens.append(token)
        ended = token in self.ends
        self._report("" if ended else self._finder.push(self.stream.push(token)))
        if not ended and not self._finder.found and len(self.tokens) < self.prompt.max_tokens:
            return False
        self._end(STOP if ended or self._finder.found else LENGTH, metrics)
        return True

    def _end(self, reason: str, metrics: Metrics) -> None:
        self._report(self._finder.push(self.stream.finish()) + self._finder.finish())
        self.done = True
        metrics.answered(self.row, self.decision, len(self.tokens))
        self.row.send(Done(self.decision, (self.text, reason), len(self.tokens)))

    def _report(self, text: str) -> None:
        self.text += text
        if text and self.prompt.streams:
            self.row.send(Text(text))


class Decoding:
    """The rows of one call of `generate`; `callbacks` are arguments of the call.

    Args:
        rows: The rows.
        tokenizer: Their tokenizer.
        prompts: Token ids that texts follow on, by row; empty for encoder-decoders.
        ends: Returns the tokens that end a text of a task (None: of the merged model).
        metrics: Counts answers.
        turns: Handed on after every token.
        decisions: The decisions on the rows, where they are known beforehand.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: SharedTokenizer,
        prompts: Sequence[Sequence[int]],
        ends: Callable[[str | None], frozenset[int]],
        metrics: Metrics,
        turns: Turns,
        decisions: Sequence[Decision] | None = None,
    ) -> None:
        self.metrics, self.turns, self._ends, self._known = metrics, turns, ends, decisions is not None
        self.states = [
            Continuation(row, TextStream(tokenizer, prompt), ends(None), Decision(None))
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        for state, decision in zip(self.states, decisions or (), strict=False):
            self._decide(state, decision)

    @property
    def callbacks(self) -> dict[str, Any]:
        """Return the arguments of `generate` that report on these rows."""
        return {"logits_processor": [_Chooser(self)], "stopping_criteria": [_Reader(self)]}

    def routed(self, routing: Routing) -> None:
        """Note the tasks of the rows, unless they were decided before."""
        if not self._known:
            for index, state in enumerate(self.states):
                self._decide(state, Decision.of(routing, index))

    def _decide(self, state: Continuation, decision: Decision) -> None:
        state.decision, state.ends = decision, self._ends(decision.task)
        if state.prompt.streams:
            state.row.send(Routed(decision))

    def of_rows(self, rows: Tensor | None) -> list[Continuation]:
        """Return the states of some rows."""
        return self.states if rows is None else [self.states[row] for row in rows.tolist()]


class _Chooser(RowCallback):
    """A logits processor: leave only the drawn token of rows that sample."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def of_rows(self, rows: Tensor | None) -> Callable[..., Tensor]:
        states = self._decoding.of_rows(rows)
        for state in states:
            state.begin()

        def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
            for index, state in enumerate(states):
                if state.generator is not None and not state.done:
                    token = state.prompt.sampling.draw(scores[index], state.generator)
                    scores[index] = float("-inf")
                    scores[index, token] = 0
            return scores

        return choose


class _Reader(RowCallback):
    """A stopping criterion: report the tokens of a step, and end rows."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def routed(self, routing: Routing) -> None:
        self._decoding.routed(routing)

    def of_rows(self, rows: Tensor | None) -> Callable[..., Tensor]:
        states, metrics, turns = self._decoding.of_rows(rows), self._decoding.metrics, self._decoding.turns

        def read(input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
            tokens = input_ids[:, -1].tolist()
            ended = [state.take(token, metrics) for state, token in zip(states, tokens, strict=True)]
            turns.hand_on()
            return torch.tensor(ended, device=input_ids.device)

        return read
