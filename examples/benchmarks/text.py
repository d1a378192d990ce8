"""The text suite: MiniLM, eight text classification tasks with an expert each, three tasks held out.

    python examples/benchmarks/prepare.py --recipe examples/recipes/experiments/text8.yaml --work-dir retex-text

Prepares `<work>/base` and `<work>/experts/<task>`, once. A fifth of every training set is held out, for methods that
choose something on validation data. The licences of some tasks do not allow shipping them here; without them (see
`common.data_folder`) the suite has the shipped tasks only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quickstart
from class_groups import GROUP, load_group
from common import Collate, Task, Training, data_folder, split_validation
from transformers import AutoTokenizer

fetch_base = quickstart.fetch_base
TASKS = ("agnews", "banking77", "medical_abstracts", "sms_spam", "snips", "trec", "sst2", "sick_nli")
UNSEEN = ("subj", "tweet_emotion", "clickbait")

SETTINGS = {
    "banking77": Training(epochs=4, learning_rate=3e-4),
    "medical_abstracts": Training(epochs=1, learning_rate=2e-4),
    "sick_nli": Training(epochs=3, learning_rate=2e-4),
    "trec": Training(epochs=2, learning_rate=2e-4),
    "sst2": Training(epochs=1, learning_rate=2e-4),
    "agnews": Training(epochs=1, learning_rate=2e-4),
}
OTHERS = Training(epochs=1, learning_rate=3e-4)
# A group of classes has few rows.
GROUPS = Training(epochs=8, learning_rate=3e-4)


def available(names: Sequence[str]) -> list[str]:
    """Return the tasks whose data are available."""
    return [name for name in names if (data_folder("text") / name).is_dir()]


def load_task(name: str) -> Task:
    """Load one text task, or a group of its classes ("banking77-3of10"): strings and integer labels."""
    group = load_group(name, load_task)
    if group is not None:
        return group
    data = data_folder("text")
    if not (data / name).is_dir():
        sys.exit(f"{data / name} is missing: put the data of task {name!r} there, or name their folder by RETEX_DATA.")
    return quickstart.load_task(name, data)


def make_collate(base: Path) -> Collate:
    """Return a function that makes batches of texts for models of this base."""
    return quickstart.text_collate(AutoTokenizer.from_pretrained(base))


def fine_tune_expert(base: Path, task: Task, folder: Path, epochs: int | None = None) -> None:
    """Train one expert on four fifths of its training set, by default for the suite's number of epochs."""
    settings = SETTINGS.get(task.name, GROUPS if GROUP.fullmatch(task.name) else OTHERS)
    settings = replace(settings, epochs=epochs or settings.epochs)
    quickstart.fine_tune_expert(base, split_validation(task)[0], settings, folder)
