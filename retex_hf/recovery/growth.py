"""Add tasks to a recovery and remove them, without access to its other experts.

A new task gets its own dimension in the task embedding: one new row in every generator, while all others stay. For a
given shared factor the best `G_new` is a least-squares problem, solved with the pseudo-inverse of `S` (of `B S` for
ReTeX-E). The remainder is `D (I - P)` with P the projector onto the rows of `S`. By Eckart-Young the best k directions
to append to `S` are its top right singular vectors, and the energy left is that of the others: the smallest k that
reaches a tolerance follows from the spectrum. The other tasks have zeros in the columns of `G_t` that multiply the
appended directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch
from torch import Tensor

from ..utils.progress import track
from .closed_form import SLAB_ROWS, best_scales, gram
from .layout import GENERATED_FIRST, MATRIX, SHARED_FIRST, VECTOR, Layout
from .module import OffsetGenerator, RecoveryModule, ScaleGenerator
from .quantize import LARGEST_CODE, SCALE, SCALE_DTYPE, encode_parts, stored_parts

# The share of the energy that float32 factors inevitably miss; a tolerance of zero means this.
EXACT = 1e-12
# Singular values of a shared factor below this share of its largest count as zero: `G_new` would be large, and its
# rounding larger than what those directions recover.
RANK_TOLERANCE = 1e-4
# Shares of rows that may be clipped at the largest code where int8 columns are appended to rows with a fixed scale.
CUT_SHARES = (0.0, 0.001, 0.01, 0.1, 0.5)


@dataclass(frozen=True)
class Extension:
    """A generator with one more row for a new task: the gamma and the relative error of every layer that shares the
    generator, by how much its rank grew, and whether its differences are now stored whole."""

    generator: OffsetGenerator
    scales: list[float]
    errors: list[float]
    grown: int = 0
    made_whole: bool = False


@dataclass
class Growth:
    """The effect of a new task on a recovery, by parameter: its relative `errors`, by how much the rank has `grown`,
    which parameters have `joined` the recovery, and which are now stored `whole` because more rank would have cost
    more."""

    errors: dict[str, float] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)
    joined: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


@torch.no_grad()
def add_to_recovery(
    recovery: RecoveryModule,
    read: Callable[[str], tuple[Tensor, Tensor]],
    tolerances: Mapping[str, float],
    joining: Mapping[str, Layout],
    *,
    dtype: str = "float32",
    affine: bool = False,
    progress: bool = True,
) -> tuple[RecoveryModule, Growth]:
    """Return the recovery with one more task, the last one. `recovery` itself is not changed.

    Args:
        recovery: The recovery of the tasks so far.
        read: Function that returns a parameter of the new expert and of the merged model, in float32 or better.
        tolerances: The relative error that the new task may have in each parameter.
        joining: Layouts of parameters that the recovery does not have yet, at any rank. The other tasks have zeros.
        dtype: How the factors are stored.
        affine: Whether the new task has a gamma in each parameter.
        progress: Show a progress bar.
    """
    dimension = recovery.task_embedding.shape[1]
    units: dict[str, list[str]] = {}
    for name in recovery:
        units.setdefault(recovery.generator_name(name), []).append(name)
    units |= {name: [name] for name in joining}
    generators, scales, growth = {}, {}, Growth()
    for first, names in track(units.items(), title="Adding the task", unit="parameter", progress=progress):
        known = first in recovery
        generator = recovery.paper_form(first) if known else empty_generator(joining[first], dimension, dtype)
        tensors = [read(name) for name in names]
        extension = extend_generator(
            generator,
            [expert for expert, _ in tensors],
            [merged for _, merged in tensors],
            max(tolerances[name] for name in names),
            dtype=dtype,
            affine=affine,
        )
        if extension.generator.layout.kind == MATRIX and extension.generator.layout.rank == 0:
            continue  # within the tolerance without recovery
        for name, gamma, error in zip(names, extension.scales, extension.errors, strict=True):
            generators[name] = extension.generator
            growth.errors[name] = error
            if affine:
                scales[name] = _extend_scale(recovery.scale(name), gamma, dimension)
            if not known:
                growth.joined.append(name)
            elif extension.made_whole:
                growth.whole.append(name)
            elif extension.grown:
                growth.grown[name] = extension.grown
    order = [*(name for name in recovery), *growth.joined]
    embedding = torch.block_diag(recovery.task_embedding.detach().cpu(), torch.ones(1, 1))
    grown = RecoveryModule(embedding, {name: generators[name] for name in order}, scales)
    return _like(grown, recovery), growth


@torch.no_grad()
def remove_from_recovery(recovery: RecoveryModule, task: int) -> RecoveryModule:
    """Return the recovery without one task. `recovery` itself is not changed.

    Drop generator rows that only this task uses, and parameters in which no other task differs from the merged model.
    Shared factors stay: directions that only this task used are kept.
    """
    embedding = recovery.task_embedding.detach()
    others = torch.arange(len(embedding)) != task
    rows = ((embedding[others] != 0).any(0) | (embedding[task] == 0)).nonzero().flatten()
    made: dict[OffsetGenerator, OffsetGenerator] = {}
    generators, scales = {}, {}
    for name in recovery:
        generator, scale = recovery.paper_form(name), recovery.scale(name)
        if generator not in made:
            made[generator] = _with_rows(generator, rows)
        shrunk = made[generator]
        own = None if scale is None else ScaleGenerator(scale.weight.detach()[rows], scale.bias.detach().clone())
        scaled = own is not None and bool(own.weight.any() or own.bias != 1)
        if not scaled and shrunk.bias is None and not shrunk.weight.any():
            continue
        generators[name] = shrunk
        if own is not None:
            scales[name] = own
    return _like(RecoveryModule(embedding[others][:, rows], generators, scales), recovery)


def empty_generator(layout: Layout, embedding_dim: int, dtype: str = "float32") -> OffsetGenerator:
    """Return a generator whose offsets are zero for every task; of rank 0, where the layout has a rank."""
    if layout.kind == MATRIX:  # nothing to store, so nothing to quantise
        layout, dtype = replace(layout, rank=0, inner_rank=None), "float32"
    stored = stored_parts(layout, embedding_dim, False, dtype)
    parts = {part: torch.zeros(shape, dtype=kind) for part, (shape, kind) in stored.items()}
    if layout.kind == VECTOR:
        parts["shared"].fill_(1)
    return OffsetGenerator.of_parts(layout, parts)


@torch.no_grad()
def extend_generator(
    generator: OffsetGenerator,
    experts: list[Tensor],
    merged: list[Tensor],
    tolerance: float,
    *,
    dtype: str = "float32",
    affine: bool = False,
) -> Extension:
    """Return a generator with a row for a new task, the last one, whose embedding is 1 there and 0 elsewhere.

    `experts` and `merged` are the tensors of all layers that share the generator, on the device that computes; the
    extended generator is on the CPU. Layers that share a generator have one offset, so it can recover the mean of their
    differences: `tolerance` is the relative error of that mean. The rank grows by the smallest number that reaches it;
    with `affine`, for the gammas that are optimal before it grows.

    Where more rank would cost as many numbers as storing the differences of all tasks whole, they are stored whole.
    Factors that are stored narrower than float32 always grow instead, because storing whole would round the offsets of
    the other tasks again. Rounding of the new task's own factors adds to the tolerance.
    """
    layout = generator.layout
    rows = len(generator.weight) + 1
    scales = torch.ones(len(merged), dtype=torch.float64)
    target = _common_difference(experts, merged, scales)
    if layout.kind != MATRIX:
        extended = _resized(generator, layout, rows, dtype)
        return _finish(extended, target, scales, experts, merged, dtype)

    def solve_scales(basis: Tensor) -> tuple[Tensor, Tensor]:
        if not affine:
            return scales, target
        found = best_scales([[expert] for expert in experts], merged, layout, basis)[:, 0]
        return found, _common_difference(experts, merged, found)

    energy = _energy(target)
    allowed = max(tolerance**2, EXACT) * energy
    basis = row_basis(_acting_factor(generator, target.device))
    # A parameter that may stay as merged has no gamma, and one equal to the merged tensor needs none.
    found, offset = (scales, target) if layout.rank == 0 or energy == 0 else solve_scales(basis)
    directions = missing_directions(_as_stack(offset, layout), basis, allowed)
    if directions is None:
        if layout.rank == 0:
            return Extension(generator, scales.tolist(), [])
        return _finish(_resized(generator, layout, rows, dtype), offset, found, experts, merged, dtype)
    grown = directions.shape[1]
    layout = replace(
        layout,
        rank=layout.rank + grown,
        inner_rank=None if layout.inner_rank is None else layout.inner_rank + grown,
    )
    num_rows = rows + (generator.bias is not None)
    if dtype == "float32" and layout.whole().stored_numbers(num_rows) <= layout.stored_numbers(num_rows):
        return replace(_finish(_made_whole(generator), target, scales, experts, merged, dtype), made_whole=True)
    extended = _resized(generator, layout, rows, dtype)
    _append_directions(extended, directions, dtype)
    found, offset = solve_scales(row_basis(_acting_factor(extended, target.device)))
    return replace(_finish(extended, offset, found, experts, merged, dtype), grown=grown)


def row_basis(factor: Tensor) -> Tensor:
    """Return orthonormal rows that span the rows of a factor (batch, q, n), with zero rows where its rank is below
    q."""
    return _decompose(factor)[2]


def pseudo_inverse(factor: Tensor) -> Tensor:
    """Return the pseudo-inverse (batch, n, q) of a factor (batch, q, n)."""
    left, values, basis = _decompose(factor)
    return (basis.mT / values.unsqueeze(-2)) @ left.mT


def missing_directions(target: Tensor, basis: Tensor, allowed: float) -> Tensor | None:
    """Return the fewest directions (batch, k, n), beside the rows of `basis`, whose span leaves at most the energy
    `allowed` of a target (batch, m, n); None where the basis alone does. Batches share one k."""
    inside = _slabbed(target, basis.mT)
    if _energy(target) - inside.square().sum().item() <= allowed:
        return None
    spectra, vectors = [], []
    for matrix, rows, projected in zip(target, basis, inside, strict=True):
        values, found = torch.linalg.eigh(_outer_gram(matrix, rows, projected))
        spectra.append(values.flip(0).clamp(min=0))
        vectors.append(found.flip(1))
    total = torch.stack(spectra).sum(0)
    left = torch.cat([total.flip(0).cumsum(0).flip(0), total.new_zeros(1)])
    count = int((left > allowed).sum())
    if count == 0:
        return None
    found = [
        _right_vectors(matrix, rows, own[:, :count]) for matrix, rows, own in zip(target, basis, vectors, strict=True)
    ]
    return torch.stack(found)


def _outer_gram(matrix: Tensor, basis: Tensor, inside: Tensor) -> Tensor:
    """Return the smaller Gram matrix of the part of a matrix outside a basis, from the Gram matrix of the whole."""
    products = gram([matrix])
    if _is_wide(matrix):
        return products - inside @ inside.T
    products = products - (products @ basis.T) @ basis
    return products - basis.T @ (basis @ products)


def _right_vectors(matrix: Tensor, basis: Tensor, vectors: Tensor) -> Tensor:
    """Return right singular vectors as rows, from eigenvectors of the smaller Gram matrix."""
    if not _is_wide(matrix):
        return vectors.T
    right = vectors.T @ matrix.double()
    right = right - (right @ basis.T) @ basis
    norms = right.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, right / norms, 0.0)


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[0] < matrix.shape[1]


def _decompose(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return singular vectors and values; values that count as zero are replaced by 1, and their right vectors by
    zero."""
    left, values, right = torch.linalg.svd(factor.double(), full_matrices=False)
    if not values.numel():
        return left, values, right
    kept = values > RANK_TOLERANCE * values.amax(-1, keepdim=True)
    return left, torch.where(kept, values, 1.0), right * kept.unsqueeze(-1)


def _acting_factor(generator: OffsetGenerator, device: torch.device) -> Tensor:
    """Return the factor that all tasks share as rows (batch, q, n) on a device: `S` or `B S`, transposed in the
    reversed order."""
    shared, inner = generator.factor("shared"), generator.factor("inner")
    assert shared is not None  # every matrix has one
    shared = shared.to(device).double()
    first = generator.layout.order == GENERATED_FIRST
    if inner is not None:
        inner = inner.to(device).double()
        shared = inner @ shared if first else shared @ inner
    return shared if first else shared.mT


def _as_stack(tensor: Tensor, layout: Layout) -> Tensor:
    stack = tensor.reshape(layout.stacked_shape)
    return stack.mT if layout.order == SHARED_FIRST else stack


def _common_difference(experts: list[Tensor], merged: list[Tensor], scales: Tensor) -> Tensor:
    """Return the mean over layers of `W - gamma W_merged`; in float64 where gammas are not all 1."""
    total = torch.zeros(())
    for expert, base, scale in zip(experts, merged, scales, strict=True):
        total = total + (expert - base if scale == 1 else expert.double() - scale * base.double())
    return total / len(experts)


def _finish(
    generator: OffsetGenerator,
    offset: Tensor,
    scales: Tensor,
    experts: list[Tensor],
    merged: list[Tensor],
    dtype: str,
) -> Extension:
    """Write the row that gives an offset (or the nearest one), and measure its error as stored."""
    layout, device = generator.layout, offset.device
    if layout.kind == MATRIX:
        row = _slabbed(_as_stack(offset, layout), pseudo_inverse(_acting_factor(generator, device)))
        row = row.mT if layout.order == SHARED_FIRST else row
    elif layout.kind == VECTOR:
        row = offset / _wake_scalar(generator).to(device)
    else:
        row = offset
    row = row.reshape(1, -1)
    bias = generator.factor("bias")
    if bias is not None:
        row = row - bias.to(device)
    for part, tensor in encode_parts(layout, {"weight": row.float()}, dtype).items():
        generator.get_parameter(part)[-1] = tensor[0]
    generated = generator.generated_row(-1).to(device)
    shared, inner = (None if f is None else f.to(device) for f in map(generator.factor, ("shared", "inner")))
    offset = layout.offset(generated, shared, inner).double()
    errors = []
    for expert, base, scale in zip(experts, merged, scales.tolist(), strict=True):
        energy = _energy(expert - base)
        missed = (scale * base.double() + offset - expert.double()).square().sum().item()
        errors.append((missed / energy) ** 0.5 if energy > 0 else 0.0)
    return Extension(generator, scales.tolist(), errors)


def _wake_scalar(generator: OffsetGenerator) -> Tensor:
    """Return a vector's shared scalar. If it is zero (where training never moved it), set it to 1, and the generator of
    the other tasks to zero instead: with a zero scalar no task could have an offset."""
    shared = generator.shared
    assert shared is not None  # every vector has one
    if shared == 0:
        shared.fill_(1)
        generator.weight.zero_()
        if generator.bias is not None:
            generator.bias.zero_()
    return shared


def _resized(generator: OffsetGenerator, layout: Layout, rows: int, dtype: str) -> OffsetGenerator:
    """Copy the stored numbers into a generator of more rows and larger rank, on the CPU; new entries are zero."""
    stored = {name: parameter.detach() for name, parameter in generator.named_parameters()}
    parts = {}
    for part, (shape, kind) in stored_parts(layout, rows, generator.bias is not None, dtype).items():
        parts[part] = torch.zeros(shape, dtype=kind)
        if part in stored:
            old = _axes(generator.layout, part, stored[part])
            _axes(layout, part, parts[part])[tuple(slice(size) for size in old.shape)] = old
    return OffsetGenerator.of_parts(layout, parts)


def _axes(layout: Layout, part: str, tensor: Tensor) -> Tensor:
    """Return a stored tensor with all axes of its factor. Scales have one number per row, so they lack the last
    axis."""
    if layout.kind != MATRIX or not part.startswith(("weight", "bias")):
        return tensor
    shape = layout.generated_shape
    return tensor.view(*tensor.shape[:-1], *(shape[:-1] if part.endswith(SCALE) else shape))


def _made_whole(generator: OffsetGenerator) -> OffsetGenerator:
    """Return a generator that stores the offset of every generator row instead of its factors, with an added row of
    zeros."""
    layout = generator.layout
    shared, inner = (None if f is None else f.double() for f in map(generator.factor, ("shared", "inner")))

    def offset(row: Tensor) -> Tensor:
        return layout.offset(row.double(), shared, inner).float().flatten().cpu()

    weight = torch.stack([offset(row) for row in generator.weight.detach()] + [torch.zeros(layout.shape).flatten()])
    bias = None if generator.bias is None else offset(generator.bias.detach())
    return OffsetGenerator(layout.whole(), weight, bias, None)


def _append_directions(generator: OffsetGenerator, directions: Tensor, dtype: str) -> None:
    """Write directions (batch, k, n) into the last rows of `S` (columns, in the reversed order), and an identity block
    into ReTeX-E's `B` so that it passes them through."""
    layout, count = generator.layout, directions.shape[1]
    if layout.order == GENERATED_FIRST:
        for part, tensor in encode_parts(layout, {"shared": directions.float()}, dtype).items():
            generator.get_parameter(part)[:, -count:] = tensor
    elif dtype == "int8":
        _append_codes(generator, directions.mT.float().cpu())
    else:
        generator.get_parameter("shared")[..., -count:] = directions.mT
    if generator.inner is not None:
        through = torch.zeros(layout.batch, count, generator.inner.shape[-1])
        through[..., -count:] = torch.eye(count)
        for part, tensor in encode_parts(layout, {"inner": through}, dtype).items():
            generator.get_parameter(part)[:, -count:] = tensor


def _append_codes(generator: OffsetGenerator, columns: Tensor) -> None:
    """Append columns in int8 to rows whose scales must not change.

    A direction may have any length, so choose one that suits the rows' scales; where none does (a row of `S` that was
    nearly zero), clip some entries. Rows of zeros get a new scale.
    """
    shared, shared_scale = generator.get_parameter("shared"), generator.get_parameter("shared" + SCALE)
    scale = shared_scale.float()
    largest = LARGEST_CODE * scale
    ratios = torch.where((largest > 0) & (columns != 0), largest / columns.abs(), torch.inf).sort(1).values

    def encoded(share: float) -> tuple[float, Tensor, Tensor]:
        length = ratios[:, int(share * (ratios.shape[1] - 1))].unsqueeze(1)
        scaled = columns * torch.where(length.isinf(), 1.0, length)
        own = (scaled.abs().amax(-1, keepdim=True) / LARGEST_CODE).to(SCALE_DTYPE)
        used = torch.where(scale > 0, scale, own.float())
        codes = torch.where(used > 0, scaled / used, 0).round().clamp(-LARGEST_CODE, LARGEST_CODE)
        likeness = torch.cosine_similarity(codes * used, columns, dim=1).mean().item()
        return likeness, codes, used

    _, codes, used = max(map(encoded, CUT_SHARES), key=itemgetter(0))
    shared[..., -columns.shape[-1] :] = codes.to(torch.int8)
    shared_scale.copy_(used)


def _extend_scale(scale: ScaleGenerator | None, gamma: float, dimension: int) -> ScaleGenerator:
    weight = torch.zeros(dimension) if scale is None else scale.weight.detach().cpu()
    bias = torch.ones(()) if scale is None else scale.bias.detach().cpu().clone()
    return ScaleGenerator(torch.cat([weight, (gamma - bias).reshape(1)]), bias)


def _with_rows(generator: OffsetGenerator, rows: Tensor) -> OffsetGenerator:
    parts = {part: tensor.detach() for part, tensor in generator.named_parameters()}
    own = {part: tensor[rows] for part, tensor in parts.items() if part.removesuffix(SCALE) == "weight"}
    return OffsetGenerator.of_parts(generator.layout, parts | own)


def _like(recovery: RecoveryModule, other: RecoveryModule) -> RecoveryModule:
    """Move a recovery to the device of another one, and make it trainable likewise."""
    embedding = other.task_embedding
    return recovery.to(embedding.device).requires_grad_(embedding.requires_grad).train(other.training)


def _slabbed(stack: Tensor, matrix: Tensor) -> Tensor:
    """Multiply in float64 without a float64 copy of the whole left side."""
    return torch.cat([part.double() @ matrix for part in stack.split(SLAB_ROWS, dim=1)], dim=1)


def _energy(tensor: Tensor) -> float:
    return sum(part.double().square().sum().item() for part in tensor.reshape(-1).split(1 << 16))
