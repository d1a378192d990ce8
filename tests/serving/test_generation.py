"""Texts through the real client equal those of `RetexModel` itself: alone, in mixed batches, whole and as streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from helpers import TASKS
from served_models import Endpoint, llama, llama_with_a_word, served, t5, texts
from signed import make_tokenizer

from retex_hf.serving.sampling import Sampling

TOKENIZER = make_tokenizer()
LONG = 12


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def decoder(artifact) -> Iterator[Endpoint]:
    with served(artifact, max_wait_ms=20) as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=["grouped", "mixed"])
def either_way(request, artifact) -> Iterator[Endpoint]:
    with served(artifact, execution=request.param, max_wait_ms=20) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory) -> Iterator[Endpoint]:
    with served(t5(tmp_path_factory.mktemp("t5")), max_wait_ms=20) as endpoint:
        yield endpoint


@torch.no_grad()
def expected(
    endpoint: Endpoint, text: str, model: str = "auto", length: int = LONG
) -> tuple[str, str | None, list[int]]:
    """What the model itself gives for a text alone: the generated text, the task, and the tokens."""
    routed, inputs = endpoint.model, TOKENIZER(text, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": length}
    if model == "merged":
        with routed.disable_adapter():
            output, task = routed.generate(**inputs, **options), None
    else:
        output = routed.generate(**inputs, **options, task=None if model == "auto" else model)
        task = output.routing.tasks[0]
    prompt = inputs["input_ids"][0].tolist()
    if routed.config.is_encoder_decoder:
        new, before = output[0, 1:].tolist(), []
    else:
        new, before = output[0, len(prompt) :].tolist(), prompt
    shown = new[: new.index(2)] if 2 in new else new
    whole = TOKENIZER.decode(before + shown, skip_special_tokens=True)
    return whole[len(TOKENIZER.decode(before, skip_special_tokens=True)) :], task, new


def ask(endpoint: Endpoint, text: str, **options: Any) -> Any:
    given = {"model": "auto", "max_tokens": LONG, "temperature": 0, **options}
    return endpoint.openai.completions.create(prompt=text, **given)


def read(stream: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """The texts and the reasons of a stream's choices, and its events."""
    found: dict[int, str] = {}
    reasons, events = {}, list(stream)
    for event in events:
        for choice in event.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            found[choice.index] = found.get(choice.index, "") + piece
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return found, reasons, events


@pytest.mark.parametrize("model", ["auto", "merged", "green"])
def test_texts_are_those_of_the_model(decoder, model):
    for text, _ in texts(4):
        answer = ask(decoder, text, model=model)
        wanted, task, tokens = expected(decoder, text, model)
        choice = answer.choices[0]
        assert (choice.text, choice.retex["task"]) == (wanted, task)
        assert choice.finish_reason == ("stop" if 2 in tokens else "length")
        assert answer.usage.prompt_tokens == len(text.split())
        assert answer.usage.completion_tokens == len(tokens)
        found, reasons, _ = read(ask(decoder, text, model=model, stream=True))
        assert (found, reasons) == ({0: wanted}, {0: choice.finish_reason})


@pytest.mark.parametrize("model", ["auto", "merged", "blue"])
def test_encoder_decoders_answer_completions(encoder_decoder, model):
    answered = 0
    for text, _ in texts(4):
        wanted, task, _ = expected(encoder_decoder, text, model)
        choice = ask(encoder_decoder, text, model=model).choices[0]
        assert (choice.text, choice.retex["task"]) == (wanted, task)
        found, _, _ = read(ask(encoder_decoder, text, model=model, stream=True))
        assert found == {0: wanted}
        answered += bool(wanted)
    assert answered >= 2


@torch.no_grad()
def test_a_task_is_asked_in_tokens_of_its_own(tmp_path):
    """The task is identified from the merged model's tokens, in which its own word is unknown."""
    own = make_tokenizer()
    own.add_tokens(["zaffre"])

    def generated(endpoint: Endpoint, tokenizer: Any, text: str, task: str) -> str:
        inputs = tokenizer(text, return_tensors="pt")
        output = endpoint.model.generate(**inputs, task=task, do_sample=False, max_new_tokens=LONG)[0].tolist()
        count = inputs["input_ids"].shape[1]
        end = output.index(2, count) if 2 in output[count:] else None
        before = tokenizer.decode(output[:count], skip_special_tokens=True)
        return tokenizer.decode(output[:end], skip_special_tokens=True)[len(before) :]

    asked = {"sky zaffre sea": "blue", "navy zaffre": "blue", "rose wine": "red", "moss fern": "green"}
    with served(llama_with_a_word(tmp_path, "blue", "zaffre"), max_wait_ms=20) as endpoint:
        answers = ask(endpoint, list(asked), model="auto").choices
        assert [one.retex["task"] for one in answers] == list(asked.values())
        for answer, (text, task) in zip(answers, asked.items(), strict=True):
            wanted = generated(endpoint, own if task == "blue" else TOKENIZER, text, task)
            assert answer.text == ask(endpoint, text, model=task).choices[0].text == wanted
        assert generated(endpoint, TOKENIZER, "navy zaffre", "blue") != answers[1].text


def test_mixtures_of_experts_answer(tmp_path):
    hard = []
    with served(llama(tmp_path, routing="soft", temperature=1.0), max_wait_ms=20) as endpoint:
        for text in ("rose sky", "moss ruby sea", "wine"):
            wanted, _, _ = expected(endpoint, text)
            assert ask(endpoint, text).choices[0].text == wanted
            found, _, _ = read(ask(endpoint, text, stream=True))
            assert found == {0: wanted}
            endpoint.model.routing = "hard"
            hard.append(expected(endpoint, text)[0] == wanted)
            endpoint.model.routing = "soft"
    assert not all(hard)


def test_concurrent_requests_of_all_kinds_get_what_each_gets_alone(either_way):
    """Different tasks, lengths, stop strings, models, plain and streaming: all in the same batches."""
    asked = []
    for number, (text, _) in enumerate(texts(36, seed=1)):
        model = ["auto", "auto", "merged", *TASKS][number % 6]
        asked.append((text, model, 1 + number % LONG, bool(number % 2)))
    wanted = [expected(either_way, text, model, length) for text, model, length, _ in asked]

    def run(one: tuple[str, str, int, bool]) -> tuple[str, str | None]:
        text, model, length, stream = one
        answer = ask(either_way, text, model=model, max_tokens=length, stream=stream)
        if not stream:
            return answer.choices[0].text, answer.choices[0].retex["task"]
        found, _, events = read(answer)
        return found[0], events[0].choices[0].retex["task"]

    batches = either_way.metric("retex_batch_rows_count")
    with ThreadPoolExecutor(36) as pool:
        found = list(pool.map(run, asked))
    assert found == [(text, task) for text, task, _ in wanted]
    assert either_way.metric("retex_batch_rows_count") - batches < 24  # they did run together


def test_probabilities_and_residuals_are_those_of_identify(decoder):
    text = "rose ruby wine"
    routing = decoder.model.identify(**TOKENIZER(text, return_tensors="pt"))
    response = decoder.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    found = response.json()["choices"][0]["retex"]
    assert found["task"] == routing.tasks[0] == "red"
    assert found["probability"] == pytest.approx(float(routing.probabilities[0].max()), abs=1e-4)
    assert found["abstained"] is False
    assert response.headers["x-retex-task"] == "red"
    assert float(response.headers["x-retex-probability"]) == pytest.approx(found["probability"], abs=1e-4)
    assert response.headers["x-retex-abstained"] == "false"


def test_streams_name_the_task_in_headers_and_come_piece_by_piece(decoder):
    wanted, task, tokens = expected(decoder, "sky sea")
    body = {"prompt": "sky sea", "max_tokens": LONG, "stream": True, "stream_options": {"include_usage": True}}
    with decoder.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-retex-task"] == task == "blue"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    found, _, events = read(ask(decoder, "sky sea", stream=True, stream_options={"include_usage": True}))
    assert found == {0: wanted}
    pieces = [event.choices[0].text for event in events if event.choices and event.choices[0].text]
    assert len(pieces) == len(wanted.split())  # a word is a token
    assert events[-1].choices == []
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (2, len(tokens))


def test_chats_go_through_the_template(decoder):
    messages = [
        {"role": "system", "content": "poppy"},
        {"role": "user", "content": [{"type": "text", "text": "ruby "}, {"type": "text", "text": "wine"}]},
    ]
    wanted, task, _ = expected(decoder, "poppy ruby wine rose", length=5)
    options = {"model": "auto", "messages": messages, "temperature": 0}
    answer = decoder.openai.chat.completions.create(**options, max_tokens=5)
    assert (answer.choices[0].message.content, answer.choices[0].retex["task"]) == (wanted, task)
    assert answer.choices[0].message.role == "assistant"
    found, _, events = read(decoder.openai.chat.completions.create(**options, max_completion_tokens=5, stream=True))
    assert found == {0: wanted}
    assert events[0].choices[0].delta.role == "assistant"
    assert events[0].object == "chat.completion.chunk"
    # Without a limit, an answer ends with the model's 64 positions.
    long = decoder.openai.chat.completions.create(**options)
    assert long.usage.total_tokens == 64 or long.choices[0].finish_reason == "stop"


def test_prompts_as_token_ids_several_prompts_and_echo(decoder):
    both = ["rose ruby", "sky sea denim"]
    ids = [TOKENIZER(text)["input_ids"] for text in both]
    wanted = [expected(decoder, text)[0] for text in both]
    assert [choice.text for choice in ask(decoder, both).choices] == wanted
    assert [choice.text for choice in ask(decoder, ids).choices] == wanted
    assert ask(decoder, ids[1]).choices[0].text == wanted[1]
    echoed = ask(decoder, both, echo=True).choices
    assert [choice.text for choice in echoed] == [both[0] + wanted[0], both[1] + wanted[1]]
    found, _, _ = read(ask(decoder, ids, echo=True, stream=True))
    assert found == {0: both[0] + wanted[0], 1: both[1] + wanted[1]}


def test_stop_strings_end_a_text_before_them(decoder):
    text = next(text for text, _ in texts(20) if len(set(expected(decoder, text)[0].split())) > 3)
    wanted = expected(decoder, text)[0]
    words = wanted.split()
    stop = next(word for place, word in enumerate(words) if place > 1 and word not in words[:place])
    for stream in (False, True):
        answer = ask(decoder, text, stop=["nowhere", stop], stream=stream)
        found, reason = (answer.choices[0].text, answer.choices[0].finish_reason) if not stream else ("", "")
        if stream:
            pieces, reasons, _ = read(answer)
            found, reason = pieces[0], reasons[0]
        assert (found, reason) == (wanted[: wanted.index(stop)], "stop")


@torch.no_grad()
def drawn(endpoint: Endpoint, text: str, sampling: Sampling, length: int) -> str:
    """What a row draws with its own random numbers, computed step by step."""
    model, ids = endpoint.model, TOKENIZER(text, return_tensors="pt")["input_ids"]
    task, generator, prompt = model.identify(input_ids=ids).tasks[0], sampling.generator(), ids.shape[1]
    for _ in range(length):
        token = sampling.draw(model(input_ids=ids, task=task).logits[0, -1], generator)
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
        if token == 2:
            break
    return TOKENIZER.decode([token for token in ids[0, prompt:].tolist() if token != 2], skip_special_tokens=True)


def test_samples_depend_on_the_seed_and_not_on_the_batch(either_way):
    given = [
        (text, Sampling(0.5 + number % 3 / 2, 0.8, seed=number)) for number, (text, _) in enumerate(texts(12, seed=3))
    ]

    def run(one: tuple[str, Sampling]) -> str:
        text, sampling = one
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        return ask(either_way, text, max_tokens=6, **options).choices[0].text.strip()

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(run, given))
    assert found == [drawn(either_way, text, sampling, 6) for text, sampling in given]
    assert len(set(found)) > 6


def test_several_samples_of_a_prompt(decoder):
    answer = ask(decoder, "rose wine", n=3, temperature=1.5, seed=7, max_tokens=6)
    wanted = [drawn(decoder, "rose wine", Sampling(1.5, seed=7 + number), 6) for number in range(3)]
    assert [choice.text.strip() for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 2  # once, not three times
    assert len({ask(decoder, "rose", temperature=2, max_tokens=8).choices[0].text for _ in range(6)}) > 1  # no seed


def test_without_settings_the_model_decides_how_tokens_are_chosen(decoder):
    text = "fern moss"
    answer = decoder.openai.completions.create(model="auto", prompt=text, max_tokens=5)
    assert answer.choices[0].text == expected(decoder, text, length=5)[0]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": "rose " * 64}, 400, "^The prompt has 64 tokens; at most 63 are read.$"),
        ({"prompt": "rose " * 60, "max_tokens": 5}, 400, "has 60 tokens and max_tokens is 5; the model takes 64"),
        ({"prompt": ""}, 400, "^The prompt has no tokens: expected a text that is not empty.$"),
        ({"prompt": [999]}, 400, "^The prompt has the token 999; there are 28, from 0.$"),
        ({"prompt": "rose", "model": "violet"}, 404, "no model 'violet'; the models are 'auto', 'merged', 'red', "),
    ],
)
def test_prompts_that_do_not_fit_are_refused(decoder, body, status, says):
    with pytest.raises(openai.APIStatusError) as refused:
        decoder.openai.completions.create(**{"model": "auto", **body})
    assert refused.value.status_code == status
    assert re.search(says, refused.value.body["message"]), refused.value.body


def test_abstentions_are_said(artifact):
    with served(artifact, routing={"method": "hard", "far": "merged"}) as endpoint:
        odd = "[UNK] [UNK] [SEP] [CLS]"
        for text, far in (("rose ruby wine poppy", False), (odd, True)):
            output = endpoint.model.generate(
                **TOKENIZER(text, return_tensors="pt"), do_sample=False, max_new_tokens=LONG
            )
            assert output.routing.abstained.tolist() == [far]
            response = endpoint.http.post("/v1/completions", json={"prompt": text, "max_tokens": LONG})
            choice = response.json()["choices"][0]
            assert choice["retex"]["abstained"] is far
            assert response.headers["x-retex-abstained"] == str(far).lower()
            if far:  # the merged model has answered
                assert choice["text"] == expected(endpoint, text, "merged")[0]
        assert endpoint.metric("retex_abstentions_total", task=choice["retex"]["task"]) == 1
