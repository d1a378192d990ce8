"""Accuracy of task identification: from reference inputs, from the weights alone, and from weights centred on a pool.

    python examples/benchmarks/identification.py        # --work-dir retex-quickstart --images retex-quickstart-images

Accuracy is the mean over tasks of the share of test rows identified as their own task. Trains the experts first if no
quickstart has run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import EVALUATION_BATCH, quiet
from suites import Suite, image_suite, text_suite

from retex_hf import RetexModel


@torch.inference_mode()
def identified(model: RetexModel, suite: Suite) -> float:
    """Return the mean over tasks of the share of test rows identified as their own task."""
    shares = []
    for task in suite.tasks:
        found = []
        for start in range(0, len(task.test_inputs), EVALUATION_BATCH):
            found += model.identify(**suite.collate(task.test_inputs[start : start + EVALUATION_BATCH])).tasks
        shares.append(found.count(task.name) / len(found))
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-quickstart"))
    parser.add_argument("--images", type=Path, default=Path("retex-quickstart-images"))
    arguments = parser.parse_args()
    quiet()
    suites = (text_suite(arguments.work_dir), image_suite(arguments.images))
    print("| experts | from reference inputs | from weights | from weights, centred |")
    print("|---|---:|---:|---:|", flush=True)
    for suite in suites:
        references = suite.references()
        from_inputs, from_weights = suite.build(), suite.build(signatures="weights")
        from_inputs.fit_signatures(references, progress=False)
        found = [identified(from_inputs, suite), identified(from_weights, suite)]
        # The same inputs, without their tasks.
        from_weights.fit_signatures([batch for batches in references.values() for batch in batches])
        found.append(identified(from_weights, suite))
        print(f"| {suite.name} | " + " | ".join(f"{share:.3f}" for share in found) + " |", flush=True)


if __name__ == "__main__":
    main()
