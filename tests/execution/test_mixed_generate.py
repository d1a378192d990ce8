"""`generate` on a mixed batch in one pass gives the tokens that group by group gives."""

from __future__ import annotations

import pytest
import torch
from families import VOCAB, tokens
from helpers import MIXED, TASKS, build_retex, rows_of
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import MaxTimeCriteria

from retex_hf import RetexModel

DECODERS = ["gpt2", "llama-tied", "llama-untied", "mamba"]
ENCODER_DECODERS = ["t5", "bart", "whisper"]
# No token twice: greedy random models would repeat one token for ever. transformers' beams take a padding token of 0
# for none, so it is another one here.
PAD = VOCAB - 1
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "no_repeat_ngram_size": 1, "pad_token_id": PAD}
ROWS = len(MIXED)


def prompts(rows: int, length: int = 6) -> dict[str, Tensor]:
    """Token ids with left padding of different lengths."""
    ids = torch.randint(3, PAD, (rows, length))
    mask = (torch.arange(length) >= torch.randint(0, length - 1, (rows, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def inputs_of(name: str, rows: int = ROWS) -> dict[str, Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 32)}
    return prompts(rows) if name in DECODERS else tokens(rows)


@pytest.fixture(scope="module")
def models() -> dict[str, RetexModel]:
    torch.manual_seed(0)
    return {name: build_retex(name, rank=4)[0] for name in DECODERS + ENCODER_DECODERS}


def both(model: RetexModel, inputs: dict, task=MIXED, **options):
    results = []
    for execution in ("grouped", "mixed"):
        model.execution = execution
        results.append(model.generate(**inputs, task=task, **OPTIONS | options))
    return results


def assert_tokens(model: RetexModel, inputs: dict, task=MIXED, **options) -> Tensor:
    grouped, mixed = both(model, inputs, task, **options)
    assert torch.equal(mixed, grouped)
    return mixed


@pytest.mark.parametrize("name", DECODERS + ENCODER_DECODERS)
def test_greedy(models, name):
    generated = assert_tokens(models[name], inputs_of(name))
    assert generated.routing.tasks == MIXED
    with models[name].disable_adapter():
        merged = models[name].generate(**inputs_of(name), **OPTIONS)
    assert merged.shape != generated.shape or not torch.equal(merged, generated)


@pytest.mark.parametrize("name", DECODERS + ENCODER_DECODERS)
def test_beams(models, name):
    assert_tokens(models[name], inputs_of(name), num_beams=3)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "t5", "bart"])
def test_beams_and_return_sequences(models, name):
    generated = assert_tokens(models[name], inputs_of(name), num_beams=4, num_return_sequences=2)
    assert len(generated) == 2 * ROWS


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "mamba"])
def test_rows_that_finish_early(models, name):
    model, inputs = models[name], inputs_of(name)
    whole = assert_tokens(model, inputs, min_new_tokens=6)
    stop = whole[rows_of("red"), -5].unique().tolist()
    generated = assert_tokens(model, inputs, eos_token_id=stop)
    assert 0 < (generated[:, -1] == PAD).sum() < ROWS


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_scores(models, name):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "min_new_tokens": 6}
    grouped, mixed = both(models[name], inputs_of(name), **options)
    assert type(mixed) is type(grouped) and torch.equal(mixed.sequences, grouped.sequences)
    assert len(mixed.logits) == len(grouped.logits) == 6
    for field in ("logits", "scores"):
        for ours, theirs in zip(mixed[field], grouped[field], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_scores_of_beams(models, name):
    options = {"return_dict_in_generate": True, "output_scores": True, "num_beams": 3, "num_return_sequences": 2}
    grouped, mixed = both(models[name], inputs_of(name), **options)
    assert torch.equal(mixed.sequences, grouped.sequences)
    torch.testing.assert_close(mixed.sequences_scores, grouped.sequences_scores, rtol=1e-4, atol=1e-5)
    assert torch.equal(mixed.beam_indices, grouped.beam_indices)


# 2 heads, prompts of 6 and 8 tokens, 32 positions and buckets: batches that equal, divide or are divided by them.
@pytest.mark.parametrize(
    ("name", "rows"), [*(("t5", rows) for rows in (1, 2, 3, 4, 8)), ("gpt2", 2), ("gpt2", 6), ("bart", 2), ("bart", 8)]
)
def test_as_many_rows_as_something_else_has_entries(models, name, rows):
    assert_tokens(models[name], inputs_of(name, rows), task=[TASKS[row % 3] for row in range(rows)])


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_prompts_of_other_lengths_than_the_probe_had(models, length):
    """A decoder's own prompt: its relative positions lead with the prompt's length."""
    inputs = inputs_of("t5", 4) | {"decoder_input_ids": torch.randint(3, PAD, (4, length))}
    assert_tokens(models["t5"], inputs, task=["red", "blue", "red", "green"])


def test_without_a_mask_and_with_default_lengths(models):
    ids = torch.randint(3, PAD, (4, 5))
    assert_tokens(models["gpt2"], {"input_ids": ids}, task=["red", "blue", "red", "green"], max_new_tokens=None)
    assert_tokens(models["gpt2"], {"inputs": ids}, task=["red", "blue", "red", "green"])


def test_encoder_outputs(models):
    model = models["t5"]
    inputs = inputs_of("t5")
    encoded = model.model.get_encoder()(**inputs)
    given = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}
    assert_tokens(model, given)


def test_mixtures_of_tasks(models):
    weights = torch.tensor([[1.0, 0, 0], [0.2, 0.3, 0.5], [0, 1.0, 0], [0.2, 0.3, 0.5], [0, 0.5, 0.5], [1.0, 0, 0]])
    assert_tokens(models["llama-untied"], inputs_of("llama-untied"), task=weights)


def test_without_a_cache(models):
    assert_tokens(models["gpt2"], inputs_of("gpt2"), use_cache=False)


def test_sampling_is_repeatable(models):
    model, inputs = models["t5"], inputs_of("t5")
    model.execution = "mixed"
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        samples.append(model.generate(**inputs, task=MIXED, do_sample=True, num_return_sequences=2, max_new_tokens=5))
    assert torch.equal(*samples) and len(samples[0]) == 2 * ROWS


def test_a_probe_calls_nothing_of_the_user(monkeypatch):
    model, _ = build_retex("gpt2", rank=4)
    lengths = []

    def stop(self, ids: Tensor, scores: Tensor, **_) -> Tensor:
        lengths.append(tuple(ids.shape))
        return torch.zeros(len(ids), dtype=torch.bool)

    model.execution = "mixed"
    monkeypatch.setattr(MaxTimeCriteria, "__call__", stop)
    criteria = [MaxTimeCriteria(max_time=600)]
    model.generate(**inputs_of("gpt2"), **OPTIONS, task=MIXED, stopping_criteria=criteria, eos_token_id=[])
    assert lengths == [(ROWS, 6 + step) for step in range(1, 7)]


def test_a_generation_config_set_after_a_call_is_followed():
    model, _ = build_retex("gpt2", rank=4)
    inputs = inputs_of("gpt2")
    model.execution = "mixed"
    model.generate(**inputs, task=MIXED, max_new_tokens=2)
    model.generation_config = GenerationConfig(max_new_tokens=3, min_new_tokens=3, pad_token_id=PAD, eos_token_id=2)
    assert model.generate(**inputs, task=MIXED).shape[1] == 6 + 3


def test_auto_takes_one_pass_where_experts_do_not_fit():
    model, _ = build_retex("t5", rank=2, expert_cache=0)
    inputs = inputs_of("t5")
    grouped, _ = both(model, inputs)
    model.expert_cache.clear()
    model.execution = "auto"
    assert torch.equal(model.generate(**inputs, task=MIXED, **OPTIONS), grouped)
    assert "mixed" in model.expert_cache and len(model.expert_cache) == 0
