"""All tasks' heads over one body: the body runs once where the model lets us take it apart."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TaskError
from ..execution import copy_with
from ..expert_weights import ExpertWeights, Weights
from ..readout import Readout, entropy


class HeadScores:
    """The scores of every task's head on a batch.

    Heads beside the model (class embeddings) are applied to one output. Heads that sit on top of a backbone (the
    classes of transformers) see the recorded output of one pass of it. Any other head gets a pass of its own.
    """

    def __init__(self, weights: ExpertWeights, body: Weights, readout: Readout) -> None:
        self.readout = readout
        # What runs once, and the module in it whose output all heads see; None where there is no such module.
        self._whole, self._recorded = weights.module(body, weights.tasks[0]), None
        self._replayed = _Replayed()
        if not any(weights.heads.values()):
            self._models = dict.fromkeys(weights.tasks, self._replayed)
            self._recorded = self._whole
        elif (backbone := _backbone(weights)) is not None:
            replaced = {id(backbone): self._replayed}
            self._models = {task: copy_with(weights.model, own, replaced).eval() for task, own in weights.heads.items()}
            self._recorded = self._whole.base_model
        else:
            self._models = {task: weights.module(body, task) for task in weights.tasks}

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores (rows, classes) by task."""
        if self._recorded is not None:
            hook = self._recorded.register_forward_hook(self._replayed.record)
            try:
                self.readout.call(self._whole, inputs)
            finally:
                hook.remove()
        scores = {task: self.readout.logits(model, inputs, task) for task, model in self._models.items()}
        self._replayed.output = None
        return scores


class _Replayed(nn.Module):
    """Stands where a module was, and answers what that has answered."""

    output: Any = None

    def record(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of that module."""
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def _backbone(weights: ExpertWeights) -> nn.Module | None:
    """The module that holds the whole body and nothing of a head; None where there is none."""
    model = weights.model
    backbone = getattr(model, "base_model", model)
    prefix = next(name for name, module in model.named_modules() if module is backbone) + "."
    heads = weights.heads[weights.tasks[0]]
    apart = all(name.startswith(prefix) for name in weights.base) and not any(name.startswith(prefix) for name in heads)
    return backbone if backbone is not model and apart else None


def most_confident(scores: Mapping[str, Tensor]) -> tuple[list[str], list[int]]:
    """For every row the task whose head is the surest, and that head's answer.

    Heads of different width are compared by their entropy relative to the largest they can have, `log(classes)`.

    >>> import torch
    >>> from retex_hf.baselines.heads import most_confident
    >>> most_confident({"a": torch.tensor([[0.0, 9.0], [0.0, 0.1]]), "b": torch.tensor([[0.0, 1.0], [5.0, 0.0]])})
    (['a', 'b'], [1, 0])
    """
    for task, logits in scores.items():
        if logits.shape[-1] < 2:
            raise TaskError(f"The head of task {task!r} has one output, so nothing says how sure it is of a row.")
    tasks = list(scores)
    doubts = torch.stack([entropy(logits) / log(logits.shape[-1]) for logits in scores.values()])
    chosen = [tasks[index] for index in doubts.argmin(0).tolist()]
    return chosen, [int(scores[task][row].argmax()) for row, task in enumerate(chosen)]
