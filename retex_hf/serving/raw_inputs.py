"""Texts and images of a request, as rows: counted, and truncated as the preprocessor does it."""

from __future__ import annotations

from typing import Any

from ..artifact.preprocess import IMAGE
from ..workflows.predictor import Predictor
from .rows import AUTO, MERGED, Row
from .shared_tokenizer import SharedTokenizer


class RawInputs:
    """Makes rows of raw inputs; `kind` names the endpoint in their keys."""

    def __init__(self, predictor: Predictor, kind: str) -> None:
        self.predictor, self.kind = predictor, kind

    def rows(self, values: list[Any], model: str) -> list[Row]:
        """Return a row per input."""
        key = (self.kind, model if model in (AUTO, MERGED) else "task")
        preprocessor = self.predictor.own.get(model, self.predictor.preprocessor)
        if preprocessor.kind == IMAGE:
            return [Row(value, model, key) for value in values]
        rows = []
        for value in values:
            pair = value if isinstance(value, tuple) else (value,)
            count = len(SharedTokenizer(preprocessor).ids(*pair))
            read = preprocessor([value])["input_ids"].shape[1]
            rows.append(Row(value, model, key, size=read, tokens=read, truncated=read < count))
        return rows
