"""Small, signed artifacts for the trials, quick to make and to load."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel

TASKS = ("red", "green", "blue")
WORDS = {
    "red": ["rose", "cherry", "ruby", "brick", "poppy", "wine"],
    "green": ["grass", "leaf", "moss", "lime", "fern", "mint"],
    "blue": ["sky", "sea", "denim", "indigo", "navy", "ice"],
}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def make_tokenizer() -> tf.PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word."""
    words = ["[PAD]", "[UNK]", "[EOS]", *(word for of in WORDS.values() for word in of)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        model_max_length=32,
        model_input_names=["input_ids", "attention_mask"],
    )


def texts(task: str, rows: int, seed: int = 0) -> list[str]:
    """Draw texts of four words of a task."""
    draw = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS[task]), (rows, 4), generator=draw).tolist()
    return [" ".join(WORDS[task][pick] for pick in row) for row in picks]


def batch(tokenizer: tf.PreTrainedTokenizerFast, rows: list[str]) -> dict[str, Tensor]:
    """Tokenise texts into keyword arguments of `forward`."""
    return dict(tokenizer(rows, padding=True, return_tensors="pt"))


def mixed_batch(tokenizer: tf.PreTrainedTokenizerFast, rows: int = 2, seed: int = 1) -> dict[str, Tensor]:
    """Make a batch of `rows` rows of every task."""
    return batch(tokenizer, [text for task in TASKS for text in texts(task, rows, seed)])


@torch.no_grad()
def moved(model: nn.Module, seed: int, scale: float = 0.5) -> nn.Module:
    """Make an expert: a copy with every weight moved a little."""
    draw = torch.Generator().manual_seed(seed)
    expert = deepcopy(model)
    for parameter in expert.parameters():
        parameter += scale * (parameter.std(correction=0) + 0.01) * torch.randn(parameter.shape, generator=draw)
    return expert.eval()


@torch.no_grad()
def separate(model: nn.Module, tokenizer: tf.PreTrainedTokenizerFast) -> None:
    """Give the words of each task a direction of their own, as training would."""
    table = model.get_input_embeddings().weight
    for words in WORDS.values():
        table[tokenizer.convert_tokens_to_ids(words)] += 5 * table.std() * torch.randn(table.shape[1])


def bert(tokenizer: tf.PreTrainedTokenizerFast) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Make a classifier, and experts with 2, 3 and 4 classes."""
    config = tf.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, initializer_range=0.2, **SIZES)
    base = tf.BertForSequenceClassification(config).eval()
    separate(base, tokenizer)
    experts = {}
    for seed, task in enumerate(TASKS, start=1):
        width = seed + 1
        head = tf.BertForSequenceClassification(tf.BertConfig(**config.to_diff_dict() | {"num_labels": width}))
        head.bert.load_state_dict(base.bert.state_dict())
        experts[task] = moved(head, seed)
        experts[task].config.id2label = {index: f"{task}-{index}" for index in range(width)}
    return base, experts


def t5(tokenizer: tf.PreTrainedTokenizerFast) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Make an encoder-decoder that generates, and its experts."""
    config = tf.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, tie_word_embeddings=False, initializer_factor=3.0,
    )  # fmt: skip
    base = tf.T5ForConditionalGeneration(config).eval()
    separate(base, tokenizer)
    return base, {task: moved(base, seed) for seed, task in enumerate(TASKS, start=1)}


FAMILIES = {"bert": bert, "t5": t5}


def make_model(family: str = "bert", tasks: tuple[str, ...] = TASKS, **config: object) -> RetexModel:
    """Make a signed model of three tasks (or fewer)."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    base, experts = FAMILIES[family](tokenizer)
    options = RetexConfig(**{"rank": 4, "feature_layer": 0, **config})
    chosen = {task: experts[task] for task in tasks}
    model = RetexModel.from_experts(base, chosen, options, progress=False, check_base=False)
    model.fit_signatures({task: [batch(tokenizer, texts(task, 24))] for task in tasks}, progress=False)
    return model


def make_artifact(folder: Path, family: str = "bert", **config: object) -> Path:
    """Save such a model to a folder, with its tokenizer."""
    make_tokenizer().save_pretrained(folder)
    make_model(family, **config).save_pretrained(folder)
    return folder
