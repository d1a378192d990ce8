"""The embedded engine: a `RetexModel` behind a queue that makes batches of concurrent requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..artifact.preprocess import IMAGE
from ..backends import library_of
from ..errors import ConfigError
from ..model.retex_model import RetexModel
from ..workflows.predictor import (
    CLASSIFIER,
    FEATURES,
    GENERATOR,
    PROMPT,
    ZERO_SHOT,
    Predictor,
    answer_kind,
    own_preprocessors,
    preprocessor_of,
    read_classes,
)
from .batching import Batcher
from .classification import Classification
from .decoding import Prompt
from .embedding import Embedding
from .errors import ApiError
from .generation import TextGeneration
from .metrics import Metrics
from .names import Names
from .options import ServeOptions
from .prompts import encode_chat, encode_ids, encode_text
from .requests import GenerationRequest, InputRequest
from .rows import AUTO, MERGED, Row

# Most characters of a text for every token that is read; a token of English has four or five.
CHARACTERS = 32
# Batches that generate take turns, token by token; others are short.
GENERATING_BATCHES = 2
# What a model does, and where it is asked for it.
GENERATES, CLASSIFIES, EMBEDS = "generates text", "classifies", "embeds"
PLACES = {GENERATES: "/v1/completions and /v1/chat/completions", CLASSIFIES: "/classify", EMBEDS: "/v1/embeddings"}


class Engine:
    """An artifact in memory, and its queue.

    Args:
        artifact: A folder or Hub id.
        options: Settings of the endpoint.
        metrics: Counts what happens.
    """

    def __init__(self, artifact: str | Path, options: ServeOptions, metrics: Metrics) -> None:
        self.options = options
        self.model = RetexModel.from_pretrained(
            artifact,
            revision=options.revision,
            expert_cache=options.expert_cache,
            execution=options.execution,
            **options.model_options,
        )
        if options.routing is not None:
            self.model.routing = options.routing
        self.names = Names.of(self.model)
        predictor = _predictor(self.model, options)
        self.kind = predictor.preprocessor.kind
        self.generation: TextGeneration | None = None
        self.inputs: Classification | Embedding | None = None
        if predictor.kind == GENERATOR:
            self.generation = TextGeneration(predictor, options, metrics)
        elif predictor.kind in (CLASSIFIER, ZERO_SHOT):
            self.inputs = Classification(predictor, options, metrics)
        else:
            self.inputs = Embedding(predictor, options, metrics)
        answers = self.generation or self.inputs
        assert answers is not None
        self.batcher = Batcher(
            answers.run,
            metrics,
            rows=options.max_batch,
            tokens=options.max_batch_tokens,
            width=self.generation.context if self.generation and self.generation.continues else None,
            wait=options.max_wait_ms / 1000,
            queue=options.max_queue,
            threads=GENERATING_BATCHES if self.generation else 1,
        )

    @property
    def does(self) -> str:
        """Return what the model does, in words."""
        return GENERATES if self.generation else CLASSIFIES if isinstance(self.inputs, Classification) else EMBEDS

    def require(self, does: str) -> None:
        """Refuse a request for what the model does not do."""
        if self.does != does:
            raise ApiError(400, f"This model {self.does}: ask {PLACES[self.does]}.", code="unsupported_endpoint")

    def input_rows(self, request: InputRequest) -> list[Row]:
        """Return the rows of a request to classify or embed."""
        assert self.inputs is not None
        for value in request.values:
            self._check_characters("input", *(value if isinstance(value, tuple) else (value,)))
        rows = self.inputs.rows(request.values, self.names.check(request.model))
        return _numbered(rows)

    def generation_rows(self, request: GenerationRequest) -> list[Row]:
        """Return the rows of a request to generate: all copies of the first prompt, then of the next."""
        generation, model = self.generation, self.names.check(request.model)
        assert generation is not None
        task = None if model in (AUTO, MERGED) else model
        for given in request.prompts:
            self._check_characters("prompt", given)
        self._check_characters("messages", *(message["content"] for message in request.messages or ()))
        encoders = [
            encode_text(prompt, generation.tokenizer)
            if isinstance(prompt, str)
            else encode_ids(prompt, generation.owner(task))
            for prompt in request.prompts
        ]
        if request.messages is not None:
            encoders = [encode_chat(request.messages, generation.tokenizer)]
        rows: list[Row] = []
        for encode in encoders:
            prompt = Prompt(encode, request.sampling, request.max_tokens or 1, request.stops, request.stream)
            if request.max_tokens is None:
                room = generation.room(len(generation.encoded(prompt, task)))
                prompt = replace(prompt, max_tokens=room)
            rows += generation.rows(prompt, model, request.copies)
        return _numbered(rows)

    def _check_characters(self, param: str, *texts: Any) -> None:
        """Refuse texts that are too long for any tokenizer to make few enough tokens of.

        To find that out by tokenising them could take minutes, in which nothing else runs.
        """
        most = CHARACTERS * self.options.max_prompt_tokens
        count = sum(len(text) for text in texts if isinstance(text, str))
        if count > most:
            raise ApiError(
                400, f"A text has {count} characters; at most {most} are read.", param=param, code="text_too_long"
            )

    def close(self) -> None:
        """Finish all rows, then stop."""
        self.batcher.close()


def _numbered(rows: list[Row]) -> list[Row]:
    for index, row in enumerate(rows):
        row.index = index
    return rows


def _predictor(model: RetexModel, options: ServeOptions) -> Predictor:
    classes = read_classes(options.classes)
    if classes is None and library_of(model.model).is_dual_encoder(model.model):
        raise ConfigError(
            "A model of images and texts classifies among classes that are named: give --classes, a JSON file of the "
            "classes of each task, {task: [names]}."
        )
    kind, length = answer_kind(model, classes is not None), options.max_length
    if length is not None and kind == GENERATOR:
        raise ConfigError("--max-length is for models that classify or embed; prompts are not truncated.")
    if options.prompt != PROMPT and classes is None:
        raise ConfigError("--prompt is for --classes.")
    if options.pooling is not None and kind != FEATURES:
        raise ConfigError("--pooling is for encoders, which embed; this model answers otherwise.")
    preprocessor = preprocessor_of(model, length)
    if length is not None and preprocessor.kind == IMAGE:
        raise ConfigError("--max-length is for texts; this model takes images.")
    return Predictor(
        model,
        preprocessor,
        classes=classes,
        prompt=options.prompt,
        batch_size=options.max_batch,
        own=own_preprocessors(model, length),
    )
