"""Uniform rank against rank by budget, at the same storage, on the experts of the quickstart.

    python examples/quickstart.py                 # trains the experts, once
    python examples/benchmarks/budget.py          # --ranks 4 8 16 32 64

Storage is the recovery's share of all experts' numbers; accuracy is with the task given, relative to the experts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import accuracy, quiet
from quickstart import TASKS, load_task, text_collate
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retex_hf import RetexConfig, RetexModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-quickstart"))
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    quiet()
    base, experts = arguments.work_dir / "base", {task: arguments.work_dir / "experts" / task for task in TASKS}
    if not all(folder.is_dir() for folder in experts.values()):
        sys.exit(f"{arguments.work_dir} holds no experts: run examples/quickstart.py first.")
    tasks = [load_task(name) for name in TASKS]
    collate = text_collate(AutoTokenizer.from_pretrained(base))
    load = AutoModelForSequenceClassification.from_pretrained
    individual = {task.name: accuracy(load(experts[task.name]).eval(), task, collate, task.name) for task in tasks}

    def normalised(model: RetexModel) -> float:
        found = [
            accuracy(lambda t=t, **x: model(**x, task=t.name), t, collate, None) / individual[t.name] for t in tasks
        ]
        return sum(found) / len(found)

    def build(**options) -> RetexModel:
        return RetexModel.from_experts(base, experts, RetexConfig(**options), progress=False)

    lines = ["| rank | storage | one rank everywhere | rank by budget |", "|---:|---:|---:|---:|"]
    with torch.inference_mode():
        for rank in tqdm(arguments.ranks, desc="ranks", unit="rank"):
            uniform = build(rank=rank)
            heads = set(uniform.heads[uniform.tasks[0]])
            body = {n: t for n, t in uniform.get_base_model().state_dict().items() if n not in heads}
            numbers = sum(tensor.numel() for tensor in body.values() if tensor.is_floating_point())
            share = uniform.recovery.stored_numbers() / (len(tasks) * numbers)
            budget = normalised(build(rank_budget=share))
            lines.append(f"| {rank} | {share:.1%} | {normalised(uniform):.3f} | {budget:.3f} |")
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
