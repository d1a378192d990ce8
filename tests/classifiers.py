"""What a user's folders look like: a base with a tokenizer, experts with heads of their own, and data for them."""

from __future__ import annotations

import json
from pathlib import Path

from families import TEXT
from helpers import make_experts, perturb
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

WORDS = 30


def make_encoders(folder: Path) -> Path:
    """`base` and one folder per task: encoders without heads."""
    base = BertModel(BertConfig(**TEXT)).eval()
    base.save_pretrained(folder / "base")
    for task, expert in make_experts(base).items():
        expert.save_pretrained(folder / task)
    return folder


def make_classifiers(folder: Path, widths: dict[str, int]) -> Path:
    """`base`, `experts/<task>` and `data/<task>/{train,test}.jsonl`. Tasks use different parts of the vocabulary."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(WORDS))]
    tokenizer = BertTokenizerFast(vocab={word: index for index, word in enumerate(words)})
    base = BertModel(BertConfig(**TEXT)).eval()
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    part = WORDS // len(widths)
    for seed, (task, width) in enumerate(widths.items()):
        labels = {index: f"{task}-{index}" for index in range(width)}
        config = BertConfig(**TEXT, id2label=labels, label2id={name: index for index, name in labels.items()})
        expert = BertForSequenceClassification(config).eval()
        expert.bert.load_state_dict(perturb(base, seed).state_dict())
        expert.save_pretrained(folder / "experts" / task)
        (folder / "data" / task).mkdir(parents=True)
        for split, rows in {"train": 80, "test": 20}.items():
            texts = [" ".join(f"w{part * seed + (row * k) % part}" for k in (1, 2, 4)) for row in range(rows)]
            lines = [json.dumps({"text": text, "label": row % width}) for row, text in enumerate(texts)]
            (folder / "data" / task / f"{split}.jsonl").write_text("\n".join(lines))
    return folder
