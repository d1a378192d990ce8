"""A tokenizer that threads share."""

from __future__ import annotations

from collections.abc import Sequence

from ..artifact.preprocess import Preprocessor
from ..errors import first_line
from .errors import ApiError


class SharedTokenizer:
    """The tokenizer of a preprocessor, used by one thread at a time.

    A call of a fast tokenizer sets its padding and truncation before it runs, so concurrent calls would run with each
    other's, or fail.
    """

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._tokenizer, self._lock = preprocessor.tokenizer, preprocessor.lock

    @property
    def pad_token_id(self) -> int:
        """Return the token that fills a batch."""
        return self._tokenizer.pad_token_id

    def ids(self, *texts: str, special: bool = True) -> list[int]:
        """Return the token ids of a text, or of a pair of texts, untruncated; with special tokens or without."""
        with self._lock:
            return list(self._tokenizer(*texts, add_special_tokens=special)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        with self._lock:
            return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat by the tokenizer's template, up to the beginning of the answer."""
        if not self._tokenizer.chat_template:
            raise ApiError(
                400,
                "The tokenizer of this model has no chat template: use /v1/completions, or save a template with it.",
                param="messages",
                code="no_chat_template",
            )
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise errors of their own, such as for roles that do not alternate
            raise ApiError(
                400, f"The chat template does not take these messages: {first_line(error)[:200]}", param="messages"
            ) from None
        return self.ids(text, special=False)
