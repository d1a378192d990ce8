"""The endpoint in operation: keys, limits, floods, clients that leave or are slow, reloads, logs and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event as Flag
from typing import Any

import httpx
import pytest
import torch
from helpers import TASKS, perturb
from served_models import Endpoint, classifier, llama, served, texts
from signed import make_tokenizer

from retex_hf import ConfigError, RetexModel
from retex_hf.serving import app
from retex_hf.serving.logs import JsonLines
from retex_hf.serving.options import ServeOptions
from retex_hf.serving.server import make_server

TOKENIZER = make_tokenizer()
KEY = "a key of this test"


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("bert"))


@contextmanager
def held(endpoint: Endpoint) -> Iterator[tuple[Flag, list[list[Any]]]]:
    """Keep batches from running until the flag is set; list the inputs of those that began."""
    batcher, go, begun = endpoint.service.engine.batcher, Flag(), []
    run = batcher._run

    def wait(rows: list[Any]) -> None:
        begun.append([row.value for row in rows])
        assert go.wait(30)
        run(rows)

    batcher._run = wait
    try:
        yield go, begun
    finally:
        go.set()
        batcher._run = run


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def classify(endpoint: Endpoint, text: str) -> httpx.Response:
    return endpoint.http.post("/classify", json={"input": text})


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_with_a_key_only_health_is_open(classifier_folder):
    with served(classifier_folder, api_key=KEY) as endpoint:
        assert endpoint.http.get("/health").json() == {"status": "ok"}
        paths = ["/v1/models", "/v1/models/red", "/metrics", "/nowhere"]
        posts = ["/classify", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/admin/reload"]
        wrong = [
            {},
            *({"authorization": value} for value in (KEY, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}", "Bearer é")),
        ]
        for headers in wrong:
            encoded = {name: value.encode() for name, value in headers.items()}
            refused = [endpoint.http.get(path, headers=encoded) for path in paths]
            refused += [endpoint.http.post(path, headers=encoded, json={"input": "rose"}) for path in posts]
            assert [response.status_code for response in refused] == [401] * 9
            assert refused[0].json()["error"]["code"] == "invalid_api_key" and KEY not in refused[0].text
        right = {"authorization": f"bearer {KEY}"}
        assert endpoint.http.post("/classify", headers=right, json={"input": "rose"}).status_code == 200
        assert [model.id for model in endpoint.openai.models.list()] == ["auto", "merged", *TASKS]


@pytest.mark.parametrize(
    "options", [{"api_key": "é"}, {"api_key": ""}, {"max_batch": 0}, {"port": 70_000}, {"host": "a b"}]
)
def test_options_that_no_endpoint_can_have_are_refused(options):
    with pytest.raises(ConfigError):
        ServeOptions(**options).check()
    assert KEY not in repr(ServeOptions(api_key=KEY))


# ---- limits and clients ----------------------------------------------------------------------------------------------


def test_a_flood_is_refused_with_a_reason_and_what_was_taken_is_answered(classifier_folder):
    with served(classifier_folder, max_queue=4, max_wait_ms=0) as endpoint, ThreadPoolExecutor(24) as pool:
        with held(endpoint) as (go, begun):
            first = pool.submit(classify, endpoint, "rose")
            until(lambda: begun)
            answers = [pool.submit(classify, endpoint, text) for text, _ in texts(20)]
            until(lambda: sum(answer.done() for answer in answers) == 16)
            refused = [answer.result() for answer in answers if answer.done()]
            go.set()
            taken = [first.result(), *(answer.result() for answer in answers if answer.result() not in refused)]
        assert [response.status_code for response in refused] == [429] * 16
        assert refused[0].json()["error"]["message"] == "4 rows wait already, and at most 4 may: try again later."
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused[0].headers["retry-after"]) <= 60
        assert [response.status_code for response in taken] == [200] * 5
        assert classify(endpoint, "rose").status_code == 200  # and it goes on
        assert endpoint.metric("retex_requests_total", path="/classify", status="429") == 16


def test_more_open_requests_than_allowed_are_refused_before_they_are_read(classifier_folder):
    with (
        served(classifier_folder, max_requests=2) as endpoint,
        ThreadPoolExecutor(4) as pool,
        held(endpoint) as (go, _),
    ):
        open_ones = [pool.submit(classify, endpoint, "rose") for _ in range(2)]
        until(lambda: endpoint.metric("retex_open_requests") == 2)
        refused = classify(endpoint, "rose")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert endpoint.http.get("/health").status_code == 200
        go.set()
        assert [one.result().status_code for one in open_ones] == [200, 200]


def test_large_bodies_are_refused_while_many_are_held(classifier_folder, monkeypatch):
    monkeypatch.setattr(app, "MOST_BODIES", 1)
    with served(classifier_folder, max_bytes=1000, max_wait_ms=0) as endpoint, ThreadPoolExecutor(2) as pool:
        with held(endpoint) as (go, begun):
            large = pool.submit(classify, endpoint, "rose " * 150)
            until(lambda: begun)
            refused = classify(endpoint, "wine " * 150)
            assert refused.status_code == 429 and "of 1000 bytes already" in refused.json()["error"]["message"]
            small = pool.submit(classify, endpoint, "wine")
            go.set()
            assert (large.result().status_code, small.result().status_code) == (200, 200)
        assert classify(endpoint, "wine " * 150).status_code == 200


def test_bodies_that_are_announced_and_not_sent_take_no_room(classifier_folder, monkeypatch):
    monkeypatch.setattr(app, "MOST_BODIES", 1)
    head = b"POST /classify HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    with served(classifier_folder, max_bytes=1000, max_wait_ms=0) as endpoint, ExitStack() as stack:
        for _ in range(20):
            address = ("127.0.0.1", endpoint.port)
            stack.enter_context(socket.create_connection(address, timeout=20)).sendall(head)
        until(lambda: endpoint.metric("retex_open_requests") == 20)
        assert classify(endpoint, "rose " * 150).status_code == 200


def test_a_request_that_takes_too_long_is_given_up(classifier_folder):
    with served(classifier_folder, timeout=3, max_wait_ms=0) as endpoint, ThreadPoolExecutor(4) as pool:
        assert classify(endpoint, "sky").status_code == 200  # experts are recovered
        with held(endpoint) as (go, begun):
            running = pool.submit(classify, endpoint, "rose")
            until(lambda: begun)
            waiting = pool.submit(classify, endpoint, "wine")
            for answer in (running.result(), waiting.result()):
                assert answer.status_code == 504
                assert answer.json()["error"]["message"] == "The request took longer than 3 seconds."
            go.set()
        assert classify(endpoint, "sky").status_code == 200
        assert begun == [["rose"]]  # what waited never ran
        assert endpoint.metric("retex_failed_rows_total", asked="auto") == 2


def post_and_leave(endpoint: Endpoint, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request by hand, and return the connection."""
    client = socket.create_connection(("127.0.0.1", endpoint.port), timeout=20)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    client.sendall(head.encode() + content)
    return client


def test_rows_of_clients_that_left_are_dropped_from_the_queue(classifier_folder):
    with served(classifier_folder, max_wait_ms=0) as endpoint, ThreadPoolExecutor(2) as pool:
        with held(endpoint) as (go, begun):
            first = pool.submit(classify, endpoint, "rose")
            until(lambda: begun)
            clients = [post_and_leave(endpoint, "/classify", {"input": "wine"}) for _ in range(3)]
            until(lambda: endpoint.metric("retex_queue_rows") == 3)
            for client in clients:
                client.close()
            until(lambda: endpoint.metric("retex_queue_rows") == 0)
            go.set()
            assert first.result().status_code == 200
        assert begun == [["rose"]]
        until(lambda: endpoint.metric("retex_requests_total", path="/classify", status="499") == 3)


def test_a_stream_whose_client_left_stops_generating(decoder_folder, monkeypatch):
    with served(decoder_folder) as endpoint:
        steps, turns = [], endpoint.service.engine.generation.turns

        def slowly() -> None:
            steps.append(1)
            time.sleep(0.05)

        monkeypatch.setattr(turns, "hand_on", slowly)
        body = {"prompt": "rose", "max_tokens": 60, "stream": True, "temperature": 2, "seed": 5}
        client = post_and_leave(endpoint, "/v1/completions", body)
        received = b""
        while received.count(b"data:") < 2:
            received += client.recv(4096)
        client.close()
        until(lambda: endpoint.metric("retex_requests_total", path="/v1/completions", status="499") == 1)
        time.sleep(0.2)
        assert len(steps) < 30
        assert endpoint.metric("retex_failed_rows_total", asked="auto") == 1
        monkeypatch.undo()
        assert endpoint.http.post("/v1/completions", json={"prompt": "rose"}).status_code == 200


def test_a_client_that_does_not_read_holds_nobody_up(decoder_folder):
    with served(decoder_folder) as endpoint:
        idle = post_and_leave(endpoint, "/v1/completions", {"prompt": "rose", "max_tokens": 60, "stream": True})
        answers = [endpoint.http.post("/v1/completions", json={"prompt": text}) for text, _ in texts(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and (part := idle.recv(65536)):
            received += part
        idle.close()
        assert b"data: [DONE]" in received  # late, but complete


def test_short_answers_do_not_wait_for_a_long_one(decoder_folder):
    with served(decoder_folder) as endpoint, ThreadPoolExecutor(2) as pool:
        turns, hand_on = endpoint.service.engine.generation.turns, endpoint.service.engine.generation.turns.hand_on

        def slowly() -> None:
            time.sleep(0.02)
            hand_on()

        turns.hand_on = slowly
        # A text that does not end by itself.
        long = {"prompt": "rose", "max_tokens": 60, "temperature": 0}
        ends = endpoint.service.engine.generation._ends
        endpoint.service.engine.generation._ends = lambda task: frozenset()
        running = pool.submit(endpoint.http.post, "/v1/completions", json=long)
        until(lambda: endpoint.metric("retex_batch_rows_count") == 1)
        short = endpoint.http.post("/v1/completions", json={"prompt": "sky", "max_tokens": 2, "temperature": 0})
        assert short.status_code == 200 and not running.done()
        endpoint.service.engine.generation._ends = ends
        assert running.result().status_code == 200


# ---- reload ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def changed(artifact: Path, folder: Path) -> Path:
    """An artifact with other weights and one task less."""
    model = RetexModel.from_pretrained(artifact)
    model.model = perturb(model.model, 77, scale=1.0)
    model.delete_task("blue")
    model.save_pretrained(folder)
    return folder


def labelled(model: RetexModel, text: str) -> tuple[str, str]:
    row = model.predict(**TOKENIZER(text, return_tensors="pt"))[0]
    return row["task"], row["label"]


def test_a_reload_drops_no_request(classifier_folder, tmp_path):
    artifact, bearer = tmp_path / "artifact", {"authorization": f"Bearer {KEY}"}
    shutil.copytree(classifier_folder, artifact)
    new = changed(classifier_folder, tmp_path / "new")
    given = [text for text, _ in texts(6)]
    wanted = [
        {labelled(RetexModel.from_pretrained(folder), text) for folder in (classifier_folder, new)} for text in given
    ]
    stop, wrong, count = Flag(), [], [0]
    with served(artifact, api_key=KEY) as endpoint, ThreadPoolExecutor(4) as pool:

        def ask() -> None:
            while not stop.is_set():
                for text, allowed in zip(given, wanted, strict=True):
                    response = endpoint.http.post("/classify", headers=bearer, json={"input": text})
                    count[0] += 1
                    row = response.json()["data"][0] if response.status_code == 200 else None
                    if row is None or (row["retex"]["task"], row["label"]) not in allowed:
                        wrong.append((text, response.text))

        clients = [pool.submit(ask) for _ in range(3)]
        until(lambda: count[0] > 20)
        shutil.rmtree(artifact)
        shutil.copytree(new, artifact)
        reloaded = endpoint.http.post("/admin/reload", headers=bearer)
        assert reloaded.json() == {"status": "reloaded", "models": ["auto", "merged", "red", "green"]}
        before = count[0]
        until(lambda: count[0] > before + 20)
        stop.set()
        for client in clients:
            client.result()
        assert not wrong
        model = endpoint.model
        for text in given:
            row = endpoint.http.post("/classify", headers=bearer, json={"input": text}).json()["data"][0]
            assert (row["retex"]["task"], row["label"]) == labelled(model, text)
        # A damaged artifact changes nothing.
        (artifact / "retex_config.json").write_text("{")
        refused = endpoint.http.post("/admin/reload", headers=bearer)
        assert refused.status_code == 500 and refused.json()["error"]["message"].startswith(
            "The artifact was not reloaded: "
        )
        assert endpoint.model is model
        assert endpoint.http.post("/classify", headers=bearer, json={"input": "rose"}).status_code == 200
        assert (
            endpoint.metric("retex_reloads_total", outcome="done"),
            endpoint.metric("retex_reloads_total", outcome="failed"),
        ) == (1, 1)


def test_the_old_engine_answers_what_it_began_and_then_ends(classifier_folder):
    with served(classifier_folder, api_key=KEY, max_wait_ms=0) as endpoint, ThreadPoolExecutor(2) as pool:
        bearer, old = {"authorization": f"Bearer {KEY}"}, endpoint.service.engine
        with held(endpoint) as (go, begun):
            running = pool.submit(endpoint.http.post, "/classify", headers=bearer, json={"input": "rose"})
            until(lambda: begun)
            assert endpoint.http.post("/admin/reload", headers=bearer).status_code == 200
            assert endpoint.service.engine is not old
            assert endpoint.http.post("/classify", headers=bearer, json={"input": "sky"}).status_code == 200
            assert any(thread.is_alive() for thread in old.batcher._threads)
            go.set()
            assert running.result().status_code == 200
        until(lambda: not any(thread.is_alive() for thread in old.batcher._threads))


def test_reloading_by_request_needs_a_key(classifier_folder):
    with served(classifier_folder) as endpoint:
        refused = endpoint.http.post("/admin/reload")
        assert refused.status_code == 403 and "needs an API key" in refused.json()["error"]["message"]


# ---- shutdown of a thread; of a process: test_process.py -------------------------------------------------------------


def test_what_runs_at_shutdown_is_finished(decoder_folder):
    with ThreadPoolExecutor(3) as pool:
        with served(decoder_folder) as endpoint:
            wanted = [endpoint.http.post("/v1/completions", json={"prompt": text}).json() for text, _ in texts(3)]
            asked = [
                pool.submit(httpx.post, f"{endpoint.url}/v1/completions", json={"prompt": text}, trust_env=False)
                for text, _ in texts(3)
            ]
            until(lambda: endpoint.metric("retex_open_requests") == 3 or all(one.done() for one in asked))
        found = [one.result().json() for one in asked]
    assert [one["choices"][0]["text"] for one in found] == [one["choices"][0]["text"] for one in wanted]


# ---- logs and metrics ------------------------------------------------------------------------------------------------


def test_logs_are_json_and_hold_no_inputs_answers_or_keys(decoder_folder, caplog):
    secret = "cherry ruby poppy"
    logging.getLogger("retex_hf.serving").propagate = True
    with caplog.at_level(logging.INFO, logger="retex_hf.serving"), served(decoder_folder, api_key=KEY) as endpoint:
        answer = endpoint.openai.completions.create(model="auto", prompt=secret, max_tokens=4)
        bearer = {"authorization": f"Bearer {KEY}"}
        endpoint.http.post("/v1/completions", headers=bearer, json={"prompt": secret, "stop": [secret], "n": "cherry"})
        endpoint.http.post("/v1/completions", headers=bearer, json={"prompt": secret, "model": "cherry"})
        endpoint.http.post(f"/{secret}", json={})
        # A bug: the message of the exception quotes the prompt.
        engine = endpoint.service.engine
        engine.batcher._run = lambda rows: (_ for _ in ()).throw(ValueError(secret))
        failed = endpoint.http.post("/v1/completions", headers=bearer, json={"prompt": secret})
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        assert "cherry" not in failed.text
        until(lambda: endpoint.metric("retex_open_requests") == 0)
    lines = [JsonLines().format(record) for record in caplog.records if record.name == "retex_hf.serving"]
    entries = [json.loads(line) for line in lines]
    whole = "\n".join(lines)
    assert not any(word in whole for word in (*secret.split(), KEY, answer.choices[0].text.split()[0]))
    requests = [entry for entry in entries if entry["event"] == "request"]
    assert [entry["status"] for entry in requests] == [200, 400, 404, 401, 500]
    first = requests[0]
    assert (first["path"], first["model"], first["rows"], first["tasks"]) == ("/v1/completions", "auto", 1, {"red": 1})
    assert (first["tokens_read"], first["tokens_generated"]) == (3, answer.usage.completion_tokens)
    bug = next(entry for entry in entries if entry["event"] == "bug")
    assert bug["error"] == "ValueError" and any("test_operations.py" in place for place in bug["at"])


def test_metrics_count_per_task(classifier_folder):
    with served(classifier_folder, max_wait_ms=50) as endpoint:
        given = [text for text, _ in texts(9)]
        routing = endpoint.model.identify(**TOKENIZER(given, padding=True, return_tensors="pt"))
        endpoint.http.post("/classify", json={"input": given})
        endpoint.http.post("/classify", json={"input": given[:2], "model": "red"})
        for task in TASKS:
            rows = [row for row, name in enumerate(routing.tasks) if name == task]
            assert endpoint.metric("retex_rows_total", task=task, asked="auto") == len(rows) > 0
            assert endpoint.metric("retex_residual_count", task=task) == len(rows)
            total = routing.residuals[rows, TASKS.index(task)].sum().item()
            assert endpoint.metric("retex_residual_sum", task=task) == pytest.approx(total, rel=1e-3, abs=1e-3)
        assert endpoint.metric("retex_rows_total", task="red", asked="task") == 2
        assert endpoint.metric("retex_latency_seconds_count", task="red") == routing.tasks.count("red") + 2
        assert endpoint.metric("retex_batch_rows_sum") == 11
        assert endpoint.metric("retex_batch_rows_count") == 2
        text = endpoint.http.get("/metrics").text
        assert 'retex_rows_total{asked="task",task="red"} 2.0' in text


def test_servers_of_other_threads_leave_signals_alone(classifier_folder):
    with served(classifier_folder) as endpoint:
        server = make_server(endpoint.service)

        async def enter() -> None:
            with server.capture_signals():
                pass

        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, enter()).result()
