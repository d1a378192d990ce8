"""Predictions for raw inputs, as the command line and the demo page show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..artifact.preprocess import Preprocessor, load_preprocessor
from ..artifact.recipe_record import RecipeRecord
from ..backends import library_of, openclip
from ..data.labels import best_label, label_scores
from ..data.readout import Classifier, Generator, Readout, ZeroShot
from ..errors import ConfigError, InputError
from ..model.retex_model import RetexModel
from ..routing import Routing
from ..utils.devices import as_model_takes
from ..utils.paths import as_path
from ..utils.strict_files import read_json

# Label or text of a row, its score, and the scores of all classes.
Reading = tuple[str | None, float | None, tuple[float, ...] | None]
NOTHING: Reading = (None, None, None)
CLASSIFIER, GENERATOR, ZERO_SHOT, FEATURES = "classifier", "generator", "zero-shot", "features"
PROMPT = "a photo of a {}."


@dataclass(frozen=True)
class Answer:
    """The answer to one input.

    `answer` is a label or a generated text (None for models that give features only), `score` the label's probability.
    `residuals` and `probabilities` are per task, where the task was identified from the input. `far` tells whether the
    input is out-of-distribution, where the routing asks for it. `scores` are those of all classes, in the order of the
    task's head.
    """

    task: str
    answer: str | None
    score: float | None
    residuals: dict[str, float] | None
    probabilities: dict[str, float] | None
    far: bool | None = None
    scores: tuple[float, ...] | None = None


class Predictor:
    """Answers raw texts or images with a [`RetexModel`].

    Args:
        model: The model.
        preprocessor: Makes batches of the inputs.
        classes: For dual encoders of images and texts: the names of the classes of each task.
        prompt: For those: the template that a class name is put into.
        batch_size: Inputs per call of the model.
        own: Preprocessors of tasks that have tokens of their own; default: made from the tokenizers stored with the
            model. Tasks are identified from the batches of `preprocessor`.
        generate: Options of `generate`, for models that generate text.

    Example:
        >>> from retex_hf.workflows.predictor import Predictor
        >>> predictor = Predictor.from_pretrained("retex-quickstart/retex")  # doctest: +SKIP
        >>> predictor.predict(["add this song to my playlist"])[0].task  # doctest: +SKIP
        'snips'
    """

    def __init__(
        self,
        model: RetexModel,
        preprocessor: Preprocessor,
        *,
        classes: Mapping[str, Sequence[str]] | None = None,
        prompt: str = PROMPT,
        batch_size: int = 64,
        own: Mapping[str, Preprocessor] | None = None,
        **generate: Any,
    ) -> None:
        self.model, self.preprocessor, self.batch_size = model, preprocessor, batch_size
        self.own = own_preprocessors(model) if own is None else dict(own)
        self.classes = {task: list(names) for task, names in (classes or {}).items()}
        self.kind = answer_kind(model, classes is not None)
        if classes is not None and self.kind != ZERO_SHOT:
            raise InputError("Classes can be named for models of images and texts only; this one has its own answers.")
        self._prompt = prompt
        self.readout = self._readout(generate)
        # Tokens must be decoded by the tokenizer that made them.
        self._own_readouts = {
            task: Generator(found.tokenizer, **generate) if self.kind == GENERATOR else self.readout
            for task, found in self.own.items()
        }

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        max_length: int | None = None,
        model_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> Predictor:
        """Load a predictor from an artifact, a folder or a Hub id; `max_length` as in [`preprocessor_of`]."""
        model = RetexModel.from_pretrained(folder, **(model_options or {}))
        own = own_preprocessors(model, max_length)
        return cls(model, preprocessor_of(model, max_length), own=own, **options)

    def _readout(self, generate: dict[str, Any]) -> Readout | None:
        if self.kind == GENERATOR:
            if generate.get("max_new_tokens", 1) < 1:
                raise InputError(f"max_new_tokens must be a positive number, not {generate['max_new_tokens']}.")
            return Generator(self.preprocessor.tokenizer, **generate)
        if generate:
            raise InputError(f"{sorted(generate)[0]!r} is for models that generate text, which this one does not.")
        if self.kind == ZERO_SHOT:
            return self._zero_shot(self.model.tasks)
        return Classifier() if self.kind == CLASSIFIER else None

    def _zero_shot(self, text_towers: Sequence[str | None]) -> ZeroShot:
        """Return a readout by the names of classes, as the text tower of each task encodes them; None: the merged one.

        The names are of the tasks in their order.
        """
        missing = [task for task in self.model.tasks if not self.classes.get(task)]
        if missing:
            raise InputError(f"The classes of task {missing[0]!r} are not named.")
        check_prompt(self._prompt)
        method = "encode_text" if library_of(self.model.model) is openclip else "get_text_features"
        towers = zip(self.model.tasks, text_towers, strict=True)
        heads = {task: self._encode_classes(method, task, tower) for task, tower in towers}
        return _ImageReadout(heads, "encode_image" if method == "encode_text" else "get_image_features")

    @torch.no_grad()
    def _encode_classes(self, method: str, task: str, tower: str | None) -> Tensor:
        encode_texts = self.preprocessor.encode_texts
        if encode_texts is None:
            raise InputError(
                "The preprocessor makes no batches of texts, which names of classes need: give encode_texts."
            )
        batch = self._moved(encode_texts([self._prompt.format(name) for name in self.classes[task]]))
        if tower is not None:
            return _as_tensor(getattr(self.model, method)(**batch, task=tower))
        with self.model.disable_adapter():
            return _as_tensor(getattr(self.model, method)(**batch))

    @cached_property
    def _merged_readout(self) -> Readout:
        """The readout of a merged model of images and texts, whose own text tower encodes the names of classes."""
        return self._zero_shot([None] * len(self.model.tasks))

    def predict(self, inputs: Sequence[Any], task: str | Sequence[str] | None = None) -> list[Answer]:
        """Answer every input; without `task`, identify each input's task from the input itself."""
        return self._run(inputs, task, merged=False)

    def merged(self, inputs: Sequence[Any], tasks: str | Sequence[str]) -> list[Answer]:
        """Answer with the plain merged model, under the heads of the given tasks."""
        return self._run(inputs, tasks, merged=True)

    @torch.no_grad()
    def identified(self, inputs: Sequence[Any]) -> list[Answer]:
        """Identify the task of every input, and answer nothing else."""
        routing = self.model.identify(**self.batch(inputs))
        return self._answers(routing.tasks, [NOTHING] * len(routing.tasks), routing)

    @torch.no_grad()
    def _run(self, inputs: Sequence[Any], task: str | Sequence[str] | None, merged: bool) -> list[Answer]:
        inputs = list(inputs)
        if isinstance(task, str):
            task = [task] * len(inputs)
        tasks = None if task is None else list(task)
        if tasks is not None and len(tasks) != len(inputs):
            raise InputError(f"{len(tasks)} tasks are named for {len(inputs)} inputs.")
        answers: list[Answer] = []
        for start in range(0, len(inputs), self.batch_size):
            rows = slice(start, start + self.batch_size)
            named = None if tasks is None else tasks[rows]
            answers += self._answer_inputs(inputs[rows], named, merged)
        return answers

    def _answer_inputs(self, inputs: list[Any], tasks: list[str] | None, merged: bool) -> list[Answer]:
        """Answer one batch of inputs; tasks with a tokenizer of their own get inputs made by that tokenizer."""
        if not self.own or self.readout is None:
            return self._answer_batch(self.batch(inputs), tasks, merged, self.readout)
        routing = None
        if tasks is None:
            pinned = self.model.active_adapter
            if pinned is None:
                routing = self.model.identify(**self.batch(inputs))
                tasks = routing.tasks if routing.weights is None else None
            elif isinstance(pinned, str):
                tasks = [pinned] * len(inputs)
            if tasks is None:  # a mixture of tasks cannot use the tokens of a single one
                return self._answer_batch(self.batch(inputs), None, merged, self.readout)
        by_row: dict[int, Answer] = {}
        for owner in dict.fromkeys(task if task in self.own else None for task in tasks):
            rows = [row for row, task in enumerate(tasks) if (task if task in self.own else None) == owner]
            preprocessor = self.preprocessor if owner is None else self.own[owner]
            readout = self.readout if owner is None else self._own_readouts[owner]
            made = self._moved(preprocessor([inputs[row] for row in rows]))
            found = self._answer_batch(made, [tasks[row] for row in rows], merged, readout)
            by_row |= zip(rows, found, strict=True)
        answers = [by_row[row] for row in range(len(inputs))]
        if routing is None:
            return answers
        read = [(answer.answer, answer.score, answer.scores) for answer in answers]
        return self._answers(tasks, read, routing)

    def _answer_batch(
        self, batch: dict[str, Any], tasks: list[str] | None, merged: bool, readout: Readout | None
    ) -> list[Answer]:
        model = self.model
        if readout is None:
            routing = None
            if tasks is None:
                routing = model.identify(**batch)
                tasks = routing.tasks
            return self._answers(tasks, [NOTHING] * len(tasks), routing)
        if merged:
            assert tasks is not None  # `merged` is called with them
            readout = self._merged_readout if self.kind == ZERO_SHOT else readout
            with model.disable_adapter():
                named = {} if self.kind == GENERATOR and not self.own else {"task": tasks}
                output = readout.call(model, batch, **named)
            return self._answers(tasks, self._read(output, tasks, readout), None)
        output = readout.call(model, batch, task=tasks)
        chosen = output.routing.tasks
        return self._answers(chosen, self._read(output, chosen, readout), output.routing if tasks is None else None)

    def _read(self, output: Any, tasks: Sequence[str], readout: Readout) -> list[Reading]:
        """Return label or text of every row, and its scores."""
        if self.kind == CLASSIFIER:
            labels = self.model.retex_config.labels
            rows = [(row, labels[task]) for row, task in zip(output.logits, tasks, strict=True)]
            return [(*best_label(row, of), tuple(label_scores(row, of).tolist())) for row, of in rows]
        answers = readout.answers(output, tasks)
        if self.kind == GENERATOR:
            return [(str(answer), None, None) for answer in answers]
        return [(self.classes[task][int(answer)], None, None) for answer, task in zip(answers, tasks, strict=True)]

    def _answers(self, tasks: Sequence[str], read: Sequence[Reading], routing: Routing | None) -> list[Answer]:
        def by_task(table: Tensor | None) -> Sequence[dict[str, float] | None]:
            if table is None:  # where the task is given
                return [None] * len(tasks)
            return [dict(zip(self.model.tasks, row, strict=True)) for row in table.tolist()]

        residuals = by_task(None if routing is None else routing.residuals)
        probabilities = by_task(None if routing is None else routing.probabilities)
        abstained = None if routing is None else routing.abstained
        far = [None] * len(tasks) if abstained is None else abstained.tolist()
        rows = zip(tasks, read, residuals, probabilities, far, strict=True)
        return [
            Answer(task, answer, score, near, likely, away, scores)
            for task, (answer, score, scores), near, likely, away in rows
        ]

    def batch(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Make a batch of raw inputs on the model's device."""
        return self._moved(self.preprocessor(inputs))

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        return as_model_takes(batch, self.model.model)


class _ImageReadout(ZeroShot):
    """Zero-shot classification that runs the image encoder only, by the library's own method."""

    def __init__(self, heads: Mapping[str, Tensor], method: str) -> None:
        super().__init__(heads, _as_tensor)
        self.method = method

    def call(self, model: nn.Module, inputs: Mapping[str, Tensor], **options: Any) -> Any:
        return getattr(model, self.method)(**inputs, **options)


def _as_tensor(features: Any) -> Tensor:
    """Return features as a tensor: transformers 5 wraps them in a tower's pooled output, OpenCLIP does not."""
    return features if isinstance(features, Tensor) else features.pooler_output


def own_preprocessors(model: RetexModel, max_length: int | None = None) -> dict[str, Preprocessor]:
    """Return the preprocessors of tasks that have a tokenizer of their own."""
    vocabulary = model.retex_config.vocabulary
    return {
        task: preprocessor_of(model, max_length, task)
        for task in model.tasks
        if task in vocabulary and vocabulary[task]["tokenizer"]
    }


def preprocessor_of(model: RetexModel, max_length: int | None = None, task: str | None = None) -> Preprocessor:
    """Load the preprocessor whose files came with a model, or with one of its tasks.

    Texts are truncated to `max_length` tokens; default: as when the model was signed, else the tokenizer's limit.
    """
    folder = None if model.side_folder is None else model.tokenizer_folder(task)
    if folder is None:
        raise ConfigError("The model has no tokenizer or processor, so it takes no raw inputs.")
    length = (model.recipe or RecipeRecord()).references().get("max_length") if max_length is None else max_length
    tokens = None if task is None else model.retex_config.vocabulary.get(task, {}).get("size")
    return load_preprocessor(folder, model.model, max_length=length, tokens=tokens)


def answer_kind(model: RetexModel, has_classes: bool) -> str:
    """Return how a model answers: by labels of its heads, by texts, by classes named in words, or not at all."""
    if model.retex_config.labels:
        return CLASSIFIER
    if library_of(model.model).is_dual_encoder(model.model):
        return ZERO_SHOT if has_classes else FEATURES
    generates = isinstance(model.model, PreTrainedModel) and model.model.can_generate()
    return GENERATOR if generates else FEATURES


def check_prompt(prompt: str) -> None:
    """Refuse a template that the name of a class cannot be put into."""
    try:
        made = prompt.format("\0")
    except (IndexError, KeyError, ValueError, AttributeError):
        made = ""
    if "\0" not in made:
        raise InputError(f"The prompt {prompt!r} must have one place for the name of a class: {PROMPT!r}, say.")


def read_classes(path: Path | None) -> dict[str, list[str]] | None:
    """Read the classes of each task from a JSON file, `{task: [names]}`."""
    if path is None:
        return None
    values = read_json(as_path(path, InputError), InputError, kind=None)
    named = isinstance(values, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in values.values()
    )
    if not named:
        raise InputError(f"{path} must hold the classes of each task, {{task: [names]}}.")
    return values
