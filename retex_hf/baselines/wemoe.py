"""WEMoE: every MLP mixes its own weights for every row, by a small router in front of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..data.readout import Answer, entropy
from ..data.task_data import TaskData
from ..errors import ConfigError
from ..evaluation.method import Material, Method, Prediction, without_padding
from ..evaluation.run import is_right
from ..merging.calibration import Batch
from ..merging.expert_weights import ExpertWeights
from ..routing import pool
from ..utils.progress import track
from .blocks import require_mlps
from .dynamic import bytes_of, row_keys, task_arithmetic, true_shares
from .heads import most_confident
from .merges import validation_batches
from .shared_body import SharedBody
from .weights import expert_weights

# Approximate memory of the weights that are mixed at once, for several rows of one layer.
LAYER_BYTES = 64 * 1024**2
# With so few tokens, applying all task vectors costs less than mixing them first.
FEW_TOKENS = 2


class WEMoE(Method):
    """MLPs have weights `W(x) = W_0 + sum_t w_t(x) tau_t`; all other tensors are task arithmetic (Tang et al., 2024).

    `w(x)` is the mean over the tokens of a row of `fc2(relu(fc1 h))`, a router in front of each MLP, without softmax.
    Routers start at `w = scale`, where the whole model is task arithmetic, and are trained on the entropy of answers.
    During generation, a row's tokens are those of the current step.

    The authors train on the test inputs, and answer under the head of the true task. Here routers are trained on
    training inputs, without labels, and are those of the step (or of the start) that answers most validation rows
    correctly under the true heads. Coefficients differ between MLPs and do not identify a task, so where the task is
    unknown the head is the one whose answer has the lowest entropy relative to the logarithm of its number of classes.
    With oracle routing, `w` is one for the true task and zero for others, in every MLP.

    Args:
        scale: Factor of the task vectors outside of MLPs, and initial output of the routers.
        mlps: Name patterns of the linear layers of an MLP, in their order, where they are not found by shape.
        steps: Training steps.
        rows_per_task: Inputs of each task in a step.
        learning_rate: Initial learning rate of Adam, with cosine decay.
        validation_rows: Labelled validation rows per task to pick the step by; 0 takes the last step.
        check_every: Steps between two looks at them; the last step is looked at too.
        remember: Cache the result of each row, as `Dynamic` does.
        progress: Show a progress bar.
    """

    name = "WEMoE"
    routes = True

    def __init__(
        self,
        *,
        scale: float = 0.3,
        mlps: Sequence[str] | None = None,
        steps: int = 1000,
        rows_per_task: int = 16,
        learning_rate: float = 1e-3,
        validation_rows: int = 64,
        check_every: int = 50,
        remember: bool = False,
        progress: bool = True,
    ) -> None:
        if check_every < 1:
            raise ConfigError(f"WEMoE: check_every must be at least 1, not {check_every!r}.")
        self.validation_rows, self.check_every = validation_rows, check_every
        self.scale, self.mlps, self.steps, self.remember = scale, mlps, steps, remember
        self.rows_per_task, self.learning_rate, self.progress = rows_per_task, learning_rate, progress

    @torch.inference_mode(False)
    def fit(self, material: Material) -> None:
        self.readout = material.readout
        self.weights = weights = expert_weights(material)
        names = require_mlps(weights.model, weights.base, self.name, self.mlps)
        with torch.no_grad():
            self.shared = SharedBody(weights, task_arithmetic(weights, self.scale))
        model = self.shared.modules[weights.tasks[0]]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(material.seed)
            self.experts = [MixedMLP(weights, model, layers, self.scale) for layers in names]
        self._remembered: dict[bytes, tuple[str, dict[str, Answer]]] = {}
        self.validation_accuracies: dict[int, float] = {}
        self.entropies = self._train(material)

    def _train(self, material: Material) -> list[float]:
        """Minimise the entropy of answers to training inputs; return its mean over tasks at every step.

        The routers are then those of the step with the best validation accuracy, the first among equals.
        """
        tasks, generator = self.weights.tasks, random.Random(material.seed)
        routers = nn.ModuleList(expert.router for expert in self.experts)
        optimizer = torch.optim.Adam(routers.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(self.steps, 1))
        validation = validation_batches(material, self.validation_rows) if self.validation_rows else {}
        kept = routers.state_dict()
        entropies = []

        def check(step: int) -> None:
            nonlocal kept
            accuracy, best = self._accuracy(validation), max(self.validation_accuracies.values(), default=-1.0)
            self.validation_accuracies[step] = accuracy
            if accuracy > best:
                kept = deepcopy(routers.state_dict())

        bar = track(range(self.steps), title="Training routers", unit="step", progress=self.progress)
        for step in bar:
            if validation and step % self.check_every == 0:
                check(step)
            optimizer.zero_grad()
            total = 0.0
            for task in tasks:
                inputs = material.collate(_draw(material.train[task], self.rows_per_task, generator))
                with torch.enable_grad():
                    loss = entropy(self._scores(inputs, [task])[task]).mean() / len(tasks)
                    loss.backward()
                total += loss.item()
            optimizer.step()
            schedule.step()
            entropies.append(total)
            bar.set_postfix(entropy=f"{total:.4f}", refresh=False)
        if validation and self.steps:
            check(self.steps)
            routers.load_state_dict(kept)
        routers.requires_grad_(False)
        return entropies

    @torch.no_grad()
    def _accuracy(self, batches: Mapping[str, Sequence[Batch]]) -> float:
        """Return the accuracy on labelled batches under their tasks' heads, averaged over tasks."""
        accuracies = []
        for task, parts in batches.items():
            right: list[bool] = []
            for part in parts:
                found = self._answer(part.inputs, [task] * part.rows)
                right += [is_right(of[task], truth) for (_, of), truth in zip(found, part.answers or [], strict=True)]
            accuracies.append(fmean(right))
        return fmean(accuracies)

    @torch.no_grad()
    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        if oracle:
            found = self._answer(inputs, tasks, true_shares(self.name, self.weights.tasks, tasks))
        elif self.remember:
            keys = row_keys(inputs)
            if not all(key in self._remembered for key in keys):
                self._remembered.update(zip(keys, self._answer(inputs, None), strict=True))
            found = [self._remembered[key] for key in keys]
        else:
            found = self._answer(inputs, tasks)
        chosen = [surest for surest, _ in found] if tasks is None else list(tasks)
        answers = [of[task] for task, (_, of) in zip(chosen, found, strict=True)]
        return Prediction(answers, chosen if self.readout.chooses_head or tasks is not None else None)

    def _answer(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None, fixed: Tensor | None = None
    ) -> list[tuple[str, dict[str, Answer]]]:
        """Return every row's most confident head (if no tasks are given) and its answers under the requested heads."""
        names = self.weights.tasks
        if not self.readout.chooses_head:
            output = self._run(inputs, fixed, partial(self.readout.call, self.shared.modules[names[0]]))
            count = len(next(iter(inputs.values())))
            texts = self.readout.answers(output, names[:1] * count)
            # Generated text does not depend on the task, so any may stand for the surest.
            return [(names[0], dict.fromkeys(names, text)) for text in texts]
        scores = self._scores(inputs, tasks or names, fixed)
        chosen = most_confident(scores)[0] if tasks is None else tasks
        classes = {task: of.argmax(-1).tolist() for task, of in scores.items()}
        return [(surest, {task: of[row] for task, of in classes.items()}) for row, surest in enumerate(chosen)]

    def _scores(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str], fixed: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self._run(inputs, fixed, lambda batch: self.shared.scores(self.readout, batch, tasks))

    def _run(self, inputs: Mapping[str, Tensor], fixed: Tensor | None, call: Any) -> Any:
        """Call a function on a batch, with MLPs that know the padding mask and the given coefficients."""
        inputs = without_padding(inputs)
        for expert in self.experts:
            expert.fixed, expert.mask = fixed, inputs.get("attention_mask")
        try:
            return call(inputs)
        finally:
            for expert in self.experts:
                expert.fixed = expert.mask = expert.coefficients = None

    def storage_bytes(self) -> int:
        """Return the bytes of one body (whose MLPs are the base's), the task vectors of MLPs, and the routers."""
        tensors = {name for expert in self.experts for name in expert.names}
        vectors = bytes_of(self.weights, {name: self.weights.vectors[name].numel() for name in tensors})
        routers = sum(p.numel() for expert in self.experts for p in expert.router.parameters())
        return self.weights.body_bytes() + vectors + 4 * routers

    def state(self) -> dict[str, Any]:
        if not self.entropies:
            return {}
        found: dict[str, Any] = {"first_entropy": self.entropies[0], "last_entropy": self.entropies[-1]}
        if self.validation_accuracies:
            step = max(self.validation_accuracies, key=self.validation_accuracies.__getitem__)
            found |= {"kept_step": step, "validation_accuracy": self.validation_accuracies[step]}
        return found


class MixedMLP:
    """Replaces the linear layers of one MLP of a model, and mixes their weights for every row.

    `router` gives the coefficients (rows, T) from the input of the first layer, over the tokens that `mask` keeps;
    `fixed` replaces it where it is given.
    """

    def __init__(self, weights: ExpertWeights, model: nn.Module, layers: Sequence[str], scale: float) -> None:
        self.names = [name for layer in layers for name in (f"{layer}.weight", f"{layer}.bias") if name in weights.base]
        self.in_decoder = _in_decoder(model, layers[0])
        self.fixed: Tensor | None = None
        self.mask: Tensor | None = None
        self.coefficients: Tensor | None = None
        for position, layer in enumerate(layers):
            module = model.get_submodule(layer)
            # The base is one more vector, with coefficient one.
            stack = torch.cat([weights.vectors[f"{layer}.weight"], weights.base[f"{layer}.weight"][None]])
            if isinstance(module, Conv1D):
                stack = stack.transpose(1, 2).contiguous()
            if position == 0:
                self.router = mlp_router(stack.shape[2], len(weights.tasks), scale)
            bias = None
            if module.bias is not None:
                bias = torch.cat([weights.vectors[f"{layer}.bias"], weights.base[f"{layer}.bias"][None]])
            module.forward = partial(self._forward, position == 0, stack, bias)

    def _forward(self, first: bool, stack: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
        if first:
            coefficients = self._route(hidden) if self.fixed is None else _for_beams(self.fixed, len(hidden))
            self.coefficients = torch.cat([coefficients, torch.ones(len(hidden), 1)], 1)
        if self.coefficients is None:
            raise ConfigError(f"WEMoE: the first layer of an MLP must run first, but {self.names[0]!r} did not.")
        return mixed_linear(hidden, self.coefficients, stack, bias)

    def _route(self, hidden: Tensor) -> Tensor:
        per_token = self.router(hidden)
        if hidden.ndim == 2:
            return per_token
        fits = self.mask is not None and not self.in_decoder and hidden.shape[:-1] == self.mask.shape
        return pool(per_token.flatten(1, -2), self.mask if fits else None, "mean")


def mlp_router(width: int, tasks: int, start: float) -> nn.Sequential:
    """Make a network of two layers whose initial output is `start` for every task, up to a little noise."""
    first, last = nn.Linear(width, width), nn.Linear(width, tasks)
    for layer, bias in ((first, 0.0), (last, start)):
        nn.init.normal_(layer.weight, std=0.01)
        nn.init.constant_(layer.bias, bias)
    return nn.Sequential(first, nn.ReLU(), last)


def mixed_linear(hidden: Tensor, coefficients: Tensor, stack: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `h_b W_b^T + bias_b` with `W_b = sum_k c_bk W_k` for every row b.

    Args:
        hidden: Inputs (rows, ..., in).
        coefficients: Coefficients `c_bk` (rows, K).
        stack: The tensors `W_k` (K, out, in).
        bias: Their biases (K, out).
    """
    tokens = hidden.flatten(1, -2) if hidden.ndim > 2 else hidden[:, None]
    if tokens.shape[1] <= FEW_TOKENS:
        applied = linear(tokens, stack.flatten(0, 1)).unflatten(-1, stack.shape[:2])
        mixed = torch.einsum("blko,bk->blo", applied, coefficients)
    else:
        at_once = max(1, LAYER_BYTES // (4 * stack[0].numel()))
        pieces = zip(tokens.split(at_once), coefficients.split(at_once), strict=True)
        mixed = torch.cat([_with_own_weights(part, of, stack) for part, of in pieces])
    if bias is not None:
        mixed = mixed + (coefficients @ bias)[:, None]
    return mixed.reshape(*hidden.shape[:-1], stack.shape[1])


def _with_own_weights(tokens: Tensor, coefficients: Tensor, stack: Tensor) -> Tensor:
    def apply(tokens: Tensor, coefficients: Tensor) -> Tensor:
        weights = (coefficients @ stack.flatten(1)).view(-1, *stack.shape[1:])
        # With the weights on the left, their gradient has the order of the stack and need not be copied.
        return torch.bmm(weights, tokens.transpose(1, 2)).transpose(1, 2)

    if not torch.is_grad_enabled():
        return apply(tokens, coefficients)
    # Mixing again costs less than keeping the weights of all rows and layers for the backward pass.
    return checkpoint(apply, tokens, coefficients, use_reentrant=False, preserve_rng_state=False)


def _for_beams(coefficients: Tensor, rows: int) -> Tensor:
    """Repeat the coefficients of each row for its beams, which are adjacent."""
    return coefficients.repeat_interleave(rows // len(coefficients), 0)


def _in_decoder(model: nn.Module, layer: str) -> bool:
    """Return whether a layer sees generated tokens, to which the mask of the inputs does not apply."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    decoder = cast(PreTrainedModel, model).get_decoder()  # only these have such a configuration
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return layer.startswith(f"{prefix}.")


def _draw(data: TaskData, count: int, generator: random.Random) -> list[Any]:
    return [data.inputs[index] for index in generator.sample(range(len(data)), min(count, len(data)))]
