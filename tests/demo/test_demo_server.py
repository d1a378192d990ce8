"""The page's server, asked by HTTP: one way in, with its limits; what is kept, and what is not asked of anybody."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import gradio as gr
import pytest
from PIL import Image
from trust.bombs import pixel_bomb, plain, scans
from trust.uploads import ANSWERED, REFUSED, Page, image_model, listener

from retex_hf import RetexModel
from retex_hf.artifact.preprocess import Preprocessor, load_preprocessor
from retex_hf.demo import guard, inputs, make_demo, uploads
from retex_hf.demo.page import launch_options
from retex_hf.demo.turns import MOST_WAITING, Busy, Turns
from retex_hf.demo.uploads import Uploads
from retex_hf.errors import InputError

JOIN = "/gradio_api/queue/join"


@contextmanager
def served(demo: gr.Blocks, **options: Any) -> Iterator[Page]:
    _, address, _ = demo.launch(**launch_options(), prevent_thread_lock=True, quiet=True, **options)
    function = next(index for index, block in demo.fns.items() if block.name == "run")
    yield Page(int(address.rstrip("/").rpartition(":")[2]), os.getpid(), function, [])
    demo.close(verbose=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[RetexModel, Preprocessor]:
    folder = tmp_path_factory.mktemp("model")
    model = image_model(folder)
    return model, load_preprocessor(folder, model.model)


@pytest.fixture(scope="module")
def page(model, tmp_path_factory) -> Iterator[Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        with served(make_demo(*model)) as page:
            yield page


def body(page: Page, data: list[Any], changed: dict[str, Any] | None = None) -> bytes:
    call: dict[str, Any] = {"data": data, "fn_index": page.function, "session_hash": "abc", "trigger_id": None}
    return json.dumps({**call, **(changed or {})}).encode()


def image(path: str, **more: Any) -> list[Any]:
    return [[{"image": {"path": path, "meta": {"_type": "gradio.FileData"}, **more}, "caption": None}], -1]


def test_an_uploaded_picture_is_answered(page):
    outcome, html = page.show([("a.png", plain("PNG", 40, 30)), ("b.JPG", plain("JPEG", 10, 20))])
    assert outcome == ANSWERED
    assert html.count('class="rx-card"') == 2 and "40 × 30 pixels" in html and "10 × 20 pixels" in html


@pytest.mark.parametrize("path", ["run/predict", "run/predict/", "api/predict", "call/run", "call/v2/run", "mcp/"])
def test_functions_are_reached_through_the_queue_only(page, path):
    _, (kept,) = page.upload([("a.png", plain("PNG"))])
    status, text = page.ask("POST", f"/gradio_api/{path}", body(page, image(kept)))
    assert (status, json.loads(text)) == (404, {"detail": "This page has no such address."})


def test_a_picture_of_too_many_pixels_is_refused(page):
    assert page.show([("bomb.png", pixel_bomb())]) == (
        REFUSED,
        "With image 1 the images have more than 32 million pixels together.",
    )


def test_all_pictures_of_a_call_have_one_budget_of_time(page, monkeypatch):
    slow = scans(12_000, 500)
    _, kept = page.upload([("a.jpg", slow), ("b.jpg", slow), ("c.jpg", slow)])
    monkeypatch.setattr(inputs, "MOST_SECONDS", 1.0)
    start = monotonic()
    call = [[image(path)[0][0] for path in kept], -1]
    outcome, says = page.call(call)
    assert outcome == REFUSED and re.fullmatch("With image [1-3] the images take more than 1 seconds to decode.", says)
    assert monotonic() - start < 15  # a second, on a machine that may be busy
    monkeypatch.undo()
    assert page.show([("a.png", plain("PNG"))])[0] == ANSWERED  # and the page goes on


def test_an_upload_is_named_once_in_a_call(page):
    _, (kept,) = page.upload([("a.png", plain("PNG"))])
    says = "An upload is named more than once; add each image once."
    assert page.call([image(kept)[0] * 2, -1]) == (REFUSED, says)


def test_only_files_of_this_page_are_read_and_nobody_is_asked(page, tmp_path):
    (tmp_path / "secret.png").write_bytes(plain("PNG"))
    _, (kept,) = page.upload([("a.png", plain("PNG"))])
    with listener() as (other, asked):
        given = [
            image(f"{other}/a.png"),
            image(f"{other}/a.png", url=f"{other}/b.png"),
            image(str(tmp_path / "secret.png")),
            image("/etc/passwd"),
            image(f"{Path(kept).parent}/../{Path(kept).parent.name}/{Path(kept).name}"),
            image(str(Path(kept).parent)),
        ]
        for data in given:
            assert page.call(data) == (REFUSED, "An image was not uploaded here; upload it again.")
        # What else a browser says of a file that is there is left out.
        assert page.call(image(kept, url=f"{other}/c.png", is_stream=True, size=-1))[0] == ANSWERED
        for path in (f"file={other}/d.png", "file=/etc/passwd", f"file={tmp_path}/secret.png", f"proxy={other}/e.png"):
            assert page.ask("GET", f"/gradio_api/{path}")[0] == 404
        assert page.ask("GET", f"/gradio_api/file={kept}") == (200, plain("PNG"))
        assert asked == []


@pytest.mark.parametrize(
    "changed",
    [
        {"session_hash": "a" * 65},
        {"session_hash": None},
        {"session_hash": "a/b"},
        {"fn_index": 99},
        {"fn_index": None},
        {"fn_index": 2**40},
        {"data": []},
        {"data": [[], -1, 0]},
        {"data": [{"path": "a"}, -1]},
        {"data": [[{}] * 33, -1]},
        {"data": [[{"video": {"path": "a"}}], -1]},
        {"data": [[], 1.5]},
        {"trigger_id": "a"},
    ],
)
def test_a_call_has_the_form_that_the_page_gives_it(page, changed):
    status, text = page.ask("POST", JOIN, body(page, [[], -1], changed))
    assert (status, json.loads(text)) == (422, {"detail": "This is not a call that the page makes."})


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 1_000_000, b'{"data": ' + b"[" * 500_000])
def test_a_body_that_is_no_call_is_refused(page, text):
    assert page.ask("POST", JOIN, text)[0] == 422


def test_bodies_are_limited_in_bytes(page, monkeypatch):
    status, text = page.ask("POST", JOIN, b" " * (guard.MOST_CALL_BYTES + 1))
    assert (status, json.loads(text)["detail"]) == (413, f"The request has more than {guard.MOST_CALL_BYTES} bytes.")
    monkeypatch.setattr(guard, "MOST_UPLOAD_BYTES", 10_000)
    assert page.upload([("a.png", bytes(5_000))] * 3)[0] == 413
    assert page.upload([("a.png", bytes(5_000))])[0] == 200


def test_uploads_are_few_small_images(page):
    before = set(os.listdir(Path(page.upload([("a.png", plain("PNG"))])[1][0]).parent))
    assert page.upload([("a.png", b"a")] * 33) == (400, "An upload is of 1 to 32 files.")
    assert page.upload([("a.png", bytes(10_000_001))]) == (413, "A file is larger than 10 MB.")
    for name in ("a.svg", "a.html", "a", "a.png.exe"):
        status, said = page.upload([("b.png", b"a"), (name, b"a")])
        assert status == 413 and said.startswith("A file is none of .bmp, .gif")
    fields = b'--x\r\nContent-Disposition: form-data; name="other"\r\n\r\na\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert page.ask("POST", "/gradio_api/upload", fields, headers)[0] == 400
    assert page.ask("POST", "/gradio_api/upload", b"no form", headers)[0] == 400
    assert (
        page.ask("POST", "/gradio_api/upload", b"files=a", {"Content-Type": "application/x-www-form-urlencoded"})[0]
        == 400
    )
    assert page.upload([])[0] == 400
    _, (kept,) = page.upload([("../../a b.PNG", plain("PNG"))])
    assert Path(kept).suffix == ".png" and "a b" not in kept
    assert set(os.listdir(Path(kept).parent)) == before | {Path(kept).name}  # of what was refused, nothing is left


def test_what_is_kept_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "MOST_KEPT_MEGABYTES", 1)
    monkeypatch.setattr(uploads, "MOST_KEPT_FILES", 4)
    told: list[str] = []
    kept = Uploads(tmp_path, told.append)
    large = [("a.png", BytesIO(bytes(600_000)), 600_000)]
    (first,) = kept.keep(large)
    assert told == [first] and kept.holds(first) and Path(first).stat().st_size == 600_000
    with pytest.raises(InputError, match="holds as many uploads as it keeps at a time"):
        kept.keep(large)
    os.remove(first)  # as gradio does after an hour
    assert not kept.holds(first)
    kept.keep(large)
    kept.keep([("a.png", BytesIO(b"a"), 1)] * 3)
    with pytest.raises(InputError, match="holds as many uploads as it keeps at a time"):
        kept.keep([("a.png", BytesIO(b"a"), 1)])
    folder = kept.folder
    del kept
    assert not folder.exists()


def test_visitors_at_once_are_limited(page, monkeypatch):
    monkeypatch.setattr(guard, "MOST_OPEN", 0)
    assert page.ask("GET", "/")[0] == 503
    monkeypatch.undo()
    monkeypatch.setattr(guard, "MOST_BODIES", 0)
    assert page.ask("GET", "/")[0] == 200
    assert page.ask("POST", JOIN, body(page, [[], -1]))[0] == 503


def test_one_call_at_a_time_and_few_that_wait():
    turns, running, go_on = Turns(), Event(), Event()

    def call() -> None:
        with turns.take():
            running.set()
            assert go_on.wait(60)

    waiting = [Thread(target=call) for _ in range(1 + MOST_WAITING)]
    for thread in waiting:
        thread.start()
    assert running.wait(60)
    while turns._few._value:  # until all of them wait
        pass
    with pytest.raises(Busy, match="The page is busy"), turns.take():
        pass
    go_on.set()
    for thread in waiting:
        thread.join()
    with turns.take():
        pass


def test_a_busy_page_says_so_however_it_is_called(model, monkeypatch):
    run = next(block.fn for block in make_demo(*model).fns.values() if block.name == "run")

    @contextmanager
    def busy(self):
        raise Busy("The page is busy; try again later.")
        yield

    monkeypatch.setattr(Turns, "take", busy)
    with pytest.raises(gr.Error, match="The page is busy"):
        run([], -1)


def test_a_page_for_texts_takes_no_uploads(tmp_path):
    from signed import make_tokenizer, signed_classifier

    make_tokenizer().save_pretrained(tmp_path)
    model = signed_classifier()
    with served(make_demo(model, load_preprocessor(tmp_path, model.model))) as page:
        assert page.upload([("a.png", plain("PNG"))])[0] == 404
        assert page.call(["sky sea navy ice", -1])[0] == ANSWERED
        assert page.call([image("/etc/passwd")[0], -1])[0] == REFUSED


def test_a_page_with_accounts_takes_uploads_of_those_who_logged_in(model, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    with served(make_demo(*model), auth=("me", "secret")) as page:
        assert page.upload([("a.png", plain("PNG"))]) == (401, "Log in first.")
        assert page.call([[], -1])[0] == REFUSED
        assert page.ask("POST", "/login", b"username=" + b"a" * 20_000)[0] == 413


def test_thumbnails_are_those_of_the_pictures(page):
    _, html = page.show([("a.png", plain("PNG", 320, 200))])
    shown = html.partition("data:image/png;base64,")[2].partition('"')[0]
    assert Image.open(BytesIO(base64.b64decode(shown))).size == (160, 100)
