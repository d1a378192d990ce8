"""The exact solve against Adam, and float32 with a certificate against float64: CLIP ViT-B/32's vision tower, r = 256.

    python examples/benchmarks/solver.py                  # --tasks 8 --threads 2 --steps 50 --repeats 2

Experts are random with differences of decaying spectrum (`shapes.py`), merged by average. Three tables:

- one matrix of every shape: seconds in float64 (whole Gram matrix, all eigenvectors) and of `solve`, and by how much
  the squared error of `solve` exceeds the optimum;
- the whole tower: `solve` over all parameters against the paper's 5,000 Adam steps, of which `--steps` are measured;
- one matrix with all 5,000 steps: Adam's final squared error.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from shapes import Experts, write_clip_experts
from torch import Tensor
from tqdm.auto import tqdm

from retex_hf import RetexConfig, TrainingConfig
from retex_hf.recovery import BuildContext, Layout, Solution, Targets, plan_layout, relative_errors, solve, train

RANK = 256
PAPER_STEPS = 5000
UNMEASURED_STEPS = 2  # the time of so many steps is subtracted, to leave out the set-up
Value = TypeVar("Value")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; a temporary folder by default")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=50, help="Adam steps to measure on the whole tower")
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many runs counts (not for Adam)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        tasks = [f"task-{number}" for number in range(arguments.tasks)]
        experts = Experts(*write_clip_experts(arguments.folder or scratch, tasks))
        targets, layouts = plan(experts)
        print(f"{arguments.tasks} tasks, rank {RANK}, {arguments.threads} threads, best of {arguments.repeats}\n")
        print_shapes(targets, layouts, arguments.repeats)
        print_tower(targets, layouts, arguments.steps, arguments.repeats)
        print_matrix(targets, layouts, arguments.repeats)


def plan(experts: Experts) -> tuple[Targets, dict[str, Layout]]:
    """Return the averaged model beside its experts, and every parameter's layout by the rank rule."""
    merged = {}
    for name in experts.names:
        merged[name] = sum(experts.read_expert(task, name) for task in experts.tasks) / len(experts.tasks)
    numbers = sum(tensor.numel() for tensor in merged.values())
    layouts = {n: plan_layout(tuple(tensor.shape), RANK, len(experts.tasks)) for n, tensor in merged.items()}
    return Targets(experts, merged, experts.names, numbers), layouts


def print_shapes(targets: Targets, layouts: Mapping[str, Layout], repeats: int) -> None:
    """Print one parameter of every matrix shape, solved in float64 throughout and by `solve`."""
    counts: dict[tuple[int, ...], int] = {}
    examples = {}
    for name, layout in layouts.items():
        if layout.kind == "matrix":
            shape = (layout.rows, layout.columns)
            counts[shape] = counts.get(shape, 0) + 1
            examples.setdefault(shape, name)
    print("| matrix | how many | float64, s | solve, s | ratio | error of the optimum | solve over the optimum |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for shape, name in examples.items():
        layout = layouts[name]
        differences = targets.differences(name)
        matrices = [difference.reshape(shape) for difference in differences]
        slow, optimum = best_of(repeats, lambda m=matrices, rank=layout.rank: solve_in_float64(m, rank))
        fast, solution = best_of(repeats, lambda d=differences, one=layout: solve(d, one))
        excess = achieved_error(matrices, solution) / optimum - 1
        print(
            f"| {shape[0]} x {shape[1]} | {counts[shape]} | {slow:.2f} | {fast:.2f} | {slow / fast:.1f} "
            f"| {optimum / solution.energy:.3f} | {max(excess, 0.0):.1e} |"
        )
    print()


def print_tower(targets: Targets, layouts: Mapping[str, Layout], steps: int, repeats: int) -> None:
    """Print the whole tower: the exact solve, reading included, and Adam."""
    exact, (residual, energy) = best_of(repeats, lambda: solve_tower(targets, layouts))
    seconds, error = measure_adam(targets, layouts, steps)
    adam = seconds / steps * PAPER_STEPS
    print("| whole tower | seconds | squared error over energy |")
    print("|---|---:|---:|")
    print(f"| exact solve | {exact:.1f} | {residual / energy:.3f} |")
    print(f"| Adam, {steps} steps | {seconds:.1f} | {error:.3f} |")
    print(f"| Adam, {PAPER_STEPS} steps, from these | {adam:.0f} | see below |")
    print(f"\nThe exact solve is {adam / exact:.0f} times as fast as {PAPER_STEPS} steps of Adam.\n")


def print_matrix(targets: Targets, layouts: Mapping[str, Layout], repeats: int) -> None:
    """Print one matrix trained to the end of the paper's schedule."""
    name = next(name for name, layout in layouts.items() if (layout.rows, layout.columns) == (768, 768))
    one = Targets(targets.experts, targets.merged, [name], targets.expert_numbers)
    exact, solution = best_of(repeats, lambda: solve(one.differences(name), layouts[name]))
    start = time.perf_counter()
    recovery = train(
        one, {name: layouts[name]}, RetexConfig(rank=RANK), TrainingConfig(steps=PAPER_STEPS), BuildContext()
    )
    seconds = time.perf_counter() - start
    print("\n| one 768 x 768 matrix | seconds | squared error over energy |")
    print("|---|---:|---:|")
    print(f"| exact solve | {exact:.2f} | {solution.residual / solution.energy:.3f} |")
    print(f"| Adam, {PAPER_STEPS} steps | {seconds:.1f} | {relative_errors(one, recovery)[name] ** 2:.3f} |")


def best_of(repeats: int, work: Callable[[], Value]) -> tuple[float, Value]:
    """Return the shortest time of several runs, and the result."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def solve_in_float64(matrices: list[Tensor], rank: int) -> float:
    """Compute factors from all eigenvectors of the whole float64 Gram matrix; return the optimal squared error."""
    gram = torch.zeros(matrices[0].shape[1], matrices[0].shape[1], dtype=torch.float64)
    for matrix in matrices:
        gram.addmm_(matrix.double().T, matrix.double())
    values, vectors = torch.linalg.eigh(gram)
    for matrix in matrices:
        (matrix.double() @ vectors[:, -rank:]).float()
    return values[:-rank].sum().item()


def achieved_error(matrices: list[Tensor], solution: Solution) -> float:
    """Return the squared error of the stored factors."""
    shared = solution.shared[0].double()
    factors = solution.generated.view(len(matrices), *solution.layout.generated_shape)[:, 0].double()
    return sum((m.double() - f @ shared).square().sum().item() for m, f in zip(matrices, factors, strict=True))


def solve_tower(targets: Targets, layouts: Mapping[str, Layout]) -> tuple[float, float]:
    residual = energy = 0.0
    for name in tqdm(targets.names, desc="Exact solve", unit="tensor"):
        solution = solve(targets.differences(name), layouts[name])
        residual, energy = residual + solution.residual, energy + solution.energy
    return residual, energy


def measure_adam(targets: Targets, layouts: Mapping[str, Layout], steps: int) -> tuple[float, float]:
    """Return the seconds of `steps` Adam steps, and the squared error over the energy after them."""
    seconds = []
    for count in (UNMEASURED_STEPS, UNMEASURED_STEPS + steps):
        # Warm-up over 600 steps would leave the learning rate near zero in a short run.
        training = TrainingConfig(steps=count, warmup_steps=0)
        start = time.perf_counter()
        recovery = train(targets, layouts, RetexConfig(rank=RANK), training, BuildContext())
        seconds.append(time.perf_counter() - start)
    missed = energy = 0.0
    for name, error in relative_errors(targets, recovery).items():
        own = sum(difference.double().square().sum().item() for difference in targets.differences(name))
        missed, energy = missed + error**2 * own, energy + own
    return seconds[1] - seconds[0], missed / energy


if __name__ == "__main__":
    main()
