"""Recovery stored in float32, bfloat16, float16 and int8, on the experts of the text quickstart.

    python examples/benchmarks/storage.py                # --work-dir retex-quickstart --dtypes bfloat16 int8

Trains the experts first if no quickstart has run. Accuracy is with the task given, relative to the experts; tasks are
identified from one row at a time, by reference inputs (independent of the recovery) and by weights (dependent on it).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import accuracy, quiet
from identification import identified
from suites import Suite, text_suite

from retex_hf import RetexModel
from retex_hf.config import RECOVERY_DTYPES


def normalised(model: RetexModel, suite: Suite, individual: dict[str, float]) -> float:
    """Return the mean over tasks of the accuracy, task given, over that of the task's expert."""
    found = [
        accuracy(lambda t=task, **x: model(**x, task=t.name), task, suite.collate, None) / individual[task.name]
        for task in suite.tasks
    ]
    return sum(found) / len(found)


def recovery_bytes(model: RetexModel) -> int:
    """Return the size of the recovery's file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "artifact")
        return sum(file.stat().st_size for file in (Path(folder) / "artifact").glob("retex_recovery*"))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-quickstart"))
    parser.add_argument("--dtypes", nargs="+", choices=RECOVERY_DTYPES, default=RECOVERY_DTYPES)
    arguments = parser.parse_args()
    quiet()
    suite = text_suite(arguments.work_dir)
    individual = {
        task.name: accuracy(suite.load_expert(suite.expert(task)).eval(), task, suite.collate, task.name)
        for task in suite.tasks
    }
    print("| stored as | recovery (MB) | relative error | normalised accuracy | identified, inputs | by weights |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for dtype in arguments.dtypes:
        model = suite.build(recovery_dtype=dtype)
        errors = list(model.recovery_errors.values())
        model.fit_signatures(suite.references(), progress=False)
        from_inputs = identified(model, suite)
        by_weights = identified(suite.build(recovery_dtype=dtype, signatures="weights"), suite)
        print(
            f"| {dtype} | {recovery_bytes(model) / 1e6:.1f} | {sum(errors) / len(errors):.4f} "
            f"| {normalised(model, suite, individual):.4f} | {from_inputs:.3f} | {by_weights:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
