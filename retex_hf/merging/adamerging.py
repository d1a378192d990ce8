"""AdaMerging: one coefficient per tensor and task, learned by minimising the entropy of the merged model's predictions.

The merged tensor is `W = W_0 + sum_t c_t tau_t`, and the loss is the entropy of predictions on unlabelled inputs. The
gradient of a coefficient is `<dL/dW, tau_t>`: an ordinary backward pass on the merged weights gives `dL/dW`, and the
inner products are taken afterwards. So, apart from the task vectors, learning holds one model and its gradients for any
number of tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.readout import entropy
from ..errors import ConfigError, RetexError
from ..utils.progress import track
from .options import check_density, check_number
from .registry import AUTO, Merger, TaskTensors, register_merge
from .threshold import magnitude_thresholds, trimming_bounds, vector_thresholds

if TYPE_CHECKING:
    from .calibration import Calibration
    from .expert_weights import ExpertWeights

# Steps between two looks at held-out rows.
CHECK_EVERY = 25
Inputs = Mapping[str, Any]
Logits = Callable[[nn.Module, Inputs, str], Tensor]
"""`logits(model, inputs, task)` returns scores (rows, choices) under a task's head, as `Readout.logits` does."""


def learn_coefficients(
    weights: ExpertWeights,
    logits: Logits,
    batches: Mapping[str, Sequence[Inputs]],
    *,
    steps: int = 500,
    learning_rate: float = 1e-3,
    rows_per_task: int = 32,
    start: float = 0.3,
    trimmed_density: float | None = None,
    progress: bool = True,
    seed: int = 0,
    check: Callable[[Mapping[str, Tensor]], float] | None = None,
    check_every: int = CHECK_EVERY,
) -> Tensor:
    """Return coefficients (tasks, tensors of the body) of least entropy, in the order of `weights.tasks` and
    `weights.base`.

    They stay in [0, 1] by projection after every step. (Clamping inside the loss has the same minimum, but a
    coefficient outside the interval would get no gradient.) Buffers (the statistics of batch normalisation) carry no
    gradient; they are averaged.

    Args:
        weights: Base, task vectors and heads.
        logits: Function that computes predictions.
        batches: Unlabelled inputs of each task, as keyword arguments of forward.
        steps: Number of Adam steps.
        learning_rate: Learning rate of Adam.
        rows_per_task: Inputs of each task per step, drawn at random from as few batches as hold that many.
        start: Initial value of all coefficients.
        trimmed_density: Share of largest entries to which each whole task vector is trimmed first (AdaMerging++).
        progress: Show a progress bar.
        seed: Seed of the draws.
        check: Function that rates a merged body. The coefficients that it rates best are returned, the initial ones
            included and the first among equals; default: those of the last step.
        check_every: Steps between two checks; the last step is checked too.
    """
    vectors = weights.vectors if trimmed_density is None else trimmed(weights.vectors, trimmed_density)
    learned = {name for name, _ in weights.model.named_parameters(remove_duplicate=False)}
    coefficients = torch.full((len(weights.tasks), len(weights.base)), float(start)).clamp_(0, 1)
    for column, name in enumerate(weights.base):
        if name not in learned:
            coefficients[:, column] = 1 / len(weights.tasks)
    # The models of all tasks are created once, around these tensors, which every step overwrites.
    body = {name: torch.empty(base.shape, requires_grad=name in learned) for name, base in weights.base.items()}
    modules = {task: weights.module(body, task) for task in weights.tasks}
    draws = {task: _draws(batches[task], rows_per_task, random.Random(f"{seed} {task}")) for task in weights.tasks}
    optimiser = torch.optim.Adam([coefficients], lr=learning_rate)
    best, kept = -inf, coefficients.clone()
    bar = track(range(steps), title="Learning coefficients", unit="step", progress=progress)
    for step in bar:
        write_body(body, weights.base, vectors, coefficients)
        if check is not None and step % check_every == 0 and (rated := check(body)) > best:
            best, kept = rated, coefficients.clone()
        total = 0.0
        for task, module in modules.items():
            found = _backward(module, logits, next(draws[task]), task)
            if not isfinite(found):
                raise RetexError(f"AdaMerging: the entropy of task {task!r} is not finite; start below {start}.")
            total += found
        coefficients.grad = coefficient_gradient(body, vectors)
        optimiser.step()
        coefficients.clamp_(0, 1)
        bar.set_postfix(entropy=f"{total / len(modules):.4f}", refresh=False)
    if check is None:
        return coefficients
    write_body(body, weights.base, vectors, coefficients)
    return coefficients if check(body) > best else kept


@torch.no_grad()
def write_body(
    body: Mapping[str, Tensor], base: Mapping[str, Tensor], vectors: Mapping[str, Tensor], coefficients: Tensor
) -> None:
    """Write `W_0 + sum_t c_t tau_t` of every tensor into `body`, and clear its gradients."""
    for column, name in enumerate(base):
        flat, stack = body[name].detach().view(-1), _flat(vectors[name])
        torch.addmv(base[name].reshape(-1), stack.T, coefficients[:, column], out=flat)
        body[name].grad = None


@torch.no_grad()
def coefficient_gradient(body: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> Tensor:
    """Return `<dL/dW, tau_t>` (tasks, tensors) from the gradients of the merged tensors; zero for tensors without
    gradient."""
    columns = []
    for name, tensor in body.items():
        stack = _flat(vectors[name])
        columns.append(torch.zeros(len(stack)) if tensor.grad is None else stack @ tensor.grad.reshape(-1))
    return torch.stack(columns, 1)


def trimmed(vectors: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Return stacked task vectors (tasks, ...) with all but the largest entries of each whole vector set to zero."""
    tasks = len(next(iter(vectors.values())))

    def read(wanted: Collection[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        return ((task, stack[task], torch.zeros_like(stack[task])) for stack in vectors.values() for task in wanted)

    size = sum(stack[0].numel() for stack in vectors.values())
    bounds = trimming_bounds(magnitude_thresholds(read, tasks, size, density))
    shrink = nn.functional.hardshrink
    return {
        name: torch.stack([shrink(vector, bound) for vector, bound in zip(stack, bounds, strict=True)])
        for name, stack in vectors.items()
    }


def _backward(module: nn.Module, logits: Logits, parts: Sequence[Inputs], task: str) -> float:
    """Accumulate the gradient of the mean entropy over the rows of some batches, one batch at a time; return that
    mean."""
    rows = sum(_rows(part) for part in parts)
    mean = 0.0
    for part in parts:
        with torch.enable_grad():
            loss = entropy(logits(module, part, task)).sum() / rows
        loss.backward()
        mean += loss.item()
    return mean


def _draws(batches: Sequence[Inputs], count: int, generator: random.Random) -> Iterator[list[Inputs]]:
    """Yield endlessly `count` rows, or all if there are fewer, from batches in random order."""
    while True:
        parts: list[Inputs] = []
        missing = count
        for number in generator.sample(range(len(batches)), len(batches)):
            rows = _rows(batches[number])
            chosen = torch.tensor(generator.sample(range(rows), min(rows, missing)))
            parts.append({n: v[chosen] if _has_rows(v) else v for n, v in batches[number].items()})
            missing -= len(chosen)
            if missing == 0:
                break
        yield parts


def _flat(stack: Tensor) -> Tensor:
    return stack.reshape(len(stack), -1)


def _rows(inputs: Inputs) -> int:
    return next(len(value) for value in inputs.values() if _has_rows(value))


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def learn_from_entropy(
    calibration: Calibration,
    *,
    trim: bool,
    density: float,
    start: float = 0.3,
    steps: int = 500,
    learning_rate: float = 1e-3,
    rows_per_task: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the coefficients of `learn_coefficients` as `{task: {tensor: number}}`.

    With held-out rows they are those of the step, or of the start, at which the merged model answers most of these
    correctly under its tasks' own heads; else those of the last step.
    """
    for name, number, least in (("steps", steps, 0), ("rows_per_task", rows_per_task, 1), ("seed", seed, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ConfigError(f"RetexConfig.merge: {name} must be an integer from {least}, not {number!r}.")
    for name, value in (("start", start), ("learning_rate", learning_rate)):
        check_number(name, value)
    _check_trim(trim, density)
    weights = calibration.weights
    found = learn_coefficients(
        weights,
        calibration.readout.logits,
        calibration.inputs(),
        steps=steps,
        learning_rate=learning_rate,
        rows_per_task=rows_per_task,
        start=start,
        trimmed_density=density if trim else None,
        progress=calibration.progress,
        seed=seed,
        check=None if calibration.held_out is None else calibration.held_out_accuracy,
    )
    return {
        "coefficients": {
            task: dict(zip(weights.base, row, strict=True))
            for task, row in zip(weights.tasks, found.tolist(), strict=True)
        }
    }


@register_merge("adamerging", prepare=True, calibrate=learn_from_entropy)
def adamerging(
    tensors: TaskTensors,
    *,
    coefficients: dict[str, dict[str, float]] | str = AUTO,
    trim: bool = False,
    density: float = 0.2,
) -> Merger:
    """Add to the base each task vector times a coefficient in [0, 1] per tensor.

    `coefficients` is `{task: {tensor: number}}`, learned from unlabelled `calibration` batches unless given.
    `trim=True` (AdaMerging++) first trims each whole task vector to its largest entries, a share `density` of them.
    """
    _check_trim(trim, density)
    factors = _checked_coefficients(coefficients, tensors)
    bounds = trimming_bounds(vector_thresholds(tensors, density)) if trim else None

    def merge(name: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        base = base.float()
        merged = base.clone()
        for number, (task, expert) in enumerate(zip(tensors.tasks, experts, strict=True)):
            vector = expert.float() - base
            if bounds is not None:
                vector = nn.functional.hardshrink(vector, bounds[number])
            merged.add_(vector, alpha=factors[task][name])
        return merged

    return merge


def _check_trim(trim: bool, density: float) -> None:
    if not isinstance(trim, bool):
        raise ConfigError(f"RetexConfig.merge: trim must be True or False, not {trim!r}.")
    check_density(density)


def _checked_coefficients(coefficients: Any, tensors: TaskTensors) -> dict[str, dict[str, float]]:
    if not isinstance(coefficients, dict) or set(coefficients) != set(tensors.tasks):
        raise ConfigError(f"RetexConfig.merge: coefficients must be a dict with an entry per task {tensors.tasks}.")
    for task, values in coefficients.items():
        if not isinstance(values, dict) or set(values) != set(tensors.names):
            odd = sorted(set(values) ^ set(tensors.names)) if isinstance(values, dict) else []
            raise ConfigError(
                f"RetexConfig.merge: coefficients of task {task!r} must have one number per merged tensor"
                + (f"; {odd[0]!r} is {'missing' if odd[0] in tensors.names else 'none of them'}." if odd else ".")
            )
        for name, value in values.items():
            check_number(f"the coefficient of {name!r} for task {task!r}", value)
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"RetexConfig.merge: the coefficient of {name!r} for task {task!r} must be in [0, 1], not {value}."
                )
    return coefficients
