"""Prompts as token ids: of a text, of token ids, or of the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import first_line
from .errors import ApiError

Tokenizers = Callable[[str | None], Any]
Encode = Callable[[str | None], list[int]]


def encode_text(text: str, tokenizers: Tokenizers) -> Encode:
    """Return what encodes a text by the tokenizer of a task, special tokens included."""

    @cache
    def encode(owner: str | None) -> list[int]:
        return list(tokenizers(owner)(text)["input_ids"])

    return encode


def encode_ids(ids: list[int], made_for: str | None) -> Encode:
    """Return what gives token ids as they are, to tasks whose tokenizer they come from."""

    def encode(owner: str | None) -> list[int]:
        if owner != made_for:
            raise ApiError(
                400,
                f"The prompt was routed to {owner!r}, which has a tokenizer of its own: send a text instead of token "
                "ids, or name the task.",
                param="prompt",
            )
        return ids

    return encode


def encode_chat(messages: list[dict[str, str]], tokenizers: Tokenizers) -> Encode:
    """Return what encodes a chat by the template of a task's tokenizer, up to the beginning of the answer."""

    @cache
    def encode(owner: str | None) -> list[int]:
        tokenizer = tokenizers(owner)
        if not tokenizer.chat_template:
            raise ApiError(
                400,
                "The tokenizer of this model has no chat template: use /v1/completions, or save a template with it.",
                param="messages",
                code="no_chat_template",
            )
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise errors of their own, such as for roles that do not alternate
            raise ApiError(
                400, f"The chat template does not take these messages: {first_line(error)[:200]}", param="messages"
            ) from None
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode
