"""The command `retex predict`."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from ..data.datasets import read_line
from ..errors import InputError
from ..model.retex_model import RetexModel
from ..utils.progress import track
from ..utils.tables import Table
from ..utils.terminal import as_json, say
from ..workflows.predictor import PROMPT, Answer, Predictor, preprocessor_of, read_classes
from .options import POSITIONAL, DeviceOptions
from .reading import STANDARD_INPUT, Input, as_input, read_inputs

SHOWN_LENGTH = 60
MOST_ROWS = 65_536  # per batch: a batch is read whole before it runs


@dataclasses.dataclass
class PredictOptions(DeviceOptions):
    """Answer texts or images, each by its own expert.

    Without --task the task of every input is identified from the input itself. On a terminal, results are a table; in a
    pipe, JSON lines, one per input as it is answered.

    Args:
        artifact: A folder or Hub id.
        inputs: Text files (one input per line, a tab between the texts of a pair), .jsonl files, images, folders of
            images, or - for standard input. Default: standard input.
        text: A text to answer, instead of files (a tab between the texts of a pair). May be repeated.
        task: The task of all inputs, if it is known.
        routing: How inputs are routed to tasks: hard, soft, or {method: hard, far: merged}. Default: as stored in the
            artifact. With far, every answer says whether its input is out-of-distribution.
        input_column: The key of the input in JSON lines. Default: text, sentence, input, image or file.
        merged: Also print the answer of the plain merged model.
        residuals: Also print the residual of every input to every task.
        format: Output format. Default: table on a terminal, else jsonl.
        batch_size: Inputs per call.
        max_length: Truncate texts to this many tokens. Default: as in the recipe, else the tokenizer's limit.
        max_new_tokens: For models that generate text: maximum length of an answer.
        classes: For models of images and texts: a JSON file of the classes of each task, {task: [names]}.
        prompt: For those: the template that a class name is put into.
        revision: Branch, tag or commit of a Hub id.
    """

    EXAMPLES = """
        retex predict my-retex inputs.txt
        retex predict my-retex --text "add this song to my playlist" --text "has my transfer arrived?"
        retex predict org/retex-images photos/ --merged
        cat inputs.jsonl | retex predict my-retex --residuals > answers.jsonl
    """

    artifact: Annotated[str, POSITIONAL]
    inputs: Annotated[list[str], POSITIONAL] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    task: str | None = None
    routing: str | dict[str, Any] | None = None
    input_column: str | None = None
    merged: bool = False
    residuals: bool = False
    format: Literal["table", "jsonl"] | None = None
    batch_size: int = 64
    max_length: int | None = None
    max_new_tokens: int | None = None
    classes: Path | None = None
    prompt: str = PROMPT
    revision: str | None = None

    def run(self) -> None:
        if self.text and self.inputs:
            raise InputError("Give either --text or files, not both.")
        if self.text and self.input_column is not None:
            raise InputError("--input-column is for files, not for --text.")
        if self.task is not None and self.residuals:
            raise InputError("--residuals are of inputs whose task is identified; leave out --task.")
        if self.task is not None and self.routing is not None:
            raise InputError("--routing is for inputs whose task is identified; leave out --task.")
        if self.prompt != PROMPT and self.classes is None:
            raise InputError("--prompt is for --classes.")
        if not 1 <= self.batch_size <= MOST_ROWS:
            raise InputError(f"--batch-size must be a positive number of at most {MOST_ROWS}, not {self.batch_size}.")
        predictor = self._predictor()
        if self.text:
            inputs: Iterable[Input] = (as_input(read_line(text)) for text in self.text)
        else:
            sources = self.inputs or [STANDARD_INPUT]
            inputs = read_inputs(sources, predictor.preprocessor.kind, self.input_column)
        records = self._records(predictor, inputs)
        if (self.format or ("table" if sys.stdout.isatty() else "jsonl")) == "table":
            self._print_table(list(track(records, title="Predicting", unit="input")))
        else:
            for record in records:
                say(as_json(record), flush=True)

    def _predictor(self) -> Predictor:
        model = RetexModel.from_pretrained(self.artifact, revision=self.revision, **self.model_options)
        if self.routing is not None:
            model.routing = self.routing
        if self.task is not None:
            model.set_adapter(self.task)
        elif model.parts().identified_by is None:
            raise InputError(f"{self.artifact} has no signatures yet: run retex sign, or name the task with --task.")
        preprocessor = preprocessor_of(model, self.max_length)
        generate: dict[str, Any] = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        classes = read_classes(self.classes)
        return Predictor(
            model, preprocessor, classes=classes, prompt=self.prompt, batch_size=self.batch_size, **generate
        )

    def _records(self, predictor: Predictor, inputs: Iterable[Input]) -> Iterator[dict[str, Any]]:
        inputs = iter(inputs)
        while chunk := list(itertools.islice(inputs, self.batch_size)):
            values = [one.value for one in chunk]
            answers = predictor.predict(values, self.task)
            merged = predictor.merged(values, [answer.task for answer in answers]) if self.merged else answers
            for one, answer, plain in zip(chunk, answers, merged, strict=True):
                yield self._record(one, answer, plain)

    def _record(self, one: Input, answer: Answer, plain: Answer) -> dict[str, Any]:
        record: dict[str, Any] = {"input": one.shown, "task": answer.task}
        if answer.far is not None:
            record["far"] = answer.far
        if answer.answer is not None:
            record["answer"] = answer.answer
        if answer.score is not None:
            record["score"] = round(answer.score, 6)
        if self.merged:
            record["merged"] = plain.answer
        if self.residuals:
            record["residuals"] = answer.residuals
        return record

    def _print_table(self, records: list[dict[str, Any]]) -> None:
        if not records:
            return
        columns = [name for name in records[0] if name != "residuals"]
        distances = records[0].get("residuals") or {}
        # Show more of an input on a wide terminal.
        limit = max(SHOWN_LENGTH, shutil.get_terminal_size().columns // 2)
        rows = []
        for record in records:
            row = [_shown(record.get(name), limit) for name in columns]
            rows.append(row + [f"{record['residuals'][task]:.2f}" for task in distances])
        words = [place for place, name in enumerate(columns) if name in ("task", "answer", "merged")]
        say(Table([*columns, *distances], rows, words=words).text())


def _shown(value: Any, limit: int) -> str:
    if value is None or isinstance(value, float):
        return "" if value is None else f"{value:.3f}"
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
