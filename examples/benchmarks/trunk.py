"""Cost and savings of a shared trunk, on the experts of the quickstart.

    python examples/quickstart.py                 # trains the experts, once
    python examples/benchmarks/trunk.py

For every depth of the trunk: the estimate that `fit_signatures` gives from unlabelled reference inputs, the accuracy
relative to the experts (task given, and unknown), and the time of a routed batch over the static merged model's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import accuracy, accuracy_on_mixed_stream, quiet
from suites import text_suite
from synthetic import seconds

from retex_hf import RetexModel

BATCH, REPEATS = 64, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-quickstart"))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    suite = text_suite(arguments.work_dir)
    tasks, references = suite.tasks, suite.references()
    individual = {
        task.name: accuracy(suite.load_expert(suite.expert(task)).eval(), task, suite.collate, task.name)
        for task in tasks
    }
    batch = suite.collate([task.test_inputs[i] for i in range(BATCH // len(tasks)) for task in tasks])

    def fitted(**options) -> RetexModel:
        model = suite.build(**options)
        model.fit_signatures(references, progress=False)
        return model

    def normalised(found: dict[str, float]) -> float:
        return sum(found[task.name] / individual[task.name] for task in tasks) / len(tasks)

    models = {"no trunk": fitted()}
    depth = models["no trunk"].config.num_hidden_layers
    for layer in range(depth - 1):
        models[f"{layer + 1} of {depth} layers"] = fitted(shared_trunk=True, feature_layer=layer)
    models["feature_layer=auto"] = fitted(shared_trunk=True)

    print("\n| trunk | answers kept (estimate) | task given | task unknown | identified | time over static |")
    print("|---|---:|---:|---:|---:|---:|")
    with torch.inference_mode():
        static = models["no trunk"].get_base_model()
        calls = {name: lambda model=model: model(**batch) for name, model in models.items()}
        times = seconds({"static": lambda: static(**batch), **calls}, REPEATS)
        for name, model in tqdm(models.items(), desc="depths", unit="depth"):
            trunk = model.retex_config.trunk
            kept = "" if trunk is None else f"{sum(c['agreement'] for c in trunk['cost'].values()) / len(tasks):.3f}"
            stream = accuracy_on_mixed_stream(model, tasks, suite.collate)
            given = {task: found["task_given"] for task, found in stream.items()}
            unknown = {task: found["task_unknown"] for task, found in stream.items()}
            identified = sum(found["identification"] for found in stream.values()) / len(tasks)
            tqdm.write(
                f"| {name} ({model.signatures.feature_layer}) | {kept} | {normalised(given):.3f} | "
                f"{normalised(unknown):.3f} | {identified:.3f} | {times[name] / times['static']:.2f}x |"
            )


if __name__ == "__main__":
    main()
