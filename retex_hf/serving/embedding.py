"""Answers by an encoder: one vector per text or image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..routing import Routing
from ..routing.pooling import pool
from ..utils.devices import as_model_takes
from ..workflows.predictor import Predictor
from .metrics import Metrics
from .options import ServeOptions
from .raw_inputs import RawInputs
from .rows import AUTO, MERGED, Decision, Done, Row

SENTENCE_MODULES = "sentence_files"
DEFAULT_POOLING = "mean"


class Embedding:
    """Embeds inputs, each by its own expert, in batches of any tasks.

    Modules after the transformer (of artifacts built from SentenceTransformers) make the vector; without them the last
    hidden states are pooled.
    """

    def __init__(self, predictor: Predictor, options: ServeOptions, metrics: Metrics) -> None:
        self.predictor, self.model, self.metrics = predictor, predictor.model, metrics
        if predictor.own:
            raise ConfigError("Encoders whose tasks have tokenizers of their own are not served.")
        self.inputs, self.pooling = RawInputs(predictor, "embed"), options.pooling or DEFAULT_POOLING
        self.sentences: Any = None
        if hasattr(self.model.model, SENTENCE_MODULES):
            self.sentences = self.model.as_sentence_transformer()
            if options.pooling is not None:
                raise ConfigError("--pooling is for encoders without modules of SentenceTransformers, which pool here.")

    def rows(self, values: list[Any], model: str) -> list[Row]:
        """Return the rows of a request's inputs."""
        return self.inputs.rows([self._prompted(value) for value in values], model)

    @torch.no_grad()
    def run(self, rows: list[Row]) -> None:
        """Answer rows of one key."""
        model = rows[0].model
        batch = self.predictor.batch([row.value for row in rows])
        if model == MERGED:
            with self.model.disable_adapter():
                vectors, routing = self._vectors(self.model(**batch), batch), None
        else:
            vectors, routing = self._routed(batch, None if model == AUTO else [row.model for row in rows])
        for index, (row, vector) in enumerate(zip(rows, vectors.float().cpu(), strict=True)):
            decision = Decision(None) if routing is None else Decision.of(routing, index)
            self.metrics.answered(row, decision, 0)
            row.send(Done(decision, vector.numpy()))

    def _routed(self, batch: dict[str, Any], tasks: list[str] | None) -> tuple[Tensor, Routing]:
        output = self.model(**batch, task=tasks)
        return self._vectors(output, batch), output.routing

    def _vectors(self, output: Any, batch: dict[str, Any]) -> Tensor:
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            raise ConfigError("The model gives no hidden states, so it has no embeddings.")
        mask = batch.get("attention_mask")
        if self.sentences is None:
            return pool(hidden, mask, self.pooling)
        features = {"token_embeddings": hidden, "attention_mask": mask}
        for module in list(self.sentences)[1:]:
            features = module(as_model_takes(features, self.model.model))
        return features["sentence_embedding"]

    def _prompted(self, value: Any) -> Any:
        """Return a text with the prompt that sentence-transformers puts before it by default."""
        name = getattr(self.sentences, "default_prompt_name", None)
        prompt = (getattr(self.sentences, "prompts", None) or {}).get(name) if name else None
        return prompt + value if prompt and isinstance(value, str) else value
