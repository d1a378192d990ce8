"""Models that tell tasks apart by what they read: each task has words of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
import transformers as tf
from helpers import TASKS, perturb
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel

WORDS = {
    "red": ["rose", "cherry", "ruby", "brick", "blood", "sunset", "poppy", "wine"],
    "green": ["grass", "leaf", "moss", "lime", "fern", "olive", "jade", "mint"],
    "blue": ["sky", "sea", "denim", "indigo", "navy", "cobalt", "azure", "ice"],
}


def make_tokenizer() -> tf.PreTrainedTokenizerFast:
    """One token per word."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(word for of in WORDS.values() for word in of)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=32,
        model_input_names=["input_ids", "attention_mask"],
    )


@torch.no_grad()
def separate(embedding: nn.Embedding, tokenizer: tf.PreTrainedTokenizerFast) -> None:
    """Move the embeddings of each task's words into a direction of their own, as a trained model's would be."""
    for words in WORDS.values():
        direction = 5 * embedding.weight.std() * torch.randn(embedding.embedding_dim)
        embedding.weight[tokenizer.convert_tokens_to_ids(words)] += direction


def references(tokenizer: tf.PreTrainedTokenizerFast, rows: int = 24) -> dict[str, list[dict[str, Tensor]]]:
    """Random texts of each task's words, tokenised."""
    draw = random.Random(0)
    texts = {task: [" ".join(draw.choices(WORDS[task], k=4)) for _ in range(rows)] for task in TASKS}
    return {task: [dict(tokenizer(of, padding=True, return_tensors="pt"))] for task, of in texts.items()}


def signed_classifier(
    names: Mapping[str, str] | None = None, labels: Mapping[str, Mapping[int, str]] | None = None
) -> RetexModel:
    """A tiny BERT classifier of three tasks with 2, 3 and 4 classes, signed by texts of each task's words.

    `names` renames tasks; `labels` names some of a task's classes.
    """
    names, labels = names or {}, labels or {}
    tokenizer = make_tokenizer()
    config = tf.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    base = tf.BertForSequenceClassification(config)
    separate(base.get_input_embeddings(), tokenizer)
    experts = {}
    for seed, task in enumerate(TASKS, start=1):
        expert = tf.BertForSequenceClassification(tf.BertConfig(**config.to_diff_dict() | {"num_labels": seed + 1}))
        expert.load_state_dict(base.bert.state_dict(prefix="bert."), strict=False)
        expert = perturb(expert, seed, scale=0.6)
        expert.config.id2label = {index: f"LABEL_{index}" for index in range(seed + 1)} | dict(labels.get(task, {}))
        experts[names.get(task, task)] = expert
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=8), progress=False, check_base=False)
    signed = references(tokenizer)
    model.fit_signatures({names.get(task, task): signed[task] for task in TASKS}, progress=False)
    return model
