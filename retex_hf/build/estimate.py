"""Estimate of a build's memory and disk needs, made before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor, prod

from ..checkpoints import TensorInfo
from ..checkpoints.tensor_store import tensor_bytes
from ..config import RetexConfig, matches, storage_bytes
from ..recovery.layout import SHARED_FIRST
from ..recovery.module import recovery_tensors
from ..recovery.solver import group_layouts, ruled_layouts

# Tensors of the size of the current parameter: per expert, and in addition.
TENSORS_PER_EXPERT, FURTHER_TENSORS = 1, 4
# Mixtures of the differences (soft training, narrow embeddings) and affine recovery are computed in float64.
TENSORS_PER_MIXED_EXPERT, TENSORS_PER_AFFINE_EXPERT = 3, 5
# Float64 matrices of the size of a Gram matrix that its decomposition needs.
GRAM_MATRICES = 4
# Float32 models that learning a merge holds besides the task vectors: base, merged, gradients, and one to run.
LEARNING_MODELS = 4
# Buffers of libraries, and memory held back by the allocator.
FIXED_MEMORY = 100_000_000


@dataclass(frozen=True)
class BuildEstimate:
    """Needs of a build that writes to disk, in bytes.

    `memory` is what the most expensive parameters need that are solved at once, besides the program itself; a merge
    that is learned from data needs all experts at once (and room for a batch, which is not counted). `disk` is an upper
    bound: tensors that all experts share need no recovery, which is known only once they are read.
    """

    tasks: int
    parameters: int
    experts: int
    memory: int
    disk: int

    def __str__(self) -> str:
        return (
            f"{self.tasks} experts of {self.parameters:,d} parameters ({_size(self.experts)}): "
            f"up to {_size(self.memory)} of memory, {_size(self.disk)} of disk."
        )


def estimate_build(
    config: RetexConfig,
    infos: Mapping[str, TensorInfo],
    heads: Mapping[str, Mapping[str, TensorInfo]],
    convolutions: frozenset[str],
    experts: int,
    learned_vectors: int = 0,
    at_once: int = 1,
) -> BuildEstimate:
    """Estimate the needs of a build.

    Args:
        config: Configuration of the build.
        infos: All tensors of the merged model.
        heads: Per task, the tensors it stores whole.
        convolutions: Names of the tensors that are convolution weights.
        experts: Bytes of the experts.
        learned_vectors: Number of task vectors in memory while the merge is learned; 0 if it is not learned.
        at_once: How many parameters are solved at the same time.
    """
    tasks = len(heads)
    own = set(next(iter(heads.values())))
    body = {name: info for name, info in infos.items() if name not in own and info.dtype.is_floating_point}
    model = sum(map(tensor_bytes, infos.values()))
    kept = sum(tensor_bytes(info) for head in heads.values() for info in head.values())
    pretrained = sum(map(tensor_bytes, body.values())) if config.feature_source == "pretrained" else 0
    recovered = {name: info.shape for name, info in body.items() if not matches(name, config.exclude)}
    return BuildEstimate(
        tasks=tasks,
        parameters=sum(prod(info.shape) for info in infos.values()),
        experts=experts,
        memory=max(
            _memory(config, {name: info.shape for name, info in body.items()}, tasks, convolutions, at_once),
            _learning_memory(body, learned_vectors),
        ),
        disk=model + kept + pretrained + _recovery_bytes(config, recovered, body, tasks, convolutions),
    )


def _memory(
    config: RetexConfig, shapes: Mapping[str, tuple[int, ...]], tasks: int, convolutions: frozenset[str], at_once: int
) -> int:
    """Return the bytes of the differences and Gram decompositions of the largest parameters, as many as are solved at
    once.

    Parameters that share a scaled offset count as one.
    """
    config = config if config.storage is None else replace(config, rank=1, storage=None)
    affine = config.recovery == "affine"
    mixed = config.soft_training is not None or (config.task_embedding_dim or tasks) < tasks
    per_expert = TENSORS_PER_AFFINE_EXPERT if affine else TENSORS_PER_MIXED_EXPERT if mixed else TENSORS_PER_EXPERT
    needs = []
    units = group_layouts(ruled_layouts(shapes, config, tasks, convolutions), config.share_layers)
    for unit, layout in units.items():
        tensors = tasks * per_expert * (len(unit) if affine else 1) + FURTHER_TENSORS
        rows, columns = layout.rows, layout.columns  # zero if nothing is decomposed
        if layout.order == SHARED_FIRST:
            rows, columns = columns, rows
        side = min(columns, tasks * rows)
        needs.append(tensors * 4 * prod(layout.shape) + GRAM_MATRICES * 8 * side**2)
    return sum(sorted(needs)[-at_once:]) + FIXED_MEMORY


def _learning_memory(body: Mapping[str, TensorInfo], vectors: int) -> int:
    if vectors == 0:
        return 0
    return (vectors + LEARNING_MODELS) * 4 * sum(prod(info.shape) for info in body.values()) + FIXED_MEMORY


def _recovery_bytes(
    config: RetexConfig,
    shapes: Mapping[str, tuple[int, ...]],
    body: Mapping[str, TensorInfo],
    tasks: int,
    convolutions: frozenset[str],
) -> int:
    if config.storage is not None:
        return floor(storage_bytes(config.storage, tasks * sum(map(tensor_bytes, body.values()))))
    units = group_layouts(ruled_layouts(shapes, config, tasks, convolutions), config.share_layers)
    dimension = config.task_embedding_dim or tasks
    wanted = recovery_tensors(
        units,
        tasks,
        dimension,
        bias=dimension < tasks,
        affine=config.recovery == "affine",
        dtype=config.recovery_dtype,
    )
    return sum(tensor_bytes(TensorInfo(shape, dtype)) for shape, dtype in wanted.values())


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
