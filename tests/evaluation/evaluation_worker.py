"""What the two-process test launches: evaluate a method whose answers depend on the whole batch, and write the rows."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from toys import Toy, toy_collate, toy_tasks

from retex_hf.evaluation import Prediction, evaluate

# An odd number of batches, the last one short; and fewer batches than processes.
SIZES = [(7, 5, 6), (2, 1)]


class Neighbour(Toy):
    """Answers each row with the class of the row before it, and takes it for that row's task."""

    def predict(self, inputs, tasks=None, *, oracle=False):
        before = inputs["rows"].roll(1, 0)
        found = super().predict({"rows": before})
        return Prediction(found.answers, found.tasks if tasks is None else list(tasks))


def main() -> None:
    folder = Path(sys.argv[1])
    # Settings of a training must not matter: with them, one process would have fewer batches than the other.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    for sizes in SIZES:
        tasks = toy_tasks(sizes, classes=2)
        found = evaluate(Neighbour(), tasks, toy_collate, batch_size=4, accelerator=accelerator, progress=False)
        found.save(folder / f"{len(sizes)}-tasks-{accelerator.process_index}.json")


if __name__ == "__main__":
    main()
