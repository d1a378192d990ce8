"""Training of the recovery module as in the paper: with Adam, from the experts' parameters alone, on accelerate.

Every optimizer step draws `batch_size` task weights from a generator seeded by the step's number, and every process
takes its share of them. So losses do not depend on the number of processes, and a resumed run makes the same draws.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_schedule_with_warmup

from ..config import RetexConfig
from ..errors import ConfigError, RetexError, first_line
from ..utils.atomic_folder import check_plain, check_target, remove, replacing, together
from ..utils.progress import track
from ..utils.strict_files import read_json
from .layout import MATRIX, Layout
from .module import RecoveryModule
from .samplers import sample_weights
from .solver import solve_all
from .targets import Targets
from .work_sharing import BuildContext

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
OBJECTIVES = ("l2", "cosine", "cosine_l2")
INITIALISATIONS = ("paper", "closed_form")
MOST_DRAWS = 65_536  # limit on task weights per step, which are all held in memory
STATE_NAME, PROGRESS_NAME = "state", "retex_progress.json"


@dataclass
class TrainingConfig:
    """Settings of the learned path; the defaults are the paper's.

    Args:
        steps: Optimizer steps on single tasks.
        soft_steps: Further steps on mixtures drawn by `RetexConfig.soft_training` (the paper's second stage).
        learning_rate: Peak learning rate of the cosine schedule.
        warmup_steps: Steps of linear warm-up.
        batch_size: Task weights per optimizer step, over all processes and accumulation steps.
        max_grad_norm: Norm to which gradients are clipped, or None.
        objective: `"l2"`, `"cosine"` (between the offsets and the differences) or `"cosine_l2"`, their sum.
        l2_weight: Lambda of `"cosine_l2"`.
        initialise: `"paper"` (random generators, zero shared factors) or `"closed_form"` (the exact optimum).
        seed: Seed of the initialisation and of the draws.
        checkpoint_dir: Folder where the state is saved, and from which it is resumed if it exists.
        checkpoint_every: Steps between two saves.
        log_every: Steps between two records (and trackers' logs); a record is the mean since the last one.

    Example:
        >>> from retex_hf import TrainingConfig
        >>> TrainingConfig(steps=500, warmup_steps=50, learning_rate=1e-3).objective
        'l2'
    """

    steps: int = 5000
    soft_steps: int = 0
    learning_rate: float = 2e-4
    warmup_steps: int = 600
    batch_size: int = 1
    max_grad_norm: float | None = None
    objective: str = "l2"
    l2_weight: float = 1.0
    initialise: str = "paper"
    seed: int = 0
    checkpoint_dir: str | Path | None = None
    checkpoint_every: int = 500
    log_every: int = 50

    def __post_init__(self) -> None:
        for name in ("steps", "soft_steps", "warmup_steps"):
            _require(isinstance(getattr(self, name), int) and getattr(self, name) >= 0, name, self, "0 or more")
        for name in ("batch_size", "checkpoint_every", "log_every"):
            _require(isinstance(getattr(self, name), int) and getattr(self, name) >= 1, name, self, "1 or more")
        _require(self.batch_size <= MOST_DRAWS, "batch_size", self, f"at most {MOST_DRAWS}")
        for name in ("learning_rate", "l2_weight"):
            value = getattr(self, name)
            _require(isinstance(value, (int, float)) and 0 < value < math.inf, name, self, "a number above 0")
        clip = self.max_grad_norm
        _require(
            clip is None or (isinstance(clip, (int, float)) and clip > 0), "max_grad_norm", self, "above 0 or None"
        )
        _require(self.objective in OBJECTIVES, "objective", self, f"one of {OBJECTIVES}")
        _require(self.initialise in INITIALISATIONS, "initialise", self, f"one of {INITIALISATIONS}")
        _require(isinstance(self.seed, int) and 0 <= self.seed < 2**32, "seed", self, "an integer from 0 to 2**32 - 1")
        _require(self.steps + self.soft_steps > 0, "steps", self, "above 0, or soft_steps")


@dataclass
class History:
    """The course of training: one record per `log_every` steps."""

    records: list[dict[str, Any]] = field(default_factory=list)


class RecoveryLoss(nn.Module):
    """The objective as a module, so that DDP, FSDP and DeepSpeed see one forward pass per step."""

    def __init__(self, recovery: RecoveryModule, targets: Targets, training: TrainingConfig) -> None:
        super().__init__()
        self.recovery = recovery
        self.targets = targets
        self.training_config = training

    def forward(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the summed objective, squared error and energy of a batch of task weights (n, T)."""
        rows = [self._one(row) for row in weights]
        losses, squares, energies = (torch.stack(part).sum() for part in zip(*rows, strict=True))
        return losses, squares.detach(), energies

    def _one(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedding = self.recovery.embed(weights)
        device = embedding.device
        square = energy = dot = norm = torch.zeros((), device=device)
        for name in self.recovery:
            difference = self.targets.mixed_difference(name, weights.cpu()).to(device, torch.float32)
            predicted = self.recovery.offset(name, embedding).float()
            scale = self.recovery.scale(name)
            if scale is not None:
                merged = self.targets.merged[name].to(device, torch.float32)
                predicted = predicted + (scale(embedding) - 1) * merged
            square = square + nn.functional.mse_loss(predicted, difference, reduction="sum")
            energy = energy + torch.linalg.vector_norm(difference).square()
            if self.training_config.objective != "l2":
                dot = dot + (predicted * difference).sum()
                norm = norm + predicted.square().sum()
        if self.training_config.objective == "l2":
            return square, square, energy
        # At the start all offsets are zero and have no direction; eps keeps the gradient well defined.
        cosine = 1 - dot / ((norm + 1e-12).sqrt() * (energy + 1e-12).sqrt())
        extra = self.training_config.l2_weight * square if self.training_config.objective == "cosine_l2" else 0.0
        return cosine + extra, square, energy


def train(
    targets: Targets,
    layouts: Mapping[str, Layout],
    config: RetexConfig,
    training: TrainingConfig,
    context: BuildContext,
    *,
    history: History | None = None,
    keep_state: bool = False,
) -> RecoveryModule:
    """Train a recovery module; resume from `checkpoint_dir` if a state is there.

    With `keep_state` the final state stays there, for a caller who first writes the result to disk and then calls
    `clear_state`.
    """
    accelerator = context.accelerator or Accelerator()
    if training.soft_steps and config.soft_training is None:
        raise ConfigError("TrainingConfig.soft_steps needs RetexConfig.soft_training to say which mixtures to draw.")
    share = _share(training.batch_size, accelerator)
    set_seed(training.seed)
    recovery = _initial(targets, layouts, config, training, replace(context, accelerator=accelerator))
    if not layouts:
        return recovery  # no expert differs from the merge
    whole = deepcopy(recovery).to("meta")  # the module's structure, for when its parameters are sharded
    if accelerator.distributed_type in SHARDED:
        _give_axes(recovery)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # DeepSpeed clips by itself, at 1 unless configured otherwise, and ignores the call below.
        accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = training.max_grad_norm or 0.0
    loss_module = RecoveryLoss(recovery, targets, training)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=training.learning_rate, fused=True)
    total = training.steps + training.soft_steps
    schedule = get_cosine_schedule_with_warmup(optimizer, training.warmup_steps, total)
    loss_module, optimizer = accelerator.prepare(loss_module, optimizer)
    # The schedule is not prepared, because accelerate would advance it once per process. Nor is it registered, because
    # accelerate restores registered objects from a pickle, which could run code.

    history = history if history is not None else History()
    checkpoint = _Checkpoint(training, config, targets, accelerator, schedule)
    start = checkpoint.resume(history)
    bar = track(
        range(start, total),
        title="Training",
        unit="step",
        initial=start,
        total=total,
        progress=context.progress and accelerator.is_main_process,
    )
    sums, since = torch.zeros(3, device=accelerator.device), 0
    for step in bar:
        method = None if step < training.steps else config.soft_training
        weights = _draw(method, training, step, targets.num_tasks)
        mine = weights[accelerator.process_index :: accelerator.num_processes]
        for part in mine.split(share):
            with accelerator.accumulate(loss_module), accelerator.autocast():
                loss, square, energy = loss_module(part.to(accelerator.device))
                # DDP averages over processes and accelerate over accumulation steps; together they give the batch's
                # mean.
                accelerator.backward(loss / share)
                if accelerator.sync_gradients and training.max_grad_norm is not None:
                    accelerator.clip_grad_norm_(loss_module.parameters(), training.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            sums += torch.stack([loss.detach(), square, energy])
        schedule.step()
        since += 1
        # Also before a checkpoint, so that no part of a record is lost between a run and its continuation.
        saving = (step + 1) % training.checkpoint_every == 0
        if (step + 1) % training.log_every == 0 or saving or step + 1 == total:
            loss, square, energy = accelerator.reduce(sums, "sum").tolist()
            if not math.isfinite(loss):
                raise RetexError(
                    f"Training diverged: the loss is {loss} at step {step + 1}. Take a smaller "
                    'learning_rate, or solver="closed_form", which has none.'
                )
            record = {
                "step": step + 1,
                "loss": loss / (training.batch_size * since),
                "relative_error": (square / energy) ** 0.5 if energy > 0 else 0.0,
                "learning_rate": schedule.get_last_lr()[0],
            }
            bar.set_postfix(loss=f"{record['loss']:.4g}", error=f"{record['relative_error']:.3f}", refresh=False)
            accelerator.log({k: v for k, v in record.items() if k != "step"}, step=step + 1)
            history.records.append(record | _gammas(accelerator.unwrap_model(loss_module).recovery))
            sums, since = torch.zeros_like(sums), 0
        if keep_state if step + 1 == total else saving:
            checkpoint.save(step + 1, history)
    if not keep_state and accelerator.is_main_process:
        clear_state(training)
    return _gathered(accelerator, loss_module, whole)


def _initial(
    targets: Targets,
    layouts: Mapping[str, Layout],
    config: RetexConfig,
    training: TrainingConfig,
    context: BuildContext,
) -> RecoveryModule:
    if training.initialise == "closed_form":
        return solve_all(targets, layouts, config, context)[0]
    return RecoveryModule.initialised(
        layouts,
        targets.num_tasks,
        config.task_embedding_dim,
        shared_layers=config.share_layers,
        affine=config.recovery == "affine",
    )


def _share(batch_size: int, accelerator: Accelerator) -> int:
    """Return how many of a batch's draws one process takes per backward pass."""
    accumulation = accelerator.gradient_accumulation_steps
    parts = accelerator.num_processes * accumulation
    if batch_size % parts:
        raise ConfigError(
            f"TrainingConfig.batch_size ({batch_size}) must be a multiple of processes times gradient accumulation "
            f"steps ({accelerator.num_processes} x {accumulation})."
        )
    return batch_size // parts


def _draw(method: Any, training: TrainingConfig, step: int, num_tasks: int) -> Tensor:
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + step)
    return sample_weights(method, training.batch_size, num_tasks, generator)


@torch.no_grad()
def _gammas(recovery: RecoveryModule) -> dict[str, dict[str, float]]:
    """Return the affine variant's task-averaged gamma of every matrix; empty otherwise."""
    scales = {name: recovery.scale(name) for name in recovery if recovery[name].layout.kind == MATRIX}
    averages = {n: scale(recovery.task_embedding).mean() for n, scale in scales.items() if scale is not None}
    means = {name: _brought_together(average).item() for name, average in averages.items()}
    return {"gamma": means} if means else {}


def _give_axes(recovery: RecoveryModule) -> None:
    """Turn scalar parameters, which FSDP2 and DeepSpeed refuse, into vectors of one number."""
    for module in recovery.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1)))


def _gathered(accelerator: Accelerator, loss_module: nn.Module, whole: RecoveryModule) -> RecoveryModule:
    """Return the whole recovery module on every process, on the CPU, however its parameters were sharded."""
    if accelerator.is_fsdp2:  # a collective operation: every process gathers each tensor
        state = {name: _brought_together(tensor) for name, tensor in loss_module.state_dict().items()}
    else:
        state = accelerator.get_state_dict(loss_module)
        if accelerator.distributed_type in SHARDED:
            state = broadcast_object_list([state if accelerator.is_main_process else None])[0]
    own = {name.removeprefix("recovery."): tensor.detach().cpu() for name, tensor in state.items()}
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    whole.load_state_dict({name: tensor.reshape(shapes[name]) for name, tensor in own.items()}, assign=True)
    return whole


def _brought_together(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Checkpoint:
    """The state of a run in a folder: accelerate's own state, our progress, and the configuration it belongs to."""

    def __init__(
        self,
        training: TrainingConfig,
        config: RetexConfig,
        targets: Targets,
        accelerator: Accelerator,
        schedule: LambdaLR,
    ) -> None:
        self.state = _state_of(training)
        self.accelerator, self.schedule = accelerator, schedule
        settings = {k: v for k, v in asdict(training).items() if not k.startswith(("checkpoint_", "log_"))}
        # Experts of the same names and shapes may have been trained again.
        experts = {} if self.state is None else {task: _digest(targets, task) for task in targets.experts.tasks}
        shapes = {name: list(targets.merged[name].shape) for name in targets.names}
        values = {"training": settings, "config": config.to_dict(), "shapes": shapes, "experts": experts}
        self.identity = json.loads(json.dumps(values))

    def save(self, step: int, history: History) -> None:
        """Write the state beside the previous one and move it into place, so that one complete state always exists."""
        state = self.state
        if state is None:
            return
        with together(self.accelerator, lambda: replacing(state, ("*",))) as scratch:
            self.accelerator.save_state(str(scratch))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                values = {"step": step, "identity": self.identity, "records": history.records}
                values["schedule"] = self.schedule.state_dict()
                (scratch / PROGRESS_NAME).write_text(json.dumps(values), encoding="utf-8")

    def resume(self, history: History) -> int:
        """Load the newest complete state; return the number of steps done."""
        if self.state is None or not self.state.parent.is_dir():
            return 0
        state = check_target(self.state)
        if not (state / PROGRESS_NAME).is_file():
            return 0
        check_plain(state)
        values = read_json(state / PROGRESS_NAME, RetexError, infinite=True)  # a loss may be infinite
        kinds = {"step": int, "identity": dict, "records": list, "schedule": dict}
        for name, kind in kinds.items():
            if not isinstance(values.get(name), kind):
                raise RetexError(f"{state / PROGRESS_NAME} has no {name!r}: delete {state} to train from the start.")
        for part, ours in self.identity.items():
            if values["identity"].get(part) != ours:
                change = _first_change(values["identity"].get(part), ours)
                raise RetexError(
                    f"{state} belongs to a run with another configuration ({change} in {part}): "
                    "use another checkpoint_dir, or delete it."
                )
        try:
            self.accelerator.load_state(str(state))
            self.schedule.load_state_dict(values["schedule"])
        except Exception as error:  # a damaged or untrusted file may make accelerate and torch raise anything
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise RetexError(
                f"{state} cannot be resumed from ({first_line(error)}): delete it to train from the start."
            ) from None
        history.records[:] = values["records"]
        return values["step"]


def clear_state(training: TrainingConfig) -> None:
    """Delete the state of a finished run whose result is saved: it would only mislead the next run."""
    state = _state_of(training)
    if state is not None and state.parent.is_dir():
        remove(state)


def _state_of(training: TrainingConfig) -> Path | None:
    """Return the folder of a run's state; None where no state is kept."""
    return None if training.checkpoint_dir is None else check_target(training.checkpoint_dir) / STATE_NAME


def _digest(targets: Targets, task: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in targets.names:
        tensor = targets.experts.read_expert(task, name)
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _first_change(theirs: Any, ours: Any) -> str:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in {**theirs, **ours}:
            if theirs.get(key) != ours.get(key):
                return f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
    return f"{theirs!r} there, {ours!r} here"


def _require(condition: bool, name: str, config: TrainingConfig, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"TrainingConfig.{name} must be {allowed}, not {getattr(config, name)!r}.")
