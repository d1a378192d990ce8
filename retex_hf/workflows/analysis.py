"""Spectra of the experts' differences from the merged model, and the error of each rank and of each budget of bytes.

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
>>> point.budgeted_error < point.uniform_error
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
from ..recovery import Layout, Targets, plan_layout, spectrum
from ..recovery.allocation import Kept, Ways
from ..recovery.layout import MATRIX, Sides, at_rank, matrix_sides
from ..recovery.spectra import measure, ways_of
from ..recovery.storage import fitting
from ..recovery.targets import difference_energy
from ..recovery.weighting import task_weights
from ..utils.progress import track
from ..utils.tensor_bank import TensorBank


class BuiltModel(Protocol):
    """The parts of a `RetexModel` that the analysis reads."""

    model: nn.Module
    retex_config: RetexConfig
    heads: TensorBank
    rows: TensorBank


@dataclass(frozen=True)
class Spectrum:
    """The energy in one parameter's differences.

    `values[q]` is the energy that rank q + 1 adds to rank q of all tasks' differences stacked; a parameter that is not
    factored (a vector) has one value, its whole energy. `ways` are the ways to keep the parameter, with energies times
    the `weights` of the tasks, and `energies` those of every task.
    """

    layout: Layout
    values: Tensor
    sides: Sides | None
    ways: Ways
    weights: list[float]
    energies: list[float]

    def missed(self, kept: Kept) -> float:
        """Return the energy that a choice misses, without weights."""
        recovered = [by_user for choice in kept.choices for by_user in choice.recovered_by_user.tolist()]
        return sum(
            max(energy - found / weight, 0.0) if weight > 0 else 0.0
            for energy, found, weight in zip(self.energies, recovered, self.weights, strict=True)
        )


@dataclass(frozen=True)
class StoragePoint:
    """One rank `rank` everywhere in float32 (`RetexConfig.paper`), and a budget of as many bytes
    (`RetexConfig.storage`).

    Shares are relative to the experts' bytes. Errors are the norm of the residual over the norm of the differences,
    over all tasks and parameters together; that of a budget is predicted from what rounding loses on average.
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
    the differences per parameter, `expert_bytes` the size of one expert without its head.
    """

    tasks: list[str]
    expert_bytes: int
    energy_ratios: dict[str, Tensor]
    spectra: dict[str, Spectrum]

    def storage_curve(self, ranks: Iterable[int] | None = None, *, progress: bool = False) -> list[StoragePoint]:
        """Return `error_against_storage` of these spectra; default ranks: all powers of two in the model's range."""
        ranks = _powers_of_two(self.spectra) if ranks is None else ranks
        return error_against_storage(self.spectra, len(self.tasks) * self.expert_bytes, ranks, progress=progress)


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
    targets = _open_targets(model, inventory, experts, names, {"token": token, "cache_dir": cache_dir}, progress)
    tasks = targets.experts.tasks
    ratios: dict[str, list[Tensor]] = {task: [] for task in tasks}
    # A parameter in which no expert differs needs no storage.
    changed = {name: energies for name, energies in targets.energies.items() if any(energies)}
    weights = task_weights(changed, "tasks")
    spectra = {}
    for name in track(list(changed), title="Reading spectra", unit="tensor", progress=progress):
        differences = targets.differences(name)
        shape, convolution = inventory.shapes[name], name in inventory.convolutions
        # A layout of rank 1 tells the kind of the parameter; its spectrum then covers all ranks.
        layout = plan_layout(shape, 1, len(tasks), convolution, order=order)
        sides = matrix_sides(shape, convolution)
        ways = ways_of(measure(differences, sides, weights[name]), shape, sides)
        spectra[name] = Spectrum(layout, spectrum(differences, layout), sides, ways, weights[name], changed[name])
        if len(shape) == 2 and shape[0] == shape[1] > 1:
            for task, difference in zip(tasks, differences, strict=True):
                ratio = energy_ratio(difference)
                if ratio is not None:
                    ratios[task].append(ratio)
    averages = {task: average_ratios(ratios[task]) for task in tasks}
    merged, heads = model.model.state_dict(), model.heads[tasks[0]]
    size = sum(merged[name].numel() * merged[name].element_size() for name in inventory.shapes if name not in heads)
    return Analysis(tasks, size, {task: mean for task, mean in averages.items() if len(mean)}, spectra)


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
    spectra: Mapping[str, Spectrum], experts_bytes: int, ranks: Iterable[int], *, progress: bool = False
) -> list[StoragePoint]:
    """Return storage and error of each uniform rank, and the error of a budget of as many bytes.

    Errors are those of the exact solver, with offsets that no layers share.

    Args:
        spectra: Spectra of all parameters, from `analyse`.
        experts_bytes: Bytes of all experts without heads.
        ranks: Uniform ranks, in the order of the result.
        progress: Show a progress bar.
    """
    ranks = list(ranks)
    for rank in ranks:
        if not isinstance(rank, int) or rank < 1:
            raise RetexError(f"Ranks must be integers above 0, not {rank!r}.")
    energy = sum(sum(found.energies) for found in spectra.values())
    if energy == 0:
        raise RetexError("No expert differs from the merged model: there is no error to trade for storage.")
    tasks = len(next(iter(spectra.values())).energies)
    ways, sides = ({name: getattr(found, what) for name, found in spectra.items()} for what in ("ways", "sides"))
    shapes = {name: found.layout.shape for name, found in spectra.items()}
    points = []
    for rank in track(ranks, title="Trading rank for storage", unit="rank", progress=progress):
        uniform = {name: at_rank(found.layout, rank, tasks) for name, found in spectra.items()}
        size = 4 * sum(layout.stored_numbers(tasks) for layout in uniform.values())
        kept, layouts = fitting(ways, shapes, sides, size)
        missed = sum(found.missed(kept[name]) for name, found in spectra.items())
        points.append(
            StoragePoint(
                rank,
                uniform_share=size / experts_bytes,
                uniform_error=(_residual(spectra, uniform) / energy) ** 0.5,
                budgeted_share=sum(layout.bytes for layout in layouts.values()) / experts_bytes,
                budgeted_error=(missed / energy) ** 0.5,
            )
        )
    return points


def _residual(spectra: Mapping[str, Spectrum], layouts: Mapping[str, Layout]) -> float:
    """Return the energy that layouts leave out."""
    # Summing the residuals keeps small ones; a difference of energies would round them away.
    return sum(
        spectra[name].values[layout.rank :].sum().item() for name, layout in layouts.items() if layout.kind == MATRIX
    )


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
    progress: bool,
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
    merged, reopened = model.model.state_dict(), _Reopened(checkpoints)
    energies = {
        name: [difference_energy(reopened.read_expert(task, name), merged[name].cpu()) for task in tasks]
        for name in track(chosen, title="Measuring", unit="tensor", progress=progress)
    }
    return Targets(reopened, {name: merged[name].cpu() for name in chosen}, names=chosen, energies=energies)


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
