"""Identification of prompts by their token ids: the merged model up to the feature layer, and the signatures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ...config import routing_options
from ...errors import ArtifactError, InputError
from ...routing.decision import decide
from ...routing.pooling import pool
from .exported import PRETRAINED, Exported

# Rows times longest row of one pass.
MOST_TOKENS = 8192
# The name of a block, of which a model can be made with fewer.
BLOCK = re.compile(r"(?:\w+\.)*(?:layers|layer|h)\.(\d+)")


@dataclass(frozen=True)
class Decision:
    """The task of a prompt, or the nearest if the router abstains: then the merged model answers."""

    task: str
    probability: float
    residual: float
    abstained: bool = False

    @property
    def model(self) -> str | None:
        """Return the name of the adapter that answers, None for the merged model."""
        return None if self.abstained else self.task

    def body(self) -> dict[str, Any]:
        """Return the field `retex` of a response."""
        return {"task": self.task, "probability": self.probability, "abstained": self.abstained}


class Router:
    """Decides on batches of prompts as `RetexModel.identify` does.

    Only the blocks up to the feature layer are loaded, in the dtype they are stored in.
    """

    def __init__(self, exported: Exported, device: str | torch.device = "cpu") -> None:
        self.exported, self.device = exported, torch.device(device)
        self.signatures = exported.signatures.to(self.device)
        layers = self.signatures.space.layers
        self.trunk, names = load_trunk(exported.folder, layers)
        if exported.config.feature_source == "pretrained":
            _overlay(self.trunk, exported.folder)
        nn.Module.to(self.trunk, self.device)
        self._found: dict[str, Tensor] = {}
        for layer, name in zip(layers, names, strict=True):
            self.trunk.get_submodule(name).register_forward_hook(partial(self._keep, layer))
        options = routing_options(exported.config.routing)
        far = options["far"] is not None
        self._thresholds = self.signatures.thresholds(options["quantile"], options["slack"]) if far else None

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Decision]:
        """Return the decision on each prompt, in order."""
        if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
            raise InputError(f"Prompt {empty[0]} has no tokens to identify its task by: name the task as the model.")
        decisions: dict[int, Decision] = {}
        for rows in batches([len(prompt) for prompt in prompts]):
            found = self._decide([list(prompts[row]) for row in rows])
            decisions.update(zip(rows, found, strict=True))
        return [decisions[row] for row in range(len(prompts))]

    @torch.inference_mode()
    def _decide(self, prompts: list[list[int]]) -> list[Decision]:
        features = self.signatures.space(self.features(prompts))
        config, temperature = self.exported.config, self.exported.config.temperature or self.signatures.temperature
        residuals = self.signatures.residuals(features)
        distances = None if self._thresholds is None else self.signatures.distances(features)
        routing = decide(residuals, config.tasks, config.routing, temperature, self._thresholds, distances)
        assert routing.probabilities is not None and routing.residuals is not None  # tasks were identified
        chosen = [(row, int(task)) for row, task in enumerate(routing.task_ids)]
        return [
            Decision(
                config.tasks[task],
                float(routing.probabilities[row, task]),
                float(routing.residuals[row, task]),
                routing.abstained is not None and bool(routing.abstained[row]),
            )
            for row, task in chosen
        ]

    def features(self, prompts: list[list[int]]) -> dict[str, Tensor]:
        """Return pooled features (rows, d) of each layer."""
        longest = max(map(len, prompts))
        # Padding on the right changes nothing before it, in a decoder; encoders see the mask.
        ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        mask = (torch.arange(longest, device=self.device) < lengths.unsqueeze(1)).long()
        self._found.clear()
        uses_cache = {"use_cache": False} if hasattr(self.trunk.config, "use_cache") else {}
        self.trunk(input_ids=ids, attention_mask=mask, **uses_cache)
        pooling = self.exported.config.feature_pooling
        return {layer: pool(hidden.float(), mask, pooling) for layer, hidden in self._found.items()}

    def _keep(self, layer: str, module: nn.Module, args: Any, output: Any) -> None:
        self._found[layer] = output[0] if isinstance(output, tuple) else output


def batches(lengths: Sequence[int], most: int = MOST_TOKENS) -> Iterator[list[int]]:
    """Yield rows that run together: of similar lengths, and of at most so many tokens with padding.

    >>> list(batches([3, 9, 4], most=10))
    [[0, 2], [1]]
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) + 1) * lengths[row] > most:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def load_trunk(folder: Path, layers: Sequence[str]) -> tuple[PreTrainedModel, list[str]]:
    """Return the merged model without a head, up to the last of the layers, and the names of the layers in it.

    Later blocks are not read at all: the model is made with as many blocks as are needed.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if block := BLOCK.fullmatch(layers[-1]):
        config.num_hidden_layers = int(block[1]) + 1
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = config.layer_types[: int(block[1]) + 1]
    model = AutoModel.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    model = model.eval().requires_grad_(False)
    known = dict(model.named_modules())
    outer = f"{model.base_model_prefix}."
    names = [layer if layer in known else layer.removeprefix(outer) for layer in layers]
    if missing := [layer for layer, name in zip(layers, names, strict=True) if name not in known]:
        raise ArtifactError(
            f"{folder}: the merged model has no module {missing[0]!r}, which prompts are identified by."
        )
    return model, names


def _overlay(model: PreTrainedModel, folder: Path) -> None:
    """Replace weights by those of the base, where features come from the base."""
    prefix = f"{model.base_model_prefix}."
    known, tensors = model.state_dict(), load_file(folder / PRETRAINED)
    named = {name if name in known else name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    model.load_state_dict({name: tensor for name, tensor in named.items() if name in known}, strict=False)
