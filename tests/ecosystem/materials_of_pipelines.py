"""Small classifiers with heads of their own, and a tokenizer of a few words for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from families import TEXT, VOCAB
from helpers import TASKS, make_experts
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = {task: [f"{task}{number}" for number in range(11)] for task in TASKS}
VOCABULARY = [*SPECIAL, *(word for words in WORDS.values() for word in words)]
assert len(VOCABULARY) < VOCAB
LABELS = {"red": ["warm", "hot"], "green": ["leaf", "lime", "moss"], "blue": ["sky", "sea", "ink", "ice"]}
TEXTS = ["red1 red2 red3", "blue4 blue5", "green1", "blue7 blue1 blue2 blue3", "red4", "green9 green2 green3"]


def make_tokenizer(**options: Any) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(word, VOCABULARY.index(word)) for word in ("[SEP]", "[CLS]")]
    words.post_processor = processors.BertProcessing(*ends)
    names = {f"{word.strip('[]').lower()}_token": word for word in SPECIAL}
    return tf.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **names, **options)


def references(tokenizer: Any, **options: Any) -> dict[str, list[dict[str, Tensor]]]:
    """Inputs of each task, of one to five of its words."""
    texts = {
        task: [" ".join(words[(row + step) % 11] for step in range(1 + row % 5)) for row in range(22)]
        for task, words in WORDS.items()
    }
    return {task: [dict(tokenizer(own, padding=True, return_tensors="pt", **options))] for task, own in texts.items()}


def with_heads(make_body: Any, make_expert: Any) -> tuple[RetexModel, dict[str, nn.Module]]:
    """A `RetexModel` of classifiers of different widths, and the classifiers. `make_expert` takes label names."""
    body = make_body().eval()
    experts = {}
    for task, moved in make_experts(body, scale=1.0).items():
        names = dict(enumerate(LABELS[task]))
        expert = make_expert(id2label=names, label2id={name: number for number, name in names.items()}).eval()
        expert.base_model.load_state_dict(moved.state_dict(), strict=False)
        for name, parameter in expert.named_parameters():
            if not name.startswith(f"{expert.base_model_prefix}."):
                nn.init.normal_(parameter)
        experts[task] = expert
    return RetexModel.from_experts(body, experts, RetexConfig(rank="full"), progress=False), experts


def text_classifier() -> tuple[RetexModel, dict[str, nn.Module]]:
    """Three classifiers of texts, of two, three and four classes."""
    torch.manual_seed(0)
    model, experts = with_heads(
        lambda: tf.BertModel(tf.BertConfig(**TEXT)),
        lambda **names: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, **names)),
    )
    model.fit_signatures(references(make_tokenizer()), progress=False)
    return model, experts
