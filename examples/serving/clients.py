"""Concurrent clients of an endpoint, each answer compared with the right one."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from retex_hf import RetexModel
from retex_hf.workflows.predictor import GENERATOR, Predictor, answer_kind, preprocessor_of


@dataclass(frozen=True)
class Question:
    """A request and its right answer."""

    path: str
    body: bytes
    answer: str


@torch.no_grad()
def questions(model: RetexModel, texts: list[str], name: str, tokens: int) -> list[Question]:
    """Return a question per text to the model of this name, answered by `RetexModel` one by one."""
    preprocessor = preprocessor_of(model)
    if answer_kind(model, False) != GENERATOR:
        predictor = Predictor(model, preprocessor)
        found = []
        for text in texts:
            routed = predictor.predict([text])[0]
            answer = routed if name == "auto" else predictor.merged([text], [routed.task])[0]
            body = json.dumps({"model": name, "input": [text]}).encode()
            found.append(Question("/classify", body, f"{routed.task}: {answer.answer}"))
        return found
    return [_completion(model, preprocessor.tokenizer, text, name, tokens) for text in texts]


def _completion(model: RetexModel, tokenizer: Any, text: str, name: str, tokens: int) -> Question:
    inputs = tokenizer(text, return_tensors="pt")
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": tokens}
    if name == "merged":
        with model.disable_adapter():
            output = model.generate(**inputs, **options)
    else:
        output = model.generate(**inputs, **options)
    prompt = [] if model.config.is_encoder_decoder else inputs["input_ids"][0].tolist()
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + output[0, len(prompt) :].tolist(), skip_special_tokens=True)
    body = {"model": name, "prompt": text, "max_tokens": tokens, "temperature": 0}
    return Question("/v1/completions", json.dumps(body).encode(), whole[len(before) :])


def answer_of(body: bytes) -> str:
    """Return the answer of a response, in the form of `Question.answer`."""
    content = json.loads(body)
    if "choices" in content:
        return content["choices"][0]["text"]
    row = content["data"][0]
    return f"{row['retex']['task']}: {row['label']}"


@dataclass
class Round:
    """The outcome of some seconds of load."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0
    refused: int = 0
    lost: int = 0

    def summary(self) -> dict[str, float]:
        """Return the figures of the round."""
        cuts = statistics.quantiles(self.latencies, n=100) if len(self.latencies) > 1 else [0.0] * 99
        return {
            "requests": len(self.latencies),
            "per_second": len(self.latencies) / self.seconds,
            "median_ms": 1000 * cuts[49],
            "p99_ms": 1000 * cuts[98],
            "wrong": self.wrong,
            "refused": self.refused,
            "lost": self.lost,
        }


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Question) -> tuple[int, bytes]:
    """Send a request over an open connection and return status and body."""
    head = f"POST {question.path} HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(question.body)}\r\n\r\n".encode() + question.body)
    await writer.drain()
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def _client(port: int, asked: Iterator[Question], end: float, outcome: Round) -> None:
    """Ask one question after the other until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        question, begun = next(asked), time.perf_counter()
        try:
            status, body = await _ask(reader, writer, question)
        except (OSError, asyncio.IncompleteReadError):
            outcome.lost += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        if status == 429:
            outcome.refused += 1
        elif status != 200:
            outcome.lost += 1
        else:
            outcome.latencies.append(time.perf_counter() - begun)
            outcome.wrong += answer_of(body) != question.answer
    writer.close()


async def load(port: int, asked: list[Question], clients: int, seconds: float) -> Round:
    """Let clients ask for some seconds; requests that have begun are finished."""
    outcome, begun = Round(), time.perf_counter()
    shuffled = [random.Random(number).sample(asked, len(asked)) for number in range(clients)]
    await asyncio.gather(*(_client(port, itertools.cycle(own), begun + seconds, outcome) for own in shuffled))
    outcome.seconds = time.perf_counter() - begun
    return outcome
