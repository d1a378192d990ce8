"""Generated tokens as text, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .shared_tokenizer import SharedTokenizer

# Tokens of the prompt that the first ones are decoded with, so that a space between them stays.
CONTEXT = 5
UNFINISHED = "\ufffd"  # what part of a character is decoded as
# A character has at most this many bytes, so a longer run of unfinished tokens is none.
MOST_PARTS = 4


class TextStream:
    """Decodes tokens one by one; the pieces together are the text.

    A token is decoded with those before it, because tokenizers put spaces between tokens and split characters.

    Args:
        tokenizer: Decodes token ids.
        prompt: Token ids that the text follows on; none for encoder-decoders.
    """

    def __init__(self, tokenizer: SharedTokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._start, self._read = 0, len(self._ids)

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        self._ids.append(token)
        return self._pending(last=False)

    def finish(self) -> str:
        """Return what was held back because a character seemed unfinished."""
        return self._pending(last=True)

    def _pending(self, last: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before, now = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
        waits = now.endswith(UNFINISHED) and len(self._ids) - self._read < MOST_PARTS
        if (waits and not last) or len(now) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


class StopFinder:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be the beginning of one.

    >>> from retex_hf.serving.text_stream import StopFinder
    >>> finder = StopFinder(["end"])
    >>> finder.push("the e"), finder.push("arth e"), finder.push("nds"), finder.found
    ('the ', 'earth ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = [stop for stop in stops if stop], "", False

    def push(self, text: str) -> str:
        """Return the text that surely comes before a stop string."""
        if self.found:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        most = min(len(text), max(map(len, self._stops), default=1) - 1)
        kept = next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return "" if self.found else held
