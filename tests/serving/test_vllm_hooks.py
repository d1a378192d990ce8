"""Hooks of the vLLM plugin, on stand-ins that call their parts in the order of vLLM 0.32's handlers.

The handlers themselves run in examples/serving/vllm_check.py, which needs an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from retex_hf.errors import InputError, RetexError
from retex_hf.serving.vllm.headers import RoutingHeaders
from retex_hf.serving.vllm.hooks import hook_generation, hook_pooling, token_ids
from retex_hf.serving.vllm.plugin import RetexPlugin, check_slots
from retex_hf.serving.vllm.router import Decision

LABELS = {"red": {0: "rose", 1: "ruby"}, "blue": {0: "sky", 1: "sea"}}


async def route(prompts):
    """Token 1 is red's, token 2 is blue's, token 9 is nobody's."""
    tasks = {1: ("red", False), 2: ("blue", False), 9: ("blue", True)}
    return [Decision(tasks[prompt[0]][0], 0.75, 1.5, tasks[prompt[0]][1]) for prompt in prompts]


class Models:
    lora_requests = {"red": "adapter of red", "blue": "adapter of blue"}  # noqa: RUF012

    def model_name(self, lora_request=None):
        return "merged" if lora_request is None else lora_request.removeprefix("adapter of ")


class Client:
    """An engine that answers with the prompt and the adapter it ran on."""

    errored = False

    def generate(self, prompt, params, request_id, *, lora_request=None):
        assert set(prompt) == {"prompt_token_ids"}
        return f"{prompt['prompt_token_ids'][0]} on {lora_request}"


class Handler:
    """As vLLM's `BaseServing`, `OpenAIServingCompletion` and `OpenAIServingChat`."""

    def __init__(self):
        self.models, self.engine_client = Models(), Client()

    def _is_model_supported(self, name):
        return not name or name == "merged"

    def _maybe_get_adapters(self, request):
        if request.model in self.models.lora_requests:
            return self.models.lora_requests[request.model]
        assert self._is_model_supported(request.model)
        return None

    async def render_completion_request(self, request):
        known = self._is_model_supported(request.model) or request.model in self.models.lora_requests
        if not known:
            return SimpleNamespace(error=SimpleNamespace(code=404))
        return [{"prompt_token_ids": [token]} for token in request.prompt]

    async def create_completion(self, request, raw_request=None):
        inputs = await self.render_completion_request(request)
        if hasattr(inputs, "error"):
            return inputs
        lora = self._maybe_get_adapters(request)
        texts = [
            self.engine_client.generate(one, None, "id", lora_request=lora)
            for one in inputs
            for _ in range(request.n or 1)
        ]
        name = self.models.model_name(lora)
        if request.stream:
            return self._stream(texts, name)
        choices = [SimpleNamespace(index=index, text=text) for index, text in enumerate(texts)]
        return SimpleNamespace(choices=choices, model=name)

    async def _stream(self, texts, name):
        for part in ("first", "second"):
            for index, text in enumerate(texts):
                chunk = {"model": name, "choices": [{"index": index, "text": f"{part} {text}"}]}
                yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"


def ask(handler, prompt, model="auto", **options):
    """Ask through the middleware, as an ASGI server would; return headers and the answer."""
    request = SimpleNamespace(**{"model": model, "prompt": prompt, "n": None, "stream": False, **options})
    sent = []

    async def app(scope, receive, send):
        # vLLM runs a handler in a task of its own, to cancel it.
        answer = await asyncio.create_task(handler.create_completion(request))
        if hasattr(answer, "__aiter__"):
            answer = [event async for event in answer]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        sent.append(answer)

    async def send(message):
        sent.append({name.decode(): value.decode() for name, value in message["headers"]})

    asyncio.run(RoutingHeaders(app)({"type": "http"}, None, send))
    return sent


def hooked():
    handler = Handler()
    hook_generation(handler, route)
    return handler


@pytest.mark.parametrize("model", ["auto", None, ""])
def test_one_prompt_runs_on_its_adapter(model):
    headers, answer = ask(hooked(), [2], model)
    assert [choice.text for choice in answer.choices] == ["2 on adapter of blue"]
    assert answer.model == "blue"
    assert answer.choices[0].retex == {"task": "blue", "probability": 0.75, "abstained": False}
    routing = {"x-retex-task": "blue", "x-retex-probability": "0.7500", "x-retex-abstained": "false"}
    assert headers == {"a": "b", **routing}


def test_every_prompt_of_a_request_runs_on_its_own_adapter():
    headers, answer = ask(hooked(), [1, 2, 9, 1], n=2)
    on = ["1 on adapter of red", "2 on adapter of blue", "9 on None", "1 on adapter of red"]
    assert [choice.text for choice in answer.choices] == [text for text in on for _ in range(2)]
    assert [choice.retex["task"] for choice in answer.choices[::2]] == ["red", "blue", "blue", "red"]
    assert [choice.retex["abstained"] for choice in answer.choices[::2]] == [False, False, True, False]
    assert answer.model == "auto" and headers["x-retex-task"] == "red,blue,blue,red"


def test_abstention_runs_the_merged_model():
    headers, answer = ask(hooked(), [9, 9])
    assert [choice.text for choice in answer.choices] == ["9 on None"] * 2
    assert answer.model == "merged" and headers["x-retex-abstained"] == "true,true"


@pytest.mark.parametrize("model", ["red", "merged"])
def test_a_named_model_is_not_routed(model):
    headers, answer = ask(hooked(), [2, 2], model)
    adapter = {"red": "adapter of red", "merged": None}[model]
    assert [choice.text for choice in answer.choices] == [f"2 on {adapter}"] * 2
    assert headers == {"a": "b"} and answer.model == model and not hasattr(answer.choices[0], "retex")


def test_unknown_models_stay_unknown():
    assert ask(hooked(), [1], "green")[1].error.code == 404
    assert ask(Handler(), [1], "auto")[1].error.code == 404  # of an endpoint that is not routed


def test_a_stream_names_the_task_of_each_choice_once():
    _, events = ask(hooked(), [1, 2], stream=True)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert events[-1] == "data: [DONE]\n\n"
    assert [chunk["choices"][0].get("retex", {}).get("task") for chunk in chunks] == ["red", "blue", None, None]
    assert chunks[3]["choices"][0]["text"] == "second 2 on adapter of blue"
    assert {chunk["model"] for chunk in chunks} == {"auto"}
    _, events = ask(hooked(), [1], stream=True)
    assert [json.loads(event.removeprefix("data: "))["model"] for event in events[:-1]] == ["red", "red"]


def test_refusals():
    with pytest.raises(InputError, match="cannot share a beam search"):
        ask(hooked(), [1, 2], use_beam_search=True)
    ask(hooked(), [1, 1], use_beam_search=True)
    for prompt in ({"prompt_embeds": 1}, {"prompt_token_ids": [1], "mm_placeholders": {"image": 1}}):
        with pytest.raises(InputError, match="text alone"):
            token_ids(prompt)
    with pytest.raises(RetexError, match=r"SimpleNamespace has no '_maybe_get_adapters': .* written for 0.32"):
        hook_generation(SimpleNamespace(_is_model_supported=None), route)


# ---- embeddings and classes ------------------------------------------------------------------------------------------


class JSONResponse:
    media_type, status_code = "application/json", 200

    def __init__(self, content, status_code=200):
        self.body = json.dumps(content).encode()


class Classifier:
    """As vLLM's `PoolingBaseServing` and `ServingClassification`."""

    models = Models()

    def _is_model_supported(self, name):
        return not name or name == "merged"

    def _maybe_get_adapters(self, request):
        return None

    async def _preprocessing(self, io_processor, context):
        context.engine_inputs = [
            {"prompts": {"prompt_token_ids": [token]}, "lora_requests": None} for token in (1, 2, 9)
        ]

    def _build_response(self, context):
        data = [
            {"index": index, "label": "LABEL_1", "probs": [0.2, 0.8], "on": one["lora_requests"]}
            for index, one in enumerate(context.engine_inputs)
        ]
        return JSONResponse({"model": context.model_name, "data": data})

    def answer(self, model, **fields):
        context = SimpleNamespace(
            request=SimpleNamespace(model=model), model_name=model, prompt_request_ids=None, **fields
        )
        asyncio.run(self._preprocessing(None, context))
        return json.loads(self._build_response(context).body)


def test_inputs_to_classify_run_on_their_own_adapters_and_labels():
    handler = Classifier()
    hook_pooling(handler, route, lambda task: LABELS.get(task, {}))
    found = handler.answer("auto")
    assert [row["on"] for row in found["data"]] == ["adapter of red", "adapter of blue", None]
    assert [row["label"] for row in found["data"]] == ["ruby", "sea", "sea"]
    assert [row["retex"]["abstained"] for row in found["data"]] == [False, False, True]
    assert found["model"] == "auto" and handler._is_model_supported("auto")
    named = handler.answer("red")
    assert [row["label"] for row in named["data"]] == ["ruby"] * 3 and "retex" not in named["data"][0]
    assert [row["label"] for row in handler.answer("merged")["data"]] == ["LABEL_1"] * 3


# ---- the plugin ------------------------------------------------------------------------------------------------------


def test_the_plugin_is_an_entry_point():
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="vllm.endpoint_plugins") if point.name == "retex"]
    if found:  # not where the package was installed before it had a plugin
        assert found[0].load() is RetexPlugin
    assert RetexPlugin().name == "retex" and RetexPlugin().required_tasks is None


def test_a_server_without_an_engine_is_refused():
    with pytest.raises(RetexError, match="needs an engine"):
        asyncio.run(RetexPlugin().init_state(None, SimpleNamespace(), SimpleNamespace(model="x")))


def test_a_slot_must_stay_empty_on_cpus():
    """Else vLLM 0.32 runs prompts without an adapter on the last one."""

    def config(device, slots):
        lora = None if slots is None else SimpleNamespace(max_loras=slots)
        return SimpleNamespace(lora_config=lora, device_config=SimpleNamespace(device_type=device))

    check_slots(config("cpu", 4), 3)
    check_slots(config("cuda", 2), 3)
    with pytest.raises(RetexError, match="--max-loras 4"):
        check_slots(config("cpu", 3), 3)
    with pytest.raises(RetexError, match="--enable-lora"):
        check_slots(config("cuda", None), 3)
