"""Small artifacts of every kind that is served, on disk, and a real server for them on a port of this machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import torch
import transformers as tf
from helpers import TASKS, make_experts, perturb
from signed import WORDS, make_tokenizer, references, separate
from torch import nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.serving.options import ServeOptions
from retex_hf.serving.server import listen, make_server
from retex_hf.serving.service import Service

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}rose{% endif %}"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def texts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Random texts of one to six words of a task, with their task."""
    draw = random.Random(seed)
    tasks = [draw.choice(TASKS) for _ in range(count)]
    return [(" ".join(draw.choices(WORDS[task], k=draw.randint(1, 6))), task) for task in tasks]


def build(folder: Path, base: nn.Module, experts: dict[str, nn.Module], **config: Any) -> Path:
    """Build an artifact of a base with a tokenizer, signed by texts of each task's words."""
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 64
    tokenizer.chat_template = TEMPLATE
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model = RetexModel.from_experts(
        folder / "base", experts, RetexConfig(**{"rank": 8, **config}), progress=False, check_base=False
    )
    model.fit_signatures(references(tokenizer), progress=False)
    model.save_pretrained(folder / "artifact")
    return folder / "artifact"


def classifier(folder: Path) -> Path:
    """A BERT of three tasks with 2, 3 and 4 classes."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = tf.BertConfig(vocab_size=len(tokenizer), **SIZES)
    base = tf.BertModel(config).eval()
    separate(base.get_input_embeddings(), tokenizer)
    experts = {}
    for seed, task in enumerate(TASKS, start=1):
        own = tf.BertConfig(**config.to_diff_dict() | {"num_labels": seed + 1})
        expert = tf.BertForSequenceClassification(own).eval()
        expert.bert.load_state_dict(perturb(base, seed, scale=0.6).state_dict())
        expert.config.id2label = {index: f"{task}-{index}" for index in range(seed + 1)}
        experts[task] = expert
    return build(folder, base, experts)


def llama(folder: Path, **config: Any) -> Path:
    """A decoder of three tasks."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(tokenizer), **SIZES, **sizes)).eval()
    separate(base.get_input_embeddings(), tokenizer)
    return build(folder, base, make_experts(base, scale=1.0), **config)


def llama_with_a_word(folder: Path, task: str, word: str) -> Path:
    """A decoder of three tasks, one of which has a word, and so a tokenizer, of its own."""
    torch.manual_seed(0)
    tokenizer, own = make_tokenizer(), make_tokenizer()
    own.add_tokens([word])
    sizes = {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(tokenizer), **SIZES, **sizes)).eval()
    separate(base.get_input_embeddings(), tokenizer)
    larger = deepcopy(base)
    larger.resize_token_embeddings(len(own), mean_resizing=False)
    experts = {name: perturb(larger if name == task else base, seed, scale=1.0) for seed, name in enumerate(TASKS)}
    for name, model in {"base": base, **experts}.items():
        model.save_pretrained(folder / name)
        (own if name == task else tokenizer).save_pretrained(folder / name)
    paths = {name: folder / name for name in TASKS}
    model = RetexModel.from_experts(folder / "base", paths, RetexConfig(rank=8), progress=False)
    model.fit_signatures(references(tokenizer), progress=False)
    model.save_pretrained(folder / "artifact")
    return folder / "artifact"


def t5(folder: Path) -> Path:
    """An encoder-decoder of three tasks."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "tie_word_embeddings": False}
    special = {"decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0}
    base = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=len(tokenizer), **sizes, **special)).eval()
    separate(base.get_input_embeddings(), tokenizer)
    return build(folder, base, make_experts(base, scale=1.0))


def encoder(folder: Path) -> Path:
    """A BERT without heads."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    base = tf.BertModel(tf.BertConfig(vocab_size=len(tokenizer), **SIZES)).eval()
    separate(base.get_input_embeddings(), tokenizer)
    return build(folder, base, make_experts(base, scale=1.0))


class Endpoint:
    """A running endpoint: its address, clients for it, and its parts."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port = service, port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=service.options.api_key or "none", max_retries=0,
            http_client=httpx.Client(timeout=60, trust_env=False),
        )  # fmt: skip

    @property
    def model(self) -> RetexModel:
        return self.service.engine.model

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def served(artifact: Path, **options: Any) -> Iterator[Endpoint]:
    """Serve an artifact from a thread."""
    service = Service(artifact, ServeOptions(port=0, **options))
    server = make_server(service)
    listener = listen(server)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    endpoint = Endpoint(service, listener.getsockname()[1])
    try:
        yield endpoint
    finally:
        endpoint.http.close()
        endpoint.openai.close()
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()
