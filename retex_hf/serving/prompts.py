"""Prompts as token ids: of a text, of token ids, or of the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .errors import ApiError
from .shared_tokenizer import SharedTokenizer

Tokenizers = Callable[[str | None], SharedTokenizer]
Encode = Callable[[str | None], list[int]]


def encode_text(text: str, tokenizers: Tokenizers) -> Encode:
    """Return what encodes a text by the tokenizer of a task, special tokens included."""

    @cache
    def encode(owner: str | None) -> list[int]:
        return tokenizers(owner).ids(text)

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
        return tokenizers(owner).chat(messages)

    return encode
