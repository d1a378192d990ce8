"""One body under the heads of all tasks, with gradients; one pass of the body serves all heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn

from ..data.readout import Readout
from ..execution import copy_with
from ..merging.expert_weights import ExpertWeights


class SharedBody:
    """Models of all tasks that share the modules of one body, so that a change to one of them applies to all tasks.

    `modules` are the models. They are one and the same where heads are outside of them.
    """

    def __init__(self, weights: ExpertWeights, body: Mapping[str, Tensor]) -> None:
        first, *others = weights.tasks
        self.modules = {first: weights.module(body, first)}
        heads = set(weights.heads[first])
        shared = list(headless(weights.model, heads))
        parts = {id(weights.model.get_submodule(name)): self.modules[first].get_submodule(name) for name in shared}
        for task in others:
            tensors = {**body, **weights.heads[task]}
            self.modules[task] = copy_with(weights.model, tensors, parts).eval() if heads else self.modules[first]
        self._memory: dict[tuple[int, int], Any] | None = None
        self._calls: Counter[int] = Counter()
        for part in parts.values():
            self._memoise(part)

    def scores(self, readout: Readout, inputs: Mapping[str, Tensor], tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return the scores (rows, classes) of a batch under the heads of some tasks, from one pass of the body."""
        self._memory = {}
        try:
            found = {}
            for task in dict.fromkeys(tasks):
                self._calls.clear()
                found[task] = readout.logits(self.modules[task], inputs, task)
            return found
        finally:
            self._memory = None

    def _memoise(self, part: nn.Module) -> None:
        forward = part.forward

        @wraps(forward)
        def remembering(*args: Any, **kwargs: Any) -> Any:
            if self._memory is None:
                return forward(*args, **kwargs)
            # A module may run more than once in a pass, in the same order in every pass.
            key = id(part), self._calls[id(part)]
            self._calls[id(part)] += 1
            if key not in self._memory:
                self._memory[key] = forward(*args, **kwargs)
            return self._memory[key]

        part.forward = remembering


def headless(module: nn.Module, heads: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the names of the largest modules that have weights, but none of a head."""
    inside = [name for name in heads if name.startswith(f"{prefix}." if prefix else "")]
    if inside:
        for name, child in module.named_children():
            yield from headless(child, inside, f"{prefix}.{name}" if prefix else name)
    elif any(True for _ in module.parameters()):
        yield prefix
