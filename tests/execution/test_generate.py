"""A mixed batch generates, row by row, what the experts generate on their own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from families import VOCAB, images, tokens
from helpers import MIXED, TASKS, assert_same, build_retex, rows_of, take
from open_clip import coca_model
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
)

from retex_hf import InputError

DECODERS = ["gpt2", "llama-tied", "llama-untied", "mixtral", "mamba"]
ENCODER_DECODERS = ["t5", "bart", "whisper"]
# No token twice: greedy random models would repeat one token for ever.
OPTIONS = {"max_new_tokens": 7, "do_sample": False, "no_repeat_ngram_size": 1}
PAD = 0


def prompts(rows: int) -> dict[str, Tensor]:
    """Token ids with left padding of different lengths."""
    ids = torch.randint(3, VOCAB, (rows, 6))
    mask = (torch.arange(6) >= torch.randint(0, 4, (rows, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@cache
def case(name: str):
    """A model, its experts and a batch, for tests that leave them as they are."""
    torch.manual_seed(0)
    model, experts = build_retex(name)
    rows = len(MIXED)
    if name == "whisper":
        return model, experts, {"input_features": torch.randn(rows, 8, 32)}
    return model, experts, prompts(rows) if name in DECODERS else tokens(rows)


def tokens_of(expert, inputs: dict[str, Tensor], step: int) -> list[int]:
    """What an expert emits at a step: as end-of-sequence tokens they stop it there, and the others elsewhere."""
    generated = expert.generate(**inputs, **OPTIONS, min_new_tokens=OPTIONS["max_new_tokens"])
    return generated[:, step - OPTIONS["max_new_tokens"]].unique().tolist()


def assert_rows(mixed: Tensor, alone: Tensor, task: str, per_row: int = 1) -> None:
    """The rows of a task are what the expert gave alone, padded on the right."""
    own = mixed.unflatten(0, (-1, per_row))[rows_of(task)].flatten(0, 1)
    assert torch.equal(own[:, : alone.shape[1]], alone)
    assert (own[:, alone.shape[1] :] == PAD).all()


@pytest.mark.parametrize("name", DECODERS + ENCODER_DECODERS)
def test_greedy_rows_equal_the_experts_own(name):
    model, experts, inputs = case(name)
    mixed = model.generate(**inputs, **OPTIONS, task=MIXED)
    assert mixed.routing.tasks == MIXED
    for task in TASKS:
        assert_rows(mixed, experts[task].generate(**take(inputs, rows_of(task)), **OPTIONS), task)


@pytest.mark.parametrize("name", [*DECODERS, "t5", "bart"])
def test_groups_that_finish_early_are_padded(name):
    model, experts, inputs = case(name)
    stop = tokens_of(experts["red"], take(inputs, rows_of("red")), step=1)
    options = OPTIONS | {"eos_token_id": stop}
    mixed = model.generate(**inputs, **options, task=MIXED)
    alone = {task: experts[task].generate(**take(inputs, rows_of(task)), **options) for task in TASKS}
    assert alone["red"].shape[1] < mixed.shape[1]
    for task in TASKS:
        assert_rows(mixed, alone[task], task)


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "mixtral"])
def test_beams_and_return_sequences(name):
    model, experts, inputs = case(name)
    options = OPTIONS | {"num_beams": 3, "num_return_sequences": 2}
    mixed = model.generate(**inputs, **options, task=MIXED)
    assert len(mixed) == 2 * len(MIXED)
    for task in TASKS:
        assert_rows(mixed, experts[task].generate(**take(inputs, rows_of(task)), **options), task, per_row=2)


DETAILS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


@pytest.fixture(params=["llama-untied", "t5"])
def detailed(request):
    model, experts = build_retex(request.param)
    inputs = prompts(len(MIXED)) if request.param in DECODERS else tokens(len(MIXED))
    model.generate(**inputs, task=MIXED, max_new_tokens=1)  # experts are at hand when the setting changes
    model.set_attn_implementation("eager")
    for expert in experts.values():
        expert.set_attn_implementation("eager")
    return model, experts, inputs


@pytest.mark.parametrize("beams", [1, 3])
def test_everything_that_generate_returns_is_put_back(detailed, beams):
    model, experts, inputs = detailed
    returned = min(beams, 2)
    stop = tokens_of(experts["blue"], take(inputs, rows_of("blue")), step=2)
    options = OPTIONS | DETAILS | {"num_beams": beams, "num_return_sequences": returned, "eos_token_id": stop}
    mixed = model.generate(**inputs, **options, task=MIXED)
    assert mixed.past_key_values is None
    for task in TASKS:
        rows = rows_of(task)
        alone = experts[task].generate(**take(inputs, rows), **options)
        assert type(mixed) is type(alone)
        assert set(mixed) == set(alone) - {"past_key_values"}
        assert_rows(mixed.sequences, alone.sequences, task, per_row=returned)
        fields = [field for field, value in alone.items() if isinstance(value, tuple)]
        assert any("attentions" in field for field in fields) and any("hidden" in field for field in fields)
        for field in fields:
            own = select(mixed[field], rows, len(alone[field]))
            assert_same(own, alone[field], rtol=1e-3, atol=1e-4)
        if beams > 1:
            torch.testing.assert_close(
                mixed.sequences_scores.unflatten(0, (-1, returned))[rows].flatten(), alone.sequences_scores
            )


def select(field, rows: list[int], steps: int | None = None):
    """The entries of a field that belong to some rows, for the first steps (or layers of an encoder)."""
    if isinstance(field, tuple):
        return tuple(select(part, rows) for part in field[:steps])
    return field.unflatten(0, (len(MIXED), -1))[rows].flatten(0, 1)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_transition_scores_agree_with_separate_runs(name, beams):
    model, experts, inputs = case(name)
    stop = tokens_of(experts["red"], take(inputs, rows_of("red")), step=2)
    options = OPTIONS | {"num_beams": beams, "eos_token_id": stop}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    mixed = model.generate(**inputs, **options, task=MIXED)
    beam_indices = mixed.beam_indices if beams > 1 else None
    scores = model.compute_transition_scores(mixed.sequences, mixed.scores, beam_indices, normalize_logits=beams == 1)
    for task in TASKS:
        alone = experts[task].generate(**take(inputs, rows_of(task)), **options)
        expected = experts[task].compute_transition_scores(
            alone.sequences, alone.scores, alone.beam_indices if beams > 1 else None, normalize_logits=beams == 1
        )
        own = scores[rows_of(task)]
        torch.testing.assert_close(own[:, : expected.shape[1]], expected, rtol=1e-3, atol=1e-4)
        assert (own[:, expected.shape[1] :] == 0).all()


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_positional_inputs(name):
    model, _, inputs = case(name)
    expected = model.generate(**inputs, **OPTIONS, task=MIXED)
    mask = inputs["attention_mask"]
    assert torch.equal(model.generate(inputs["input_ids"], attention_mask=mask, **OPTIONS, task=MIXED), expected)
    assert torch.equal(model.generate(inputs=inputs["input_ids"], attention_mask=mask, **OPTIONS, task=MIXED), expected)


def test_inputs_embeds_give_new_tokens_only():
    model, experts, inputs = case("llama-untied")
    embeds, mask = torch.randn(len(MIXED), 6, 16), inputs["attention_mask"]
    mixed = model.generate(inputs_embeds=embeds, attention_mask=mask, **OPTIONS, task=MIXED)
    for task in TASKS:
        own = take({"inputs_embeds": embeds, "attention_mask": mask}, rows_of(task))
        assert_rows(mixed, experts[task].generate(**own, **OPTIONS), task)


def test_a_generation_config_object_is_followed():
    model, experts, inputs = case("gpt2")
    stop = tokens_of(experts["red"], take(inputs, rows_of("red")), step=1)
    config = GenerationConfig(
        max_new_tokens=5, no_repeat_ngram_size=1, num_beams=2, eos_token_id=stop, pad_token_id=39, do_sample=False
    )
    mixed = model.generate(**inputs, generation_config=config, task=MIXED)
    alone = {task: experts[task].generate(**take(inputs, rows_of(task)), generation_config=config) for task in TASKS}
    assert len({len(part[0]) for part in alone.values()}) > 1
    for task, part in alone.items():
        assert torch.equal(mixed[rows_of(task), : part.shape[1]], part)
        assert (mixed[rows_of(task), part.shape[1] :] == 39).all()


def test_the_models_own_generation_config_is_followed_also_after_a_call():
    model, experts = build_retex("gpt2")
    inputs = prompts(len(MIXED))
    model.generate(**inputs, task=MIXED, max_new_tokens=2)
    for option, value in {"max_new_tokens": 4, "num_beams": 2, "no_repeat_ngram_size": 1}.items():
        setattr(model.generation_config, option, value)
    mixed = model.generate(**inputs, task=MIXED)
    for task in TASKS:
        options = {"max_new_tokens": 4, "num_beams": 2, "no_repeat_ngram_size": 1}
        assert_rows(mixed, experts[task].generate(**take(inputs, rows_of(task)), **options), task)


def test_without_a_padding_token_the_end_token_pads():
    model, experts, inputs = case("gpt2")
    stop = tokens_of(experts["red"], take(inputs, rows_of("red")), step=1)
    before, model.generation_config.pad_token_id = model.generation_config.pad_token_id, None
    try:
        mixed = model.generate(**inputs, **OPTIONS, eos_token_id=stop, task=MIXED)
    finally:
        model.generation_config.pad_token_id = before
    alone = experts["red"].generate(**take(inputs, rows_of("red")), **OPTIONS, eos_token_id=stop, pad_token_id=stop[0])
    own = mixed[rows_of("red")]
    assert alone.shape[1] < mixed.shape[1]
    assert torch.equal(own[:, : alone.shape[1]], alone)
    assert (own[:, alone.shape[1] :] == stop[0]).all()


def test_as_many_processors_as_rows_all_reach_every_group():
    model, _, inputs = case("gpt2")
    inputs = take(inputs, [0, 1])
    first = model.generate(**inputs, **OPTIONS, task=["red", "green"])[:, 6].tolist()
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor([token]) for token in reversed(first)])
    again = model.generate(**inputs, **OPTIONS, logits_processor=processors, task=["red", "green"])
    assert not set(again[:, 6:].flatten().tolist()) & set(first)


class TokenOfRow(LogitsProcessor):
    """Asks for another token in each row of the batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores))
        return scores.index_put((rows, rows + 5), torch.tensor(1e6))


class StopOfRow(StoppingCriteria):
    """Stops the first row of the batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        return torch.arange(len(input_ids)) == 0


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("logits_processor", TokenOfRow()),
        ("logits_processor", PrefixConstrainedLogitsProcessor(lambda row, _: [row + 5], 1)),
        ("stopping_criteria", StopOfRow()),
    ],
)
def test_what_may_look_at_the_places_of_rows_is_refused_for_several_experts(name, entry):
    model, _, inputs = case("gpt2")
    with pytest.raises(InputError, match=f"'{name}' holds a {type(entry).__name__}, .* the 3 experts"):
        model.generate(**inputs, **OPTIONS, **{name: [entry]}, task=MIXED)


def test_what_may_look_at_the_places_of_rows_serves_one_expert():
    model, _, inputs = case("gpt2")
    output = model.generate(**inputs, max_new_tokens=2, logits_processor=[TokenOfRow()], task="red")
    assert output[:, 6].tolist() == [5 + row for row in range(len(output))]


@pytest.mark.parametrize("name", ["streamer", "prefix_allowed_tokens_fn", "assistant_model"])
def test_what_serves_one_generation_is_refused_for_several_experts(name):
    model, _, inputs = case("gpt2")
    with pytest.raises(InputError, match=f"'{name}' cannot serve the 3 experts"):
        model.generate(**inputs, **OPTIONS, **{name: lambda *_: [1]}, task=MIXED)


@pytest.mark.parametrize(
    ("name", "value"), [("prompt_lookup_num_tokens", 2), ("assistant_early_exit", 1), ("use_mtp", True)]
)
def test_assisted_generation_is_refused_for_several_experts(name, value):
    model, _, inputs = case("gpt2")
    says = f"^'{name}' cannot serve the 3 experts this batch needs: call once per task with task=.$"
    with pytest.raises(InputError, match=says):
        model.generate(**inputs, **OPTIONS, **{name: value}, task=MIXED)
    with pytest.raises(InputError, match=says):
        model.generate(**inputs, generation_config=GenerationConfig(**OPTIONS, **{name: value}), task=MIXED)


def test_assisted_generation_that_the_model_is_set_to_is_refused_unless_switched_off():
    model, _ = build_retex("gpt2")
    inputs = prompts(2)
    expected = model.generate(**inputs, **OPTIONS, task=MIXED[:2])
    model.generation_config.prompt_lookup_num_tokens = 2
    with pytest.raises(InputError, match="'prompt_lookup_num_tokens' cannot serve the 2 experts"):
        model.generate(**inputs, **OPTIONS, task=MIXED[:2])
    off = model.generate(**inputs, **OPTIONS, prompt_lookup_num_tokens=None, task=MIXED[:2])
    assert torch.equal(off, expected)
    model(**inputs, task=MIXED[:2])  # which generates nothing


def test_assisted_generation_serves_one_expert():
    model, experts, inputs = case("gpt2")
    row = take(inputs, rows_of("red")[:1])
    output = model.generate(**row, max_new_tokens=3, do_sample=False, prompt_lookup_num_tokens=2, task=["red"])
    assert torch.equal(output, experts["red"].generate(**row, max_new_tokens=3, do_sample=False))


def test_what_serves_one_generation_is_allowed_for_one_expert():
    model, _, inputs = case("gpt2")
    output = model.generate(**inputs, max_new_tokens=3, prefix_allowed_tokens_fn=lambda *_: [5], task="red")
    assert (output[:, 6:] == 5).all()


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_routed_generation_follows_what_identify_says(name):
    model, _, inputs = case(name)
    references = {task: [take(inputs, rows_of(task))] for task in TASKS}
    model.retex_config = replace(model.retex_config, signature_rank=1)
    model.fit_signatures(references, progress=False)
    routing = model.identify(**inputs)
    assert len(set(routing.tasks)) > 1
    routed = model.generate(**inputs, **OPTIONS)
    assert routed.routing.tasks == routing.tasks
    assert torch.equal(routed, model.generate(**inputs, **OPTIONS, task=routing.tasks))


def test_routed_generation_takes_inputs_and_mask_as_generate_does():
    model, _, inputs = case("gpt2")
    model.fit_signatures({task: [take(inputs, rows_of(task))] for task in TASKS}, progress=False)
    expected = model.generate(**inputs, **OPTIONS)
    positional = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **OPTIONS)
    assert torch.equal(positional, expected)
    assert positional.routing.tasks == expected.routing.tasks


def test_whisper_segments_follow_the_rows():
    model, experts = build_retex("whisper")
    for module in (model, *experts.values()):
        module.generation_config.no_timestamps_token_id = 30  # tokens from 31 on are times
    sounds = torch.randn(len(MIXED), 8, 32)
    options = {"max_new_tokens": 6, "return_segments": True, "return_timestamps": True}
    mixed = model.generate(input_features=sounds, **options, task=MIXED)

    def described(segments):
        return [
            [(float(part["start"]), float(part["end"]), part["tokens"].tolist()) for part in row] for row in segments
        ]

    for task in TASKS:
        alone = experts[task].generate(input_features=sounds[rows_of(task)], **options)
        assert_rows(mixed["sequences"], alone["sequences"], task)
        assert [described(mixed["segments"])[row] for row in rows_of(task)] == described(alone["segments"])


@pytest.fixture
def coca(monkeypatch):
    """Captions by OpenCLIP's own sampling loop; its beam search needs a class that transformers 5 no longer has, and
    the import that fails for it switches the loop off too."""
    monkeypatch.setattr(coca_model, "_has_transformers", True)
    monkeypatch.setitem(coca_model.GENERATION_TYPES, "top_k", TopKLogitsWarper)
    model, experts = build_retex("open_clip-coca")
    options = {"generation_type": "top_k", "seq_len": 7, "min_seq_len": 1, "sot_token_id": 1, "repetition_penalty": 5.0}
    return model, experts, images(len(MIXED))["pixel_values"], options


def test_coca_captions(coca):
    model, experts, pictures, options = coca
    mixed = model.generate(pictures, **options, eos_token_id=2, task=MIXED)
    for task in TASKS:
        assert_rows(mixed, experts[task].generate(pictures[rows_of(task)], **options, eos_token_id=2), task)


def test_coca_captions_of_different_lengths_are_padded_with_its_own_token(coca):
    model, experts, pictures, options = coca
    free = experts["green"].generate(pictures[rows_of("green")], **options, eos_token_id=VOCAB - 1)
    stop = int(free[0, 1])
    alone = {task: experts[task].generate(pictures[rows_of(task)], **options, eos_token_id=stop) for task in TASKS}
    assert len({part.shape[1] for part in alone.values()}) > 1
    mixed = model.generate(pictures, **options, eos_token_id=stop, task=MIXED)
    for task in TASKS:
        assert_rows(mixed, alone[task], task)
