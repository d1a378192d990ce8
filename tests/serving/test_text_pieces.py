"""Texts in pieces: together they are the text, a character is never cut, and stop strings are never shown."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retex_hf.artifact.preprocess import Preprocessor
from retex_hf.serving.sampling import Sampling
from retex_hf.serving.shared_tokenizer import SharedTokenizer
from retex_hf.serving.text_stream import StopFinder, TextStream

WORDS = "der Fluß fließt übers Feld; 🐟🐠 日本語 тест, naïve café — the quick (brown) fox's jump."


def byte_level() -> PreTrainedTokenizerFast:
    """Tokens of few bytes, so that characters are split between tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([WORDS[:20]], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece's way: a token carries the space before it, and the first space of a text is dropped."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([WORDS], trainers.BpeTrainer(vocab_size=100))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def shared(tokenizer: PreTrainedTokenizerFast) -> SharedTokenizer:
    return SharedTokenizer(Preprocessor("text", lambda texts: {}, tokenizer))


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_pieces_are_the_text(make):
    tokenizer = make()
    ids = tokenizer(WORDS)["input_ids"]
    stream = TextStream(shared(tokenizer))
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids) == WORDS
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_a_text_follows_on_its_prompt_with_the_space_between(make):
    tokenizer = make()
    ids = tokenizer(WORDS)["input_ids"]
    for cut in range(1, len(ids)):
        if "\ufffd" in tokenizer.decode(ids[:cut]):
            continue  # a prompt does not end within a character
        stream = TextStream(shared(tokenizer), ids[:cut])
        text = "".join(stream.push(token) for token in ids[cut:]) + stream.finish()
        assert tokenizer.decode(ids[:cut]) + text == WORDS, cut


def test_half_a_character_at_the_end_is_shown_as_such():
    tokenizer = byte_level()
    ids = tokenizer("🐟")["input_ids"]
    assert len(ids) > 1
    stream = TextStream(shared(tokenizer))
    assert [stream.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.finish() == "\ufffd"


def test_stop_strings_are_found_across_pieces_of_any_size():
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("abc", k=draw.randint(1, 30)))
        stops = ["".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        finder, shown, rest = StopFinder(stops), "", text
        while rest and not finder.found:
            size = draw.randint(1, 5)
            shown += finder.push(rest[:size])
            rest = rest[size:]
        shown += finder.finish()
        places = [text.find(stop) for stop in stops if stop in text]
        found = finder.found
        assert found == bool(places)
        if not found:
            assert shown == text
        else:  # the first that is complete, which may be one that begins later than a longer one
            ends = min(text.find(stop) + len(stop) for stop in stops if stop in text)
            assert not any(stop in shown for stop in stops) and text.startswith(shown) and len(shown) < ends


def test_drawn_tokens_follow_the_distribution():
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=1)
    expected = torch.softmax(scores.double() / 0.7, 0)
    kept = torch.tensor([True, True, False, False])  # 0.77, 0.18: together above 0.9
    expected = torch.where(kept, expected, 0) / expected[kept].sum()
    torch.testing.assert_close(sampling.probabilities(scores), expected)
    generator = sampling.generator()
    drawn = torch.tensor([sampling.draw(scores, generator) for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert (shares - expected).abs().max() < 0.02
    again = sampling.generator()
    assert [sampling.draw(scores, again) for _ in range(50)] == drawn[:50].tolist()
    assert Sampling(temperature=1.0, top_k=1).probabilities(scores).tolist() == [1, 0, 0, 0]
    assert Sampling(temperature=1.0, top_p=0.0).probabilities(scores).tolist() == [1, 0, 0, 0]
    assert Sampling(temperature=2e-6).probabilities(1e4 * scores).tolist() == [1, 0, 0, 0]


def test_threads_share_a_tokenizer_that_is_set_in_different_ways():
    """One thread truncates and pads, others do not: each gets its own."""
    tokenizer, text = byte_level(), WORDS * 20
    tokenizer.pad_token = tokenizer.decode([0])
    preprocessor = Preprocessor(
        "text", lambda rows: tokenizer(rows, padding=True, truncation=True, max_length=5), tokenizer
    )
    free, length = SharedTokenizer(preprocessor), len(tokenizer(text)["input_ids"])

    def run(number: int) -> int:
        if number % 2:
            return len(preprocessor([text, "a"])["input_ids"][1])
        return len(free.ids(text))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(400))) == [length, 5] * 200
