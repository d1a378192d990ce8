"""Response bodies in OpenAI's shapes, each with the field `retex`: which task answered, how sure, and abstentions."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from .classification import Label
from .rows import MERGED, Decision, Done, Row

# A header names the tasks of so many rows; the body names all.
MOST_IN_HEADER = 64


def headers_of(decisions: Sequence[Decision]) -> dict[str, str]:
    """Return headers that say which task answered each row, how sure the router was, and whether it abstained.

    Names are percent-encoded; a row that the merged model answered has the name "merged".

    >>> from retex_hf.serving.responses import headers_of
    >>> from retex_hf.serving.rows import Decision
    >>> headers_of([Decision("law", 0.987654), Decision(None)])
    {'x-retex-task': 'law,merged', 'x-retex-probability': '0.9877,', 'x-retex-abstained': 'false,false'}
    """
    shown = decisions[:MOST_IN_HEADER]
    likely = ["" if one.probability is None else f"{one.probability:.4f}" for one in shown]
    return {
        "x-retex-task": ",".join(quote(one.task or MERGED, safe="") for one in shown),
        "x-retex-probability": ",".join(likely),
        "x-retex-abstained": ",".join(str(one.abstained).lower() for one in shown),
    }


def usage(rows: Sequence[Row], answers: Sequence[Done], copies: int = 1) -> dict[str, int]:
    """Return the number of tokens; a prompt counts once for all of its copies."""
    read, written = sum(row.tokens for row in rows[::copies]), sum(answer.tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Completion:
    """The bodies of one answer of /v1/completions, or of /v1/chat/completions."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def body(self, answers: Sequence[Done], texts: Sequence[str], used: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for index, (answer, text) in enumerate(zip(answers, texts, strict=True)):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append(self._choice(index, content, answer.decision, answer.value[1]))
        return {**self._head, "choices": choices, "usage": used}

    def begin(self, index: int, decision: Decision, text: str) -> dict[str, Any]:
        """Return the first event of a choice; `text` is what it begins with."""
        content = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._event([self._choice(index, content, decision, None)])

    def piece(self, index: int, decision: Decision, text: str) -> dict[str, Any]:
        """Return an event with more of a choice's text."""
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._event([self._choice(index, content, decision, None)])

    def end(self, index: int, answer: Done) -> dict[str, Any]:
        """Return the last event of a choice."""
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._event([self._choice(index, content, answer.decision, answer.value[1])])

    def counted(self, used: dict[str, int]) -> dict[str, Any]:
        """Return the event that counts tokens."""
        return {**self._event([]), "usage": used}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    @staticmethod
    def _choice(index: int, content: dict[str, Any], decision: Decision, reason: str | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason, "retex": decision.body()}


def classified(model: str, rows: Sequence[Row], answers: Sequence[Done]) -> dict[str, Any]:
    """Return the body of /classify: vLLM's, with the score of the label."""
    data = []
    for row, answer in zip(rows, answers, strict=True):
        label: Label = answer.value
        scores = None if label.scores is None else list(label.scores)
        data.append(
            {
                "index": row.index,
                "label": label.label,
                "score": label.score,
                "probs": scores,
                "num_classes": None if scores is None else len(scores),
                "retex": {**answer.decision.body(), "truncated": row.truncated},
            }
        )
    return {**_listed("classify-", model, rows), "data": data}


def embedded(model: str, rows: Sequence[Row], answers: Sequence[Done], encoded: bool) -> dict[str, Any]:
    """Return the body of /v1/embeddings."""
    data = []
    for row, answer in zip(rows, answers, strict=True):
        vector: np.ndarray = answer.value
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoded else vector.tolist()
        retex = {**answer.decision.body(), "truncated": row.truncated}
        data.append({"object": "embedding", "index": row.index, "embedding": shown, "retex": retex})
    return {**_listed("embd-", model, rows), "data": data}


def _listed(prefix: str, model: str, rows: Sequence[Row]) -> dict[str, Any]:
    read = sum(row.tokens for row in rows)
    return {
        "id": prefix + secrets.token_hex(12),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "usage": {"prompt_tokens": read, "total_tokens": read},
    }


def model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return the body of /v1/models."""
    return {"object": "list", "data": [model_entry(name, created) for name in names]}


def model_entry(name: str, created: int) -> dict[str, Any]:
    """Return the body of /v1/models/NAME."""
    return {"id": name, "object": "model", "created": created, "owned_by": "retex"}
