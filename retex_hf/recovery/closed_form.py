"""Exact minimisers of the recovery loss, one parameter (or one group of parameters that share factors) at a time.

The basic problem is `min sum_t ||G_t S - D_t||^2`. The `G_t` are free matrices (one generator row per task), so by
Eckart-Young the optimum is the truncated SVD of the stacked differences: `S` holds the top right singular vectors and
`G_t = D_t S^T`. Only a Gram matrix is needed; float64 keeps its small eigenvalues, which a float32 Gram matrix would
drown. The variants reduce to the same problem:

- ReTeX-E: `A_t (B S)` spans what rank r_g spans, so `B S` is the rank-r_g solution;
- reversed order: the transposed differences;
- soft (Dirichlet) training and narrow task embeddings: other differences, see `Design`;
- shared layers: `sum_l ||O_t - D_t^l||^2 = L ||O_t - mean_l D_t^l||^2 + const`, so the mean difference;
- affine: alternate between the factors for given scales and, for a given `S`, scales and `G_t` together. Each half-step
  is a closed form, so the loss never rises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .design import Design
from .shapes import MATRIX, SHARED_FIRST, Layout

AFFINE_STEPS = 20
AFFINE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Solution:
    """Factors of one parameter and what they leave out.

    `generated` has one row per generator row (per task, unless the embedding is narrow), `shared` and `inner` are as
    the layout says, `scales` (layers, T) are the affine variant's gamma. `energy` is the squared norm of the
    differences (of their mixtures, under soft training), `residual` the part that the factors cannot represent.
    """

    layout: Layout
    generated: Tensor
    shared: Tensor | None
    energy: float
    residual: float
    inner: Tensor | None = None
    scales: Tensor | None = None


def solve(differences: list[Tensor], layout: Layout, design: Design | None = None) -> Solution:
    """Factor the differences `D_t` of one parameter (one tensor per task, in the parameter's shape)."""
    design = design or Design(len(differences))
    targets, energy, outside = design.project(differences)
    if layout.kind != MATRIX:
        shared = None if layout.shared_shape is None else torch.ones(())
        generated = design.unproject(torch.stack([target.reshape(-1).float() for target in targets]))
        return Solution(layout, generated, shared, energy, outside)

    generated = torch.empty(len(targets), *layout.generated_shape)
    shared = torch.empty(layout.shared_shape)
    stacks = [target.reshape(layout.stacked_shape) for target in targets]
    residual = outside
    for index in range(layout.batch):
        matrices = [stack[index] for stack in stacks]
        factors, vectors, left = _solve_ordered(matrices, layout)
        residual += left
        shared[index] = vectors
        for row, factor in enumerate(factors):
            generated[row, index] = factor
    return Solution(
        layout, design.unproject(generated.flatten(1)), shared, energy, residual, inner=_inner_factor(layout)
    )


def solve_shared(layers: list[list[Tensor]], layout: Layout, design: Design | None = None) -> Solution:
    """Factors that several layers of one shape share; `layers[l][t]` is the difference of layer l for task t."""
    means = [torch.stack([layer[task].float() for layer in layers]).mean(0) for task in range(len(layers[0]))]
    solution = solve(means, layout, design)
    design = design or Design(len(means))
    energy = sum(design.project(layer)[1] for layer in layers)
    spread = energy - len(layers) * solution.energy
    return replace(solution, energy=energy, residual=len(layers) * solution.residual + max(spread, 0.0))


def solve_affine(
    experts: list[list[Tensor]], merged: list[Tensor], layout: Layout, design: Design | None = None
) -> Solution:
    """`gamma_t W_merged + G_t S` for the experts' tensors `experts[l][t]` of one or several layers."""
    tasks, layers = len(experts[0]), len(merged)
    scales = torch.ones(layers, tasks, dtype=torch.float64)
    offsets = _differences(experts, merged, scales)
    best = solve_shared(offsets, layout, design) if layers > 1 else solve(offsets[0], layout, design)
    energy = best.energy
    if layout.kind != MATRIX:  # the offset is exact already
        return replace(best, scales=scales.float())
    solution, best_scales = best, scales
    for _ in range(AFFINE_STEPS):
        scales = _best_scales(experts, merged, solution)
        offsets = _differences(experts, merged, scales)
        solution = solve_shared(offsets, layout, design) if layers > 1 else solve(offsets[0], layout, design)
        improved = best.residual - solution.residual
        if improved > 0:
            best, best_scales = solution, scales
        if improved <= AFFINE_TOLERANCE * best.residual:
            break
    return replace(best, scales=best_scales.float(), energy=energy)


def _differences(experts: list[list[Tensor]], merged: list[Tensor], scales: Tensor) -> list[list[Tensor]]:
    return [
        [tensor.double() - scale * base.double() for tensor, scale in zip(layer, layer_scales, strict=True)]
        for layer, base, layer_scales in zip(experts, merged, scales, strict=True)
    ]


def _best_scales(experts: list[list[Tensor]], merged: list[Tensor], solution: Solution) -> Tensor:
    """The gamma of every layer and task that are best together with the best `G_t`, for the solution's `S`.

    With P the projector onto what `S` does not span, layer l's part outside is `(W^l - g^l M^l) P`; inside, all layers
    share one `G_t`, so only deviations from the layers' mean count. Both are quadratic in the gammas.
    """
    layout = solution.layout
    layers, tasks = len(merged), len(experts[0])

    def split(tensor: Tensor) -> tuple[Tensor, Tensor]:
        stack = tensor.double().reshape(layout.stacked_shape)
        basis = solution.shared.double()
        if layout.order == SHARED_FIRST:
            stack, basis = stack.mT, basis.mT
        basis = basis[:, : layout.solved_rank]
        inside = stack @ basis.mT
        return inside, stack - inside @ basis

    bases = [split(base) for base in merged]
    inside = torch.stack([part.flatten() for part, _ in bases])
    system = (inside @ inside.T) * (torch.eye(layers, dtype=torch.float64) - 1 / layers)
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
        # lstsq, because a layer may be zero, or lie within the span of S.
        scales[:, task] = torch.linalg.lstsq(system, right.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return scales


def spectrum(differences: list[Tensor], layout: Layout, design: Design | None = None) -> Tensor:
    """Energy that each further rank recovers (descending); the whole energy, for parameters that are not factored."""
    targets, energy, _ = (design or Design(len(differences))).project(differences)
    if layout.kind != MATRIX:
        return torch.tensor([energy], dtype=torch.float64)
    stacks = [target.reshape(layout.stacked_shape) for target in targets]
    total = torch.zeros((), dtype=torch.float64)
    for index in range(layout.batch):
        matrices = [_ordered(stack[index], layout) for stack in stacks]
        total = total + torch.linalg.eigvalsh(_gram(matrices)).flip(0).clamp(min=0)
    return total


def solve_matrices(differences: list[Tensor], rank: int) -> tuple[list[Tensor], Tensor, float]:
    """Top-`rank` factors `G_t (a, r)`, `S (r, b)` of a list of (a, b) matrices, and the discarded energy."""
    values, shared = _right_vectors(differences, rank)
    factors = [(difference.double() @ shared.T).float() for difference in differences]
    return factors, shared.float(), values[rank:].clamp(min=0).sum().item()


def _solve_ordered(differences: list[Tensor], layout: Layout) -> tuple[list[Tensor], Tensor, float]:
    """`solve_matrices` under the layout's order and inner rank."""
    values, shared = _right_vectors([_ordered(difference, layout) for difference in differences], layout.rank)
    rank = layout.solved_rank
    factors = [(_ordered(difference, layout).double() @ shared[:rank].T).float() for difference in differences]
    left = values[rank:].clamp(min=0).sum().item()
    if layout.order == SHARED_FIRST:
        return [factor.T for factor in factors], shared.T.float(), left
    return factors, shared.float(), left


def _ordered(difference: Tensor, layout: Layout) -> Tensor:
    return difference.T if layout.order == SHARED_FIRST else difference


def _inner_factor(layout: Layout) -> Tensor | None:
    """ReTeX-E's `B`: it picks the first r_g rows of `S`."""
    if layout.inner_shape is None:
        return None
    return torch.eye(*layout.inner_shape[1:]).expand(layout.inner_shape).clone()


def _right_vectors(differences: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """All eigenvalues of the Gram matrix (descending), and the top right singular vectors of the stack as rows."""
    values, vectors = torch.linalg.eigh(_gram(differences))
    values, vectors = values.flip(0), vectors.flip(1)[:, :rank]
    if _is_wide(differences):
        stacked = torch.cat([difference.double() for difference in differences])
        shared = vectors.T @ stacked
        # Directions without energy have no right singular vector to normalise; zero rows are the exact answer there.
        norms = shared.norm(dim=1, keepdim=True)
        shared = torch.where(norms > 1e-7 * norms.max(), shared / norms, 0.0)
    else:
        shared = vectors.T
    # An eigenvector's sign is arbitrary; fixing it makes the result independent of how the work was divided.
    peaks = shared.gather(1, shared.abs().argmax(1, keepdim=True))
    return values, shared * torch.where(peaks < 0, -1.0, 1.0)


def _is_wide(differences: list[Tensor]) -> bool:
    rows, columns = differences[0].shape
    return len(differences) * rows < columns


def _gram(differences: list[Tensor]) -> Tensor:
    """The smaller of the two Gram matrices of the stacked differences."""
    if _is_wide(differences):
        stacked = torch.cat([difference.double() for difference in differences])
        return stacked @ stacked.T
    gram = torch.zeros(differences[0].shape[1], differences[0].shape[1], dtype=torch.float64)
    for difference in differences:
        difference = difference.double()
        gram.addmm_(difference.T, difference)
    return gram
