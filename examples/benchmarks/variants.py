"""Every variant of the paper on real experts, solved exactly and trained with Adam, in one table.

    python examples/quickstart_images.py          # trains the experts, once
    python examples/benchmarks/variants.py        # --steps 500 2000 5000 by default; a finished row is not run again

Loss is the variant's own objective at the end: the expected squared error over tasks (over mixtures of tasks, for the
soft variants). Normalised accuracy is with the task given, relative to the individual experts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import accuracy, quiet
from quickstart_images import TASKS, collate, load_task
from transformers import AutoModelForImageClassification

from retex_hf import RetexConfig, RetexModel, TrainingConfig
from retex_hf.recovery import soft_moments

DIRICHLET = {"soft_training": {"method": "dirichlet", "alpha": 1.0}}
ARITHMETIC = {"merge": {"method": "task_arithmetic", "scale": 0.3}}
VARIANTS: dict[str, dict[str, Any]] = {
    "ReTeX": {},
    "ReTeX-E, inner rank half": {"inner_rank": None},  # filled in from the rank
    "affine": {"recovery": "affine"},
    "reversed order": {"factor_order": "shared_first"},
    "shared layers": {"share_layers": True},
    "embedding of 2": {"task_embedding_dim": 2},
    "Dirichlet(1)": DIRICHLET,
    "task arithmetic": ARITHMETIC,
    "task arithmetic, Dirichlet(1)": {**ARITHMETIC, **DIRICHLET},
}
OBJECTIVES = {"cosine": {"objective": "cosine"}, "cosine + L2": {"objective": "cosine_l2"}}
COLUMNS = ("variant", "solver", "loss", "relative error", "normalised accuracy", "stored numbers", "seconds")


@torch.no_grad()
def misses(model: RetexModel, experts: dict[str, dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return Gram matrices over tasks of the residuals of recovery, and of the differences themselves."""
    merged = model.get_base_model().state_dict()
    recovered = {task: model.recover(task) for task in model.tasks}
    miss, energy = torch.zeros(len(model.tasks), len(model.tasks)), torch.zeros(len(model.tasks), len(model.tasks))
    for name in model.recovery:
        missed = torch.stack([(recovered[task][name] - experts[task][name]).flatten() for task in model.tasks])
        difference = torch.stack([(experts[task][name] - merged[name]).flatten() for task in model.tasks])
        miss += missed @ missed.T
        energy += difference @ difference.T
    return miss, energy


def measure(model: RetexModel, experts: dict[str, dict[str, Tensor]], individual: dict[str, float]) -> dict[str, Any]:
    """Measure loss, errors, accuracy and storage of one model."""
    miss, energy = misses(model, experts)
    moments = soft_moments(model.retex_config, len(model.tasks))
    moments = torch.eye(len(model.tasks)) / len(model.tasks) if moments is None else moments.float()
    normalised = []
    for name in model.tasks:
        found = accuracy(lambda name=name, **inputs: model(**inputs, task=name), load_task(name), collate, None)
        normalised.append(found / individual[name])
    return {
        "loss": (moments * miss).sum().item(),
        "relative error": (miss.trace() / energy.trace()).sqrt().item(),
        "normalised accuracy": sum(normalised) / len(normalised),
        "stored numbers": model.recovery.stored_numbers(),
    }


def variants(rank: int) -> dict[str, RetexConfig]:
    """Return the configurations, with values that depend on the rank filled in."""
    options = {name: dict(values) for name, values in VARIANTS.items()}
    options["ReTeX-E, inner rank half"]["inner_rank"] = rank // 2
    return {name: RetexConfig.paper(rank=rank, **values) for name, values in options.items()}


def runs(rank: int, steps: list[int]) -> dict[tuple[str, str], tuple[RetexConfig, Any]]:
    """Return (variant, solver) -> configuration and training."""
    planned = {}
    for name, config in variants(rank).items():
        planned[name, "exact"] = (config, None)
        for count in steps:
            soft = 0 if config.soft_training is None else count // 2
            planned[name, f"Adam {count:,}"] = (config, training(count - soft, soft_steps=soft))
    for name, options in OBJECTIVES.items():
        for count in steps:
            planned[name, f"Adam {count:,}"] = (RetexConfig.paper(rank=rank), training(count, **options))
    return planned


def training(steps: int, **options: Any) -> TrainingConfig:
    """Return the paper's settings; its 600 warm-up steps are 12 % of its 5,000."""
    return TrainingConfig(steps=steps, warmup_steps=max(1, round(0.12 * steps)), log_every=1000, **options)


def _steps(settings: TrainingConfig | None) -> int:
    return 0 if settings is None else settings.steps + settings.soft_steps


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---" + "|---:" * (len(COLUMNS) - 2) + "|"]
    for row in rows:
        cells = [row["variant"], row["solver"], f"{row['loss']:.3f}", f"{row['relative error']:.3f}"]
        cells += [f"{row['normalised accuracy']:.3f}", f"{row['stored numbers']:,}", f"{row['seconds']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-quickstart-images"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, nargs="*", default=[500, 2000, 5000])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(arguments.threads)
    folders = {task: arguments.work_dir / "experts" / task for task in TASKS}
    if not all(folder.is_dir() for folder in folders.values()):
        sys.exit(f"{arguments.work_dir} holds no experts: run examples/quickstart_images.py first.")
    models = {task: AutoModelForImageClassification.from_pretrained(folder).eval() for task, folder in folders.items()}
    experts = {task: model.state_dict() for task, model in models.items()}
    individual = {task: accuracy(model, load_task(task), collate, task) for task, model in models.items()}

    def build(config: RetexConfig, settings: TrainingConfig | None) -> RetexModel:
        options = {"solver": "closed_form"} if settings is None else {"solver": "adam", "training": settings}
        return RetexModel.from_experts(arguments.work_dir / "base", folders, config, progress=False, **options)

    finished = arguments.work_dir / "variants.json"
    rows = json.loads(finished.read_text(encoding="utf-8")) if finished.is_file() else []
    done = {(row["variant"], row["solver"]) for row in rows}
    planned = runs(arguments.rank, arguments.steps)
    # Short runs first: an interrupted table is then complete up to some number of steps.
    waiting = sorted((key for key in planned if key not in done), key=lambda key: _steps(planned[key][1]))
    for variant, solver in tqdm(waiting, desc="variants", unit="run"):
        config, settings = planned[variant, solver]
        start = time.perf_counter()
        model = build(config, settings)
        seconds = time.perf_counter() - start
        rows.append({"variant": variant, "solver": solver, **measure(model, experts, individual), "seconds": seconds})
        finished.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    order = list(planned)
    rows.sort(key=lambda row: order.index((row["variant"], row["solver"])))
    table = as_table(rows)
    (arguments.work_dir / "variants.md").write_text(table, encoding="utf-8")
    print(f"\nTorch threads: {arguments.threads}\n\n{table}")


if __name__ == "__main__":
    main()
