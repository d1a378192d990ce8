"""Task identification without reference inputs: choose the task whose own update responds most to an input.

`score_t = mean over layers of log |f(D_t W) (h - m)|^2`, with `h` the input of the layer in the merged model (the
square is averaged over tokens or positions), `D_t` the recovered update of the layer's weight, and `m` and `W` the mean
and the whitening of inputs of no task; see `responses`. Scores are compared with those of these inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import ConfigError, InputError
from ..recovery import Generator, RecoveryModule
from ..recovery.components import COMPONENTS, ROUNDED
from ..recovery.layout import MATRIX, WHOLE
from ..utils.progress import SECONDS_WITHOUT_BAR, track
from .features import FeatureExtractor
from .fitting import without_labels
from .responses import Neutral, Responses, mean_input

Hear = Callable[[str, nn.Module, Tensor, Tensor | None], Tensor | None]
"""What to note (rows, ...) of a layer, by its name, itself, its input and the mask of tokens."""


@dataclass
class WeightSignatures:
    """What `signatures="weights"` learns from a pool of unlabelled inputs: by how much the mean score of each task is
    above that of inputs of no task, `lead` (T,), in passes that end at `feature_layer`."""

    lead: Tensor
    feature_layer: str

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as they are stored."""
        return {"lead": self.lead}

    def to(self, device: torch.device) -> WeightSignatures:
        return WeightSignatures(self.lead.to(device), self.feature_layer)

    def without(self, task: int) -> WeightSignatures:
        """Return the statistics without one task."""
        return WeightSignatures(self.lead[torch.arange(len(self.lead)) != task], self.feature_layer)

    @classmethod
    def fit(
        cls, scorer_of: Callable[[Mapping[str, Any]], WeightScorer], batches: Iterable[Mapping[str, Any]]
    ) -> WeightSignatures:
        """Compute the mean leads of all rows of a pool; `scorer_of` returns the scorer that fits a batch."""
        leads, layer = [], ""
        for batch in map(without_labels, batches):
            scorer = scorer_of(batch)
            leads.append((scorer(batch) - scorer.centre).cpu())
            layer = scorer.feature_layer
        if not leads:
            raise InputError("The pool of unlabelled inputs is empty.")
        return cls(torch.cat(leads).mean(0), layer)


class WeightScorer:
    """Scores of all tasks from one pass of the merged model, which ends where the extractor's does.

    It uses linear layers, transformers' Conv1D and 2-D convolutions whose weight is recovered, as far as they run and
    see one batch row per row. `centre` (T,) is the mean score of the inputs of no task that it was calibrated with;
    without calibration updates are taken as they are, and the centre is zero.
    """

    def __init__(self, extractor: FeatureExtractor, recovery: RecoveryModule) -> None:
        self.extractor, self.recovery = extractor, recovery
        self.feature_layer = extractor.layers[-1]
        self.centre = recovery.task_embedding.new_zeros(len(recovery.task_embedding))
        self._neutral: dict[str, Neutral] | None = None
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

    def calibrate(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Learn what enters the layers on inputs of no task, and the mean scores of these, in two passes. Call it once,
        before the scorer is shared."""
        title, count = "Reading inputs of no task", 2 * len(batches)
        with track(title=title, unit="batch", total=count, delay=SECONDS_WITHOUT_BAR, leave=False) as bar:

            def read(hear: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
                for batch in batches:
                    yield hear(batch)
                    bar.update()

            heard = list(read(partial(self._listen_to, hear=_pooled)))
            names = [name for name in heard[0] if all(name in of_batch for of_batch in heard)]
            self._neutral = {name: Neutral.fit(torch.cat([of_batch[name] for of_batch in heard])) for name in names}
            self.centre = torch.cat(list(read(self))).mean(0)

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return scores (rows, T)."""
        heard = self._listen_to(inputs, self._scored)
        if not heard:
            raise ConfigError(
                f"Tasks cannot be identified by their weights: on the way to {self.feature_layer!r} no layer runs in "
                "which all tasks differ from the merged model; call fit_signatures with inputs of each task, or name "
                "the task with task=."
            )
        return torch.stack(list(heard.values())).mean(0)

    @torch.no_grad()
    def _listen_to(self, inputs: Mapping[str, Any], hear: Hear) -> dict[str, Tensor]:
        """Return what one pass lets hear (rows, ...) of every layer that sees one batch row per row."""
        self.extractor.layouts(inputs)  # first, because its probing passes must not be recorded
        current, context = _Pass(hear, inputs.get("attention_mask")), copy_context()
        context.run(_current.set, current)
        rows = len(context.run(self.extractor, inputs)[self.feature_layer])
        # Layers that see windows or single tokens do not tell which row these belong to. Of a layer that runs more than
        # once, the last run counts.
        return {name: found for name, found in current.heard.items() if len(found) == rows}

    def _scored(self, name: str, module: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        if self._neutral is not None and name not in self._neutral:
            return None
        responses = self._responses_of(name, module)
        return responses(hidden, mask) if responses.usable else None

    def _responses_of(self, name: str, module: nn.Module) -> Responses:
        """Return the responses of a layer; concurrent first calls may repeat the work, with the same result."""
        if name not in self._responses:
            neutral = None if self._neutral is None else self._neutral[name]
            generator = self.recovery[f"{name}.weight"]
            self._responses[name] = Responses(module, generator, self.recovery.task_embedding, neutral)
        return self._responses[name]


@dataclass
class _Pass:
    """What one pass has heard so far, by layer."""

    hear: Hear
    mask: Any
    heard: dict[str, Tensor] = field(default_factory=dict)


# The running pass, in a context of its own, because many threads share one scorer.
_current: ContextVar[_Pass | None] = ContextVar("retex_scoring_pass", default=None)


def _listen(name: str, module: nn.Module, args: tuple[Tensor]) -> None:
    """Hear what enters a layer (a forward pre-hook). It holds no reference to its scorer, which would be a cycle that
    keeps the model alive."""
    current, hidden = _current.get(), args[0]
    if current is None:
        return
    mask = current.mask
    fits = isinstance(mask, Tensor) and hidden.ndim == 3 and mask.shape == hidden.shape[:2]
    with torch.autocast(hidden.device.type, enabled=False):
        found = current.hear(name, module, hidden.float(), mask.to(hidden.device).bool() if fits else None)
    if found is not None:
        current.heard[name] = found


def _pooled(name: str, module: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor:
    return mean_input(module, hidden, mask)


def _can_respond(module: nn.Module, generator: Generator) -> bool:
    layout = generator.layout
    if layout.kind not in (MATRIX, WHOLE, COMPONENTS, ROUNDED) or layout.batch != 1:
        return False
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros"
    return isinstance(module, (nn.Linear, Conv1D))
