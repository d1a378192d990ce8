"""Exact minimisers of the recovery loss, one parameter (or one group of parameters that share factors) at a time.

The basic problem is `min sum_t ||G_t S - D_t||^2`. The `G_t` are free matrices (one generator row per task), so by
Eckart-Young the optimum is the truncated SVD of the stacked differences: `S` holds the top right singular vectors and
`G_t = D_t S^T`. Where the rank is small beside both sides of the stack, `krylov` finds them from a few products, with a
certificate. Else, and where it has none, a Gram matrix is decomposed; it is summed in float64, because float32 rounding
would swamp its small eigenvalues, and `eigen` decides where float32 suffices after that. The variants reduce to the
same problem:

- ReTeX-E: `A_t (B S)` has rank at most r_g, so `B S` is the rank-r_g solution;
- reversed order: the transposed differences;
- weighted tasks: differences times the roots of the weights;
- soft (Dirichlet) training and narrow task embeddings: other differences, see `Design`;
- shared layers: `sum_l ||O_t - D_t^l||^2 = L ||O_t - mean_l D_t^l||^2 + const`, so the mean difference;
- affine: alternate between the factors for given scales and, for a given `S`, scales and `G_t` together. Each half-step
  is a closed form, so the loss never rises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import krylov
from .design import Design
from .eigen import TOLERANCE, eigenvalues, top_eigenpairs
from .layout import MATRIX, SHARED_FIRST, Layout
from .targets import squared_norm

AFFINE_STEPS = 20
AFFINE_TOLERANCE = 1e-4
# A float32 product with orthonormal rows misses about 1e-13 of the energy, which is negligible above this share.
FLOAT32_SHARE = 1e-6
# Rows that are cast to float64 at a time, and the side of the blocks of a Gram matrix: large enough for full speed.
SLAB_ROWS = 1024
GRAM_BLOCK = 256


@dataclass(frozen=True)
class Solution:
    """Factors of one parameter and the energy that they leave out.

    `generated` has one row per generator row (per task, unless the embedding is narrow); the layout determines `shared`
    and `inner`; `scales` (layers, T) are the affine variant's gamma. `energy` is the squared norm of the differences
    (of their mixtures, under soft training), `residual` the part that the factors cannot represent. `loss` is that
    part as it is minimised, with the weights of the tasks, and `least` a lower bound on it for all factors of this form
    (and given scales).
    """

    layout: Layout
    generated: Tensor
    shared: Tensor | None
    energy: float
    residual: float
    loss: float
    least: float
    inner: Tensor | None = None
    scales: Tensor | None = None


def solve(differences: list[Tensor], layout: Layout, design: Design | None = None) -> Solution:
    """Factor the differences `D_t` of one parameter (one tensor per task, in the parameter's shape)."""
    design = design or Design(len(differences))
    targets, energy, outside = design.project(differences)
    if layout.kind != MATRIX:
        shared = None if layout.shared_shape is None else targets[0].new_ones((), dtype=torch.float32)
        generated = design.unproject(torch.stack([target.reshape(-1).float() for target in targets]))
        return Solution(layout, generated, shared, energy, outside, outside, outside)

    device = targets[0].device
    generated = torch.empty(len(targets), *layout.generated_shape, device=device)
    assert layout.shared_shape is not None  # every matrix has one
    shared = torch.empty(layout.shared_shape, device=device)
    stacks = [target.reshape(layout.stacked_shape) for target in targets]
    residual = least = outside
    for index in range(layout.batch):
        matrices = [stack[index] for stack in stacks]
        factors, vectors, left, bound = _solve_ordered(matrices, layout)
        residual, least = residual + left, least + bound
        shared[index] = vectors
        for row, factor in enumerate(factors):
            generated[row, index] = factor
    generated = design.unproject(generated.flatten(1))
    return Solution(layout, generated, shared, energy, residual, residual, least, inner=_inner_factor(layout))


def solve_weighted(differences: list[Tensor], layout: Layout, weights: Sequence[float]) -> Solution:
    """Factor differences such that `sum_t w_t ||G_t S - D_t||^2` is least; `differences` are scaled in place.

    With `sqrt(w_t) D_t` for `D_t` that is the basic problem. Energy and residual of the result count every task alike.
    A task of weight 0 has no difference.
    """
    roots = [weight**0.5 if weight > 0 else 1.0 for weight in weights]
    for difference, root in zip(differences, roots, strict=True):
        difference.mul_(root)
    energies = [squared_norm(difference) for difference in differences]
    solution = solve(differences, layout)
    # The rows of `S` are orthonormal, so what `G_t` has not is missed; but only the sum is free of rounding errors.
    missed = [max(whole - squared_norm(part), 0.0) for whole, part in zip(energies, solution.generated, strict=True)]
    share = solution.residual / sum(missed) if sum(missed) > 0 else 0.0
    for generated, root in zip(solution.generated, roots, strict=True):
        generated /= root
    return replace(
        solution,
        energy=sum(whole / root**2 for whole, root in zip(energies, roots, strict=True)),
        residual=sum(share * part / root**2 for part, root in zip(missed, roots, strict=True)),
    )


def solve_shared(layers: Iterable[list[Tensor]], layout: Layout, design: Design | None = None) -> Solution:
    """Solve for factors that several layers of one shape share; `layers[l][t]` is the difference of layer l for task t.

    The layers are iterated once, so they may be computed lazily.
    """
    means: list[Tensor] = []
    energy, count = 0.0, 0
    for layer in layers:
        design = design or Design(len(layer))
        energy += design.project(layer)[1]
        if not means:
            means = [torch.zeros_like(difference, dtype=torch.float32) for difference in layer]
        for mean, difference in zip(means, layer, strict=True):
            mean += difference
        count += 1
    solution = solve([mean.div_(count) for mean in means], layout, design)
    spread = max(energy - count * solution.energy, 0.0)
    residual, least = count * solution.residual + spread, count * solution.least + spread
    return replace(solution, energy=energy, residual=residual, loss=residual, least=least)


def solve_affine(
    experts: list[list[Tensor]], merged: list[Tensor], layout: Layout, design: Design | None = None
) -> Solution:
    """Fit `gamma_t W_merged + G_t S` to the experts' tensors `experts[l][t]` of one or several layers."""
    tasks, layers = len(experts[0]), len(merged)
    scales = torch.ones(layers, tasks, dtype=torch.float64)
    offsets = _differences(experts, merged, scales)
    best = solve_shared(offsets, layout, design) if layers > 1 else solve(offsets[0], layout, design)
    energy = best.energy
    if layout.kind != MATRIX:  # the offset is exact already
        return replace(best, scales=scales.float())
    solution, kept = best, scales
    for _ in range(AFFINE_STEPS):
        scales = best_scales(experts, merged, layout, _solved_basis(solution))
        offsets = _differences(experts, merged, scales)
        solution = solve_shared(offsets, layout, design) if layers > 1 else solve(offsets[0], layout, design)
        improved = best.residual - solution.residual
        if improved > 0:
            best, kept = solution, scales
        if improved <= AFFINE_TOLERANCE * best.residual:
            break
    return replace(best, scales=kept.float(), energy=energy)


def _differences(experts: list[list[Tensor]], merged: list[Tensor], scales: Tensor) -> list[list[Tensor]]:
    return [
        [tensor.double() - scale * base.double() for tensor, scale in zip(layer, layer_scales, strict=True)]
        for layer, base, layer_scales in zip(experts, merged, scales, strict=True)
    ]


def _solved_basis(solution: Solution) -> Tensor:
    """Return the span of a solution's `S` as orthonormal rows."""
    assert solution.shared is not None  # every matrix has one
    basis = solution.shared.double()
    basis = basis.mT if solution.layout.order == SHARED_FIRST else basis
    return basis[:, : solution.layout.solved_rank]


def best_scales(experts: list[list[Tensor]], merged: list[Tensor], layout: Layout, basis: Tensor) -> Tensor:
    """Return the gamma of every layer and task (layers, T), optimal together with the best `G_t`, for a shared factor
    that spans the rows of `basis` (orthonormal, or zero; the columns, in the reversed order).

    With P the projector onto the complement of the span of `S`, layer l's part outside is `(W^l - g^l M^l) P`; inside,
    all layers share one `G_t`, so only deviations from the layers' mean count. Both are quadratic in the gammas.
    """
    layers, tasks = len(merged), len(experts[0])

    def split(tensor: Tensor) -> tuple[Tensor, Tensor]:
        stack = tensor.double().reshape(layout.stacked_shape)
        stack = stack.mT if layout.order == SHARED_FIRST else stack
        inside = stack @ basis.mT
        return inside, stack - inside @ basis

    bases = [split(base) for base in merged]
    inside = torch.stack([part.flatten() for part, _ in bases])
    system = (inside @ inside.T) * (torch.eye(layers, dtype=torch.float64, device=basis.device) - 1 / layers)
    system += torch.diag(torch.stack([outside.square().sum() for _, outside in bases]))
    scales = torch.empty(layers, tasks, dtype=torch.float64)
    for task in range(tasks):
        parts = [split(layer[task]) for layer in experts]
        mean = torch.stack([part for part, _ in parts]).mean(0)
        right = torch.stack(
            [
                (outside * base_outside).sum() + ((part - mean) * base_inside).sum()
                for (part, outside), (base_inside, base_outside) in zip(parts, bases, strict=True)
            ]
        )
        # lstsq, because a layer may be zero, or lie within the span of S. On the CPU, because only it has the driver
        # for rank-deficient systems; the system has one number per layer.
        solved = torch.linalg.lstsq(system.cpu(), right.cpu().unsqueeze(1), driver="gelsd")
        scales[:, task] = solved.solution.squeeze(1)
    return scales


def spectrum(differences: list[Tensor], layout: Layout, design: Design | None = None) -> Tensor:
    """Return the energy that each further rank recovers (descending), or the whole energy of a parameter that is not
    factored."""
    targets, energy, _ = (design or Design(len(differences))).project(differences)
    if layout.kind != MATRIX:
        return torch.tensor([energy], dtype=torch.float64)
    stacks = [target.reshape(layout.stacked_shape) for target in targets]
    total = torch.zeros((), dtype=torch.float64, device=targets[0].device)
    for index in range(layout.batch):
        matrices = [_ordered(stack[index], layout) for stack in stacks]
        total = total + eigenvalues(gram(matrices))
    return total


def solve_matrices(differences: list[Tensor], rank: int) -> tuple[list[Tensor], Tensor, float]:
    """Return top-`rank` factors `G_t (a, r)`, `S (r, b)` of a list of (a, b) matrices, and the discarded energy."""
    factors, shared, discarded, _ = factor(differences, rank)
    return factors, shared, discarded


def _solve_ordered(differences: list[Tensor], layout: Layout) -> tuple[list[Tensor], Tensor, float, float]:
    """Apply `factor` under the layout's order and inner rank."""
    differences = [_ordered(difference, layout) for difference in differences]
    factors, shared, discarded, least = factor(differences, layout.rank, layout.solved_rank)
    if layout.order == SHARED_FIRST:
        return [factor.T for factor in factors], shared.T, discarded, least
    return factors, shared, discarded, least


def factor(differences: list[Tensor], rank: int, kept: int | None = None) -> tuple[list[Tensor], Tensor, float, float]:
    """Return `G_t (a, kept)`, `S (rank, b)`, the energy outside the first `kept` rows of S (default: all), and a lower
    bound on the energy outside any as many."""
    kept = rank if kept is None else kept
    found = _from_products(differences, rank, kept)
    if found is not None:
        factors = [part[:, :kept].float() for part in found.factors]
        return factors, found.rows.float(), found.discarded, found.least
    shared, discarded, energy = _from_gram(differences, rank, kept)
    factors = _left_factors(differences, shared[:kept], discarded, energy)
    return factors, shared.float(), discarded, discarded / (1 + TOLERANCE)


def _ordered(difference: Tensor, layout: Layout) -> Tensor:
    return difference.T if layout.order == SHARED_FIRST else difference


def _inner_factor(layout: Layout) -> Tensor | None:
    """Return ReTeX-E's `B`, which selects the first r_g rows of `S`."""
    if layout.inner_shape is None:
        return None
    return torch.eye(*layout.inner_shape[1:]).expand(layout.inner_shape).clone()


def right_vectors(differences: list[Tensor], rank: int) -> Tensor:
    """Return the first `rank` right singular vectors of stacked matrices as rows, in float64."""
    found = _from_products(differences, rank, rank)
    return _from_gram(differences, rank, rank)[0].double() if found is None else found.rows


def _from_products(differences: list[Tensor], rank: int, kept: int) -> krylov.Leading | None:
    """Return the top right singular vectors of a stack by a Krylov space; None where that does not pay or is not
    certified."""
    rows, columns = differences[0].shape
    if not krylov.pays(len(differences) * rows, columns, rank):
        return None
    found = krylov.leading_vectors(differences, rank, kept)
    if found is None:
        return None
    signs = _signs(found.rows)
    return replace(
        found, rows=found.rows * signs, factors=[factor * signs.T.to(factor.dtype) for factor in found.factors]
    )


def _from_gram(differences: list[Tensor], rank: int, kept: int) -> tuple[Tensor, float, float]:
    """Return the top right singular vectors of the stack as rows, the energy outside the first `kept`, and the total
    energy."""
    products = gram(differences)
    energy = products.diagonal().sum().item()
    _, vectors, discarded = top_eigenpairs(products, rank, kept)
    del products
    if _is_wide(differences):
        shared = vectors.new_zeros(rank, differences[0].shape[1])
        rows = vectors.split([len(part) for part in _row_slabs(differences)])
        for part, weights in zip(_row_slabs(differences), rows, strict=True):
            shared.addmm_(weights.T, part.double())
        # Directions without energy have no right singular vector to normalise; zero rows are the exact answer there.
        norms = shared.norm(dim=1, keepdim=True)
        shared = torch.where(norms > 1e-7 * norms.max(), shared / norms, 0.0)
    else:
        shared = vectors.T
    return shared * _signs(shared), discarded, energy


def _signs(rows: Tensor) -> Tensor:
    """Return signs (n, 1) that make the largest number of every row positive.

    The sign of an eigenvector is arbitrary; fixing it makes the result independent of how the work was divided.
    """
    peaks = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return torch.where(peaks < 0, -1.0, 1.0)


def _left_factors(differences: list[Tensor], shared: Tensor, discarded: float, energy: float) -> list[Tensor]:
    """Return `G_t = D_t S^T`, in float64 only where float32 rounding would be visible beside the discarded energy."""
    if discarded > FLOAT32_SHARE * energy:
        shared = shared.float()
    return [
        torch.cat([(part.to(shared.dtype) @ shared.T).float() for part in _row_slabs([difference])])
        for difference in differences
    ]


def _is_wide(differences: list[Tensor]) -> bool:
    rows, columns = differences[0].shape
    return len(differences) * rows < columns


def gram(differences: list[Tensor]) -> Tensor:
    """Return the smaller of the two Gram matrices of the stacked differences, in float64; compute one triangle, by
    blocks."""
    wide = _is_wide(differences)
    side = len(differences) * differences[0].shape[0] if wide else differences[0].shape[1]
    starts = range(0, side, GRAM_BLOCK)
    products = torch.zeros(side, side, dtype=torch.float64, device=differences[0].device)
    for slab in _column_slabs(differences) if wide else _row_slabs(differences):
        slab = slab.double()
        for start in starts:
            stop = start + GRAM_BLOCK
            products[start:stop, start:].addmm_(slab[:, start:stop].T, slab[:, start:])
    for start in starts:
        stop = start + GRAM_BLOCK
        products[stop:, start:stop] = products[start:stop, stop:].T
    return products


def _row_slabs(differences: list[Tensor]) -> Iterator[Tensor]:
    """Yield the rows of the stack in parts, so that float64 copies stay small."""
    return (part for difference in differences for part in difference.split(SLAB_ROWS))


def _column_slabs(differences: list[Tensor]) -> Iterator[Tensor]:
    """Yield the columns of the stack in parts, as rows."""
    for start in range(0, differences[0].shape[1], SLAB_ROWS):
        yield torch.cat([difference[:, start : start + SLAB_ROWS].T for difference in differences], dim=1)
