"""Requests to the endpoints, checked field by field before anything is computed."""

from __future__ import annotations

import base64
import binascii
import secrets
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from PIL import Image

from ..errors import brief
from ..utils.images import TooManyPixels, TooSlow, Unreadable, read_image
from .errors import ApiError
from .fields import MOST_STRING, Fields
from .options import ServeOptions
from .rows import AUTO
from .sampling import Sampling

ROLES = ("system", "developer", "user", "assistant")
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 1000
MOST_MESSAGES = 1000
DEFAULT_TOKENS = 16  # OpenAI's, for completions
# For all images of a request together, and for decoding them.
MOST_PIXELS, MOST_SECONDS = 32_000_000, 20.0
# Fields that change nothing in these values.
NEUTRAL: dict[str, list[Any]] = {
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "logit_bias": [{}],
    "best_of": [1],
    "suffix": [""],
}
NEUTRAL_CHAT: dict[str, list[Any]] = {
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "tools": [[]],
    "tool_choice": ["none"],
    "logprobs": [False],
    "modalities": [["text"]],
}


@dataclass(frozen=True)
class GenerationRequest:
    """A request to generate text: prompts (texts or token ids) or one chat, and how to continue them.

    `max_tokens` is None where the answer may be as long as the model and the limits allow.
    """

    model: str
    prompts: list[str | list[int]]
    messages: list[dict[str, str]] | None
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    copies: int
    stream: bool
    usage: bool
    echo: bool


@dataclass(frozen=True)
class InputRequest:
    """A request to classify or embed inputs; `base64` is the encoding of vectors."""

    model: str
    values: list[Any]
    base64: bool = False


def read_completion(fields: Fields, options: ServeOptions, default: Sampling) -> GenerationRequest:
    """Read the body of /v1/completions."""
    prompts = _prompts(fields.take("prompt"), options)
    for name, allowed in NEUTRAL.items():
        fields.only(name, allowed)
    fields.only("logprobs", [])
    few, most = min(DEFAULT_TOKENS, options.max_tokens), options.max_tokens
    tokens, echo = fields.whole("max_tokens", few, least=1, most=most), fields.flag("echo")
    return _generation(fields, options, default, prompts=prompts, messages=None, echo=echo, max_tokens=tokens)


def read_chat(fields: Fields, options: ServeOptions, default: Sampling) -> GenerationRequest:
    """Read the body of /v1/chat/completions."""
    messages = _messages(fields.take("messages"))
    for name, allowed in NEUTRAL_CHAT.items():
        fields.only(name, allowed)
    fields.only("top_logprobs", [])
    old = fields.whole("max_tokens", None, least=1, most=options.max_tokens)
    new = fields.whole("max_completion_tokens", old, least=1, most=options.max_tokens)
    return _generation(fields, options, default, prompts=[], messages=messages, echo=False, max_tokens=new)


def _generation(
    fields: Fields,
    options: ServeOptions,
    default: Sampling,
    *,
    prompts: list[str | list[int]],
    messages: list[dict[str, str]] | None,
    echo: bool,
    max_tokens: int | None,
) -> GenerationRequest:
    """Read the fields that both endpoints share."""
    stream = fields.flag("stream")
    request = GenerationRequest(
        model=_model(fields),
        prompts=prompts,
        messages=messages,
        sampling=_sampling(fields, default),
        max_tokens=max_tokens,
        stops=_stops(fields.take("stop")),
        copies=fields.whole("n", 1, least=1, most=options.max_rows) or 1,
        stream=stream,
        usage=_usage(fields.take("stream_options"), stream),
        echo=echo,
    )
    fields.text("user")  # names the caller's own user, and changes nothing
    fields.finish()
    rows = request.copies * max(1, len(prompts))
    if rows > options.max_rows:
        raise _too_many_rows(rows, options)
    return request


def read_inputs(fields: Fields, options: ServeOptions, kind: str, *, vectors: bool) -> InputRequest:
    """Read the body of /classify or /v1/embeddings; `kind` is "text" or "image"."""
    given = fields.take("input")
    values = given if isinstance(given, list) else [given]
    if not values or given is None:
        raise ApiError(400, f"input must be {_kind_words(kind)}, or a list of such.", param="input")
    if len(values) > options.max_rows:
        raise _too_many_rows(len(values), options)
    encoding = "float"
    if vectors:
        encoding = fields.text("encoding_format", "float") or "float"
        if encoding not in ("float", "base64"):
            raise ApiError(400, "encoding_format must be float or base64.", param="encoding_format")
        fields.only("dimensions", [])
    model = _model(fields)
    fields.text("user")
    fields.finish()
    read = _images(values) if kind == "image" else [_text(value, index) for index, value in enumerate(values)]
    return InputRequest(model, read, encoding == "base64")


def _model(fields: Fields) -> str:
    name = fields.text("model")
    return AUTO if name is None else name


def _sampling(fields: Fields, default: Sampling) -> Sampling:
    """Return how tokens are chosen: by the request, else as the model's own settings say."""
    seed = fields.whole("seed", None, least=-(2**63), most=2**63 - 1)
    temperature = fields.number("temperature", None, least=0, most=2)
    top_p = fields.number("top_p", None, least=0, most=1)
    if temperature is not None:
        default = replace(default, temperature=temperature)
    if top_p is not None:
        default = replace(default, top_p=top_p)
    return replace(default, seed=secrets.randbits(62) if seed is None else seed % 2**63)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else value if isinstance(value, list) else [value]
    fits = all(isinstance(stop, str) and 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in stops)
    if not fits or len(stops) > MOST_STOPS:
        raise ApiError(
            400,
            f"stop must be a text, or a list of at most {MOST_STOPS} texts of 1 to {MOST_STOP_CHARACTERS} characters.",
            param="stop",
        )
    return tuple(stops)


def _usage(value: Any, stream: bool) -> bool:
    """Return whether the last event of a stream counts tokens."""
    if value is None:
        return False
    if not stream or not isinstance(value, dict):
        raise ApiError(400, "stream_options must be an object, and is for stream=true only.", param="stream_options")
    inner = Fields(value)
    asked = inner.flag("include_usage")
    inner.finish()
    return asked


def _prompts(value: Any, options: ServeOptions) -> list[str | list[int]]:
    """Return prompts: a text, token ids, or a list of either."""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    fits = isinstance(value, list) and value and all(isinstance(one, str) or _are_ids(one) for one in value)
    if not fits:
        raise ApiError(400, "prompt must be a text, a list of token ids, or a list of such.", param="prompt")
    if len(value) > options.max_rows:
        raise _too_many_rows(len(value), options)
    return value


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value)
    )


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_MESSAGES:
        raise ApiError(400, f"messages must be a list of 1 to {MOST_MESSAGES} messages.", param="messages")
    return [_message(message, index) for index, message in enumerate(value)]


def _message(value: Any, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} must be an object with role and content.", param=where)
    fields = Fields(value)
    role, content = fields.text("role"), fields.take("content")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    message = {"role": role, "content": _content(content, f"{where}.content")}
    name = fields.text("name")
    fields.finish()
    return message if name is None else {**message, "name": name}


def _content(value: Any, where: str) -> str:
    """Return the text of a message, which may come in parts."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or len(part) > 2:
            raise ApiError(400, f"{where} must be a text, or a list of parts of type text.", param=where)
    return "".join(part["text"] for part in parts)


def _text(value: Any, index: int) -> str | tuple[str, str]:
    """Return a text, or a pair of texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return value[0], value[1]
    raise ApiError(
        400, f"input[{index}] must be {_kind_words('text')}, not {brief(value, MOST_STRING)}.", param=f"input[{index}]"
    )


def _images(values: list[Any]) -> list[Image.Image]:
    """Decode images, within limits of pixels and time for all of them."""
    read, left, end = [], MOST_PIXELS, monotonic() + MOST_SECONDS
    for index, value in enumerate(values):
        name = f"input[{index}]"
        try:
            image = read_image(_image_bytes(value, name), name, most_pixels=left, seconds=max(0.0, end - monotonic()))
        except TooManyPixels:
            raise ApiError(
                400, f"With {name} the images have more than {MOST_PIXELS} pixels together.", param=name
            ) from None
        except TooSlow:
            raise ApiError(
                400, f"With {name} the images take more than {MOST_SECONDS:.0f} seconds to decode.", param=name
            ) from None
        except Unreadable as error:
            raise ApiError(400, str(error), param=name) from None
        left -= image.width * image.height
        read.append(image.convert("RGB"))
    return read


def _image_bytes(value: Any, name: str) -> bytes:
    """Return the bytes of an image that is given in base64, with or without the head of a data URL."""
    if isinstance(value, str):
        head, comma, data = value.partition(",")
        if not comma:
            data = value
        if not comma or (head.startswith("data:image/") and head.endswith(";base64")):
            try:
                return base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                pass
    raise ApiError(400, f"{name} must be {_kind_words('image')}.", param=name)


def _kind_words(kind: str) -> str:
    return "an image in base64 or as data URL" if kind == "image" else "a text or a pair of texts"


def _too_many_rows(rows: int, options: ServeOptions) -> ApiError:
    return ApiError(400, f"The request has {rows} rows; at most {options.max_rows} are taken.", code="rows")
