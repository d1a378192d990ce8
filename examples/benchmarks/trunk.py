"""What a shared trunk costs and saves, on the experts of the quickstart.

    python examples/quickstart.py                 # trains the experts, once
    python examples/benchmarks/trunk.py

For every depth of the trunk: the estimate that `fit_signatures` gives from unlabelled reference inputs, the accuracy
relative to the experts (task given, and unknown), and the time of a routed batch over the static merged model's.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import accuracy, accuracy_on_mixed_stream, quiet, reference_inputs
from quickstart import TASKS, load_task, text_collate
from synthetic import seconds
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retex_hf import RetexConfig, RetexModel

RANK, BATCH, REPEATS = 64, 64, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-quickstart"))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    base, experts = arguments.work_dir / "base", {task: arguments.work_dir / "experts" / task for task in TASKS}
    if not all(folder.is_dir() for folder in experts.values()):
        sys.exit(f"{arguments.work_dir} holds no experts: run examples/quickstart.py first.")
    tasks = [load_task(name) for name in TASKS]
    collate = text_collate(AutoTokenizer.from_pretrained(base))
    load = AutoModelForSequenceClassification.from_pretrained
    individual = {task.name: accuracy(load(experts[task.name]).eval(), task, collate, task.name) for task in tasks}
    references = {task.name: [collate(reference_inputs(task, 64))] for task in tasks}
    rows = [task.test_inputs[i] for i in range(BATCH // len(tasks)) for task in tasks]
    batch = collate(rows)

    def fitted(**options) -> RetexModel:
        config = RetexConfig(rank=RANK, exclude=["*embeddings*"], **options)
        model = RetexModel.from_experts(base, experts, config, progress=False)
        model.fit_signatures(references, progress=False)
        return model

    def normalised(found: dict[str, float]) -> float:
        return sum(found[task.name] / individual[task.name] for task in tasks) / len(tasks)

    depth = load(base).config.num_hidden_layers
    models = {"no trunk": fitted()}
    for layer in range(depth - 1):
        models[f"{layer + 1} of {depth} layers"] = fitted(shared_trunk=True, feature_layer=layer)
    models["feature_layer=auto"] = fitted(shared_trunk=True)

    print("\n| trunk | answers kept (estimate) | task given | task unknown | identified | time over static |")
    print("|---|---:|---:|---:|---:|---:|")
    with torch.inference_mode():
        static = next(iter(models.values())).get_base_model()
        calls = {name: lambda model=model: model(**batch) for name, model in models.items()}
        times = seconds({"static": lambda: static(**batch), **calls}, REPEATS)
        for name, model in tqdm(models.items(), desc="depths", unit="depth"):
            trunk = model.retex_config.trunk
            kept = "" if trunk is None else sum(c["agreement"] for c in trunk["cost"].values()) / len(tasks)
            given = {task.name: accuracy(partial(model, task=task.name), task, collate, None) for task in tasks}
            stream = accuracy_on_mixed_stream(model, tasks, collate)
            unknown = {task: found["task_unknown"] for task, found in stream.items()}
            identified = sum(found["identification"] for found in stream.values()) / len(tasks)
            estimate = kept if kept == "" else f"{kept:.3f}"
            tqdm.write(
                f"| {name} ({model.signatures.feature_layer}) | {estimate} | {normalised(given):.3f} | "
                f"{normalised(unknown):.3f} | {identified:.3f} | {times[name] / times['static']:.2f}x |"
            )


if __name__ == "__main__":
    main()
