"""Task identification without reference inputs: choose the task whose own update responds most to an input.

`score_t = mean over layers of log( |D_t h|^2 / |D_t|_F^2 )`, with `h` the input of the layer in the merged model (`|D_t
h|^2` is averaged over tokens), and `D_t = G_t S` the recovered update of the layer's weight. The factors make this
cheap: `|G_t S h|^2 = (S h)^T (G_t^T G_t) (S h)`, one r-by-r Gram matrix per task and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import ConfigError, InputError
from ..recovery import ComponentGenerator, Generator, RecoveryModule
from ..recovery.components import COMPONENTS, ROUNDED
from ..recovery.layout import GENERATED_FIRST, MATRIX, WHOLE
from .features import FeatureExtractor
from .fitting import without_labels

SMALLEST = torch.finfo(torch.float32).tiny
ROUNDING = torch.finfo(torch.float32).eps


@dataclass
class WeightSignatures:
    """Statistics that `signatures="weights"` learns from a pool of unlabelled inputs: the mean score of each task,
    `centre` (T,), of a pass that ends at `feature_layer`."""

    centre: Tensor
    feature_layer: str

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as they are stored."""
        return {"centre": self.centre}

    def to(self, device: torch.device) -> WeightSignatures:
        return WeightSignatures(self.centre.to(device), self.feature_layer)

    def without(self, task: int) -> WeightSignatures:
        """Return the statistics without one task."""
        return WeightSignatures(self.centre[torch.arange(len(self.centre)) != task], self.feature_layer)

    @classmethod
    def fit(
        cls, make: Callable[[Mapping[str, Any]], WeightScorer], batches: Iterable[Mapping[str, Any]]
    ) -> WeightSignatures:
        """Compute the mean scores of all rows of a pool; `make` creates a scorer that fits a batch."""
        scorer, scores = None, []
        for batch in map(without_labels, batches):
            scorer = scorer or make(batch)
            scores.append(scorer(batch).cpu())
        if scorer is None:
            raise InputError("The pool of unlabelled inputs is empty.")
        return cls(torch.cat(scores).mean(0), scorer.feature_layer)


class Responses:
    """The strength with which each task's update of one layer responds to the layer's input.

    Where the factor applied to the input is shared, the input is projected once and every task has a Gram matrix
    `grams` (T, r, r); where it is the task's own (or there are no factors), every task has a projection.
    """

    def __init__(self, module: nn.Module, generator: Generator, embeddings: Tensor) -> None:
        self.module = module
        transposed = isinstance(module, Conv1D)
        self.grams: Tensor | None = None
        if isinstance(generator, ComponentGenerator):
            self._respond_separately(generator, embeddings, transposed)
            return
        layout, shared, inner = generator.layout, generator.factor("shared"), generator.factor("inner")
        own = [generator.generated(embedding) for embedding in embeddings]
        if shared is None:  # stored whole
            own = [factor.view(layout.shape[0], -1) for factor in own]
            self.projections = [factor.T if transposed else factor for factor in own]
            self.norms = torch.stack([factor.square().sum() for factor in own])
            return
        # The acting matrix is `left @ right`; Conv1D acts with the transpose of its weight.
        first = layout.order == GENERATED_FIRST
        own, shared = [factor[0] for factor in own], shared[0]
        if inner is not None:
            shared = inner[0] @ shared if first else shared @ inner[0]
        if transposed:
            own, shared = [factor.T for factor in own], shared.T
        if first != transposed:
            self.projections = [shared]
            self.grams = torch.stack([factor.T @ factor for factor in own])
            self.norms = (self.grams * (shared @ shared.T)).sum((1, 2))
        else:
            # |S x| = |R x| with the small triangle R of S = Q R.
            triangle = torch.linalg.qr(shared, mode="r").R
            self.projections = [triangle @ factor for factor in own]
            self.norms = torch.stack([factor.square().sum() for factor in self.projections])

    def _respond_separately(self, generator: ComponentGenerator, embeddings: Tensor, transposed: bool) -> None:
        """Give every task a projection of its own: |L R x| = |T R x| with the small triangle T of L = Q T."""
        self.projections = []
        for embedding in embeddings:
            if generator.layout.is_factored:
                left, right = (factor[0] for factor in generator.factors(embedding))
                left, right = (right.T, left.T) if transposed else (left, right)
                self.projections.append(torch.linalg.qr(left, mode="r").R @ right)
            else:
                offset = generator(embedding).flatten(1)
                self.projections.append(offset.T if transposed else offset)
        self.norms = torch.stack([matrix.square().sum() for matrix in self.projections])

    @property
    def usable(self) -> bool:
        """Return whether every task changes the layer by more than rounding; otherwise responses are not defined."""
        return bool((self.norms > ROUNDING * self.norms.max()).all())

    def __call__(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return `log( |D_t h|^2 / |D_t|_F^2 )` of every row and task, averaged over (unmasked) tokens inside the
        log."""
        energies = [self._energy(self._project(hidden, matrix), mask) for matrix in self.projections]
        energy = energies[0] if self.grams is not None else torch.stack(energies, 1)
        return (energy / self.norms).clamp(min=SMALLEST).log()

    def _project(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """Apply a matrix in place of the layer's weight: (rows, tokens or positions, rows of the matrix)."""
        if isinstance(self.module, nn.Conv2d):
            layer = self.module
            kernel = matrix.reshape(-1, *layer.weight.shape[1:])
            return F.conv2d(hidden, kernel, None, layer.stride, layer.padding, layer.dilation).flatten(2).mT
        return F.linear(hidden, matrix).reshape(len(hidden), -1, len(matrix))

    def _energy(self, projected: Tensor, mask: Tensor | None) -> Tensor:
        count: Tensor | int = projected.shape[1]
        if mask is not None:
            projected = projected * mask.unsqueeze(-1)
            count = mask.sum(1, keepdim=True).clamp(min=1)
        if self.grams is None:
            return (projected.square().sum((1, 2)).unsqueeze(1) / count).squeeze(1)
        # One r-by-r moment per row serves all tasks.
        moments = projected.mT @ projected
        return moments.flatten(1) @ self.grams.flatten(1).T / count


class WeightScorer:
    """Scores of all tasks from one pass of the merged model, which ends where the extractor's does.

    It uses linear layers, transformers' Conv1D and 2-D convolutions whose weight is recovered, as far as they run and
    see one batch row per row. Gram matrices are computed when a layer first runs.
    """

    def __init__(self, extractor: FeatureExtractor, recovery: RecoveryModule) -> None:
        self.extractor, self.recovery = extractor, recovery
        self.feature_layer = extractor.layers[-1]
        self._responses: dict[str, Responses] = {}
        modules = dict(extractor.entry.part.named_modules(prefix=extractor.entry.path))
        names = [name for name in modules if f"{name}.weight" in recovery]
        layers = [name for name in names if _can_respond(modules[name], recovery[f"{name}.weight"])]
        if not layers:
            raise ConfigError(
                "To identify tasks by their weights needs a recovered linear or convolution layer on the way to "
                f"{self.feature_layer!r}, and there is none: call fit_signatures with inputs of each task, or name the "
                "task with task=."
            )
        for name in layers:
            modules[name].register_forward_pre_hook(partial(_listen, name))

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return scores (rows, T)."""
        self.extractor.layouts(inputs)  # first, because its probing passes must not be recorded
        current, context = _Pass(self, inputs.get("attention_mask")), copy_context()
        context.run(_current.set, current)
        rows = len(context.run(self.extractor, inputs)[self.feature_layer])
        # Layers that see windows or single tokens do not tell which row these belong to.
        heard = [scores for scores in current.heard if len(scores) == rows]
        if not heard:
            raise ConfigError(
                f"Tasks cannot be identified by their weights: on the way to {self.feature_layer!r} no layer runs in "
                "which all tasks differ from the merged model; call fit_signatures with inputs of each task, or name "
                "the task with task=."
            )
        return torch.stack(heard).mean(0)

    def responses(self, name: str, module: nn.Module) -> Responses:
        """Return the responses of a layer; concurrent first calls may repeat the work, with the same result."""
        if name not in self._responses:
            self._responses[name] = Responses(module, self.recovery[f"{name}.weight"], self.recovery.task_embedding)
        return self._responses[name]


@dataclass
class _Pass:
    """The scores (rows, T) that one pass has collected so far, one entry per layer."""

    scorer: WeightScorer
    mask: Any
    heard: list[Tensor] = field(default_factory=list)


# The running pass, in a context of its own, because many threads share one scorer.
_current: ContextVar[_Pass | None] = ContextVar("retex_scoring_pass", default=None)


def _listen(name: str, module: nn.Module, args: tuple[Tensor]) -> None:
    """Record the responses of a layer (a forward pre-hook). It holds no reference to its scorer, which would be a cycle
    that keeps the model alive."""
    current, hidden = _current.get(), args[0]
    if current is None:
        return
    responses, mask = current.scorer.responses(name, module), current.mask
    if not responses.usable:
        return
    fits = isinstance(mask, Tensor) and hidden.ndim == 3 and mask.shape == hidden.shape[:2]
    with torch.autocast(hidden.device.type, enabled=False):
        current.heard.append(responses(hidden.float(), mask.to(hidden.device).bool() if fits else None))


def _can_respond(module: nn.Module, generator: Generator) -> bool:
    layout = generator.layout
    if layout.kind not in (MATRIX, WHOLE, COMPONENTS, ROUNDED) or layout.batch != 1:
        return False
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros"
    return isinstance(module, (nn.Linear, Conv1D))
