"""ReTeX on images: one base network, four experts with their own heads, one artifact.

    python examples/quickstart_images.py

Runs offline, on a CPU, in a few minutes. Pre-trained vision models need a download, so the script first trains a small
ResNet as the base, on all tasks together for a short while. The experts are then fine-tuned from it, one per task (see
data/README.md). A second run reuses the base and the experts of the first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from common import (
    DATA,
    SECONDS,
    Task,
    Training,
    evaluate,
    evaluate_in_fresh_process,
    parse_arguments,
    read_json,
    reference_inputs,
    timed,
    train,
    train_experts,
    whole_folder,
    write_report,
)
from transformers import (
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

from retex_hf import RetexConfig, RetexModel

TASKS = ("mnist", "fashion", "quickdraw", "omniglot_alphabet")
NETWORK = {
    "num_channels": 1,
    "embedding_size": 32,
    "hidden_sizes": [64, 128, 256],
    "depths": [1, 1, 1],
    "layer_type": "basic",
}
BASE_TRAINING = Training(epochs=3, learning_rate=3e-3, batch_size=64, head_speed_up=1.0)
EXPERT_TRAINING = Training(epochs=5, learning_rate=1e-3)
REFERENCE_INPUTS = 64


def load_task(name: str) -> Task:
    """Load one of the image tasks that ship with the examples."""
    arrays = np.load(DATA / "image" / f"{name}.npz")
    columns = [arrays["train_x"], arrays["train_y"].tolist(), arrays["test_x"], arrays["test_y"].tolist()]
    return Task(name, read_json(DATA / "image" / f"{name}.json"), *columns)


def all_in_one(tasks: list[Task]) -> Task:
    """Join all tasks into one, with every class of every task."""
    label_names, train_labels, test_labels = [], [], []
    for task in tasks:
        train_labels += [len(label_names) + label for label in task.train_labels]
        test_labels += [len(label_names) + label for label in task.test_labels]
        label_names += [f"{task.name}/{label}" for label in task.label_names]
    train_inputs = np.concatenate([task.train_inputs for task in tasks])
    test_inputs = np.concatenate([task.test_inputs for task in tasks])
    return Task("all tasks together", label_names, train_inputs, train_labels, test_inputs, test_labels)


# Same as `collate`, in a form that is saved with a model and also takes larger images.
PROCESSOR = ViTImageProcessor(size={"height": 28, "width": 28}, rescale_factor=1 / 255, do_normalize=False)


def collate(images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Batch grey images of 28 x 28 bytes as values between 0 and 1."""
    return {"pixel_values": torch.from_numpy(np.stack(images)).unsqueeze(1) / 255}


def train_base(tasks: list[Task], folder: Path) -> None:
    """Train the base from scratch; keep its body, drop its head over all classes."""
    torch.manual_seed(0)
    together = all_in_one(tasks)
    model = ResNetForImageClassification(ResNetConfig(**NETWORK, num_labels=len(together.label_names)))
    train(model, together, collate, BASE_TRAINING)
    with whole_folder(folder) as partial:
        model.base_model.save_pretrained(partial)
        PROCESSOR.save_pretrained(partial)


def fine_tune_expert(base: Path, task: Task, folder: Path) -> None:
    """Train one expert from the base and save it as an ordinary transformers checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_pretrained(
        base,
        id2label=dict(enumerate(task.label_names)),
        label2id={label: i for i, label in enumerate(task.label_names)},
    )
    train(model, task, collate, EXPERT_TRAINING)
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)


def build(base: Path, tasks: list[Task], work: Path, storage: str, seconds: dict[str, float]) -> None:
    """Build one artifact from the experts."""
    with timed(seconds, "build"):
        experts = {task.name: work / "experts" / task.name for task in tasks}
        model = RetexModel.from_experts(base, experts, RetexConfig(storage=storage, num_reference=REFERENCE_INPUTS))
    with timed(seconds, "fit signatures"):
        model.fit_signatures({task.name: [collate(reference_inputs(task, REFERENCE_INPUTS))] for task in tasks})
    with timed(seconds, "save"):
        model.save_pretrained(work / "retex")


def use(tasks: list[Task], work: Path) -> None:
    """Load the artifact and test it against the experts."""
    seconds = read_json(work / SECONDS)
    with timed(seconds, "load"):
        model = RetexModel.from_pretrained(work / "retex")
    with timed(seconds, "evaluate"):
        load_expert = AutoModelForImageClassification.from_pretrained
        results = evaluate(model, tasks, collate, lambda task: load_expert(work / "experts" / task))
    write_report(work, model, results, seconds)


def main() -> None:
    torch.set_num_threads(1)  # so small a network gains little from more threads, and loses much on shared cores
    arguments = parse_arguments("ReTeX on four image tasks, from training to evaluation.", "retex-quickstart-images")
    work = arguments.work_dir
    tasks = [load_task(name) for name in TASKS]
    if arguments.evaluate_only:
        use(tasks, work)
        return
    base, seconds = work / "base", {}
    if not base.exists():
        with timed(seconds, "train the base"):
            train_base(tasks, base)
    train_experts(tasks, work, seconds, lambda task, folder: fine_tune_expert(base, task, folder))
    build(base, tasks, work, arguments.storage, seconds)
    evaluate_in_fresh_process(__file__, work, seconds)


if __name__ == "__main__":
    main()
