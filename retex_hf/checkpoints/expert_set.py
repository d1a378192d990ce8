"""The base and all experts under the names of one model, checked against each other before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from ..errors import CheckpointError, shorten
from ..utils.devices import CPU
from .inventory import Inventory
from .sources import TensorInfo

Entries = dict[str, tuple[TensorInfo, Callable[[], Tensor]]]

# Fine-tuning moves a weight matrix by a fraction of its norm (cosine near 1); matrices of unrelated models are
# orthogonal (cosine near 0). Values in between do not occur.
RELATED_COSINE = 0.2
RELATED_SAMPLE = 9
COSINE_CHUNK = 1 << 20
# The number of a layer (or of anything else that is numbered) in a tensor's name.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass
class Checkpoint:
    """The tensors of one checkpoint under the model's names, tied ones once; each is read onto `device`."""

    label: str
    entries: Entries
    ties: dict[str, list[str]] = field(default_factory=dict)
    device: torch.device = CPU

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name][0].shape

    def read(self, name: str) -> Tensor:
        tensor = self.entries[name][1]()
        for other_name in self.ties.get(name, ()):
            other = self.entries[other_name][1]()
            if other.data_ptr() != tensor.data_ptr() and not torch.equal(other, tensor):
                raise CheckpointError(
                    f"{self.label}: {name!r} and {other_name!r} are tied in the model but differ in this checkpoint."
                )
        return tensor.to(self.device)

    @classmethod
    def from_entries(cls, label: str, entries: Entries, inventory: Inventory, device: torch.device = CPU) -> Checkpoint:
        """Make a checkpoint with tied tensors under one name each. A file may hold any of their names, or several."""
        entries, ties = dict(entries), {}
        for name, aliases in inventory.aliases.items():
            present = [alias for alias in aliases if alias in entries]
            if present:
                chosen = name if name in present else present[0]
                entries[name] = entries[chosen]
                ties[name] = [alias for alias in present if alias != chosen]
        return cls(label, entries, ties, device)


@dataclass
class ExpertSet:
    """The inputs of a build: tensors in `names` are merged and recovered, `heads` are stored in full per task.

    `vocabulary` lists those of `names` in which some tasks have more or fewer rows; `own` then holds the tasks'
    checkpoints before alignment. `sizes` is the number of tokens per task, if the model has tensors with a row per
    token.
    """

    base: Checkpoint
    experts: dict[str, Checkpoint]
    names: list[str]
    heads: list[str]
    vocabulary: list[str] = field(default_factory=list)
    own: dict[str, Checkpoint] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        return list(self.experts)

    def read_base(self, name: str) -> Tensor:
        return self.base.read(name)

    def read_expert(self, task: str, name: str) -> Tensor:
        return self.experts[task].read(name)

    def read_rows(self, task: str, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows of a task's tensor beyond the base's."""
        return read_finite(self.own[task], name, dtype)[self.base.shape(name)[0] :]

    def rows_shape(self, task: str, name: str) -> tuple[int, ...]:
        size, *trailing = self.own[task].shape(name)
        return (max(0, size - self.base.shape(name)[0]), *trailing)


def check_experts(
    inventory: Inventory,
    base: Checkpoint,
    experts: dict[str, Checkpoint],
    unexpected: dict[str, list[str]],
    head_names: set[str],
) -> ExpertSet:
    """Sort the tensors into merged ones and heads; refuse experts that do not fit the model or each other.

    `unexpected` lists names per task that the model does not have; `head_names` are heads by model class or by the
    user's choice.
    """
    wanted = list(inventory.shapes)
    for task, expert in experts.items():
        missing = [name for name in wanted if name not in expert]
        if missing:
            raise CheckpointError(f"{expert.label} lacks {len(missing)} tensor(s) of the model: {shorten(missing)}.")
        if unexpected.get(task):
            extra = unexpected[task]
            raise CheckpointError(f"{expert.label} has {len(extra)} tensor(s) the model does not: {shorten(extra)}.")
    for checkpoint in (base, *experts.values()):
        for name in wanted:
            if name in checkpoint:
                check_floating(checkpoint.label, name, checkpoint.entries[name][0].dtype)
    body = [name for name in wanted if name not in head_names]
    present = [name for name in body if name in base]
    if 2 * len(present) < len(body):
        raise CheckpointError(
            f"{base.label} has only {len(present)} of the {len(body)} tensors of the experts' model: it is another "
            "architecture."
        )
    kinds = {NUMBER.sub("*", name) for name in present}
    layers = [name for name in body if name not in base and NUMBER.sub("*", name) in kinds]
    if layers:
        raise CheckpointError(
            f"{base.label} lacks {shorten(layers)} but has others of the kind: the experts have more layers than it."
        )

    names, heads = [], []
    for name in wanted:
        if name in head_names or name not in base or _is_own_output(name, base, experts):
            heads.append(name)
        else:
            names.append(name)
    return ExpertSet(base, experts, names, heads)


def check_integers(names: Iterable[str], entries: Mapping[str, Entries]) -> None:
    """Refuse checkpoints (entries by label) that differ in integer tensors, such as a permutation: these are neither
    merged nor stored per task. The batch counts of batch normalisation are ignored."""
    for name in names:
        having = [(label, found[name][1]().cpu()) for label, found in entries.items() if name in found]
        if name.endswith("num_batches_tracked") or not having:
            continue
        (first, expected), *others = having
        for label, tensor in others:
            if not torch.equal(tensor, expected):
                raise CheckpointError(
                    f"{label}: tensor {name!r} holds other integers than in {first}: experts may differ in "
                    "floating-point tensors only."
                )


def check_floating(label: str, name: str, dtype: torch.dtype) -> None:
    """Refuse a weight that is not stored in floating point."""
    if not dtype.is_floating_point:
        raise CheckpointError(f"{label}: tensor {name!r} has dtype {dtype}, expected floating point.")


def _is_own_output(name: str, base: Checkpoint, experts: dict[str, Checkpoint]) -> bool:
    """Return whether experts differ in the leading axis (classes, vocabulary); refuse any other difference."""
    expected = base.shape(name)
    different = [expert for expert in experts.values() if expert.shape(name) != expected]
    for expert in different:
        shape = expert.shape(name)
        if len(shape) != len(expected) or shape[1:] != expected[1:]:
            raise CheckpointError(
                f"{expert.label}: tensor {name!r} has shape {shape}, but the base has {expected}: "
                "another architecture or another base."
            )
    return bool(different)


def check_related(experts: ExpertSet, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse an expert that was not fine-tuned from this base, judged by the cosines of a few weight matrices."""
    matrices = [name for name in experts.names if len(shapes[name]) > 1 and min(shapes[name]) > 1]
    step = max(1, len(matrices) // RELATED_SAMPLE)
    sample = matrices[step // 2 :: step]
    cosines: dict[str, list[float]] = {task: [] for task in experts.tasks}
    for name in sample:
        base = experts.read_base(name)
        for task in experts.tasks:
            cosines[task].append(_cosine(base, experts.read_expert(task, name)))
    for task, values in cosines.items():
        # NaN compares false: a damaged tensor is reported by name when it is merged.
        if values and median(values) < RELATED_COSINE:
            raise CheckpointError(
                f"{experts.experts[task].label} does not descend from {experts.base.label}: the median cosine between "
                f"their weight matrices is {median(values):.2f} (pass check_base=False to build anyway)."
            )


def _cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine between two tensors, 0 if one is zero; float64, so that squares neither overflow nor vanish."""
    dot = one_square = other_square = 0.0
    for a, b in zip(one.reshape(-1).split(COSINE_CHUNK), other.reshape(-1).split(COSINE_CHUNK), strict=True):
        a, b = a.double(), b.double()
        dot += (a @ b).item()
        one_square += (a @ a).item()
        other_square += (b @ b).item()
    norms = one_square**0.5 * other_square**0.5
    return dot / norms if norms else 0.0


def read_finite(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Read a tensor; refuse NaN, infinity, and values that would be infinite in `dtype`, the model's."""
    return check_range(checkpoint.read(name), checkpoint.label, name, dtype)


def check_range(tensor: Tensor, label: str, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor unchanged; refuse values that are not finite, or would not be in `dtype`."""
    check_floating(label, name, tensor.dtype)
    if not tensor.numel():
        return tensor
    # NaN and infinity show in the extremes, which need one pass and no extra memory.
    extremes = torch.aminmax(tensor)
    if not all(value.isfinite() for value in extremes):
        raise CheckpointError(f"{label}: tensor {name!r} holds NaN or infinite values.")
    largest = max(value.abs().item() for value in extremes)
    if dtype is not None and largest > torch.finfo(dtype).max:
        raise CheckpointError(
            f"{label}: tensor {name!r} holds {largest:.1e}, but the merged model is in {dtype}, as its first expert "
            "is, which cannot hold that: name an expert in a wider dtype first."
        )
    return tensor
