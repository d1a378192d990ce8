"""Spectra of the experts' differences from the merged model, and the error and storage of each rank.

Experts are read again, one parameter at a time, beside the merged model of a build.

>>> import torch
>>> from transformers import BertConfig, BertModel
>>> from retex_hf import RetexConfig, RetexModel
>>> from retex_hf.workflows.analysis import analyse
>>> base = BertModel(BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
>>> weights = base.state_dict()
>>> experts = {t: {n: w + 0.01 * torch.randn(w.shape) for n, w in weights.items()} for t in ("a", "b")}
>>> model = RetexModel.from_experts(base, experts, RetexConfig(rank=4), progress=False)
>>> analysis = analyse(model, experts, progress=False)
>>> len(analysis.energy_ratios["a"])  # one ratio for every q up to the hidden size
16
>>> point = analysis.storage_curve([4])[0]
>>> point.budgeted_error <= point.uniform_error
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..backends import library_of
from ..checkpoints import Checkpoint, Inventory, TensorInfo, open_source, read_finite, take_inventory
from ..checkpoints.vocabulary import Vocabulary, aligned_view
from ..config import RetexConfig
from ..errors import CheckpointError, RetexError, TaskError, shorten
from ..recovery import Layout, Spectrum, Targets, allocate, plan_layout, spectrum
from ..recovery.layout import MATRIX, at_rank
from ..utils.progress import track
from ..utils.tensor_bank import TensorBank


class BuiltModel(Protocol):
    """The parts of a `RetexModel` that the analysis reads."""

    model: nn.Module
    retex_config: RetexConfig
    heads: TensorBank
    rows: TensorBank


@dataclass(frozen=True)
class StoragePoint:
    """Uniform rank `rank`, and the rank budget that may store as many numbers.

    Shares are relative to the experts' storage, as in `RetexConfig.rank_budget`. Errors are the norm of the residual
    over the norm of the differences, over all tasks and parameters together.
    """

    rank: int
    uniform_share: float
    uniform_error: float
    budgeted_share: float
    budgeted_error: float


@dataclass(frozen=True)
class Analysis:
    """Result of `analyse`.

    `energy_ratios` are the paper's rho_q per task (empty if the model has no square matrices), `spectra` the spectra of
    the stacked differences per parameter, `expert_numbers` how many numbers one expert stores without its head.
    """

    tasks: list[str]
    expert_numbers: int
    energy_ratios: dict[str, Tensor]
    spectra: dict[str, Spectrum]

    def storage_curve(self, ranks: Iterable[int] | None = None, *, progress: bool = False) -> list[StoragePoint]:
        """Return `error_against_storage` of these spectra; default ranks: all powers of two in the model's range."""
        ranks = _powers_of_two(self.spectra) if ranks is None else ranks
        return error_against_storage(self.spectra, len(self.tasks), self.expert_numbers, ranks, progress=progress)


def analyse(
    model: BuiltModel,
    experts: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    progress: bool = True,
) -> Analysis:
    """Compute the spectra of the experts' differences from a built model.

    Args:
        model: A `RetexModel`; differences are taken from its merged weights.
        experts: `{task: expert}`, the experts it was built from, in the form passed to the build.
        names: Parameters to analyse. Default: all except heads, whether or not the build recovers them.
        token: Hub token.
        cache_dir: Hub cache folder.
        progress: Show a progress bar.
    """
    inventory = take_inventory(model.model)
    order = model.retex_config.factor_order
    targets = _open_targets(model, inventory, experts, names, {"token": token, "cache_dir": cache_dir})
    tasks = targets.experts.tasks
    ratios: dict[str, list[Tensor]] = {task: [] for task in tasks}
    spectra = {}
    for name in track(targets.names, title="Reading spectra", unit="tensor", progress=progress):
        differences = targets.differences(name)
        shape = inventory.shapes[name]
        # A layout of rank 1 tells the kind of the parameter; its spectrum then covers all ranks.
        layout = plan_layout(shape, 1, len(tasks), name in inventory.convolutions, order=order)
        found = Spectrum(layout, spectrum(differences, layout))
        if found.values.sum() == 0:
            continue  # no expert differs: nothing to store
        spectra[name] = found
        if len(shape) == 2 and shape[0] == shape[1] > 1:
            for task, difference in zip(tasks, differences, strict=True):
                ratio = energy_ratio(difference)
                if ratio is not None:
                    ratios[task].append(ratio)
    averages = {task: average_ratios(ratios[task]) for task in tasks}
    return Analysis(
        tasks, targets.expert_numbers, {task: mean for task, mean in averages.items() if len(mean)}, spectra
    )


def energy_ratio(difference: Tensor) -> Tensor | None:
    """Return rho_q of one matrix: the share of its squared norm in its top q singular directions, for q = 1, 2, ...

    Return None for a matrix of zeros, which has no directions.

    >>> import torch
    >>> from retex_hf.workflows.analysis import energy_ratio
    >>> energy_ratio(torch.diag(torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0]))).tolist()
    [0.5625, 0.8125, 0.875, 0.9375, 1.0]
    """
    rows, columns = difference.shape
    values = spectrum([difference], Layout((rows, columns), MATRIX, 1, rows, columns, 1))
    total = values.sum()
    return values.cumsum(0) / total if total > 0 else None


def average_ratios(ratios: list[Tensor]) -> Tensor:
    """Average several rho_q; beyond its last direction, a matrix counts as 1.

    >>> import torch
    >>> from retex_hf.workflows.analysis import average_ratios
    >>> average_ratios([torch.tensor([0.5, 1.0]), torch.tensor([0.25, 0.5, 1.0])]).tolist()
    [0.375, 0.75, 1.0]
    """
    if not ratios:
        return torch.empty(0, dtype=torch.float64)
    mean = torch.zeros(max(len(ratio) for ratio in ratios), dtype=torch.float64)
    for ratio in ratios:
        mean[: len(ratio)] += ratio
        mean[len(ratio) :] += 1
    return mean / len(ratios)


def error_against_storage(
    spectra: Mapping[str, Spectrum],
    num_tasks: int,
    expert_numbers: int,
    ranks: Iterable[int],
    *,
    progress: bool = False,
) -> list[StoragePoint]:
    """Return storage and error of each uniform rank, and the error of a rank budget with the same storage.

    Errors are those of the closed form, with offsets that no layers share. The error of a budget never exceeds that of
    the uniform rank it is compared with.

    Args:
        spectra: Spectra of all parameters, from `analyse`.
        num_tasks: Number of tasks.
        expert_numbers: How many numbers one expert stores.
        ranks: Uniform ranks, in the order of the result.
        progress: Show a progress bar.

    >>> import torch
    >>> from retex_hf.workflows.analysis import error_against_storage
    >>> from retex_hf.recovery import Spectrum, plan_layout
    >>> spectra = {"w": Spectrum(plan_layout((4, 4), 1, num_tasks=2), torch.tensor([3.0, 1.0, 0.0, 0.0]))}
    >>> error_against_storage(spectra, num_tasks=2, expert_numbers=16, ranks=[1])
    [StoragePoint(rank=1, uniform_share=0.375, uniform_error=0.5, budgeted_share=0.375, budgeted_error=0.5)]
    """
    ranks = list(ranks)
    for rank in ranks:
        if not isinstance(rank, int) or rank < 1:
            raise RetexError(f"Ranks must be integers above 0, not {rank!r}.")
    energy = sum(found.values.sum().item() for found in spectra.values())
    if energy == 0:
        raise RetexError("No expert differs from the merged model: there is no error to trade for storage.")

    def measure(layouts: Mapping[str, Layout]) -> tuple[float, int]:
        stored = sum(layout.stored_numbers(num_tasks) for layout in layouts.values())
        return (_residual(spectra, layouts) / energy) ** 0.5, stored

    points = []
    for rank in track(ranks, title="Trading rank for storage", unit="rank", progress=progress):
        uniform_error, numbers = measure(
            {name: at_rank(found.layout, rank, num_tasks) for name, found in spectra.items()}
        )
        budgeted = measure(allocate(spectra, num_tasks, numbers))
        # `allocate` compares recovered energy, this compares residuals: rounding may order them differently.
        budgeted_error, budgeted_numbers = min(budgeted, (uniform_error, numbers))
        whole = num_tasks * expert_numbers
        points.append(StoragePoint(rank, numbers / whole, uniform_error, budgeted_numbers / whole, budgeted_error))
    return points


def _residual(spectra: Mapping[str, Spectrum], layouts: Mapping[str, Layout]) -> float:
    """Return the energy that layouts leave out; a parameter without a layout is left out whole."""
    # Summing the residuals keeps small ones; a difference of energies would round them away.
    left = 0.0
    for name, found in spectra.items():
        layout = layouts.get(name)
        if layout is None:
            left += found.values.sum().item()
        elif layout.kind == MATRIX:
            left += found.values[layout.rank :].sum().item()
    return left


def _powers_of_two(spectra: Mapping[str, Spectrum]) -> list[int]:
    """Return 1, 2, 4, ... below the smaller side of the largest matrix."""
    sides = [min(s.layout.rows, s.layout.columns) for s in spectra.values() if s.layout.kind == MATRIX]
    return [2**power for power in range((max(sides, default=2) - 1).bit_length())]


@dataclass
class _Reopened:
    """The experts' tensors under the model's names."""

    checkpoints: dict[str, Checkpoint]

    @property
    def tasks(self) -> list[str]:
        return list(self.checkpoints)

    def read_expert(self, task: str, name: str) -> Tensor:
        return read_finite(self.checkpoints[task], name).cpu()


def _open_targets(
    model: BuiltModel,
    inventory: Inventory,
    experts: Mapping[str, Any],
    names: Iterable[str] | None,
    options: dict[str, Any],
) -> Targets:
    tasks = list(model.retex_config.tasks)
    if set(experts) != set(tasks):
        raise TaskError(f"experts must be those of the model's tasks, {tasks}, not {list(experts)}.")
    heads = model.heads[tasks[0]]
    body = [name for name in inventory.shapes if name not in heads]
    chosen = body if names is None else list(names)
    unknown = [name for name in chosen if name not in body]
    if unknown:
        raise RetexError(f"names holds {shorten(unknown)}, which the model does not merge.")

    library = library_of(model.model)
    checkpoints = {}
    for task in tasks:
        source = open_source(experts[task], f"expert {task!r}", **options)
        checkpoint = Checkpoint.from_entries(source.label, library.align(model.model, source)[0], inventory)
        if model.rows.get(task):
            checkpoint = _with_shared_rows(checkpoint, model, task)
        _check_fits(checkpoint, {name: inventory.shapes[name] for name in chosen})
        checkpoints[task] = checkpoint
    merged = model.model.state_dict()
    return Targets(
        _Reopened(checkpoints),
        {name: merged[name].cpu() for name in chosen},
        names=chosen,
        expert_numbers=sum(merged[name].numel() for name in body),
    )


def _with_shared_rows(expert: Checkpoint, model: BuiltModel, task: str) -> Checkpoint:
    """Restrict an expert to the merged model's tokens; further tokens are stored as they are."""
    names, tensors = list(model.rows[task]), model.model.state_dict()
    entries: dict[str, tuple[TensorInfo, Callable[[], Tensor]]] = {
        name: (TensorInfo(tuple(tensors[name].shape), tensors[name].dtype), tensors[name].cpu) for name in names
    }
    size = len(tensors[names[0]])
    return aligned_view(expert, Checkpoint("the merged model", entries), Vocabulary(names, size, {}))


def _check_fits(expert: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in expert:
            raise CheckpointError(f"{expert.label} lacks tensor {name!r} of the model.")
        if expert.shape(name) != shape:
            raise CheckpointError(f"{expert.label}: tensor {name!r} has shape {expert.shape(name)}, not {shape}.")
