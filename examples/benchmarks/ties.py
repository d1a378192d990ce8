"""TIES of experts with the shapes of CLIP ViT-B/32's vision tower: ours against mergekit's.

    python examples/benchmarks/ties.py --mergekit path/to/mergekit-yaml          # --tasks 8 --threads 1 --repeats 2

Experts are random with differences of decaying spectrum (`shapes.py`). Both read them from files and write the merged
model to one. mergekit trims each tensor, as `trim="tensor"` does; ours trims the whole task vector by default, as the
TIES paper does. mergekit runs as a command, so its start-up time is measured too, by running it with --help.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shapes import Experts, write_clip_experts

from retex_hf.merging import get_merger

DENSITY = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; a temporary folder by default")
    parser.add_argument("--mergekit", type=Path, help="mergekit's command mergekit-yaml")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many runs counts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        tasks = [f"task-{number}" for number in range(arguments.tasks)]
        base, experts = write_clip_experts(folder, tasks)
        tensors = Experts(base, experts)
        print(f"{arguments.tasks} tasks, {arguments.threads} threads, best of {arguments.repeats}\n")
        rows = {}
        for trim in ("vector", "tensor"):
            target = folder / f"{trim}.safetensors"
            rows[f'ours, trim="{trim}"'] = best_of(
                arguments.repeats, lambda trim=trim, target=target: merge(tensors, trim, target)
            )
        if arguments.mergekit is None:
            print("mergekit is left out: --mergekit names its command.\n")
        else:
            recipe, output = write_recipe(folder, base, experts), folder / "mergekit"
            rows["mergekit"] = best_of(
                arguments.repeats,
                lambda: run(arguments.mergekit, arguments.threads, recipe, output, "--no-copy-tokenizer"),
            )
            rows["mergekit, start-up only"] = best_of(1, lambda: run(arguments.mergekit, arguments.threads, "--help"))
        reference = rows.get("mergekit")
        print("| TIES | seconds | mergekit's time over it |")
        print("|---|---:|---:|")
        for label, seconds in rows.items():
            print(f"| {label} | {seconds:.1f} | {'' if reference is None else f'{reference / seconds:.1f}'} |")
        if reference is not None:
            share = agreement(folder / "tensor.safetensors", output)
            print(f'\nmergekit and ours with trim="tensor" agree in {share:.4%} of all entries.')


def merge(tensors: Experts, trim: str, target: Path) -> None:
    merger = get_merger("ties", {"density": DENSITY, "trim": trim}, tensors)
    merged = {}
    for name in tensors.names:
        experts = [tensors.read_expert(task, name) for task in tensors.tasks]
        merged[name] = merger(name, tensors.read_base(name), experts)
    save_file(merged, target, metadata={"format": "pt"})


def write_recipe(folder: Path, base: Path, experts: dict[str, Path]) -> Path:
    """Write mergekit's configuration as JSON, which is valid YAML."""
    models = [{"model": str(path), "parameters": {"density": DENSITY, "weight": 1.0}} for path in experts.values()]
    recipe = {"merge_method": "ties", "base_model": str(base), "models": models, "dtype": "float32"}
    recipe["parameters"] = {"normalize": True}
    (folder / "ties.yml").write_text(json.dumps(recipe), encoding="utf-8")
    return folder / "ties.yml"


def run(command: Path, threads: int, *arguments: str | Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    subprocess.run([command, *arguments], check=True, capture_output=True, env=environment)


def best_of(repeats: int, work: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def agreement(ours: Path, theirs: Path) -> float:
    """Return the share of entries that agree up to rounding; one entry more or less at a threshold changes its mean."""
    same = total = 0
    files = [safe_open(file, framework="pt") for file in sorted(theirs.glob("*.safetensors"))]
    with safe_open(ours, framework="pt") as left:
        for right in files:
            for name in right.keys():  # noqa: SIM118  (a file handle, not a dict)
                close = torch.isclose(left.get_tensor(name), right.get_tensor(name), rtol=1e-5, atol=1e-7)
                same, total = same + close.sum().item(), total + close.numel()
    return same / total


if __name__ == "__main__":
    main()
