"""Answers as HTML. Everything is composed by `Markup.format`, which escapes its arguments.

Texts come from visitors; task names and labels come with untrusted artifacts.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from typing import Any

from markupsafe import Markup
from PIL import Image

from ..workflows.predictor import Answer

SHOWN_CHARACTERS = 400
THUMBNAIL = (160, 160)


@dataclass(frozen=True)
class Call:
    """One call of the page: inputs, the answers of ReTeX and of the plain merged model, and the time that each took.

    `prepared` tells that ReTeX had to prepare experts during the call, which later calls find in the cache.
    """

    inputs: Sequence[Any]
    answers: Sequence[Answer]
    merged: Sequence[Answer]
    seconds: float
    merged_seconds: float
    prepared: bool = False


def call_html(call: Call) -> Markup:
    """Render a line on the whole call, and one card per input."""
    rows = zip(call.inputs, call.answers, call.merged, strict=True)
    cards = [card_html(number, *row) for number, row in enumerate(rows, start=1)]
    return Markup('<div class="rx">{}{}</div>').format(summary_html(call), Markup("").join(cards))


def summary_html(call: Call) -> Markup:
    """Render how many inputs one call answered, and how long ReTeX and the merged model took."""
    number = len(call.inputs)
    asked = "1 input" if number == 1 else f"{number} inputs"
    times = [_latency("ReTeX", "retex", call.seconds)]
    if any(answer.answer is not None for answer in call.merged):  # otherwise the merged model was not run
        times.append(_latency("merged model", "merged", call.merged_seconds))
    note = " ReTeX had to recover experts first; later calls reuse them." if call.prepared else ""
    return Markup('<p class="rx-summary" role="status">{} in one call: {}.{}</p>').format(
        asked, Markup(", ").join(times), note
    )


def card_html(number: int, given: Any, answer: Answer, merged: Answer) -> Markup:
    """Render one input: its content, its task, both answers, and the bars of all tasks."""
    body = [_shown(given), _answers_html(answer, merged)]
    return Markup(
        '<article class="rx-card" aria-label="Input {}">'
        '<div class="rx-left">{}</div>'
        '<div class="rx-right"><p class="rx-chosen">{} <strong data-task="{}">{}</strong></p>{}</div>'
        "</article>"
    ).format(number, Markup("").join(body), _routing_label(answer), answer.task, answer.task, bars_html(answer))


def _routing_label(answer: Answer) -> str:
    """Return how an input came to its task."""
    if answer.far:
        return "Out of distribution; the nearest task is"
    return "Task" if answer.residuals is None else "Routed to"


def bars_html(answer: Answer) -> Markup:
    """Render a table of all tasks, the nearest first: a bar as long as the residual, its value, and the probability."""
    if answer.residuals is None or answer.probabilities is None:
        return Markup('<p class="rx-note">The task was chosen by hand.</p>')
    lengths = bar_lengths(answer.residuals)
    rows = []
    for task, residual in sorted(answer.residuals.items(), key=lambda item: item[1]):
        row = (
            '<tr{}><th scope="row" title="{}">{}</th>'
            '<td class="rx-track"><span class="rx-fill" style="width:{}%"></span></td>'
            '<td class="rx-number">{}</td><td class="rx-number">{}</td></tr>'
        )
        near = Markup(' class="rx-near"') if task == answer.task else ""
        length, share = f"{100 * lengths[task]:.1f}", f"{100 * answer.probabilities[task]:.1f} %"
        rows.append(Markup(row).format(near, task, task, length, f"{residual:.3f}", share))
    return Markup(
        '<table class="rx-bars"><thead><tr><th scope="col">Task</th>'
        '<th scope="col" colspan="2">Residual <span class="rx-hint">(smaller is nearer)</span></th>'
        '<th scope="col">Probability</th></tr></thead><tbody>{}</tbody></table>'
    ).format(Markup("").join(rows))


def bar_lengths(residuals: Mapping[str, float]) -> dict[str, float]:
    """Return the length of each bar, as a share of the longest.

    Residuals of weight signatures may be negative; then bars start at the smallest.

    >>> from retex_hf.demo.cards import bar_lengths
    >>> bar_lengths({"a": 1.0, "b": 4.0}), bar_lengths({"a": -3.0, "b": -1.0, "c": -2.0})
    ({'a': 0.25, 'b': 1.0}, {'a': 0.0, 'b': 1.0, 'c': 0.5})
    """
    finite = [value for value in residuals.values() if isfinite(value)]
    start = min(0.0, *finite) if finite else 0.0
    span = max(finite, default=0.0) - start
    return {task: (value - start) / span if span > 0 and isfinite(value) else 0.0 for task, value in residuals.items()}


def thumbnail_uri(image: Image.Image) -> str:
    """Return a small copy of an image as a data URI."""
    small = image.copy()
    small.thumbnail(THUMBNAIL)
    return png_uri(small)


def png_uri(image: Any) -> str:
    """Return a Pillow image or a matplotlib figure as a data URI."""
    buffer = BytesIO()
    if isinstance(image, Image.Image):
        image.save(buffer, format="png")
    else:
        image.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _latency(title: str, of: str, seconds: float) -> Markup:
    return Markup('<strong>{}</strong> <span data-latency="{}">{} ms</span>').format(title, of, f"{1000 * seconds:.0f}")


def _shown(given: Any) -> Markup:
    """Render the input itself: a thumbnail, a text, or two."""
    if isinstance(given, Image.Image):
        size = f"{given.width} × {given.height} pixels"
        return Markup('<p class="rx-input"><img src="{}" alt="Input image, {}"></p>').format(thumbnail_uri(given), size)
    texts = [given] if isinstance(given, str) else given
    return Markup("").join(Markup('<p class="rx-input">{}</p>').format(_cut(text)) for text in texts)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS].rstrip() + " …"


def _answers_html(answer: Answer, merged: Answer) -> Markup:
    if answer.answer is None:
        return Markup('<p class="rx-note">This model gives features, not answers: only the task is shown.</p>')
    return Markup('<dl class="rx-answers">{}{}</dl>').format(
        _answer_html("ReTeX", "retex", answer), _answer_html("Merged model", "merged", merged)
    )


def _answer_html(title: str, of: str, answer: Answer) -> Markup:
    score = "" if answer.score is None else Markup('<span class="rx-score">{}</span>').format(f"{answer.score:.3f}")
    # A generator may give an empty answer; an empty box would look broken.
    text = answer.answer or Markup('<span class="rx-hint">(empty)</span>')
    return Markup('<div class="rx-answer rx-{}"><dt>{}</dt><dd><span data-answer="{}">{}</span>{}</dd></div>').format(
        of, title, of, text, score
    )
