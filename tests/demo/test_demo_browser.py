"""The page in a real browser: what it shows is what the model says."""

from __future__ import annotations

import runpy
import shutil
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import gradio as gr
import pytest
import torch
import transformers as tf
from helpers import TASKS, perturb
from PIL import Image
from signed import make_tokenizer, signed_classifier

from retex_hf import RetexConfig, RetexModel
from retex_hf.artifact.preprocess import Preprocessor, load_preprocessor
from retex_hf.demo import make_demo
from retex_hf.demo.page import launch_options

sync_api = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="There is no Chromium on the PATH.")

APP = Path(__file__).parents[2] / "examples" / "space" / "app.py"
EVIL_TASK, EVIL_LABEL = "green<img src=x onerror=hacked=1>", "<img src=x onerror=hacked=2>"
EVIL_TEXT = "<script>hacked=3</script><img src=x onerror=hacked=4> {{value}} ${hacked=5} ruby wine"
SHADES = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}


@pytest.fixture(scope="module")
def page() -> Iterator:
    """A tab of a headless browser that notes where its requests go."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.hosts = set()
        page.on("request", lambda request: page.hosts.add(request.url.split("/")[2] if "://" in request.url else ""))
        page.set_default_timeout(20_000)
        yield page
        browser.close()


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> tuple[Path, RetexModel, Preprocessor]:
    """An artifact in a folder, as it loads from there; one of its tasks and one of its labels are HTML."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("artifact")
    make_tokenizer().save_pretrained(folder)
    signed_classifier(names={"green": EVIL_TASK}, labels={"red": {0: EVIL_LABEL, 1: EVIL_LABEL}}).save_pretrained(
        folder
    )
    model = RetexModel.from_pretrained(folder)
    return folder, model, load_preprocessor(folder, model.model)


@torch.no_grad()
def test_mixed_texts_are_shown_as_the_model_answers_them(page, text_model, monkeypatch):
    folder, model, preprocessor = text_model
    texts = ["sky sea navy ice", "rose wine ruby", "moss leaf lime", EVIL_TEXT, "cobalt denim azure"]
    with _space(folder, monkeypatch) as address:
        page.goto(address)
        page.get_by_label("Texts, one per line").fill("\n".join(texts))
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector(".rx-card >> nth=4")
        batch = preprocessor(texts)
        routing, predicted = model.identify(**batch), model.predict(**batch)
        with model.disable_adapter():
            merged = model.predict(**batch, task=routing.tasks)
        assert routing.tasks == ["blue", "red", EVIL_TASK, "blue", "blue"]
        assert page.locator(".rx-chosen strong").all_inner_texts() == routing.tasks
        assert page.locator(".rx-input").all_inner_texts() == texts
        _check_answers(page, "retex", predicted)
        _check_answers(page, "merged", merged)
        assert page.locator(".rx-bars tbody tr").count() == len(texts) * len(TASKS)
        nearest = page.locator(".rx-bars tbody tr:first-child td:nth-child(3)").all_inner_texts()
        expected = routing.residuals.min(1).values.tolist()
        assert [float(value) for value in nearest] == pytest.approx(expected, abs=6e-4)
        assert page.locator(".rx-summary").inner_text().startswith("5 inputs in one call: ReTeX ")

        page.get_by_label("Task").click()
        page.get_by_role("option", name="blue").click()
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector("text=The task was chosen by hand. >> nth=4")
        assert page.locator(".rx-chosen strong").all_inner_texts() == ["blue"] * 5
        _check_answers(page, "retex", model.predict(**batch, task="blue"))

        page.get_by_label("Texts, one per line").fill("\n".join(["rose"] * 33))
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector("text=There are 33 texts; the page takes at most 32 at once.")

        page.get_by_role("tab", name="Overview").click()
        page.wait_for_selector("#figures figure >> nth=1")
        assert page.locator(".rx-tasks tbody th").all_inner_texts() == model.tasks
        assert page.locator(".rx-tasks tbody td >> nth=0").inner_text() == f"2: {EVIL_LABEL}, {EVIL_LABEL}"
        assert page.locator("#figures img").evaluate_all("all => all.every(one => one.naturalWidth > 400)")
        assert page.evaluate("typeof hacked") == "undefined"
        assert page.hosts <= {address.split("/")[2], ""}


def test_titles_and_examples_are_shown_as_they_are(page, text_model):
    _, model, preprocessor = text_model
    with _served(model, preprocessor, title=EVIL_TEXT, examples=[EVIL_TEXT, "sky sea\nmoss fern"]) as address:
        page.goto(address)
        assert page.locator("h1").inner_text() == EVIL_TEXT
        page.get_by_role("button", name="sky sea").click()
        sync_api.expect(page.locator("#inputs textarea")).to_have_value("sky sea\nmoss fern")
        page.get_by_role("button", name="<script>").click()
        sync_api.expect(page.locator("#inputs textarea")).to_have_value(EVIL_TEXT)
        assert page.evaluate("typeof hacked") == "undefined"


@torch.no_grad()
def test_dropped_images_are_shown_as_the_model_answers_them(page, tmp_path):
    model, preprocessor = _image_model(tmp_path)
    files = [tmp_path / f"{place}.png" for place in range(4)]
    tasks = ["blue", "red", "green", "red"]
    for seed, (task, file) in enumerate(zip(tasks, files, strict=True)):
        _picture(task, 100 + seed).save(file)
    (tmp_path / "broken.png").write_bytes(b"no image at all")
    with _served(model, preprocessor, examples=[[files[0], files[2]]]) as address:
        page.goto(address)
        page.locator("#inputs input[type=file]").set_input_files(files)
        page.wait_for_selector("#inputs img >> nth=3")
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector(".rx-card >> nth=3")
        batch = preprocessor([Image.open(file) for file in files])
        routing, predicted = model.identify(**batch), model.predict(**batch)
        assert routing.tasks == tasks
        assert page.locator(".rx-chosen strong").all_inner_texts() == tasks
        _check_answers(page, "retex", predicted)
        assert page.locator(".rx-input img").evaluate_all("all => all.map(one => one.naturalWidth)") == [48] * 4
        assert page.locator(".rx-bars tbody tr").count() == len(files) * len(TASKS)

        page.locator("button.gallery-item").click()
        sync_api.expect(page.locator("#inputs button.thumbnail-item")).to_have_count(2)
        page.get_by_role("button", name="Run").click()
        sync_api.expect(page.locator(".rx-chosen strong")).to_have_text(["blue", "green"])

        page.goto(address)
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector("text=Add at least one image.")
        page.locator("#inputs input[type=file]").set_input_files([tmp_path / "broken.png"])
        page.wait_for_selector("#inputs button.thumbnail-item")
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector("text=Image 1 cannot be read")


def _check_answers(page: Any, of: str, rows: list[dict[str, Any]]) -> None:
    """The shown labels and scores are those of `model.predict`."""
    assert page.locator(f"[data-answer={of}]").all_inner_texts() == [row["label"] for row in rows]
    scores = page.locator(f".rx-{of} .rx-score").all_inner_texts()
    assert [float(score) for score in scores] == pytest.approx([row["score"] for row in rows], abs=6e-4)


@contextmanager
def _space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`python app.py` with the artifact named by the environment, in a thread of this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RETEX_ARTIFACT", str(folder))
    monkeypatch.setenv("GRADIO_SERVER_PORT", str(port))
    Thread(target=runpy.run_path, args=(str(APP),), kwargs={"run_name": "__main__"}, daemon=True).start()
    yield _answering(f"http://127.0.0.1:{port}/")
    gr.close_all(verbose=False)


def _answering(address: str) -> str:
    """Wait until a server answers."""
    for _ in range(300):
        try:
            urllib.request.urlopen(address).close()
            return address
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(address)


@contextmanager
def _served(model: RetexModel, preprocessor: Preprocessor, **options: Any) -> Iterator[str]:
    """A page of `make_demo` on a free port."""
    demo = make_demo(model, preprocessor, **options)
    yield demo.launch(**launch_options(), prevent_thread_lock=True, quiet=True)[1]
    demo.close(verbose=False)


def _image_model(folder: Path) -> tuple[RetexModel, Preprocessor]:
    """A tiny ViT classifier of three tasks, each over pictures of its own colour."""
    config = tf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    base = tf.ViTForImageClassification(config)
    experts = {task: perturb(base, seed, scale=0.6) for seed, task in enumerate(TASKS, start=1)}
    for task, expert in experts.items():
        expert.config.id2label = {index: f"{task} {index}" for index in range(2)}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=8), progress=False)
    tf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    preprocessor = load_preprocessor(folder, model.model)
    pictures = {task: [preprocessor([_picture(task, seed) for seed in range(24)])] for task in TASKS}
    model.fit_signatures(pictures, progress=False)
    return model, preprocessor


def _picture(task: str, seed: int) -> Image.Image:
    """Noise around a task's colour."""
    noise = torch.randn(48, 48, 3, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray((torch.tensor(SHADES[task]) + 25 * noise).clamp(0, 255).byte().numpy())
