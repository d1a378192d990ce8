"""The page: a Gradio app of two tabs over a `Predictor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from time import perf_counter
from typing import Any

from ..artifact.preprocess import TEXT, Preprocessor
from ..errors import RetexError
from ..model.retex_model import RetexModel
from ..workflows.predictor import GENERATOR, Predictor, answer_kind, preprocessor_of

try:
    import gradio as gr
    from gradio.utils import get_upload_folder
    from markupsafe import Markup, escape
except ModuleNotFoundError as error:
    if error.name not in ("gradio", "markupsafe"):
        raise
    raise RetexError('The page needs gradio: pip install "retex-hf[demo]".') from error

from starlette.middleware import Middleware

from .cards import Call, call_html
from .guard import Guard
from .inputs import MOST_CHARACTERS, MOST_INPUTS, MOST_MEGABYTES, read_images, read_texts
from .overview import figures_html, overview_html
from .style import CSS
from .turns import Busy, Turns
from .uploads import Uploads

AUTOMATIC = -1
NEW_TOKENS = 64
MOST_WAITING = 32
# Gradio keeps the last output of this many visitors.
MOST_VISITORS = 64
# Uploads are deleted after an hour; the clean-up runs every ten minutes.
CLEAN_UP = (600, 3600)
SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif"]


class Page(gr.Blocks):
    """A page that is reached through a `Guard` only, however it is launched."""

    def launch(self, *arguments: Any, app_kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Serve the page; the arguments are those of `gradio.Blocks.launch`."""
        options = {"state_session_capacity": MOST_VISITORS, **options}
        given = dict(app_kwargs or {})
        given["middleware"] = [self._guard(), *given.get("middleware", ())]
        return super().launch(*arguments, app_kwargs=given, **options)

    def _guard(self) -> Middleware:
        uploads = None
        if any(isinstance(block, gr.Gallery) for block in self.blocks.values()):
            uploads = Uploads(Path(get_upload_folder()), self.upload_file_set.add)
            for block in self.blocks.values():
                for component in (block, *getattr(block, "_components", ())):
                    uploads.examples |= {str(path) for path in component.keep_in_cache}
        return Middleware(Guard, uploads=uploads, inputs={index: len(of.inputs) for index, of in self.fns.items()})


def make_demo(
    model: RetexModel,
    preprocessor: Preprocessor,
    *,
    title: str | None = None,
    examples: Sequence[Any] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
) -> gr.Blocks:
    """Make a page that answers texts or images with ReTeX and with the plain merged model, side by side.

    Args:
        model: The model.
        preprocessor: Makes batches of raw inputs, see `load_preprocessor`. It determines whether inputs are texts or
            images.
        title: Heading of the page. Default: "ReTeX".
        examples: Examples that visitors may click on: texts (of one or several lines), or lists of image files.
        classes: For dual encoders of images and texts: the names of the classes of each task. Without them, the page
            shows only tasks.

    Returns:
        `gradio.Blocks`; call its `launch` with the options from `launch_options()`.
    """
    generates = answer_kind(model, classes is not None) == GENERATOR
    generate: dict[str, Any] = {"max_new_tokens": NEW_TOKENS} if generates else {}
    predictor = Predictor(model, preprocessor, classes=classes, **generate)
    title = title or "ReTeX"
    turns = Turns()
    with Page(title=title, analytics_enabled=False, delete_cache=CLEAN_UP) as page:
        # Put the style in the page itself, not in an option of `launch`, so that it applies however the page is
        # launched.
        _html(f"<style>{CSS}</style>")
        _html(str(_heading(title, model.tasks)))
        with gr.Tab("Try it"):
            _add_try_it(predictor, examples, turns)
        with gr.Tab("Overview") as overview:
            _html(str(overview_html(model)), elem_id="overview")
            figures = _html(elem_id="figures", min_height=60)
        # Draw figures on first view, and once.
        figures_of = cache(lambda: str(figures_html(model)))
        overview.select(
            _one_at_a_time(turns, figures_of), outputs=figures, api_visibility="private", concurrency_limit=1
        )
    for function in page.fns.values():  # otherwise gradio would run clicks on examples outside of its queue
        function.queue, function.concurrency_limit = True, 1
    page.queue(max_size=MOST_WAITING, api_open=False)
    # Gradio keeps uncollected answers for each visitor, and has no option to limit their number.
    page._queue.pending_messages_per_session.max_size = MOST_VISITORS
    return page


def launch(
    artifact: str | Path,
    *,
    title: str | None = None,
    examples: Sequence[Any] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    max_length: int | None = None,
    revision: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, str, str]:
    """Load an artifact and serve its page.

    Args:
        artifact: A folder or a Hub id.
        title: Heading of the page. Default: the artifact's name.
        examples: See `make_demo`.
        classes: See `make_demo`.
        max_length: Truncate texts to this many tokens; default: as when the model was signed.
        revision: Branch, tag or commit on the Hub.
        model_options: Options of `RetexModel.from_pretrained`: `token`, `device_map` and the like.
        options: Options of `gradio.Blocks.launch`, which override those of `launch_options()`: `server_port`,
            `inbrowser`, `share`, `auth` and the like.

    Returns:
        The result of `gradio.Blocks.launch`: the app, its local address and its public one.
    """
    model = RetexModel.from_pretrained(artifact, revision=revision, **(model_options or {}))
    page = make_demo(
        model,
        preprocessor_of(model, max_length),
        title=title or Path(artifact).name,
        examples=examples,
        classes=classes,
    )
    return page.launch(**{**launch_options(), **options})


def launch_options() -> dict[str, Any]:
    """Return options for `gradio.Blocks.launch`: nothing leaves the machine, nothing is kept, uploads are limited."""
    theme = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=SYSTEM_FONTS, font_mono=["monospace"])
    # The theme's own hints are too pale to read.
    hints = {"block_info_text_color": "*neutral_500", "block_info_text_color_dark": "*neutral_400"}
    return {
        "share": False,
        "max_file_size": f"{MOST_MEGABYTES}mb",
        "footer_links": [],
        "run_history": False,
        "ssr_mode": False,
        "theme": theme.set(**hints),
    }


def answer(predictor: Predictor, inputs: Sequence[Any], task: str | None, *, first: bool = False) -> Call:
    """Run both models on the same inputs, and time them.

    Args:
        predictor: Predictor of both models.
        inputs: Texts or images.
        task: The task of all inputs, or None to identify it.
        first: Whether the model has not been called before.
    """
    experts = predictor.model.expert_cache
    missed, start = experts.misses, perf_counter()
    answers = predictor.predict(inputs, task)
    seconds, prepared, start = perf_counter() - start, first or experts.misses > missed, perf_counter()
    merged = predictor.merged(inputs, [given.task for given in answers])
    return Call(inputs, answers, merged, seconds, perf_counter() - start, prepared)


def _add_try_it(predictor: Predictor, examples: Sequence[Any] | None, turns: Turns) -> None:
    is_text = predictor.preprocessor.kind == TEXT
    given: gr.Textbox | gr.Gallery
    if is_text:
        given = gr.Textbox(
            label="Texts, one per line",
            info=f"Up to {MOST_INPUTS} texts. A pair of texts goes on one line, with a tab between the two.",
            lines=5,
            max_lines=12,
            max_length=MOST_INPUTS * (MOST_CHARACTERS + 1),
            elem_id="inputs",
        )
    else:
        given = gr.Gallery(
            label=f"Images, up to {MOST_INPUTS} of {MOST_MEGABYTES} MB",
            type="filepath",
            file_types=["image"],
            sources=["upload", "clipboard"],
            buttons=[],
            columns=8,
            height=220,
            object_fit="contain",
            interactive=True,
            elem_id="inputs",
        )
    with gr.Row():
        choices = _choices(predictor.model)
        info = None if choices[0][1] == AUTOMATIC else "This model has no signatures to route by: choose a task."
        choice = gr.Dropdown(
            choices, value=choices[0][1], label="Task", info=info, elem_id="task", scale=4, min_width=260
        )
        button = gr.Button("Run", variant="primary", elem_id="run", scale=1, min_width=120)
    if examples:
        gr.Examples(
            [[example if is_text else _as_list(example)] for example in examples], [given], cache_examples=False
        )
    result = _html(elem_id="result", min_height=60)
    read = read_texts if is_text else _read_gallery
    run = _one_at_a_time(turns, _handler(predictor, read))
    triggers = [button.click, given.submit] if isinstance(given, gr.Textbox) else [button.click]
    # One call at a time: concurrent calls would slow each other down and make their latencies meaningless.
    gr.on(triggers, run, [given, choice], result, api_visibility="private", concurrency_limit=1)


def _handler(predictor: Predictor, read: Callable[[Any], list[Any]]) -> Callable[[Any, int], str]:
    tasks, first = predictor.model.tasks, True

    def run(given: Any, choice: int) -> str:
        nonlocal first
        try:
            call = answer(predictor, read(given), None if choice == AUTOMATIC else tasks[choice], first=first)
        except RetexError as error:
            # The message may quote a task's name, and toasts are HTML.
            raise gr.Error(str(escape(error)), print_exception=False) from None
        except Exception as error:  # tell visitors that it failed, and write the cause to the log
            raise gr.Error("The model failed on these inputs; the log of the page says why.") from error
        first = False
        return str(call_html(call))

    return run


def _one_at_a_time(turns: Turns, function: Callable[..., str]) -> Callable[..., str]:
    """Return a function that runs for one visitor at a time, however gradio calls it."""

    @wraps(function)
    def taken(*given: Any) -> str:
        try:
            with turns.take():
                return function(*given)
        except Busy as error:
            raise gr.Error(str(error), print_exception=False) from None

    return taken


def _html(value: str = "", **options: Any) -> gr.HTML:
    """Make an HTML component without gradio's own styling."""
    return gr.HTML(value, apply_default_css=False, padding=False, **options)


def _choices(model: RetexModel) -> list[tuple[str, int]]:
    """List the choices: routing, where the model supports it, and every task."""
    can_route = model.parts().identified_by is not None
    tasks = [(task, index) for index, task in enumerate(model.tasks)]
    return [("Route automatically", AUTOMATIC), *tasks] if can_route else tasks


def _read_gallery(gallery: Sequence[tuple[str, str | None]] | None) -> list[Any]:
    return read_images([path for path, _ in gallery or []])


def _as_list(files: Any) -> list[str]:
    """Return one image file, or several, as a list."""
    return [str(files)] if isinstance(files, (str, Path)) else [str(file) for file in files]


def _heading(title: str, tasks: Sequence[str]) -> Markup:
    lead = f"One merged model, {len(tasks)} tasks. Each input is answered by the expert it belongs to."
    return Markup('<div class="rx"><h1>{}</h1><p class="rx-lead">{}</p></div>').format(title, lead)
