"""Folders and names that the documents use, with small models in them. Each function prepares the current folder.

A setup takes the local Hub of the test and returns names for the page's Python blocks.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf_writer
import torch
import transformers as tf
from decoders import UNSERVED, saved_decoder
from doc_blocks import ROOT
from helpers import perturb
from huggingface_hub import HfApi
from local_hub import LocalHub
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.cli import main

TASKS = ("snips", "banking77", "medical_abstracts", "clickbait")
ROWS = {"train": 96, "test": 24}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
Setup = Callable[[LocalHub], dict[str, Any]]


# ---- what examples/quickstart.py leaves ------------------------------------------------------------------------------


def quickstart(hub: LocalHub) -> dict[str, Any]:
    """Make `retex-quickstart/` with a tiny BERT and its experts, and `examples/` with some rows of the shipped data."""
    if Path("retex-quickstart").exists():
        return {}
    Path("examples").mkdir()
    shutil.copytree(ROOT / "examples" / "recipes", "examples/recipes")
    texts = [text for task in TASKS for text in _copy_rows(task)]
    tokenizer = _tokenizer(texts)
    base = tf.BertModel(tf.BertConfig(vocab_size=len(tokenizer), **SIZES)).eval()
    base.save_pretrained("retex-quickstart/base")
    tokenizer.save_pretrained("retex-quickstart/base")
    for seed, task in enumerate(TASKS):
        labels = dict(enumerate(json.loads(Path(f"examples/data/text/{task}/labels.json").read_text())))
        names = {"id2label": labels, "label2id": {label: index for index, label in labels.items()}}
        config = tf.BertConfig(vocab_size=len(tokenizer), **SIZES, **names)
        expert = tf.BertForSequenceClassification(config).eval()
        expert.bert.load_state_dict(perturb(base, seed).state_dict())
        with gzip.open(f"examples/data/text/{task}/test.jsonl.gz", "rt") as rows:
            right = json.loads(next(rows))["label"]
        with torch.no_grad():
            expert.classifier.bias[right] += 1.0  # an expert without any right answer cannot be a reference
        expert.save_pretrained(f"retex-quickstart/experts/{task}")
        tokenizer.save_pretrained(f"retex-quickstart/experts/{task}")
    return {}


def _copy_rows(task: str) -> list[str]:
    """Copy some rows of a shipped task; return the texts."""
    source, target, texts = ROOT / "examples/data/text" / task, Path("examples/data/text", task), []
    target.mkdir(parents=True)
    shutil.copy(source / "labels.json", target)
    for split, count in ROWS.items():
        with gzip.open(source / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = random.Random(0).sample(lines.readlines(), count)
        texts += [json.loads(row)["text"] for row in rows]
        with gzip.open(target / f"{split}.jsonl.gz", "wt", encoding="utf-8") as out:
            out.writelines(rows)
    return texts


def _tokenizer(texts: list[str]) -> tf.PreTrainedTokenizerFast:
    """Make a tokenizer of the most frequent words."""
    counted = Counter(word for text in texts for word in re.findall(r"[a-z]+", text.lower()))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for word, _ in counted.most_common(500))]
    return tf.BertTokenizerFast(vocab={word: index for index, word in enumerate(words)}, model_max_length=64)


def artifact(hub: LocalHub) -> dict[str, Any]:
    """Make `my-retex` of three tasks, built and signed, and `inputs.txt`."""
    quickstart(hub)
    data = [f"--data={task}=examples/data/text/{task}" for task in TASKS[:3]]
    assert main(["build", "examples/recipes/three_tasks.yaml", "--output-dir", "my-retex"]) == 0
    assert main(["sign", "my-retex", *data]) == 0
    Path("inputs.txt").write_text("add this song to my playlist\nhas my transfer arrived?\n")
    return {}


# ---- adapters and language models ------------------------------------------------------------------------------------


def _adapter(base: nn.Module, folder: str, seed: int, modules: list[str]) -> None:
    torch.manual_seed(seed)
    model = get_peft_model(deepcopy(base), LoraConfig(target_modules=modules, r=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def flan_t5(hub: LocalHub) -> dict[str, Any]:
    """Make a tiny T5 and two LoRA adapters, in folders of their names on the Hub."""
    config = tf.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    base = tf.T5ForConditionalGeneration(config).eval()
    base.save_pretrained("google/flan-t5-base")
    for seed, task in enumerate(("cola", "mnli")):
        _adapter(base, f"tanganke/flan-t5-base_glue-{task}_lora-16", seed, ["q", "v"])
    return {}


def llama(hub: LocalHub) -> dict[str, Any]:
    """Put an artifact of four small Llamas on the Hub."""
    base = gguf_writer.make().eval()
    experts = {task: perturb(base, seed) for seed, task in enumerate(("paws", "qasc", "story", "wiki"))}
    config = RetexConfig(rank=8, exclude=["*embed*", "lm_head*", "*norm*"])
    RetexModel.from_experts(base, experts, config, progress=False).save_pretrained("llama")
    hub.put("org/retex-llama-4task", Path("llama"))
    return {}


def served(hub: LocalHub) -> dict[str, Any]:
    """Save an artifact of three small Llamas that routes by words."""
    saved_decoder(Path("my-retex"), exclude=UNSERVED)
    return {}


def hub_experts(hub: LocalHub) -> dict[str, Any]:
    """Put experts of every kind where docs/experts.md looks for them: on the Hub, and in folders."""
    base = gguf_writer.make().eval()
    base.save_pretrained("files/base")
    perturb(base, 1).save_pretrained("files/checkpoint")
    perturb(base, 2).save_pretrained("files/experts/qasc")
    _adapter(base, "adapters/story", 3, ["q_proj", "v_proj"])
    _adapter(base, "files/adapters/wiki", 4, ["q_proj", "v_proj"])
    for name in ("base", "checkpoint", "experts", "adapters"):
        hub.put(f"org/{name}", Path("files", name))
    HfApi(token="hf_local").create_branch("org/experts", branch="v2")
    Path("models").mkdir()
    gguf_writer.write(perturb(base, 5), Path("models/wino-Q8_0.gguf"))
    return {}


# ---- other libraries -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module of one's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def modules(hub: LocalHub) -> dict[str, Any]:
    """Name a module, a module, a state dict and a weight file, and batches for them."""
    base = Net(64).eval()
    save_file(perturb(base, 3).state_dict(), "dogs.safetensors")
    places = {"car": 3, "bird": -3, "dog": 0}
    return {
        "Net": Net,
        "base_module": base,
        "module": perturb(base, 1),
        "state_dict": perturb(base, 2).state_dict(),
        "x": torch.randn(4, 64),
        **{f"{kind}_batches": [torch.randn(32, 64) + place] for kind, place in places.items()},
    }


def timm_experts(hub: LocalHub) -> dict[str, Any]:
    """Name two experts of timm."""
    import timm

    torch.manual_seed(0)
    base = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64).eval()
    torch.manual_seed(0)  # the page makes the same base again
    return {"experts": {"cars": perturb(base, 1), "birds": perturb(base, 2)}}


def sentence_transformers(hub: LocalHub) -> dict[str, Any]:
    """Make folders of SentenceTransformers: a tiny BERT and mean pooling."""
    texts = {"law": ["the court of appeal", "a contract is void"], "films": ["a film of two hours", "the actor sings"]}
    tokenizer = _tokenizer(texts["law"] + texts["films"])
    base = tf.BertModel(tf.BertConfig(vocab_size=len(tokenizer), **SIZES)).eval()
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    for seed, name in enumerate(("base", "law", "films")):
        folder = Path(f"{name}-folder")
        (perturb(base, seed) if seed else base).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return {"texts": {task: 8 * of for task, of in texts.items()}, "sentences": texts["law"] + texts["films"]}


PREPARED = (quickstart, artifact, flan_t5, llama, served, hub_experts, modules, timm_experts, sentence_transformers)
SETUPS: dict[str, Setup] = {setup.__name__: setup for setup in PREPARED}
