"""Hooks into vLLM's request handlers: after a prompt has been rendered to token ids, before its adapter is looked up.

The handlers are objects of vLLM's; `hook_generation` and `hook_pooling` replace methods of single objects, never of
classes. They rely on names of vLLM 0.32, and refuse to start where one is missing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ...artifact.export_files import AUTO
from ...errors import InputError, RetexError
from .headers import current, note
from .router import Decision

Route = Callable[[Sequence[Sequence[int]]], Awaitable[list[Decision]]]
Labels = Callable[[str], dict[int, str]]
# Marks a rendered prompt whose adapter is not that of the whole request.
ADAPTER = "retex_adapter"


def is_auto(name: str | None) -> bool:
    """Return whether a request leaves the choice of the task to the router."""
    return name in (None, "", AUTO)


def check_names(handler: Any, names: Sequence[str]) -> None:
    """Refuse a vLLM whose handlers lack what the hooks replace."""
    if missing := [name for name in names if not hasattr(handler, name)]:
        raise RetexError(
            f"This vLLM's {type(handler).__name__} has no {missing[0]!r}: the plugin of retex_hf was written for 0.32."
        )


def accept_auto(handler: Any) -> None:
    """Let a handler that is hooked accept the model "auto"; all others keep refusing it as unknown."""
    check_names(handler, ["_is_model_supported", "_maybe_get_adapters", "models"])
    supported = handler._is_model_supported
    handler._is_model_supported = lambda name: name == AUTO or supported(name)


# ---- generation ------------------------------------------------------------------------------------------------------


def hook_generation(handler: Any, route: Route) -> None:
    """Route the prompts of completions and chats."""
    accept_auto(handler)
    check_names(handler, ["engine_client"])
    handler.engine_client = AdapterClient(handler.engine_client, handler.models)
    for render, create in (
        ("render_completion_request", "create_completion"),
        ("render_chat_request", "create_chat_completion"),
    ):
        if hasattr(handler, render):
            check_names(handler, [create])
            setattr(handler, render, _routed_render(getattr(handler, render), handler.models, route))
            setattr(handler, create, _named_answers(getattr(handler, create)))


def _routed_render(render: Callable[..., Awaitable[Any]], models: Any, route: Route) -> Callable[..., Awaitable[Any]]:
    async def routed(request: Any) -> Any:
        auto = is_auto(request.model)
        result = await render(request)
        if not auto or hasattr(result, "error"):
            return result
        inputs = result if isinstance(result, list) else result[1]
        decisions = await route([token_ids(one) for one in inputs])
        note(decisions)
        assign(request, inputs, decisions, models)
        return result

    return routed


def token_ids(engine_input: Any) -> list[int]:
    """Return the token ids of a rendered prompt; refuse what is not a text."""
    found = engine_input.get("prompt_token_ids") if hasattr(engine_input, "get") else None
    if not found or engine_input.get("mm_placeholders"):
        raise InputError("Only prompts of text alone are routed: name a task as the model.")
    return list(found)


def assign(request: Any, inputs: Sequence[Any], decisions: Sequence[Decision], models: Any) -> None:
    """Set the adapter of a request by its prompts: the request's model, where they agree, else one per prompt."""
    names = [decision.model for decision in decisions]
    if len(set(names)) == 1:
        request.model = names[0] or models.model_name()
        return
    if getattr(request, "use_beam_search", False):
        raise InputError("Prompts of several tasks cannot share a beam search: send a request for each.")
    request.model = AUTO
    for engine_input, name in zip(inputs, names, strict=True):
        engine_input[ADAPTER] = name


class AdapterClient:
    """vLLM's engine client, with the adapter of each prompt where prompts of one request differ."""

    def __init__(self, client: Any, models: Any) -> None:
        self._client, self._models = client, models

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(prompt, dict) and ADAPTER in prompt:
            name = prompt[ADAPTER]
            prompt = {key: value for key, value in prompt.items() if key != ADAPTER}
            kwargs["lora_request"] = None if name is None else self._models.lora_requests[name]
        return self._client.generate(prompt, *args, **kwargs)


def _named_answers(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Add to each choice of an answer, or to the chunks of a stream, which task answered it."""

    async def named(request: Any, *args: Any, **kwargs: Any) -> Any:
        copies = request.n or 1
        result = await create(request, *args, **kwargs)
        decisions = list(current.get() or ())
        if not decisions or hasattr(result, "error"):
            return result
        if hasattr(result, "__aiter__"):
            return _named_stream(result, decisions, copies)
        for choice in result.choices:
            choice.retex = decisions[choice.index // copies].body()
        if len({decision.model for decision in decisions}) > 1:
            result.model = AUTO
        return result

    return named


async def _named_stream(stream: AsyncIterator[str], decisions: Sequence[Decision], copies: int) -> AsyncIterator[str]:
    """Add the routing to the first chunk of each choice."""
    seen: set[int] = set()
    mixed = len({decision.model for decision in decisions}) > 1
    async for event in stream:
        if len(seen) == copies * len(decisions) and not mixed:
            yield event
        else:
            yield _named_event(event, decisions, copies, seen, mixed)


def _named_event(event: str, decisions: Sequence[Decision], copies: int, seen: set[int], mixed: bool) -> str:
    data = event.removeprefix("data: ").strip()
    if not data.startswith("{"):
        return event
    chunk = json.loads(data)
    for choice in chunk.get("choices", ()):
        if choice["index"] not in seen:
            seen.add(choice["index"])
            choice["retex"] = decisions[choice["index"] // copies].body()
    if mixed and "model" in chunk:
        chunk["model"] = AUTO
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


# ---- embeddings and classes ------------------------------------------------------------------------------------------


def hook_pooling(handler: Any, route: Route, labels: Labels) -> None:
    """Route the inputs of embeddings and classifications, and name classes by the labels of their task."""
    accept_auto(handler)
    check_names(handler, ["_preprocessing", "_build_response"])
    preprocess, respond = handler._preprocessing, handler._build_response

    async def routed(io_processor: Any, context: Any) -> None:
        auto = is_auto(context.request.model)
        await preprocess(io_processor, context)
        if not auto:
            return
        if context.prompt_request_ids is not None:
            raise InputError("An input that is longer than the model's context is not routed: name a task.")
        decisions = await route([token_ids(one["prompts"]) for one in context.engine_inputs])
        note(decisions)
        names = [decision.model for decision in decisions]
        for engine_input, name in zip(context.engine_inputs, names, strict=True):
            engine_input["lora_requests"] = None if name is None else handler.models.lora_requests[name]
        context.model_name = (names[0] or handler.models.model_name()) if len(set(names)) == 1 else AUTO
        context.retex = decisions

    def named(context: Any) -> Any:
        response = respond(context)
        return _with_routing(response, getattr(context, "retex", None), context.model_name, labels)

    handler._preprocessing, handler._build_response = routed, named


def _with_routing(response: Any, decisions: Sequence[Decision] | None, model: str, labels: Labels) -> Any:
    """Rewrite the JSON of a response: labels of the task, and the routing of each row."""
    if response.media_type != "application/json":  # embeddings as bytes; headers name the task
        return response
    content = json.loads(response.body)
    for row in content.get("data") or ():
        decision = decisions[row["index"]] if decisions else None
        if "probs" in row:
            named = labels(model if decision is None else decision.task)
            if named:
                row["label"] = named.get(max(range(len(row["probs"])), key=row["probs"].__getitem__))
        if decision is not None:
            row["retex"] = decision.body()
    return type(response)(content=content, status_code=response.status_code)
