"""MoW-Merging: mixes blocks in which experts disagree for every row, and merges all others once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..errors import ConfigError
from ..evaluation.method import Material
from ..merging.expert_weights import ExpertWeights, Weights
from .blocks import block_tensors, find_attention, norms_and_embeddings, require_mlps
from .dynamic import Dynamic, Mixtures, bytes_of
from .gate import GateTraining, TaskGate
from .merges import learned_merge, source_body


class MoW(Dynamic):
    """`W(x) = sum_t g_t(x) W_t` in some blocks, AdaMerging++ in all others (Ye et al., 2025).

    It mixes the `blocks` attention blocks and as many MLPs whose task vectors have the lowest mean cosine similarity
    over pairs of tasks, and all normalisation layers and embeddings. The gate `g` is a small network with a softmax
    over tasks, trained on the tasks of a few per cent of the training inputs, without labels. It reads the mean of the
    last hidden state of the model at `g = 1/T`, which can be made from the stored tensors.

    The authors learn the static part on test inputs and answer under the head of the true task. Here it is learnt on
    training inputs (its step is picked on labelled validation rows, see `learned_merge`), the gate's epoch is picked on
    validation inputs, and where the task is unknown the head is that of
    the largest `g_t`.

    Args:
        blocks: Number of attention blocks, and of MLPs, to mix; all where a model has fewer.
        mlps: Name patterns of the linear layers of an MLP, in their order, where they are not found by shape.
        attention: Name patterns of attention blocks, where they are not found by class; empty for none.
        train_share: Share of each task's training inputs that the gate sees.
        validation_rows: Validation inputs per task, to pick the epoch by.
        hidden: Width of the gate.
        epochs: Epochs of the gate's training.
        learning_rate: Learning rate of the gate, with Adam.
        batch_size: Batch size of the gate's training.
        static: A finished body for the tensors that are not mixed. Default: AdaMerging++, learnt here.
        static_steps: Steps of AdaMerging++.
        static_rows_per_task: Inputs of each task in a step of AdaMerging++.
        static_learning_rate: Learning rate of AdaMerging++.
        static_pool: Unlabelled inputs of each task to draw these from, and most validation rows to pick the step by.
        density: Share of a task vector that AdaMerging++ keeps.
        progress: Show progress bars.
        options: See `Dynamic`.
    """

    name = "MoW-Merging"

    def __init__(
        self,
        *,
        blocks: int = 5,
        mlps: Sequence[str] | None = None,
        attention: Sequence[str] | None = None,
        train_share: float = 0.05,
        validation_rows: int = 256,
        hidden: int = 128,
        epochs: int = 30,
        learning_rate: float = 1e-3,
        batch_size: int = 64,
        static: Mapping[str, Tensor] | None = None,
        static_steps: int = 500,
        static_rows_per_task: int = 32,
        static_learning_rate: float = 1e-3,
        static_pool: int = 1024,
        density: float = 0.2,
        progress: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not 0 < train_share <= 1:
            raise ConfigError(f"MoW: train_share must be in (0, 1], not {train_share!r}.")
        self.blocks, self.mlps, self.attention = blocks, mlps, attention
        self.train_share, self.validation_rows, self.hidden = train_share, validation_rows, hidden
        self.static, self.density, self.static_pool = static, density, static_pool
        self._training = GateTraining(epochs, learning_rate, batch_size, progress)
        self.static_steps, self.static_rows_per_task = static_steps, static_rows_per_task
        self.static_learning_rate = static_learning_rate

    def prepare(self, material: Material) -> Mixtures:
        weights = self.weights
        self.mixed_blocks = self._choose_blocks()
        chosen = [module for modules in self.mixed_blocks for module in modules]
        dynamic = {*block_tensors(chosen, weights.base), *norms_and_embeddings(weights.model, weights.base)}
        self.dynamic = [name for name in weights.base if name in dynamic]
        whole = self._learn_static(material) if self.static is None else self.static
        static = {name: whole[name] for name in weights.base if name not in dynamic}
        corners = {name: weights.base[name] + weights.vectors[name] for name in self.dynamic}
        middle = {**static, **{name: stack.mean(0) for name, stack in corners.items()}}
        self.gate = TaskGate(weights, middle, lambda width: gate_network(width, self.hidden, len(weights.tasks)))
        counts = {task: max(1, ceil(self.train_share * len(material.train[task]))) for task in weights.tasks}
        self.validation_accuracy = self.gate.fit(material, counts, self.validation_rows, self._training)
        return Mixtures(weights, corners, static)

    def _choose_blocks(self) -> list[tuple[str, ...]]:
        """Choose the blocks in which task vectors agree the least; return names of modules."""
        model, body = self.weights.model, self.weights.base
        mlps = require_mlps(model, body, self.name, self.mlps)
        attention = [(name,) for name in find_attention(model, body, mlps, self.attention)]
        if not attention and self.attention != []:
            raise ConfigError(
                f"{self.name} mixes attention blocks, but {type(model).__name__} has none by "
                + ("class: name them with attention=." if self.attention is None else f"the names {self.attention}.")
            )
        chosen = []
        for kind in (attention, mlps):
            alike = {block: similarity(self.weights, block_tensors(block, body)) for block in kind}
            chosen += sorted(kind, key=alike.__getitem__)[: self.blocks]
        return chosen

    def _learn_static(self, material: Material) -> Weights:
        merge = {
            "method": "adamerging",
            "trim": True,
            "density": self.density,
            "steps": self.static_steps,
            "rows_per_task": self.static_rows_per_task,
            "learning_rate": self.static_learning_rate,
        }
        return source_body(self.weights, learned_merge(material, merge, self.static_pool))

    def route(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.gate(inputs)

    def storage_bytes(self) -> int:
        """Return the bytes of the static tensors, every expert's copy of the mixed ones, and the gate."""
        weights, dynamic = self.weights, set(self.dynamic)
        copies = {name: len(weights.tasks) if name in dynamic else 1 for name in weights.base}
        numbers = {name: copies[name] * base.numel() for name, base in weights.base.items()}
        return bytes_of(weights, numbers) + 4 * self.gate.numbers()

    def state(self) -> dict[str, Any]:
        blocks = [" + ".join(block) for block in self.mixed_blocks]
        return {"mixed_blocks": blocks, "gate_validation_accuracy": self.validation_accuracy}


def gate_network(width: int, hidden: int, tasks: int) -> nn.Sequential:
    """Make a network with one hidden layer."""
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, tasks))


def similarity(weights: ExpertWeights, names: Collection[str]) -> float:
    """Return the mean cosine similarity of task vectors of some tensors over pairs of tasks; 1 for one task."""
    vectors = normalize(torch.cat([weights.vectors[name].flatten(1) for name in names], 1), dim=1)
    pairs = list(combinations(range(len(vectors)), 2))
    return sum(float(vectors[a] @ vectors[b]) for a, b in pairs) / len(pairs) if pairs else 1.0
