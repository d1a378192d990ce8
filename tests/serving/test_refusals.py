"""Requests of untrusted clients: every one gets an answer in OpenAI's shape and one sentence, and nothing breaks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served_models import Endpoint, classifier, llama, served

from retex_hf.serving import http

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/classify")
CHAT = [{"role": "user", "content": "rose"}]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Iterator[Endpoint]:
    limits = {"max_rows": 4, "max_bytes": 2000, "max_tokens": 8}
    with served(llama(tmp_path_factory.mktemp("llama")), **limits) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> Iterator[Endpoint]:
    with served(classifier(tmp_path_factory.mktemp("bert")), max_rows=4, max_bytes=2000) as endpoint:
        yield endpoint


def refusal(response: Any, status: int = 400) -> dict[str, Any]:
    """The error of a response, which has OpenAI's shape and one sentence."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".") and "\n" not in error["message"] and len(error["message"]) < 500
    return error


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, not a list"),
        (b'{"prompt": "\xff"}', "is not text in UTF-8"),
        (b'{"prompt": "\\ud800"}', "half a character"),
        (b'{"n": NaN, "prompt": "rose"}', "NaN is not a number"),
        (b'{"prompt": "rose", "prompt": "wine"}', "'prompt' appears twice"),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "nested too deeply"),
        (b'{"prompt": "rose", "max_tokens": ' + b"9" * 1500 + b"}", "max_tokens must be an integer from 1 to 8, not"),
        (b'{"prompt": "rose", "temperature": 1e999}', "the number 1e999 is too large"),
    ],
)
def test_bodies_that_are_no_json(decoder, body, says):
    response = decoder.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert says in refusal(response)["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "prompt must be a text, a list of token ids, or a list of such."),
        ({"prompt": {"a": 1}}, "prompt", "prompt must be a text"),
        ({"prompt": []}, "prompt", "prompt must be a text"),
        ({"prompt": ["rose", 1]}, "prompt", "prompt must be a text"),
        ({"prompt": [True]}, "prompt", "prompt must be a text"),
        ({"prompt": [-1]}, "prompt", "prompt must be a text"),
        ({"prompt": ["rose"] * 5}, None, "The request has 5 rows; at most 4 are taken."),
        ({"prompt": ["rose", "wine"], "n": 3}, None, "The request has 6 rows; at most 4 are taken."),
        ({"n": 10**30}, "n", "n must be an integer from 1 to 4, not 1000000000000000000000000000000."),
        ({"n": True}, "n", "n must be an integer from 1 to 4, not True."),
        ({"max_tokens": 9}, "max_tokens", "max_tokens must be an integer from 1 to 8, not 9."),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be an integer from 1 to 8, not 1.5."),
        ({"temperature": 3}, "temperature", "temperature must be a number from 0 to 2, not 3."),
        ({"temperature": "hot"}, "temperature", "temperature must be a number from 0 to 2, not 'hot'."),
        ({"top_p": -0.1}, "top_p", "top_p must be a number from 0 to 1, not -0.1."),
        ({"seed": 2**70}, "seed", "seed must be an integer from"),
        ({"stop": [""]}, "stop", "stop must be a text, or a list of at most 16 texts"),
        ({"stop": ["a"] * 17}, "stop", "stop must be a text, or a list of at most 16 texts"),
        ({"stream": "yes"}, "stream", "stream must be true or false, not 'yes'."),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is for stream=true only."),
        ({"stream": True, "stream_options": {"all": 1}}, "all", "'all' is not supported here."),
        ({"model": 7}, "model", "model must be a text, not 7."),
        ({"logprobs": 3}, "logprobs", "logprobs=3 is not supported here."),
        ({"best_of": 2}, "best_of", "best_of=2 is not supported here: only 1 is."),
        (
            {"presence_penalty": 0.5},
            "presence_penalty",
            "presence_penalty=0.5 is not supported here: only 0 or 0.0 is.",
        ),
        ({"logit_bias": {"5": 100}}, "logit_bias", "is not supported here: only {} is."),
        ({"suffix": "end"}, "suffix", "suffix='end' is not supported here: only '' is."),
        ({"top_k": 5}, "top_k", "'top_k' is not supported here."),
        ({"guided_json": {}}, "guided_json", "'guided_json' is not supported here."),
    ],
)
def test_fields_that_are_wrong_or_not_supported(decoder, body, param, says):
    given = body if "prompt" in body or not body else {"prompt": "rose", **body}
    error = refusal(decoder.http.post("/v1/completions", json=given))
    assert error["param"] == param and says in error["message"], error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["rose"]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "rose"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "tool_calls"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": CHAT, "logprobs": True}, "logprobs"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_chats_that_are_wrong_or_not_supported(decoder, body, param):
    assert refusal(decoder.http.post("/v1/chat/completions", json=body))["param"] == param


def test_values_that_change_nothing_are_accepted(decoder):
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1, "user": "me", "n": None}
    assert decoder.http.post("/v1/completions", json={"prompt": "rose", **neutral}).status_code == 200
    chat = {"response_format": {"type": "text"}, "tools": None, "logprobs": False}
    assert decoder.http.post("/v1/chat/completions", json={"messages": CHAT, **chat}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": ["rose", ""]}, None),
        ({"input": ["rose", ["a", "b", "c"]]}, "input[1]"),
        ({"input": "rose", "top_k": 2}, "top_k"),
        ({"input": ["rose"] * 5}, None),
    ],
)
def test_inputs_that_are_wrong(labels, body, param):
    assert refusal(labels.http.post("/classify", json=body))["param"] == param


def test_what_a_model_does_not_do_is_refused_and_says_what_it_does(decoder, labels):
    assert "This model generates text: ask /v1/comp" in refusal(decoder.http.post("/classify", json={}))["message"]
    assert refusal(labels.http.post("/v1/embeddings", json={}))["message"] == "This model classifies: ask /classify."


def test_unknown_paths_methods_models_and_types(decoder):
    assert refusal(decoder.http.post("/v1/completions", json={"model": "", "prompt": "rose"}), 404)["param"] == "model"
    assert "no '/v2'" in refusal(decoder.http.get("/v2"), 404)["message"]
    assert "takes POST only" in refusal(decoder.http.get("/v1/completions"), 405)["message"]
    unknown = refusal(decoder.http.post("/v1/completions", json={"prompt": "rose", "model": "x" * 900}), 404)
    assert unknown["code"] == "model_not_found" and "the models are 'auto', 'merged', 'red', " in unknown["message"]
    assert refusal(decoder.http.get("/v1/models/violet"), 404)["code"] == "model_not_found"
    assert decoder.http.get("/v1/models/red").json()["id"] == "red"
    typed = decoder.http.post("/v1/completions", content=b'{"prompt": "rose"}', headers={"content-type": "text/plain"})
    assert refusal(typed, 415)["message"] == "The content type must be application/json."


def test_texts_that_are_too_long_are_not_tokenised(decoder, labels, monkeypatch):
    """A tokenizer may take minutes for a long word, and nothing else runs meanwhile."""
    for endpoint, path, body in (
        (decoder, "/v1/completions", {"prompt": "a" * 33}),
        (decoder, "/v1/completions", {"prompt": ["rose", "a" * 33]}),
        (decoder, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 33}]}),
        (labels, "/classify", {"input": ["rose", "a" * 33]}),
        (labels, "/classify", {"input": [["rose", "a" * 33]]}),
    ):
        monkeypatch.setattr(endpoint.service.options, "max_prompt_tokens", 1)
        error = refusal(endpoint.http.post(path, json=body))
        assert error["code"] == "text_too_long" and "at most 32 are read" in error["message"]


def test_bodies_that_are_too_large(decoder):
    large = {"prompt": "rose " * 1000}
    assert refusal(decoder.http.post("/v1/completions", json=large), 413)["code"] == "too_large"

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"rose " * 10

    chunked = decoder.http.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert refusal(chunked, 413)["code"] == "too_large"


def test_a_body_that_does_not_arrive(decoder, monkeypatch):
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", decoder.port), timeout=20) as client:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n"
        )
        client.sendall(head.encode() + b'{"prompt"')
        answer = ""
        while "}}" not in answer and (part := client.recv(4096)):  # head and body may come in two parts
            answer += part.decode()
    assert answer.startswith("HTTP/1.1 408") and "did not arrive" in answer


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["prompt", "messages", "input", "model", "n", "max_tokens", "temperature", "top_p", "stop", "stream", "seed",
     "echo", "stream_options", "logprobs", "user", "tools"]
)  # fmt: skip


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=st.dictionaries(FIELDS, JSON, max_size=4))
def test_no_body_makes_the_server_fail(decoder, labels, path, body):
    for endpoint in (decoder, labels):
        content = json.dumps(body).encode()
        response = endpoint.http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 404), (path, body, response.text)
        if response.status_code != 200:
            refusal(response, response.status_code)
