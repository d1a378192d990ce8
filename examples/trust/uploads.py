"""Decompression bombs, and posts to every route: the demo's server must refuse or answer each, in little memory and
time.

A real server of a small image model runs in a process of its own. Allowed outcomes of a picture (`bombs.py`):

- refused: the upload, the call, or its answer is one sentence;
- answered: the page shows the task of the picture.

Allowed outcomes of a post to a route of gradio:

- closed: the guard does not let it through;
- as the page does: it is one of the few requests that a page in a browser makes.

Everything else is a problem: more memory than a call may take, in the server or in the process that decodes; a missing
answer; a crashed server; an answer to a picture that must be refused; any outgoing request of the server; a leaked file
of the machine.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any
from urllib.parse import quote

import torch
import transformers as tf
from tqdm.auto import tqdm

from retex_hf import RetexConfig, RetexModel
from retex_hf.artifact.preprocess import load_preprocessor
from trust.bombs import Picture, pictures, pixel_bomb, plain
from trust.subjects import TASKS, moved
from trust.tally import Tally

REFUSED, ANSWERED, CLOSED, OPEN = "refused", "answered", "closed", "as the page does"
# Limits of a call: its time, and memory beyond that of a warm server, for the server and its child processes.
SECONDS, MEGABYTES = 60.0, 1000
AT_ONCE = 20
# Routes that a page in a browser requests.
PAGE = ("/gradio_api/queue/join", "/gradio_api/upload", "/login", "/login/")


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Post pictures as a browser does, and calls to every route; the long form has hundreds of both."""
    work_dir.mkdir(parents=True, exist_ok=True)
    shown, posted = Tally("pictures on the page"), Tally("posts to the page's server")
    with listener() as (other, asked), server(work_dir) as page:
        page.warm()
        for picture in tqdm(list(pictures(size, seed)), desc=shown.name, disable=not progress):
            shown.add(*judge(picture, page))
        for name, method, path, body in tqdm(list(posts(page, size, other)), desc=posted.name, disable=not progress):
            posted.add(*_judge_post(page, name, method, path, body))
        posted.add(*_flood(page))
        if asked:
            posted.problems.append(f"the server asked for {asked[:3]}")
    return [shown, posted]


def judge(picture: Picture, page: Page) -> tuple[str, str | None]:
    """Show a picture to the page; return the outcome, and the problem, if any."""
    with page.watched() as cost:
        outcome, said = page.show([(f"picture{picture.suffix}", picture.data)])
    wrong = cost.problem()
    if outcome not in (REFUSED, ANSWERED):
        wrong = f"{outcome}: {said}"
    elif picture.refused and outcome == ANSWERED:
        wrong = "is answered"
    elif outcome == REFUSED and ("\n" in said.strip() or not said.strip().endswith(".") or len(said) > 300):
        wrong = f"is not refused in one sentence: {said[:300]}"
    return (outcome, None) if wrong is None else ("wrong", f"{picture.name}: {wrong}")


def posts(page: Page, size: str, other: str) -> Iterator[tuple[str, str, str, bytes]]:
    """Yield calls of the page's function with a bomb, with URLs and with files of the machine, to every route."""
    bomb = page.upload([("bomb.png", pixel_bomb())])[1][0]
    given = {"a bomb": {"path": bomb}, "an address": {"path": f"{other}/a.png"}, "a file": {"path": "/etc/passwd"}}
    given["a file and an address"] = {"path": bomb, "url": f"{other}/b.png"}
    if size == "short":
        given = {"a bomb": given["a bomb"], "an address": given["an address"]}
    for name, file in given.items():
        data = [[{"image": {**file, "meta": {"_type": "gradio.FileData"}}, "caption": None}], -1]
        body = {"data": data, "fn_index": page.function, "session_hash": secrets.token_hex(5), "trigger_id": None}
        for path in page.routes:
            filled = _filled(path, body["session_hash"])
            for method in ("POST",) if size == "short" else ("POST", "PUT", "PATCH", "DELETE"):
                yield name, method, filled, json.dumps(body).encode()
    for path in (f"file={other}/c.png", f"file={quote(other)}/d.png", "file=/etc/passwd", "file=../../etc/passwd"):
        yield "a file", "GET", f"/gradio_api/{path}", b""
    yield "an address", "GET", f"/gradio_api/proxy={other}/e.png", b""


def _filled(path: str, session: str) -> str:
    """Fill the parameters of a route with values; 'predict' is how gradio calls a function by its index."""
    values = {"api_name": "predict", "session_hash": session, "event_id": session}
    parts = path.split("{")
    return parts[0] + "".join(
        values.get(part.partition("}")[0].partition(":")[0], "0") + part.partition("}")[2] for part in parts[1:]
    )


def _judge_post(page: Page, name: str, method: str, path: str, body: bytes) -> tuple[str, str | None]:
    with page.watched() as cost:
        status, text = page.ask(method, path, body)
    wrong = cost.problem()
    if wrong is None and b"root:" in text:
        wrong = "shows a file of the machine"
    if wrong is None and not (400 <= status < 500 or (method == "POST" and path in PAGE and status in (200, 503))):
        wrong = f"is answered with {status}"
    outcome = OPEN if path in PAGE and method == "POST" else CLOSED
    return (outcome, None) if wrong is None else ("wrong", f"{method} {path} with {name}: {wrong}")


def _flood(page: Page) -> tuple[str, str | None]:
    """Send many calls with the bomb at once, through the queue and around it."""
    path = page.upload([("bomb.png", pixel_bomb())])[1][0]
    data = [[{"image": {"path": path, "meta": {"_type": "gradio.FileData"}}, "caption": None}], -1]
    body = json.dumps({"data": data, "fn_index": page.function, "session_hash": "flood"}).encode()
    routes = ("/gradio_api/run/predict", "/gradio_api/api/predict", "/gradio_api/call/predict", PAGE[0])
    with page.watched() as cost, ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda route: page.ask("POST", route, body), routes * AT_ONCE))
        outcome, _ = page.show([("after.png", plain("PNG"))])
    wrong = cost.problem() or (None if outcome == ANSWERED else f"afterwards the page says {outcome}")
    return (CLOSED, None) if wrong is None else ("wrong", f"{AT_ONCE} calls at once to each of {routes}: {wrong}")


class Page:
    """A client of a page, like a browser, with access to the memory figures of its server."""

    def __init__(self, port: int, process: int, function: int, routes: list[str]) -> None:
        self.port, self.process, self.function, self.routes = port, process, function, routes

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None):
        """Send a request; return the status and the beginning of the answer. Status 0 means that the server is gone."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read(1_000_000)
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()
        finally:
            connection.close()

    def upload(self, files: list[tuple[str, bytes]]) -> tuple[int, Any]:
        """Upload files; return the status, and their paths or the error."""
        mark = secrets.token_hex(16)
        parts = [
            f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
            + data
            + b"\r\n"
            for name, data in files
        ]
        headers = {"Content-Type": f"multipart/form-data; boundary={mark}"}
        status, text = self.ask("POST", PAGE[1], b"".join(parts) + f"--{mark}--\r\n".encode(), headers)
        return status, json.loads(text) if status == 200 else text.decode(errors="replace")

    def show(self, files: list[tuple[str, bytes]]) -> tuple[str, str]:
        """Upload pictures, run the page on them, and wait; return whether it refused or answered, and its message."""
        status, paths = self.upload(files)
        if status != 200:
            return (REFUSED if 400 <= status < 500 else f"status {status}"), paths
        images = [{"image": {"path": path, "meta": {"_type": "gradio.FileData"}}, "caption": None} for path in paths]
        return self.call([images, -1])

    def call(self, data: list[Any]) -> tuple[str, str]:
        """Run the page's function through its queue."""
        session = secrets.token_hex(5)
        body = {"data": data, "fn_index": self.function, "session_hash": session, "trigger_id": None}
        status, text = self.ask("POST", PAGE[0], json.dumps(body).encode())
        if status != 200:
            return (REFUSED if 400 <= status < 500 else f"status {status}"), json.loads(text)["detail"]
        _, text = self.ask("GET", f"/gradio_api/queue/data?session_hash={session}")
        messages = [json.loads(line.removeprefix("data: ")) for line in text.decode().splitlines() if line]
        done = [message for message in messages if message["msg"] == "process_completed"]
        if not done:
            return "no answer", text.decode()[:300]
        output = done[0]["output"]
        return (ANSWERED, output["data"][0]) if done[0]["success"] else (REFUSED, str(output["error"]))

    def warm(self) -> None:
        """Run everything on the server once, so that later growth is due to the call."""
        for _ in range(2):
            outcome, said = self.show([("warm.png", plain("PNG", 1000, 1000))])
            if outcome != ANSWERED:
                raise RuntimeError(f"The page does not answer an ordinary picture: {said}")

    @contextmanager
    def watched(self) -> Iterator[Cost]:
        """Measure what the server and its child processes take meanwhile."""
        cost = Cost(self)
        yield cost
        cost.end()


class Cost:
    """Time, and the peak of memory of processes beyond their level before."""

    def __init__(self, page: Page) -> None:
        self._page, self._start = page, monotonic()
        self._before = {}
        for process in self._processes():
            Path(f"/proc/{process}/clear_refs").write_text("5")  # reset the peak
            self._before[process] = _kilobytes(process, "VmRSS")
        self.seconds = self.megabytes = 0.0

    def _processes(self) -> list[int]:
        children = Path(f"/proc/{self._page.process}/task/{self._page.process}/children").parent.parent.glob(
            "*/children"
        )
        started = [int(child) for file in children for child in file.read_text().split()]
        return [self._page.process, *started]

    def end(self) -> None:
        self.seconds = monotonic() - self._start
        most = [_kilobytes(process, "VmHWM") - self._before.get(process, 0) for process in self._processes()]
        self.megabytes = sum(most) / 1000

    def problem(self) -> str | None:
        if self.seconds > SECONDS:
            return f"takes {self.seconds:.0f} seconds"
        return f"takes {self.megabytes:.0f} MB" if self.megabytes > MEGABYTES else None


def _kilobytes(process: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # the process has just ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


@contextmanager
def server(work_dir: Path) -> Iterator[Page]:
    """Serve the page of a small image model, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(work_dir)), daemon=False)
    process.start()
    theirs.close()
    try:
        yield Page(*ours.recv())
    finally:
        ours.close()  # the server then ends by itself
        process.join(SECONDS)
        process.kill()
        process.join()


def _serve(connection: Connection, work_dir: str) -> None:
    os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(dir=work_dir)
    from retex_hf.demo.page import launch_options, make_demo

    torch.set_num_threads(1)
    model = image_model(Path(work_dir))
    demo = make_demo(model, load_preprocessor(work_dir, model.model))
    function = next(index for index, block in demo.fns.items() if block.name == "run")
    app, address, _ = demo.launch(**launch_options(), prevent_thread_lock=True, quiet=True)
    routes = sorted(set(_paths(app.routes)))
    if "/gradio_api/run/{api_name}" not in routes:
        raise RuntimeError("FastAPI keeps its routes elsewhere by now: not all addresses would be tried.")
    connection.send((int(address.rstrip("/").rpartition(":")[2]), os.getpid(), function, routes))
    try:
        connection.recv()
    except EOFError:
        demo.close(verbose=False)


def _paths(routes: Iterable[Any]) -> Iterator[str]:
    """Yield every route of an app, including those of nested routers."""
    for route in routes:
        within = getattr(route, "original_router", route)
        yield from [route.path] if hasattr(route, "path") else _paths(within.routes)


def image_model(folder: Path) -> RetexModel:
    """Make a small ViT that answers pictures of any size, with its image processor in a folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    base = tf.ViTForImageClassification(tf.ViTConfig(**sizes, image_size=32, patch_size=8)).eval()
    experts = {task: moved(base, number) for number, task in enumerate(TASKS, start=1)}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=4), progress=False)
    tf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    shades = {task: [{"pixel_values": torch.randn(8, 3, 32, 32) / 4 + place}] for place, task in enumerate(TASKS)}
    model.fit_signatures(shades, progress=False)
    return model


@contextmanager
def listener() -> Iterator[tuple[str, list[str]]]:
    """Run a server that records every request to it; there should be none."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

        do_HEAD = do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_address[1]}", asked
        other.shutdown()
