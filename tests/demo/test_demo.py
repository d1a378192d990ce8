"""The page without a browser: limits on inputs, the HTML of cards and overview, what a call computes."""

from __future__ import annotations

import importlib
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import gradio as gr
import pytest
import torch
import transformers as tf
from helpers import TASKS, build_retex, make_experts, perturb
from PIL import Image
from signed import WORDS, make_tokenizer, references, separate, signed_classifier

from retex_hf import RetexConfig, RetexModel
from retex_hf.artifact.preprocess import Preprocessor, load_preprocessor
from retex_hf.demo import inputs as demo_inputs
from retex_hf.demo import launch, make_demo
from retex_hf.demo.cards import Call, bar_lengths, call_html, card_html
from retex_hf.demo.inputs import MOST_CHARACTERS, MOST_INPUTS, read_images, read_texts
from retex_hf.demo.overview import (
    NOT_MEASURED,
    NOT_READABLE,
    NOT_SIGNED,
    evaluation_html,
    figures_html,
    overview_html,
)
from retex_hf.demo.page import _choices, _handler, answer, launch_options
from retex_hf.errors import InputError, RetexError
from retex_hf.workflows.analysis import energy_ratio
from retex_hf.workflows.energy import recovered_energy
from retex_hf.workflows.predictor import Answer, Predictor

EVIL = "<script>alert(1)</script> & \"quotes\" 'too'"


class Seen(HTMLParser):
    """The tags, attributes and texts that a browser would see."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.texts.append(data)

    def values(self, name: str) -> list[str | None]:
        return [value for key, value in self.attributes if key == name]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Predictor:
    """A signed classifier whose second task and one label are HTML."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    model = signed_classifier(names={"green": EVIL}, labels={"red": {0: EVIL}})
    return Predictor(model, load_preprocessor(folder, model.model))


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_lines_are_texts_and_tabs_make_pairs():
    assert read_texts("one\r\n\n  \ntwo words\n") == ["one", "two words"]
    assert read_texts("a \t b\nc\td") == [("a", "b"), ("c", "d")]
    assert read_texts("only one\t") == ["only one"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "Type at least one text."),
        (" \n\t\n", "Type at least one text."),
        ("x\n" * (MOST_INPUTS + 1), "There are 33 texts; the page takes at most 32 at once."),
        ("fine\n" + "x" * (MOST_CHARACTERS + 1), "Text 2 has 10001 characters; the page takes at most 10000."),
        ("a\tb\tc", "Text 1 has 3 parts between tabs; a pair of texts has two."),
    ],
)
def test_texts_beyond_the_limits_are_refused_in_one_sentence(typed, says):
    with pytest.raises(InputError) as error:
        read_texts(typed)
    assert str(error.value) == says


def test_images_are_read_in_order_upright_and_rgb(tmp_path):
    Image.new("RGBA", (8, 4), (255, 0, 0, 255)).save(tmp_path / "red.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned: to be shown turned by a quarter
    Image.new("RGB", (8, 4), (0, 0, 255)).save(tmp_path / "turned.jpg", exif=exif)
    red, turned = read_images([tmp_path / "red.png", tmp_path / "turned.jpg"])
    assert (red.mode, red.size, red.getpixel((0, 0))) == ("RGB", (8, 4), (255, 0, 0))
    assert (turned.mode, turned.size) == ("RGB", (4, 8))


def test_images_beyond_the_limits_are_refused(tmp_path, monkeypatch):
    Image.new("RGB", (4, 4)).save(tmp_path / "fine.png")
    fine = tmp_path / "fine.png"
    with pytest.raises(InputError, match="Add at least one image"):
        read_images([])
    with pytest.raises(InputError, match="There are 33 images; the page takes at most 32"):
        read_images([fine] * 33)
    (tmp_path / "large.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(10_000_001))
    with pytest.raises(InputError, match="Image 2 is larger than 10 MB"):
        read_images([fine, tmp_path / "large.png"])
    monkeypatch.setattr(demo_inputs, "MOST_PIXELS", 40)
    assert len(read_images([fine, fine])) == 2
    (tmp_path / "cut.png").write_bytes(fine.read_bytes()[:45])  # its size can be read, its pixels cannot
    with pytest.raises(InputError, match="With image 3 the images have more than"):
        read_images([fine, fine, tmp_path / "cut.png"])
    with pytest.raises(InputError, match="Image 2 cannot be read"):
        read_images([fine, tmp_path / "cut.png"])


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path):
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0), b"IDAT": b""}
    written = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    ]
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(written))
    with pytest.raises(InputError, match="With image 1 the images have more than 32 million pixels together"):
        read_images([tmp_path / "bomb.png"])


@pytest.mark.parametrize("content", [b"no image at all", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b""])
def test_what_is_no_image_is_refused(tmp_path, content):
    (tmp_path / "file.png").write_bytes(content)
    with pytest.raises(InputError, match="Image 1 cannot be read; the page takes PNG, JPEG"):
        read_images([tmp_path / "file.png"])


# ---- cards -----------------------------------------------------------------------------------------------------------


def test_a_card_says_what_the_answers_say():
    near = {"a": 2.0, "b": 1.0, "c": 4.0}
    routed = Answer("b", "yes", 0.9, near, {"a": 0.25, "b": 0.7, "c": 0.05})
    seen = Seen(card_html(1, "the text", routed, Answer("b", "no", 0.6, None, None)))
    assert seen.texts[0] == "the text"
    assert seen.values("data-task") == ["b"]
    assert [seen.texts[seen.texts.index(of) + 1 :][:2] for of in ("ReTeX", "Merged model")] == [
        ["yes", "0.900"],
        ["no", "0.600"],
    ]
    # The nearest first: the length of its bar, its residual and its probability.
    assert seen.values("style") == ["width:25.0%", "width:50.0%", "width:100.0%"]
    assert seen.texts[-9:] == ["b", "1.000", "70.0 %", "a", "2.000", "25.0 %", "c", "4.000", "5.0 %"]


def test_everything_in_a_card_is_escaped():
    routed = Answer(EVIL, EVIL, 0.9, {EVIL: 1.0, "other": 2.0}, {EVIL: 0.7, "other": 0.3})
    call = Call([EVIL, (EVIL, "pair")], [routed, routed], [routed, routed], 0.1, 0.25)
    seen = Seen(call_html(call))
    assert not {"script", "img"} & set(seen.tags)
    assert seen.texts.count(EVIL) == 2 * (1 + 1 + 2 + 1)  # input, task, two answers and a bar, in each of two cards
    assert seen.values("data-task") == [EVIL, EVIL]


def test_a_call_says_how_long_both_models_took():
    given = Answer("a", "yes", 0.9, None, None)
    seen = Seen(call_html(Call(["text"] * 2, [given] * 2, [given] * 2, seconds=0.1, merged_seconds=0.25)))
    assert "".join(seen.texts).startswith("2 inputs in one call: ReTeX 100 ms, merged model 250 ms.")


def test_a_long_text_is_cut():
    card = card_html(1, "x" * 5000, Answer("a", "yes", 0.5, None, None), Answer("a", "yes", 0.5, None, None))
    assert "x" * 400 + " …" in card
    assert "x" * 401 not in card


def test_pinned_tasks_have_no_bars_and_features_no_answers():
    pinned = Seen(card_html(1, "text", Answer("a", "", None, None, None), Answer("a", "other", None, None, None)))
    assert "The task was chosen by hand." in pinned.texts
    assert "(empty)" in pinned.texts
    assert "table" not in pinned.tags
    nameless = Answer("a", None, None, {"a": 1.0}, {"a": 1.0})
    features = Seen(card_html(1, Image.new("RGB", (300, 150)), nameless, nameless))
    assert "This model gives features, not answers: only the task is shown." in features.texts
    assert features.values("alt") == ["Input image, 300 × 150 pixels"]
    assert features.values("src")[0].startswith("data:image/png;base64,")


def test_bars_of_odd_residuals():
    assert bar_lengths({"a": 0.0, "b": 0.0}) == {"a": 0.0, "b": 0.0}
    assert bar_lengths({"a": float("nan"), "b": 2.0, "c": 1.0}) == {"a": 0.0, "b": 1.0, "c": 0.5}
    assert bar_lengths({"a": float("inf")}) == {"a": 0.0}


# ---- calls -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_call_answers_as_the_model_does(classifier):
    texts = [WORDS[task][0] + " " + WORDS[task][1] for task in ("blue", "red", "green", "red")]
    call = answer(classifier, texts, None)
    batch = classifier.preprocessor(texts)
    routing, predicted = classifier.model.identify(**batch), classifier.model.predict(**batch)
    assert [given.task for given in call.answers] == routing.tasks == ["blue", "red", EVIL, "red"]
    assert [(given.answer, given.score) for given in call.answers] == [(p["label"], p["score"]) for p in predicted]
    for given, residuals, shares in zip(call.answers, routing.residuals, routing.probabilities, strict=True):
        assert list(given.residuals.values()) == residuals.tolist()
        assert list(given.probabilities.values()) == shares.tolist()
    with classifier.model.disable_adapter():
        merged = classifier.model.predict(**batch, task=routing.tasks)
    assert [(given.answer, given.score) for given in call.merged] == [(p["label"], p["score"]) for p in merged]
    assert call.seconds > 0
    assert call.merged_seconds > 0


def test_a_pinned_call_uses_that_task_for_all(classifier):
    call = answer(classifier, [WORDS["blue"][0], WORDS["red"][0]], "red")
    assert [given.task for given in (*call.answers, *call.merged)] == ["red"] * 4
    assert call.answers[0].residuals is None


def test_a_call_says_that_experts_were_prepared(classifier, monkeypatch):
    texts = [WORDS["blue"][0], WORDS["red"][0], WORDS["blue"][1]]
    monkeypatch.setattr(classifier.model, "execution", "grouped")
    classifier.model.train().eval()  # forgets the recovered experts
    assert [answer(classifier, texts, None).prepared for _ in range(2)] == [True, False]
    run = _handler(classifier, read_texts)
    shown = ["ReTeX had to recover experts first" in run("\n".join(texts), -1) for _ in range(2)]
    assert shown == [True, False]  # whatever was at hand, it is the first call of this page


def test_errors_become_one_escaped_sentence(classifier):
    run = _handler(classifier, read_texts)
    with pytest.raises(gr.Error) as error:
        run("one\ta\tb", -1)
    assert error.value.message == "Text 1 has 3 parts between tabs; a pair of texts has two."

    with pytest.raises(gr.Error) as error:
        _handler(classifier, _raising(InputError(EVIL)))("", -1)
    assert "<" not in error.value.message
    assert unescape(error.value.message) == EVIL
    with pytest.raises(gr.Error) as error:
        _handler(classifier, _raising(IndexError("a path that is nobody's business")))("", -1)
    assert error.value.message == "The model failed on these inputs; the log of the page says why."


def _raising(error: Exception) -> Callable[[str], list[str]]:
    def read(_: str) -> list[str]:
        raise error

    return read


def test_without_signatures_a_task_must_be_chosen():
    model, _ = build_retex("bert-classifier", signatures="inputs")
    assert _choices(model) == [(task, index) for index, task in enumerate(TASKS)]
    model.retex_config = replace(model.retex_config, signatures="weights")
    assert _choices(model)[0] == ("Route automatically", -1)


def test_a_generator_answers_in_words(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = tf.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    base = tf.T5ForConditionalGeneration(config).eval()
    separate(base.get_input_embeddings(), tokenizer)
    model = RetexModel.from_experts(base, make_experts(base, scale=1.0), RetexConfig(rank="full"), progress=False)
    model.fit_signatures(references(tokenizer), progress=False)
    page = make_demo(model, load_preprocessor(tmp_path, model.model))
    run = next(block.fn for block in page.fns.values() if block.name == "run")
    seen = Seen(run(f"{WORDS['red'][0]}\n{WORDS['blue'][1]}", -1))
    assert seen.values("data-task") == ["red", "blue"]
    predictor = Predictor(model, load_preprocessor(tmp_path, model.model), max_new_tokens=64)
    given = predictor.predict([WORDS["red"][0]])[0]
    start = seen.texts.index("ReTeX", 3)
    assert seen.texts[start + 1] == (given.answer or "(empty)")


def test_a_dual_encoder_without_classes_shows_tasks():
    model, _ = build_retex("clip", feature_layer=-1)
    pictures = {task: torch.randn(8, 3, 32, 32) / 4 + shift for shift, task in enumerate(TASKS)}
    model.fit_signatures({task: [{"pixel_values": batch}] for task, batch in pictures.items()}, progress=False)
    batch = {"pixel_values": pictures["blue"][:2]}
    predictor = Predictor(model, Preprocessor("image", lambda images: batch))
    seen = Seen(call_html(answer(predictor, [Image.new("RGB", (9, 9))] * 2, None)))
    assert seen.values("data-task") == ["blue", "blue"]
    assert seen.values("data-latency") == ["retex"]
    assert seen.values("data-answer") == []


def test_the_page_asks_nobody_else_and_answers_one_at_a_time(classifier):
    page = make_demo(classifier.model, classifier.preprocessor)
    assert page.analytics_enabled is False
    assert {block.concurrency_limit for block in page.fns.values()} == {1}
    options = launch_options()
    assert (options["share"], options["run_history"], options["max_file_size"]) == (False, False, "10mb")


def test_launch_passes_its_options_on(tmp_path, monkeypatch):
    make_tokenizer().save_pretrained(tmp_path)
    signed_classifier().save_pretrained(tmp_path)
    seen = {}
    monkeypatch.setattr(gr.Blocks, "launch", lambda page, **options: seen.update(options, title=page.title))
    launch(tmp_path, server_port=7000, share=True, revision=None, model_options={"expert_cache": 0})
    assert (seen["title"], seen["server_port"], seen["share"]) == (tmp_path.name, 7000, True)
    assert seen["run_history"] is False
    assert "revision" not in seen


def test_a_missing_gradio_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "retex_hf.demo.page")
    with pytest.raises(RetexError, match=r'The page needs gradio: pip install "retex-hf\[demo\]"\.'):
        importlib.import_module("retex_hf.demo.page")


# ---- overview --------------------------------------------------------------------------------------------------------


def test_the_overview_shows_tasks_classes_and_distances_escaped(classifier):
    model = classifier.model
    seen = Seen(overview_html(model))
    assert not {"script", "img"} & set(seen.tags)
    assert [text for text in seen.texts if text in model.tasks][:3] == model.tasks
    assert f"2: {EVIL}, LABEL_1" in seen.texts
    assert NOT_MEASURED in seen.texts
    shown = [float(text) for text in seen.texts[-12:] if text not in model.tasks]
    expected = model.signatures.residuals(model.signatures.mean)
    torch.testing.assert_close(torch.tensor(shown).view(3, 3), expected, atol=0.0051, rtol=0)
    assert (torch.tensor(shown).view(3, 3).argmin(1) == torch.arange(3)).all()


def test_without_signatures_the_overview_says_so():
    assert NOT_SIGNED in overview_html(build_retex("bert-classifier")[0])


def test_measured_figures_are_shown_or_said_to_be_missing(classifier, monkeypatch):
    def figure(value):
        return {"value": value, "low": value, "high": value}

    accuracy = {"mean": figure(0.625), "tasks": {"red": figure(0.5), EVIL: figure(0.75)}}
    summary = {
        "tasks": {"red": 4, EVIL: 4},
        "individual": None,
        "bootstrap": {"confidence": 0.95},
        "methods": {"ReTeX": {"modes": {"unknown": {"accuracy": accuracy, "identification": accuracy}}}},
    }
    seen = Seen(evaluation_html(summary))
    row = ["ReTeX", "50.0", "75.0", "62.5"]
    header = ["Method", "red", EVIL, "Mean"]
    assert seen.texts == [
        "Accuracy, task unknown (%)", *header, *row, "Inputs identified correctly (%)", *header, *row
    ]  # fmt: skip
    assert NOT_READABLE in evaluation_html({"methods": {"ReTeX": {"modes": {"known": 1}}}})
    for evaluation, drawn in ((summary, 3), ({"methods": 3}, 2)):  # beside the errors and the energy
        monkeypatch.setattr(classifier.model, "evaluation", evaluation)
        html = figures_html(classifier.model)
        assert Seen(html).tags.count("figure") == drawn
        assert ("The stored data cannot be drawn." in html) == (drawn == 2)
    first = next(iter(classifier.model.recovery_errors))
    for unknown, drawn in (({first: None}, 2), (dict.fromkeys(classifier.model.recovery_errors), 1)):
        monkeypatch.setattr(classifier.model, "evaluation", None)
        monkeypatch.setattr(classifier.model, "recovery_errors", {**classifier.model.recovery_errors, **unknown})
        html = figures_html(classifier.model)
        assert Seen(html).tags.count("figure") == drawn
        assert "cannot be drawn" not in html


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 4},
        {"rank": "full"},
        {"rank": 4, "factor_order": "shared_first"},
        {"rank": 6, "inner_rank": 3},
        {"rank": 6, "inner_rank": 3, "factor_order": "shared_first"},
        {"rank": 4, "recovery_dtype": "int8"},
        {"rank": 4, "task_embedding_dim": 1},
    ],
)
def test_energy_is_that_of_the_recovered_offsets(options):
    base = tf.BertModel(tf.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    experts = {task: perturb(base, seed) for seed, task in enumerate(TASKS)}
    model = RetexModel.from_experts(base, experts, RetexConfig(**options), progress=False)
    names = [name for name in model.recovery if tuple(model.recovery[name].layout.shape) == (16, 16)]
    assert len(names) == 5
    found = recovered_energy(model.recovery, model.tasks)
    for index, task in enumerate(TASKS):
        embedding = model.recovery.embed(torch.eye(len(TASKS))[index])
        ratios = [energy_ratio(model.recovery.offset(name, embedding)) for name in names]
        expected = torch.stack(ratios).mean(0)
        torch.testing.assert_close(found[task], expected[: len(found[task])], atol=1e-5, rtol=1e-5, check_dtype=False)
        assert found[task][-1] == pytest.approx(1.0)
