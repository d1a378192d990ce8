"""Networks that classify tasks from a body's features, trained on inputs of known task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..errors import ConfigError
from ..evaluation.method import Material
from ..merging.expert_weights import ExpertWeights
from ..routing import FeatureExtractor, feature_blocks
from ..utils.progress import track

FEATURE_BATCH = 64


@dataclass(frozen=True)
class GateTraining:
    """How a gate is trained: epochs over the training inputs, by Adam."""

    epochs: int
    learning_rate: float
    batch_size: int
    progress: bool

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"A gate is trained for at least one epoch, not {self.epochs}.")


class TaskGate:
    """A softmax over tasks from the mean of a body's last hidden state. Only the network is trained.

    Args:
        weights: Describe the model; features are read below its heads.
        body: The tensors whose features are read.
        make: Makes the network, from features (rows, d) to scores (rows, T), given the width d.
    """

    network: nn.Module
    """Made by `fit`."""

    def __init__(self, weights: ExpertWeights, body: Mapping[str, Tensor], make: Callable[[int], nn.Module]) -> None:
        model = weights.module(body, weights.tasks[0])
        self.tasks = weights.tasks
        self.layer = feature_blocks(model)[-1]
        self.extractor = FeatureExtractor(model, [self.layer], "mean")
        self._make = make

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the features (rows, d) of a batch."""
        return self.extractor(inputs)[self.layer]

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the probabilities (rows, T) of the tasks."""
        return self.network(self.features(inputs)).softmax(-1)

    def fit(
        self, material: Material, rows_per_task: Mapping[str, int], validation_rows: int, how: GateTraining
    ) -> float:
        """Train on training inputs and their tasks, without labels; return the accuracy on validation inputs."""
        training, known = self._read(
            {task: material.sample(task, rows_per_task[task]) for task in self.tasks}, material, how.progress
        )
        held_out, held_known = self._read(
            {task: list(material.validation[task].inputs[:validation_rows]) for task in self.tasks},
            material,
            how.progress,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(material.seed)
            self.network = self._make(training.shape[1])
            return train_gate(self.network, (training, known), (held_out, held_known), how)

    def numbers(self) -> int:
        """Return how many numbers the network holds."""
        return sum(tensor.numel() for tensor in self.network.state_dict().values() if tensor.is_floating_point())

    def _read(self, inputs: Mapping[str, Sequence[Any]], material: Material, progress: bool) -> tuple[Tensor, Tensor]:
        features, known = [], []
        for number, rows in enumerate(track(inputs.values(), title="Reading features", unit="task", progress=progress)):
            for start in range(0, len(rows), FEATURE_BATCH):
                features.append(self.features(material.collate(rows[start : start + FEATURE_BATCH])))
            known.append(torch.full((len(rows),), number))
        return torch.cat(features), torch.cat(known)


@torch.inference_mode(False)
@torch.enable_grad()
def train_gate(
    network: nn.Module, training: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], how: GateTraining
) -> float:
    """Train a classifier of features by Adam, and keep the epoch with the best validation accuracy.

    Return the share of validation rows that it gets right. Draws from torch's global generator.
    """
    features, known = training
    optimizer = torch.optim.Adam(network.parameters(), lr=how.learning_rate)
    best, kept = -1.0, network.state_dict()
    for _ in track(range(how.epochs), title="Training the gate", unit="epoch", progress=how.progress):
        network.train()
        for rows in torch.randperm(len(features)).split(how.batch_size):
            if len(rows) == 1 < len(features):
                continue  # batch normalisation cannot normalise a single row
            loss = cross_entropy(network(features[rows]), known[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            accuracy = (network(validation[0]).argmax(-1) == validation[1]).float().mean().item()
        if accuracy > best:
            best, kept = accuracy, deepcopy(network.state_dict())
    network.load_state_dict(kept)
    network.eval().requires_grad_(False)
    return best
